"""The programs of scripts/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "scripts"


def load_script(name: str) -> Any:
    """A script as a module; the modules beside it are found as when it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    loader = SourceFileLoader(f"{name}_script", str(FOLDER / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclasses look themselves up there
    loader.exec_module(module)
    return module
