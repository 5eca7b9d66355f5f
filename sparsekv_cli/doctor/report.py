"""The report of ``doctor``, made of sections. If a section fails, the others still follow.

A failed section is None in the report, and ``problems`` has the reason.
"""

from collections.abc import Callable
from typing import Any

from sparsekv_cli import __version__
from sparsekv_cli.doctor import folders, machine, models

#: Section -> the function that makes it. The function may add lines to the list of problems.
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
        except Exception as error:  # any error of a broken library
            report[name] = None
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return report | {"problems": problems}
