"""Weeks of the prefix cache on disk, in which the clock jumps and writers are killed."""

from __future__ import annotations

import gc
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from soaking.usage import Curve

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.prefix.blocks import MAGIC
from sparsekv_cli.prefix.folder import HOUR, PrefixFolder
from sparsekv_cli.prefix.prefixes import Prefixes
from sparsekv_cli.settings.config import SessionConfig

LEAST = 24  # hours, however long they take; a minute has more than a week
LENGTHS = (520, 600, 1100)  # of prompts; the last one takes three blocks
N_PROMPTS, N_MOST = 12, LENGTHS[-1]
KEPT = 4  # prompts of the greatest length that fit the folder
FOREIGN = "notes of the user.txt"


def pass_time(folder: Path, seconds: float) -> None:
    """Makes all files older; a negative time makes them newer."""
    for path in folder.glob("*"):
        used = path.stat().st_mtime - seconds
        os.utime(path, (used, used))


def event(folder: Path, rng: random.Random) -> str:
    """Something that happens to a folder."""
    chosen, blocks = rng.random(), sorted(folder.glob("*.rows"))
    if chosen < 0.1:
        (folder / f".sparsekv-{rng.randrange(10**8):08}.tmp").write_bytes(MAGIC + bytes(1000))
        return "writers killed"
    if chosen < 0.2:
        pass_time(folder, rng.choice((-1, 1)) * rng.uniform(1, 30 * 24 * HOUR))
        return "jumps of the clock"
    if chosen < 0.25 and blocks:
        with open(rng.choice(blocks), "r+b") as file:
            file.truncate(rng.randrange(2000))
        return "files cut"
    if chosen < 0.27:
        shutil.rmtree(folder)
        return "folders removed"
    return "hours without an event"


def soak(path: Path, place: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Uses the cache for as many hours as there is time for."""
    rng, counts, folder = random.Random(seed), Counter[str](), place / "prefixes"
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=16, ctx_size=N_MOST)
    model = load_model(path, build_method("full", {}), config)
    model.gguf.content.wait()
    prompts = [
        np.random.RandomState(seed + i).randint(3, 300, N_MOST).tolist() for i in range(N_PROMPTS)
    ]
    types, said = ("f16", "f16"), list[str]()
    limit = KEPT * N_MOST * sum(
        each.store.row_bytes * each.spec.n_head_kv for each in model.sequence().caches
    )  # fmt: skip
    expected: dict[tuple[int, int], np.ndarray] = {}

    def use(which: int, n: int, *, keeps: bool = True) -> int:
        """Prefills a prompt. Returns for how many tokens the folder had rows."""
        identity = model.decoder.identity_of(types)
        kept = PrefixFolder(folder, limit, said.append)
        rows = Prefixes(kept, "tiny", identity, types, 0, lambda text: None)
        sequence = model.sequence()
        logits = sequence.prefill(prompts[which][:n], rows=rows if keeps else None)
        rows.finish()
        if (which, n) not in expected and not keeps:
            expected[which, n] = logits
        elif keeps:
            if (which, n) not in expected:
                use(which, n, keeps=False)
            if not np.array_equal(expected[which, n], logits):
                raise SparseKVError(f"prompt {which} of {n} tokens has other logits from the disk")
        return sequence.timings.cached_tokens

    begun, curve = time.monotonic(), Curve()
    while time.monotonic() - begun < seconds or counts["hours"] < LEAST:
        counts[event(folder, rng)] += 1
        if is_there := folder.exists():
            (folder / FOREIGN).write_text("mine")
            os.utime(folder / FOREIGN, (0, 0))
        for _ in range(rng.randint(0, 2)):
            which, n = rng.randrange(N_PROMPTS), rng.choice(LENGTHS)
            counts["uses"] += 1
            counts["found"] += use(which, n) > 0
            counts["hours in which the newest prompt is lost"] += use(which, n) == 0
            entries = PrefixFolder(folder, limit, said.append).entries()
            size = sum(each.size for each in entries)
            if size > limit:
                raise SparseKVError(f"the folder has {size} bytes, the limit is {limit}")
            left = [each.path.name for each in entries if each.path.suffix == ".tmp"]
            if len(left) > 16:
                raise SparseKVError(f"{len(left)} files of killed writers are left")
            if is_there and not (folder / FOREIGN).exists():
                raise SparseKVError("a file of the user has gone")
        counts["hours"] += 1
        pass_time(folder, HOUR)
        if counts["hours"] % 8 == 0:
            gc.collect()
            curve.look()
    model.gguf.close()
    if lost := counts["hours in which the newest prompt is lost"]:
        raise SparseKVError(f"the prompt that was kept last is not found {lost} times")
    return {**counts, "warnings": len(said), **curve.check("folder")}
