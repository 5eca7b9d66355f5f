"""``sparsekv-cli doctor``: the facts about this installation that a bug report needs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.tables import print_pairs, print_table, size
from sparsekv_cli.commands.shared.terminal import write_json, write_text

FOLDER = ("name", "path", "files", "size", "writable")
MODEL = ("name", "where", "architecture", "size")


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@verbose_option
def command(as_json: bool) -> None:
    """Show what a bug report needs: versions, CPU, memory, GPU, folders and models.

    No prompt and no secret is shown. No model is loaded. Problems are listed at the end.
    """
    from sparsekv_cli.doctor.report import examine

    report = examine()
    if as_json:
        write_json(report)
    else:
        show(report)


def show(report: Mapping[str, Any]) -> None:
    """Prints a table of each section that could be made, then the problems."""
    python, cpu, memory = (report[name] or {} for name in ("python", "cpu", "memory"))
    print_pairs(
        "",
        [
            ("sparsekv-cli", report["version"]),
            ("Python", " ".join(map(str, python.values())) or "unknown"),
            ("CPU", _cpu(cpu)),
            ("CPU features", _features(report["cpu_features"], True)),
            ("CPU lacks", _features(report["cpu_features"], False)),
            ("memory", _memory(memory)),
            ("GPU", _gpu(report["gpu"])),
        ],
    )
    packages = report["packages"] or {}
    _table("packages", (), [(name, found or "not installed") for name, found in packages.items()])
    _table("folders", FOLDER, [_folder(folder) for folder in report["folders"] or ()])
    _table("models", MODEL, [_model(model) for model in report["models"] or ()])
    variables = report["environment"] or {}
    _table("environment", (), [(name, _at_home(value)) for name, value in variables.items()])
    problems = [(str(i), _at_home(text)) for i, text in enumerate(report["problems"], 1)]
    _table("problems", (), problems)
    if not problems:
        write_text("no problems\n")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    if rows:
        print_table(title, columns, rows)


def _cpu(cpu: Mapping[str, Any]) -> str:
    if not cpu:
        return "unknown"
    quota = cpu["container_quota"]
    limited = "no container quota" if quota is None else f"container quota {quota:g} CPUs"
    return (
        f"{cpu['name']} ({cpu['architecture']}), {cpu['usable']} of {cpu['count']} CPUs usable, "
        f"{limited}, threads by default {cpu['threads']}"
    )


def _features(features: Mapping[str, bool] | None, has: bool) -> str:
    if features is None:
        return "unknown"
    return " ".join(name for name, is_there in features.items() if is_there == has) or "none"


def _memory(memory: Mapping[str, int | None]) -> str:
    physical, available, limit = (
        "unknown" if n is None else size(n)
        for n in (
            memory.get(f"{name}_bytes") for name in ("physical", "available", "container_limit")
        )
    )
    limited = "no container limit" if limit == "unknown" else f"container limit {limit}"
    return f"{available} available of {physical}, {limited}"


def _gpu(gpu: Mapping[str, Any] | None) -> str:
    if gpu is None:
        return "unknown"
    if not gpu["driver"]:
        return "no driver"
    devices = [
        f"{each['name']}, {size(each['memory_bytes'])}, compute capability {each['capability']}"
        for each in gpu["devices"]
    ]
    cuda = f"torch for CUDA {gpu['cuda_of_torch']}" if gpu["cuda_of_torch"] else ""
    return "; ".join(filter(None, [*devices, cuda, gpu["driver_version"]])) or "a driver"


def _folder(folder: Mapping[str, Any]) -> tuple[Any, ...]:
    counted = folder["files"] is not None
    return (
        folder["name"],
        _at_home(folder["path"]) if folder["path"] else "",
        folder["files"] if counted else "",
        size(folder["bytes"]) if counted else "",
        "yes" if folder["writable"] else "no",
    )


def _model(model: Mapping[str, Any]) -> tuple[Any, ...]:
    n_bytes = model["file_bytes"]
    return (
        model["name"],
        model["where"],
        model["architecture"] or "",
        "" if n_bytes is None else size(n_bytes),
    )


def _at_home(text: str) -> str:
    """Returns ``text`` with ``~`` for the home folder, so that it does not show the user's name."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return text
    return text if home == os.sep else text.replace(home, "~")
