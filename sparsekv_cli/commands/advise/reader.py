"""Reads prompts for ``advise`` and stores their rows on disk, from which every method starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence as Ids
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sparsekv_cli.commands.options.prefix import PrefixOptions, prefixes_maker
from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.prefix.folder import PrefixFolder, default_prefix_folder, limit_of
from sparsekv_cli.prefix.prefixes import LEAST
from sparsekv_cli.sequence import Attention

if TYPE_CHECKING:
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model
    from sparsekv_cli.sequence import Sequence

N_PROBE = 512  # tokens of the prefill that measures the speed of reading


class Reader:
    """Prefills prompts for any method, with rows from disk.

    If the prefix cache is off or cannot be written, the rows are in a temporary folder.
    """

    def __init__(self, model: Model, prefix: PrefixOptions, n_bytes: int) -> None:
        """n_bytes: the bytes of all rows that will be stored."""
        from sparsekv_cli.planning.work import prefill_work

        self._model = model
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        reason = _reason_against(prefix, n_bytes)
        if reason:
            self._temporary = tempfile.TemporaryDirectory(prefix="sparsekv-cli-")
            say(f"{reason}: rows are kept in a temporary folder until the end")
            limit = max(prefix.limit or 2.0, 3 * n_bytes / 2**30)
            path = Path(self._temporary.name)
            prefix = replace(prefix, directory=path, is_off=False, limit=limit)
        self.keeps_rows = not reason
        self._rows = prefixes_maker(model, prefix)
        self._seconds = 0.0  # of a product of a prefill
        budget = model.decoder.sparse_budget
        self._work = lambda n: prefill_work(model.gguf, model.hparams, n, budget(n))
        model.gguf.content.wait()  # rows belong to a model by its hash

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def on_disk(self, ids: Ids[int]) -> int:
        """Returns how many first tokens of ``ids`` have rows on disk for ``full``."""
        rows = self._rows(self._model.method)
        return 0 if rows is None else rows.find(ids).n

    def expected(self, n: int, n_known: int = 0) -> float:
        """Returns the seconds to read n tokens of which the first n_known have rows."""
        if not self._seconds:
            sequence = self._model.sequence()
            n_probe = min(N_PROBE, sequence.n_ctx)
            sequence.prefill([0] * n_probe)
            self._seconds = sequence.timings.prefill_s / self._work(n_probe)
        return self._seconds * (self._work(n) - self._work(n_known))

    def read(self, ids: Ids[int], method: Method) -> Sequence:
        """Returns a sequence with the prompt ``ids``. ``method`` is sparse in all steps."""
        model, rows = self._model, self._rows(method)
        specs = model.prepare(method)
        model.engine.load_kernels(method, specs)
        sequence = model.sequence(Attention(method, specs, 0))
        with PrefillProgress() as bar:
            sequence.prefill(ids, bar, rows=rows)
        if rows is not None:
            rows.finish()
        return sequence

    def read_first(self, ids: Ids[int]) -> tuple[Sequence, float, float]:
        """Reads a prompt with ``full`` and says how long it takes.

        Returns the sequence, the seconds, and the seconds of a second reading. Raises SparseKVError
        if the rows cannot be kept.
        """
        n, n_known = len(ids), self.on_disk(ids)
        if n_known:
            say(f"{n_known} of {n} tokens are on disk")
        if n - n_known > LEAST:
            say(f"reading {n - n_known} tokens: about {self.expected(n, n_known):.0f} s")
        sequence = self.read(ids, self._model.method)
        seconds = sequence.timings.prefill_s
        if n < LEAST or n_known > n - LEAST:
            return sequence, seconds, seconds
        del sequence  # gone before there is another one
        if not self.on_disk(ids):
            raise SparseKVError(
                f"the rows of {n} tokens cannot be kept on disk: make room, or name another folder "
                "with --cache-dir"
            )
        sequence = self.read(ids, self._model.method)
        return sequence, seconds, sequence.timings.prefill_s


def _reason_against(prefix: PrefixOptions, n_bytes: int) -> str:
    """Returns why the user's folder cannot keep the rows; empty if it can."""
    path = prefix.directory or default_prefix_folder()
    if prefix.is_off:
        return "the prefix cache is switched off"
    if path is None:
        return "there is no home folder and no XDG_CACHE_HOME"
    if 2 * n_bytes > limit_of(path, prefix.limit):  # rows in q8_0 would change the comparison
        return f"the rows take {n_bytes / 2**30:.1f} GiB, more than half of --cache-limit"
    place = next(each for each in (path, *path.parents) if each.exists())
    is_usable = place != path or PrefixFolder(path, 0, say).is_usable()
    if not (place.is_dir() and os.access(place, os.W_OK) and is_usable):
        return f"{path} cannot be written"
    return ""
