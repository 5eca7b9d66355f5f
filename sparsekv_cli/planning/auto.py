"""``--method auto``: the fastest method that loses no more than the user allows.

The losses of methods are measured once a model, and stored in its sidecar with machine and date. A
loss is the mean distance to dense attention (KLD) over tokens that a method decodes after a text.
Half of these tokens continue the text. The others repeat a passage of the text whose first tokens
end the prompt. A method that has lost the passage cannot repeat it. The speed of methods is a
forecast (plan.py). In contexts in which the chosen method is not faster than dense attention,
attention is dense.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekv_cli.calibration.calibrations import CalibrationText
from sparsekv_cli.calibration.sidecar import Entry
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.compare import compare
from sparsekv_cli.evaluation.roofline import cpu_name
from sparsekv_cli.methods import METHODS, build_method, spec_of, stated_options
from sparsekv_cli.methods.base import Method
from sparsekv_cli.planning.kept import method_key
from sparsekv_cli.planning.plan import Forecast

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.forward import OnProgress

AUTO = "auto"  # name of the method on the command line, and of the entry in the sidecar
N_TEXT = 4096  # tokens of the text on which losses are measured
# first tokens of the passage, in the prompt; and decoded tokens of passage and of text, each
N_BEGUN, N_HALF = 32, 48
# Budgets that are measured besides each method's default.
BUDGETS = ("2%", "10%")
LEAST_TEXT = 1024  # tokens; in shorter texts a method leaves out too little for a measurable loss
ORACLE = (
    "even exact top-k ({spec}) loses {kld:.3f}, and {max_loss:g} is allowed, so no choice of so "
    "many rows is good enough on this model; take full, more --dense-layers or a larger --budget"
)
GAIN = 1.02  # the chosen method must be so many times as fast as ``full``


@dataclass(frozen=True)
class Losses:
    """The losses of methods on one model, KLD to dense attention."""

    machine: str
    date: str
    kld: Mapping[str, float]  # by ``method_key``
    # name of a method -> hash of its calibration
    calibrations: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, methods: Sequence[Method]) -> list[Method]:
        """Returns the methods that were not measured with their present options."""
        return [each for each in methods if method_key(each) not in self.kld]

    def only(self, methods: Sequence[Method]) -> Losses:
        """Returns the losses of ``methods``, as far as they are known."""
        keys = {method_key(each) for each in methods}
        return replace(self, kld={key: kld for key, kld in self.kld.items() if key in keys})

    def oracle(self, max_loss: float) -> str:
        """Returns a sentence if even exact top-k with the largest budget loses too much, else "".

        A method that chooses other rows cannot help then.
        """
        fewest, most = BUDGETS
        options: tuple[dict[str, str], ...] = ({"budget": most}, {}, {"budget": fewest})
        by_rows = [build_method("topk", each) for each in options]
        tried = [each for each in by_rows if method_key(each) in self.kld]
        if not tried or min(self.kld.values()) <= max_loss:
            return ""
        spec, kld = spec_of(tried[0]), self.kld[method_key(tried[0])]
        return ORACLE.format(spec=spec, kld=kld, max_loss=max_loss)

    def as_entry(self, n_tokens: int, text: CalibrationText) -> Entry:
        losses = {**vars(self), "kld": dict(self.kld)}
        digest = hashlib.sha256(text.text.encode()).hexdigest()
        return Entry({"losses": np.array(json.dumps(losses))}, n_tokens, text.name, digest)

    @staticmethod
    def of_entry(entry: Entry) -> Losses:
        """Returns the losses in an entry of a sidecar.

        Raises KeyError, TypeError or ValueError if ``as_entry`` has not made the entry.
        """
        try:
            losses = Losses(**json.loads(str(entry.tensors["losses"])))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(losses.kld, dict) or not all(map(_is_loss, losses.kld.values())):
            raise ValueError("a loss is no number")
        if not isinstance(losses.calibrations, dict):
            raise ValueError("its calibrations have no names")
        return losses


def _is_loss(value: Any) -> bool:
    return isinstance(value, float | int) and 0 <= value < inf


@dataclass(frozen=True)
class Rated:
    """A method, its loss, and its predicted tokens a second."""

    method: Method
    kld: float
    tps: float

    @property
    def spec(self) -> str:
        """The method as on the command line: ``quest:budget=2%``."""
        return spec_of(self.method)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        method = self.method
        named = {"name": method.name, "options": stated_options(method)}
        return {**named, "kld": self.kld, "predicted_tps": self.tps}


@dataclass(frozen=True)
class MethodChoice:
    """The method that was chosen for a context of n tokens, and why."""

    chosen: Rated
    sparse_from: int  # contexts up to so many rows are dense
    full_tps: float
    n: int
    max_loss: float
    rated: Sequence[Rated]
    losses: Losses | None
    is_busy: bool = False  # True: the speeds are of a busy machine, so that ``full`` is chosen

    @property
    def repeat(self) -> str:
        """Options of the command line that give this choice again."""
        method = self.chosen.method
        wait = f" --sparse-from {self.sparse_from}" if method.work_of_a_head else ""
        return f"{as_flags(method)}{wait}"

    @property
    def why(self) -> str:
        """The reason of the choice, in a sentence."""
        name, found = self.chosen.spec, self.losses
        if found is None:
            return (
                f"auto: {name}, because contexts below {LEAST_TEXT} tokens are too short for more"
            )
        if self.is_busy:
            return "auto: full, because the speeds of a busy machine are not to be believed"
        measured = f"KLD measured {found.date} on {found.machine}"
        faster = [
            f"{each.spec} {each.kld:.3f}"
            for each in self.rated
            if each.kld > self.max_loss and each.tps > self.chosen.tps
        ]
        beyond = f"; faster ones lose more: {', '.join(faster)}" if faster else ""
        if name == "full":
            oracle = found.oracle(self.max_loss)
            return (
                f"auto: full, because at {self.n} tokens no method that loses at most "
                f"{self.max_loss:g} is predicted to be faster ({measured}){beyond}"
            ) + (f"; {oracle}" if oracle else "")
        return (
            f"auto: {name}, because at {self.n} tokens {self.chosen.tps:.0f} tokens/s are "
            f"predicted of it, {self.full_tps:.0f} of full, and it loses {self.chosen.kld:.3f} of "
            f"the {self.max_loss:g} allowed ({measured}){beyond}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.chosen.as_dict(),
            "repeat": self.repeat,
            "why": self.why,
            "context": self.n,
            "max_loss": self.max_loss,
            "is_believable": not self.is_busy,
            "considered": [each.as_dict() for each in self.rated],
        }


def as_flags(method: Method) -> str:
    """Returns the method as options of the command line: ``--method quest -o budget=2%``."""
    options = (f" -o {key}={text}" for key, text in stated_options(method).items())
    return f"--method {method.name}{''.join(options)}"


def candidates(model: Model) -> list[Method]:
    """Returns the methods that the model can run, each with default options and with BUDGETS."""
    methods = [build_method(name, {}) for name in METHODS if name != "full"]
    return [
        variant
        for each in methods
        if model.calibrations.has(each)
        for variant in (each, *(build_method(each.name, {"budget": text}) for text in BUDGETS))
    ]


def worth_forecasting(methods: Sequence[Method], losses: Losses, max_loss: float) -> list[Method]:
    """Returns the methods whose speed is of interest: small loss, or default options."""
    return [
        each
        for each in methods
        if losses.kld.get(method_key(each), inf) <= max_loss or not stated_options(each)
    ]


def kept_losses(model: Model) -> Losses | None:
    """Returns the losses in the model's sidecar; None if there are none.

    Losses of methods that now have another calibration are left out.
    """
    entry = model.calibrations.find(AUTO)
    try:
        losses = None if entry is None else Losses.of_entry(entry)
    except (KeyError, TypeError, ValueError):
        return None
    if losses is None:
        return None
    now = model.calibrations.digests(build_method(name, {}) for name in METHODS)
    same = {
        key: kld
        for key, kld in losses.kld.items()
        if losses.calibrations.get(name := key.partition(" ")[0]) == now.get(name)
    }
    return replace(losses, kld=same)


def measure_losses(
    model: Model,
    methods: Sequence[Method],
    text: CalibrationText,
    n_tokens: int = N_TEXT,
    progress: OnProgress | None = None,
    known: Losses | None = None,
) -> tuple[Losses, Entry]:
    """Measures the losses of ``methods`` on a text. known: losses that the result has too.

    Each method decodes the text's last tokens, and a passage of the text again. The losses count
    for every context, so the user's context does not limit n_tokens. Raises SparseKVError if the
    text is too short.
    """
    ids = model.tokenizer.encode(text.text, add_eos=False, parse_special=False)
    n_tokens, engine = min(n_tokens, model.hparams.n_ctx_train), copy(model.engine)
    engine.n_ctx, model = max(model.n_ctx, n_tokens), replace(model, engine=engine)
    ids = ids[:n_tokens]
    if len(ids) < LEAST_TEXT:
        raise SparseKVError(
            f"{len(ids)} tokens of text {text.name} are too few to measure what methods lose: at "
            f"least {LEAST_TEXT} are needed"
        )
    by_key = {"full": build_method("full", {}), **{method_key(each): each for each in methods}}
    prompt, following = loss_task(ids)
    _, *rows = compare(model, by_key, prompt, len(following), following, on_step=progress)
    kld = {row.spec: max(0.0, row.kld_mean) for row in rows}
    date, calibrations = datetime.now(UTC).date().isoformat(), model.calibrations.digests(methods)
    if known is not None:
        kld, calibrations = {**known.kld, **kld}, {**known.calibrations, **calibrations}
    losses = Losses(cpu_name(), date, kld, calibrations)
    return losses, losses.as_entry(len(ids), text)


def loss_task(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns a prompt and the tokens to decode: a passage from its middle, then the text's end."""
    end, middle = len(ids) - N_HALF - N_BEGUN - N_HALF, len(ids) // 2
    passage = ids[middle : middle + N_BEGUN + N_HALF]
    prompt = [*ids[:end], *passage[:N_BEGUN]]
    return prompt, [*passage[N_BEGUN:], *ids[end : end + N_HALF]]


def choose(
    forecast: Forecast, methods: Sequence[Method], losses: Losses, n: int, max_loss: float
) -> MethodChoice:
    """Returns the fastest of ``methods`` at n tokens that loses at most ``max_loss``, or ``full``.

    On a busy machine it returns ``full``. forecast: of methods that are sparse at every depth.
    """
    full = build_method("full", {})
    dense = Rated(full, 0.0, 1 / forecast.seconds(full, n))
    rated = [
        Rated(each, losses.kld[key], 1 / forecast.seconds(each, n))
        for each in methods
        if (key := method_key(each)) in losses.kld and key in forecast.speeds.methods
    ]
    rated.sort(key=lambda each: -each.tps)
    allowed = [each for each in rated if each.kld <= max_loss and each.tps > GAIN * dense.tps]
    chosen, sparse_from, is_busy = dense, 0, forecast.speeds.is_busy
    if allowed and not is_busy:
        chosen = allowed[0]
        pays = forecast.pays_from(chosen.method) or 0
        sparse_from = max(0, min(n, pays) - 1)
    return MethodChoice(chosen, sparse_from, dense.tps, n, max_loss, rated, losses, is_busy)


def too_short(n: int, max_loss: float) -> MethodChoice:
    """Returns the choice of ``full``, for contexts in which methods leave out hardly any rows."""
    full = Rated(build_method("full", {}), 0.0, 0.0)
    return MethodChoice(full, 0, 0.0, n, max_loss, (), None)
