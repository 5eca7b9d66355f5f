"""The report of ``doctor``. A section that fails does not stop the others.

It is None in the report, and the list of problems has the reason.
"""

from collections.abc import Callable
from typing import Any

from sparsekv_cli import __version__
from sparsekv_cli.doctor import folders, machine, models

#: Makers of sections by name. Each gets the list of problems and adds to it.
SECTIONS: dict[str, Callable[[list[str]], Any]] = {
    "python": machine.python,
    "packages": machine.packages,
    "cpu": machine.cpu,
    "cpu_features": machine.cpu_features,
    "memory": machine.memory,
    "gpu": machine.gpu,
    "folders": folders.folders,
    "models": models.models,
    "environment": machine.environment,
}


def examine() -> dict[str, Any]:
    """Returns the version, all sections by name, and ``problems``, a list of lines."""
    report: dict[str, Any] = {"version": __version__}
    problems: list[str] = []
    for name, section in SECTIONS.items():
        try:
            report[name] = section(problems)
        except Exception as error:  # of a broken library; the other sections follow
            report[name] = None
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return report | {"problems": problems}
