"""What a kernel's key is made of: the files that its module imports, and no others."""

import textwrap
from pathlib import Path

import pytest

from sparsekv_cli.cpu.jit.compiling.kernel_cache import SOURCES
from sparsekv_cli.cpu.jit.compiling.sources import Sources

FILES = {
    "__init__.py": "",
    "attend.py": """
        import numpy as np
        from top.inner import tile
        def lazily():
            from top.late import later
    """,
    "inner/__init__.py": "",
    "inner/tile.py": "from top.inner.rows import (\n    ROWS,\n    WIDTH,\n)",
    "inner/rows.py": "ROWS = 1",
    "late.py": "import top.last as last",
    "last.py": "",
    "other.py": "from top import attend",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


def test_imports_are_followed_through_folders_brackets_and_functions(root):
    found = Sources("top", root).closure("top.attend")
    assert found - {"top", "top.inner"} == {
        "top.attend", "top.inner.tile", "top.inner.rows", "top.late", "top.last",
    }  # fmt: skip


@pytest.mark.parametrize("edited", ["attend.py", "inner/rows.py", "late.py", "last.py"])
def test_an_edit_changes_the_digest_of_what_imports_it(root, edited):
    before = Sources("top", root)
    (root / edited).write_text(f"{(root / edited).read_text()}\n# edited")
    after = Sources("top", root)
    assert before.digest("top.attend") != after.digest("top.attend")
    assert before.digest("top.inner.rows") == after.digest("top.inner.rows") or "rows" in edited


@pytest.mark.parametrize("edited", ["attend.py", "inner/rows.py", "late.py"])
def test_a_process_that_may_have_imported_either_text_shares_no_kernels(root, edited):
    """The file is edited between the start of the process and its import, or after it."""
    started, text = Sources("top", root), (root / edited).read_text()
    before = Sources("top", root).digest("top.attend")
    (root / edited).write_text(f"{text}\n# edited")
    after = Sources("top", root).digest("top.attend")
    found = started.digest("top.attend")
    assert found not in (before, after) and found == started.digest("top.attend")


def test_an_edit_of_another_file_changes_nothing(root):
    before = Sources("top", root).digest("top.attend")
    (root / "other.py").write_text("import numpy")
    assert Sources("top", root).digest("top.attend") == before


def test_kernels_depend_on_what_writes_their_code():
    found = SOURCES.closure("sparsekv_cli.cpu.attention.decode")
    assert {"sparsekv_cli.cpu.attention.tile", "sparsekv_cli.cpu.jit.llvm"} <= found
    assert not any("lfps" in name or "sals" in name for name in found)
