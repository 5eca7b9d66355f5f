"""The library: ``load`` opens a model, which answers messages and prompts.

from sparsekv_cli import load

with load("model.gguf", method="lfps") as model:
    print(model.chat("Hello"))
"""

from sparsekv_cli.library.language_model import LanguageModel as LanguageModel
from sparsekv_cli.library.loading import load as load
from sparsekv_cli.library.replies import Reply as Reply
from sparsekv_cli.library.replies import Stream as Stream
