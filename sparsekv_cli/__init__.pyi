from sparsekv_cli.library import LanguageModel as LanguageModel
from sparsekv_cli.library import Reply as Reply
from sparsekv_cli.library import Stream as Stream
from sparsekv_cli.library import load as load

__version__: str
