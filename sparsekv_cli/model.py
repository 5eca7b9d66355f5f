"""An opened model and its parts: file, sizes, tokenizer, engine, calibrations."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv_cli import warmup
from sparsekv_cli.cache.counters import Speculation, Timings
from sparsekv_cli.cache.row_sizes import token_bytes
from sparsekv_cli.calibration.calibrations import Calibrations, OnCalibrate
from sparsekv_cli.drafts.sources import new_drafts
from sparsekv_cli.engine import DecoderEngine
from sparsekv_cli.errors import OptionError, SparseKVError
from sparsekv_cli.machine import open_engine
from sparsekv_cli.methods import build_method, depth
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.architectures import architecture_of
from sparsekv_cli.models.gguf.file import GGUFFile, open_gguf
from sparsekv_cli.models.gguf.keys import read_architecture
from sparsekv_cli.models.hparams import HParams, read_hparams
from sparsekv_cli.models.sources.locate import resolve_model
from sparsekv_cli.models.weights import read_weights
from sparsekv_cli.sequence import Attention, Sequence
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.warmup import OnCompile

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparsekv_cli.cache.spec import LayerSpec
    from sparsekv_cli.models.repack import OnLoad
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer

DRAFT_METHOD = "quest"  # the draft model's default method


@dataclass(frozen=True)
class Model:
    """An opened model, which does not change. Its sequences own the state. See ``load_model``."""

    gguf: GGUFFile
    hparams: HParams
    config: SessionConfig  # the user's settings
    engine: DecoderEngine
    calibrations: Calibrations
    n_threads: int
    load_s: float  # seconds
    load_tokenizer: Callable[[], Tokenizer]  # reads it once
    attention: Attention | None = None  # the default of its sequences
    draft: Model | None = None  # the smaller model that drafts for sequences

    @property
    def n_bytes(self) -> int:
        """The bytes of the weights of the model and of its draft model, as in their files."""
        return self.gguf.size + (0 if self.draft is None else self.draft.n_bytes)

    @property
    def tokenizer(self) -> Any:
        return self.load_tokenizer()

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    @property
    def decoder(self) -> Any:
        return self.engine.decoder

    @property
    def method(self) -> Method:
        return self._default.method

    @property
    def sparse_from(self) -> int:
        return self._default.sparse_from

    @property
    def _default(self) -> Attention:
        assert self.attention is not None
        return self.attention

    def sequence(self, attention: Attention | None = None) -> Sequence:
        """Returns a sequence without tokens."""
        source = self.config.speculate
        if source not in self.engine.draft_sources:
            source = "off"
        of_model = None if self.draft is None else self.draft.sequence()
        timings = Timings(load_s=self.load_s, speculation=Speculation(source))
        sequence = Sequence(self.engine, attention or self._default, timings=timings)
        sequence.drafts = new_drafts(source, sequence, of_model)
        return sequence

    def row_bytes(self, n: int) -> int:
        """Returns the bytes of K and V of n tokens, at most those of the context."""
        return min(n, self.n_ctx) * token_bytes(self.hparams.layers, *self.method.kv_types)

    def close(self) -> None:
        """Closes the files of the model and of its draft model."""
        self.gguf.close()
        if self.draft is not None:
            self.draft.close()

    def using(self, attention: Attention) -> Model:
        """Returns the model with another default way to attend, whose kernels are loaded."""
        self.engine.load_kernels(attention.method, attention.specs)
        return replace(self, attention=attention)

    def attention_of(
        self,
        method: Method,
        sparse_from: int | None = None,
        on_compile: OnCompile | None = None,
        on_calibrate: OnCalibrate | None = None,
    ) -> Attention:
        """Returns how a sequence attends with ``method``, which is calibrated if necessary.

        sparse_from: see SessionConfig; None takes its value. The depth from which sparse steps pay
        is known only for steps on the host. Raises SparseKVError for a method that the model's
        layers do not allow.
        """
        method.check_layers(self.hparams.layers)
        specs = self.prepare(method, on_compile, on_calibrate)
        n = self.sparse_from_of(method, sparse_from)
        return Attention(depth.with_sparse_from(method, n) if n else method, specs, n)

    def sparse_from_of(self, method: Method, sparse_from: int | None = None) -> int:
        """Returns the depth up to which ``method`` is dense. sparse_from: as in attention_of."""
        n = self.config.sparse_from if sparse_from is None else sparse_from
        if not method.work_of_a_head:
            return 0
        if n < 0 and self.engine.decodes_on_host(method):
            return depth.sparse_from(method, self.decoder.layer_specs())
        return max(0, n)

    def prepare(
        self,
        method: Method,
        on_compile: OnCompile | None = None,
        on_calibrate: OnCalibrate | None = None,
    ) -> list[LayerSpec]:
        """Returns the layers' specs for ``method``, which is calibrated and compiled if necessary.

        on_compile: called with the progress of compiling (see warmup.py). on_calibrate: called with
        the progress of a calibration (see calibration/calibrations.py).
        """
        specs = [
            replace(spec, n_checkpoints=self.config.checkpoints)
            for spec in self.calibrations.specs(method, on_calibrate)
        ]
        if self.engine.decodes_on_host(method):
            warmup.compile_method_kernels(self.decoder, method, specs, on_compile)
        return specs


def load_model(
    path: Path,
    method: Method,
    config: SessionConfig,
    on_compile: OnCompile | None = None,
    on_calibrate: OnCalibrate | None = None,
    *,
    most: int = 0,
    on_load: OnLoad | None = None,
    drafts: bool = False,
) -> Model:
    """Opens and checks a model whose sequences attend with ``method`` by default.

    on_compile, on_calibrate: as Model.prepare takes them. most: tokens of a sequence if ``config``
    does not state them. 0, or more than the model was trained for, takes the trained length.
    on_load: called with the bytes of weights that are read, on the CPU. drafts: it only drafts, so
    its tokenizer is not read before it is needed. Raises SparseKVError, which says what is wrong.
    """
    from sparsekv_cli.cpu.jit.install import use_threads
    from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

    started = time.perf_counter()
    if config.chat_template:
        from sparsekv_cli.models.chat.named import named_template  # which imports jinja2

        config = replace(config, chat_template=named_template(config.chat_template))
    file = open_gguf(path)
    draft: Model | None = None
    try:
        file.change(config)
        architecture = architecture_of(read_architecture(file))
        hparams = read_hparams(file)
        if config.speculate == "mtp" and hparams.next_block is None:
            raise OptionError(
                f"--speculate mtp: {path} has no next-token block that can make drafts"
            )
        method.check_layers(hparams.layers)
        n_ctx = config.ctx_size or min(hparams.n_ctx_train, most or hparams.n_ctx_train)
        if config.draft_model:
            draft = _load_draft(file, config, n_ctx, on_compile, on_calibrate)
        draft_bytes = draft.row_bytes(n_ctx) if draft and draft.method.holds_all_rows else 0
        n_threads = use_threads(config.threads)  # first: a router's rows are dequantised at once
        weights = read_weights(file, hparams, architecture, n_ctx)
        # While kernels lay out the weights, a thread reads the tokenizer. Both take half a second.
        with ThreadPoolExecutor(1) as reader:
            read = partial(load_tokenizer, file.metadata)
            tokenizer = cache(read) if drafts else reader.submit(read).result
            engine = open_engine(
                hparams, architecture, weights, method, config, n_threads, n_ctx, on_compile,
                lambda: tokenizer().eog_ids, draft_bytes, on_load,
            )  # fmt: skip
        decoder: Any = engine.decoder
        calibrations = Calibrations(
            file,
            hparams,
            decoder.model_identity,
            decoder,
            lambda text: tokenizer().encode(text, add_eos=False, parse_special=False),
            Path(config.calibration) if config.calibration else None,
        )
        model = Model(
            file, hparams, config, engine, calibrations, n_threads, 0.0, tokenizer, draft=draft
        )
        model = model.using(model.attention_of(method, None, on_compile, on_calibrate))
        return replace(model, load_s=time.perf_counter() - started)
    except BaseException:
        file.close()
        if draft is not None:
            draft.close()
        raise


def changes_of_draft(file: GGUFFile, draft: GGUFFile) -> dict[str, Any]:
    """Returns which of the user's changes a draft model takes not, with their defaults.

    It is stretched by the same factor. Base and original context are of one model: the draft takes
    them if both were trained alike. Keys are of one file.
    """
    own: dict[str, Any] = {"override_kv": ""}
    metadata = [each.parts[0].metadata for each in (file, draft)]
    for name, key in (("rope_freq_base", "rope.freq_base"), ("yarn_orig_ctx", "context_length")):
        found = {of.get(f"{of.get('general.architecture')}.{key}") for of in metadata}
        own |= {name: 0} if len(found) > 1 else {}
    return own


def _load_draft(
    file: GGUFFile,
    config: SessionConfig,
    n_ctx: int,
    on_compile: OnCompile | None,
    on_calibrate: OnCalibrate | None,
) -> Model:
    """Opens the draft model for the model in ``file``. config, n_ctx: those of that model.

    Raises SparseKVError for another vocabulary, OptionError for a method that does not exist.
    """
    from sparsekv_cli.models.tokenizer.vocab import string_list

    path = resolve_model(config.draft_model)
    try:
        method = build_method(config.draft_method or DRAFT_METHOD, {})
    except ValueError as error:
        raise OptionError(f"--draft-method: {error}") from None
    with open_gguf(path) as other:
        tokens, its_tokens = (string_list(each.metadata, "tokens") for each in (file, other))
        n = min(len(tokens), len(its_tokens))  # a vocabulary may end with tokens of no meaning
        if not n or tokens[:n] != its_tokens[:n]:
            raise SparseKVError(
                f"{path}: has another vocabulary than {file.path}: a draft model needs the same"
            )
        alone = replace(
            config, speculate="off", draft_model="", draft_method="", chat_template="",
            calibration="", device="cpu", **changes_of_draft(file, other),
        )  # fmt: skip
        other.change(alone)
        alone = replace(alone, ctx_size=min(config.ctx_size, read_hparams(other).n_ctx_train))
    return load_model(path, method, alone, on_compile, on_calibrate, most=n_ctx, drafts=True)
