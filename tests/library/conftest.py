"""A tiny model for the library."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import make_model

from sparsekv_cli import LanguageModel, load

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
FAST = {"threads": 1, "prefill_dtype": "f32"}


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    return make_model(folder / "tiny.gguf", n_layer=3, wtype="Q8_0", chat_template=TEMPLATE)


@pytest.fixture
def model(path: Path) -> Iterator[LanguageModel]:
    with load(path, n_ctx=400, **FAST) as opened:
        yield opened
