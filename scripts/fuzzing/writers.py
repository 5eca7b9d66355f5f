"""The jobs that write files, each with what its reader finds before and after."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from faults import FAULTS, KILLED, at_once, problem_of, run

from sparsekv_cli.errors import SparseKVError

MINE = {"mine.txt": b"mine", "thesis.tmp": b"mine", ".a.json.12.tmp": b"mine"}
IDS = [3 + i * i % 250 for i in range(700)]
N_PROCESSES = 3


class Writer(ABC):
    """A job that writes into a folder. ``steps``: whether a part of what is new is a state too."""

    steps = False

    def prepare(self, folder: Path) -> None:  # noqa: B027 - some begin with nothing
        """Writes the state that the job finds."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Does the job."""

    @abstractmethod
    def read(self, folder: Path) -> Any:
        """Returns what the next run finds."""


def layers(n: int) -> list[Any]:
    """The caches of two small layers, with n rows that tell their place."""
    from sparsekv_cli.cache.layer import DenseCache
    from sparsekv_cli.cache.spec import LayerSpec

    caches = []
    for i in range(2):
        cache = DenseCache(LayerSpec(i, 2, 2, 2, 16, 16, 1))
        cache.store.reserve(n)
        rows = np.arange(n, dtype=np.float16)[:, None] + np.float16(i)
        cache.store.k[:, :n], cache.store.v[:, :n], cache.store.n = rows, -rows, n
        caches.append(cache)
    return caches


def identity() -> Any:
    """Returns the identity of rows of no model."""
    from sparsekv_cli.models.identity import ModelIdentity, RowsIdentity

    content: Any = SimpleNamespace(known=lambda: "0" * 32, wait=lambda: "0" * 32)
    return RowsIdentity(ModelIdentity(content, ()), ("f16", "f16"), (), "f32")


class Prefix(Writer):
    """The prefix folder."""

    def rows(self, folder: Path) -> Any:
        from sparsekv_cli.prefix.folder import PrefixFolder
        from sparsekv_cli.prefix.prefixes import Prefixes

        place = PrefixFolder(folder, 1 << 30, say)
        return Prefixes(place, "m", identity(), ("f16", "f16"), 1, lambda text: None)

    def write(self, folder: Path) -> None:
        rows, caches = self.rows(folder), layers(len(IDS))
        rows.begin(IDS, rows.find(IDS), 0, caches)
        for i, cache in enumerate(caches):
            rows.take(i, cache)
        rows.finish()

    def read(self, folder: Path) -> Any:
        rows, caches, known = self.rows(folder), layers(0), layers(len(IDS))
        n = rows.load(rows.find(IDS), caches, len(IDS))
        for cache, right in zip(caches, known, strict=True):
            if not np.array_equal(cache.store.k[:, :n], right.store.k[:, :n]):
                return "other rows"
        return n


class Session(Prefix):
    """A session file."""

    def rows(self, folder: Path) -> Any:
        from sparsekv_cli.prefix.session_file import SessionFile

        path = folder / "a.session"
        return SessionFile(path, "m", identity(), ("f16", "f16"), 1, say, lambda text: None)


class Kernels(Writer):
    """The kernel cache."""

    def prepare(self, folder: Path) -> None:
        self.store(folder).write("a", b"old" * 1000)

    def write(self, folder: Path) -> None:
        self.store(folder).write("a", b"new" * 1000)

    def read(self, folder: Path) -> Any:
        return str(self.store(folder).read("a"))

    def store(self, folder: Path) -> Any:
        from sparsekv_cli.cpu.jit.compiling.store import KernelStore

        return KernelStore(folder)


class Calibration(Writer):
    """A sidecar of calibrations."""

    def prepare(self, folder: Path) -> None:
        self.keep(folder, "sals", 1.0)
        self.keep(folder, "fasa", 1.0)

    def write(self, folder: Path) -> None:
        self.keep(folder, "fasa", 2.0)

    def keep(self, folder: Path, name: str, value: float) -> None:
        from sparsekv_cli.calibration.sidecar import Entry, write_entry

        entry = Entry({"a": np.full((2, 4000), value, np.float32)}, 300, "a text", "0" * 64)
        write_entry(folder / "a.npz", name, identity().model, entry)

    def read(self, folder: Path) -> Any:
        from sparsekv_cli.calibration.sidecar import read_entry

        entries = [
            read_entry(folder / "a.npz", name, identity().model) for name in ("sals", "fasa")
        ]
        return [each and float(each.tensors["a"].sum()) for each in entries]


class Speeds(Writer):
    """The speeds that ``plan`` measured."""

    def prepare(self, folder: Path) -> None:
        self.keep(folder, 1.0)

    def write(self, folder: Path) -> None:
        self.keep(folder, 2.0)

    def keep(self, folder: Path, pace: float) -> None:
        from sparsekv_cli.planning.kept import write_speeds
        from sparsekv_cli.planning.speeds import Speeds as Measured

        write_speeds(folder / "a.json", Measured("a", 2, "b", 1e9, pace, 0.1, 100, 5, 10, {}))

    def read(self, folder: Path) -> Any:
        from sparsekv_cli.planning.kept import read_speeds

        return (found := read_speeds(folder / "a.json")) and found.pace


class Answers(Writer):
    """The output of ``run --jsonl``: a line an answer."""

    steps = True

    def prepare(self, folder: Path) -> None:
        self.path(folder).write_text('{"line": 1, "text": "a"}\n{"line": 2, "te', "utf-8")

    def path(self, folder: Path) -> Path:
        return folder / "a.jsonl"

    def write(self, folder: Path) -> None:
        from sparsekv_cli.commands.run.jsonl import Output, resume
        from sparsekv_cli.system.files import AppendedFile

        with AppendedFile(self.path(folder), is_alone=True) as file:
            output = Output(file.write, lambda text: None)
            for number in range(resume(self.path(folder))[0] + 1, 4):
                output.expect(number)
                output.put(number, {"line": number, "text": "b" * 1000})
            time.sleep(0.01)  # so that processes meet

    def read(self, folder: Path) -> Any:
        from sparsekv_cli.commands.run.jsonl import resume

        path = self.path(folder)
        resume(path)
        return path.read_text("utf-8").splitlines() if path.exists() else []


class Records(Writer):
    """The records of ``eval --jsonl``."""

    steps = True

    def records(self, folder: Path) -> Any:
        from sparsekv_cli.evaluation.perplexity.records import PerplexityRecords

        return PerplexityRecords(folder / "a.jsonl", {"model": "m"})

    def prepare(self, folder: Path) -> None:
        self.records(folder)

    def write(self, folder: Path) -> None:
        records = self.records(folder)
        for i in range(2):
            numbers = dict.fromkeys([*records.columns, "rows_attended", "head_steps"], 1)
            records.add({"chunk": i, "name": "full" * 100, "options": {}, **numbers})

    def read(self, folder: Path) -> Any:
        return [str(each) for each in self.records(folder).by_key.values()]


class History(Writer):
    """The history of ``chat``."""

    def prepare(self, folder: Path) -> None:
        self.history(folder).store_string("old\nlines")

    def history(self, folder: Path) -> Any:
        from sparsekv_cli.commands.chat.prompt import Pastes, open_history

        os.environ["XDG_STATE_HOME"] = str(folder)
        return open_history(Pastes())

    def write(self, folder: Path) -> None:
        self.history(folder).store_string("a new one, not as short " + "x" * 100)

    def read(self, folder: Path) -> Any:
        history = self.history(folder)
        return sorted(set(history.load_history_strings()))


class Saved(Writer):
    """A conversation that ``/save`` writes."""

    def prepare(self, folder: Path) -> None:
        self.save(folder, "old")

    def write(self, folder: Path) -> None:
        self.save(folder, "new " * 100)

    def save(self, folder: Path, text: str) -> None:
        from sparsekv_cli.commands.chat.files import save_messages

        save_messages(str(folder / "a.json"), [{"role": "user", "content": text}])

    def read(self, folder: Path) -> Any:
        from sparsekv_cli.commands.chat.files import load_messages

        return load_messages(str(folder / "a.json"))


class Download(Writer):
    """A download of the hub, which goes on where it broke off."""

    CONTENT = bytes(range(256)) * 40
    DIGEST = hashlib.sha256(CONTENT).hexdigest()

    def blobs(self, folder: Path) -> Path:
        return folder / "models--a--b" / "blobs"

    def prepare(self, folder: Path) -> None:
        self.blobs(folder).mkdir(parents=True)
        (self.blobs(folder) / f"{self.DIGEST}.part").write_bytes(self.CONTENT[:1000])

    def write(self, folder: Path) -> None:
        from huggingface_hub import file_download

        from sparsekv_cli.models.sources.hub import HubFile, explained, fetch_file

        def http_get(url: str, stream: Any, resume_size: int = 0, **_: Any) -> None:
            for at in range(resume_size, len(self.CONTENT), 4000):
                stream.write(self.CONTENT[at : at + 4000])
            stream.flush()

        file = HubFile("m.gguf", len(self.CONTENT), self.DIGEST)
        file_download.http_get = http_get  # type: ignore[assignment]
        os.environ["HF_HUB_CACHE"] = str(folder)
        try:
            with explained("a/b", "http://hub"):
                fetch_file("a/b", file, "0" * 40, "http://hub", say)
        except OSError as error:  # the command line makes a line of it
            raise SparseKVError(f"{error.filename}: {error.strerror}") from None

    def read(self, folder: Path) -> Any:
        path = self.blobs(folder) / self.DIGEST
        return str(path.read_bytes()) if path.exists() else None


WRITERS: dict[str, type[Writer]] = {
    "prefix folder": Prefix,
    "session file": Session,
    "kernel cache": Kernels,
    "calibration": Calibration,
    "speeds": Speeds,
    "output of run --jsonl": Answers,
    "records of eval": Records,
    "chat history": History,
    "chat /save": Saved,
    "download": Download,
}


def say(text: str) -> None:
    print(text, file=sys.stderr)


@contextlib.contextmanager
def copy_of(prepared: Path) -> Iterator[Path]:
    """A copy of a folder, with files of the user's in it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "a"
        shutil.copytree(prepared, folder)
        for name, content in MINE.items():
            (folder / name).write_bytes(content)
        yield folder


def quietly(function: Callable[[Path], Any], folder: Path) -> Any:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        return function(folder)


def check(name: str) -> dict[str, Any]:
    """The numbers of a writer: its operations, the faults that were tried, and problems."""
    writer, problems, n_tried = WRITERS[name](), [], 0
    with tempfile.TemporaryDirectory() as place:
        prepared = Path(place) / "prepared"
        prepared.mkdir(mode=0o700)
        writer.prepare(prepared)
        with copy_of(prepared) as folder:
            old = quietly(writer.read, folder)
            n = run(writer.write, folder).n
            new = quietly(writer.read, folder)
        if old == new:
            problems.append("the job changes nothing")
        states = [new[:i] for i in range(len(old), len(new) + 1)] if writer.steps else [old, new]
        for fault in FAULTS:
            for i in range(1, n + 1):
                n_tried += 1
                with copy_of(prepared) as folder:
                    problem = _after(writer, folder, fault, i, states)
                if problem:
                    problems.append(f"{fault} at {i}: {problem}")
        with copy_of(prepared) as folder:
            outcomes = at_once(writer.write, folder, N_PROCESSES)
            if all(each.error for each in outcomes) or any(map(problem_of, outcomes)):
                problems.append(f"{N_PROCESSES} at once: {outcomes}")
            if quietly(writer.read, folder) != new:
                problems.append(f"{N_PROCESSES} at once: {quietly(writer.read, folder)}"[:300])
    return {"operations": n, "faults": n_tried, "problems": problems}


def _after(writer: Writer, folder: Path, fault: str, n: int, states: list[Any]) -> str:
    """What is wrong after a fault at the n-th operation; empty if nothing."""
    outcome = run(writer.write, folder, fault, n)
    if problem := problem_of(outcome):
        return problem
    if fault == "no folder":
        return ""
    if outcome.code == KILLED and not fault.startswith("kill"):
        return "it was killed"
    try:
        state = quietly(writer.read, folder)
    except SparseKVError as error:
        return f"it cannot be read: {error}"
    if state not in states:
        return f"a third state: {str(state)[:200]}"
    if fault in ("ENOSPC", "EDQUOT", "EROFS", "short write"):
        left = [path.name for path in folder.rglob("*.tmp") if path.name not in MINE]
        if left and fault != "EROFS":
            return f"left: {left}"
    try:
        quietly(writer.write, folder)
    except SparseKVError as error:
        return f"it cannot go on: {error}"
    if (state := quietly(writer.read, folder)) != states[-1]:
        return f"it does not go on: {str(state)[:200]}"
    for name, content in MINE.items():
        if not (folder / name).exists() or (folder / name).read_bytes() != content:
            return f"{name} is another"
    return ""
