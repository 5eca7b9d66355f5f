"""The programs of scripts/ as modules."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "scripts"


def load_script(path: str) -> Any:
    """A program by its path in scripts/, as a module. It finds the modules beside it."""
    program = FOLDER / path
    if str(program.parent) not in sys.path:
        sys.path.insert(0, str(program.parent))
    loader = SourceFileLoader(f"{program.name}_script", str(program))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclasses look themselves up there
    loader.exec_module(module)
    return module
