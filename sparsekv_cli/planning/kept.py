"""The speeds of a model's shape on this machine: read from the user's cache, or measured once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from sparsekv_cli import __version__
from sparsekv_cli.calibration.calibrations import Calibrations
from sparsekv_cli.calibration.run import CALIBRATION
from sparsekv_cli.calibration.sidecar import Entry, digest
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.hparams import HParams, read_hparams
from sparsekv_cli.models.identity import identity_in
from sparsekv_cli.planning.speeds import MethodCurve, Speeds, middle
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.system.files import open_regular, replace_file, user_cache
from sparsekv_cli.system.work import load_beyond_cores, usable_cores

if TYPE_CHECKING:
    from sparsekv_cli.warmup import OnCompile

FORMAT = 8  # raise it when the measurement changes
# Passes over all methods. The median of a method's measurements counts.
N_PASSES = 3
# (part that is being measured, number of finished parts, number of parts)
OnMeasure = Callable[[str, int, int], None]
# Keys of metadata that do not change a step's time begin so.
NAMES = ("general.", "tokenizer.")
NOT_CALIBRATED = "not calibrated: sparsekv-cli calibrate"


def shape_key(file: GGUFFile, config: SessionConfig, machine: str, n_threads: int) -> str:
    """Returns a hash of all that decides a step's time: shapes, types, settings, machine."""
    shapes = [(i.name, i.shape, int(i.type)) for i in file.tensors.values()]
    metadata = [
        (key, str(value)) for key, value in file.metadata.items() if not key.startswith(NAMES)
    ]
    architecture = file.metadata.get("general.architecture")
    decoding = config.activations, config.repack
    settings = *decoding, config.prefill_dtype, machine, n_threads, __version__, FORMAT
    text = repr((shapes, metadata, architecture, settings))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def method_key(method: Method) -> str:
    """Returns a text with a method's name and all of its options."""
    return f"{method.name} {json.dumps(method.options(), sort_keys=True)}"


def read_speeds(path: Path | None) -> Speeds | None:
    """Returns the speeds in a file; None if the file is missing or has other contents."""
    bad = ValueError, KeyError, TypeError, AttributeError, RecursionError
    if path is None:
        return None
    with contextlib.suppress(OSError, *bad), open_regular(path) as file:
        return Speeds.from_dict(json.loads(file.read()))
    return None


def write_speeds(path: Path | None, speeds: Speeds) -> None:
    """Replaces the file by ``speeds``. Raises SparseKVError if it cannot be written."""
    if path is None:
        raise SparseKVError("speeds cannot be kept: there is no home folder and no XDG_CACHE_HOME")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(speeds.as_dict(), indent=1) + "\n").encode())
    except OSError as error:
        raise SparseKVError(f"{path}: speeds cannot be kept there: {error.strerror}") from None


def calibration_of(
    method: Method, file: GGUFFile, hparams: HParams, n_ctx: int = 0
) -> Entry | None:
    """Returns a method's stored calibration for this model, or None.

    It is also None if the file has no data of tensors. n_ctx: the context; 0: the model's.
    """
    if not file.has_data:
        return None
    nothing: Any = None  # a search neither decodes nor tokenizes
    identity = identity_in(file, hparams, n_ctx)
    return Calibrations(file, hparams, identity, nothing, nothing).find_of(method)


def _without_others(known: Speeds | None, entries: Mapping[str, Entry | None]) -> Speeds | None:
    """Returns the speeds without curves of methods that now have another calibration.

    entries: method's key -> its calibration.
    """
    if known is None:
        return None
    hashes = {key: entry and digest(entry.tensors) for key, entry in entries.items()}
    curves = {
        key: curve
        for key, curve in known.methods.items()
        if key not in hashes or curve.options.get(CALIBRATION) == hashes[key]
    }
    return replace(known, methods=curves)


def speeds_of(
    file: GGUFFile,
    config: SessionConfig,
    methods: Sequence[Method],
    *,
    again: bool = False,
    is_quick: bool = False,
    on_measure: OnMeasure | None = None,
    on_compile: OnCompile | None = None,
) -> Speeds:
    """Returns the speeds of a model's shape with ``methods``. It measures and stores missing ones.

    Other work on the machine makes it slower for minutes. So the pace of ``full`` is measured
    before and after each curve, and the curve is divided by it. All curves refer to the median pace
    of the first measurement. Methods without a calibration that they need are left out.

    again: measure everything. is_quick: missing speeds are measured once, in seconds and less
    exactly, and stored in another file. A longer measurement is used if it has all methods. Speeds
    of a busy machine are measured again when the machine is quiet. Warns if they cannot be stored.
    Raises SparseKVError for a model that cannot run.
    """
    from sparsekv_cli.evaluation.roofline import cpu_name
    from sparsekv_cli.planning.measure import Measurement

    hparams, machine = read_hparams(file), cpu_name()
    name = shape_key(file, config, machine, config.threads or usable_cores())
    path = user_cache(f"speeds/{name}.json")
    wanted = {method_key(each): each for each in (build_method("full", {}), *methods)}
    entries = {
        key: calibration_of(each, file, hparams, config.ctx_size)
        for key, each in wanted.items()
        if each.needs == CALIBRATION
    }
    wanted = {key: each for key, each in wanted.items() if entries.get(key, each) is not None}
    known = None if again else _without_others(read_speeds(path), entries)
    if is_quick and (known is None or not known.methods.keys() >= wanted.keys()):
        path = user_cache(f"speeds/{name}.quick.json")
        known = None if again else _without_others(read_speeds(path), entries)
    is_busy = load_beyond_cores() is not None
    if is_quick and known is not None and known.is_busy and not is_busy:
        known = None
    missing = {
        key: each for key, each in wanted.items() if known is None or key not in known.methods
    }
    if known is not None and not missing:
        return known
    measurement = Measurement(file, config, on_compile, is_quick=is_quick)
    report = on_measure or (lambda what, done, total: None)
    n_passes = 1 if is_quick else N_PASSES
    n_parts = 1 + n_passes * len(missing)
    report("weights", 0, n_parts)
    if known is None:
        known = replace(measurement.speeds(machine), is_quick=is_quick)
    known = replace(known, is_busy=known.is_busy or is_busy)
    found: dict[str, list[MethodCurve]] = {key: [] for key in missing}  # divided by the pace
    paces = [measurement.pace()]
    for i, (key, method) in enumerate(n_passes * list(missing.items()), 1):
        report(method.name, i, n_parts)
        entry = entries.get(key)
        curve = measurement.curve(method, {} if entry is None else entry.tensors)
        if entry is not None:
            curve = replace(curve, options={**curve.options, CALIBRATION: digest(entry.tensors)})
        if not is_quick:
            paces.append(measurement.pace())
        found[key].append(curve.times(1 / mean(paces[-2:])))
    if not known.methods:
        pace = median(paces)
        known = replace(known, pace=pace, step_seconds=known.step_seconds * pace / known.pace)
    curves = dict(known.methods)
    for key, method in missing.items():
        curves[key] = middle(found[key]).times(known.pace)
        if method.name != "full" and type(method).dense_layer is Method.dense_layer:
            curves[key] = curves[key].with_dense_layers_of(curves[next(iter(wanted))])
    is_busy = known.is_busy or load_beyond_cores() is not None  # the machine may have become busy
    speeds = replace(known, methods=curves, is_busy=is_busy)
    report("done", n_parts, n_parts)
    try:
        write_speeds(path, speeds)
    except SparseKVError as error:  # they are measured again next time
        warnings.warn(str(error), stacklevel=2)
    return speeds
