"""The child process of a fuzz run: opens a target, then runs the cases that it is sent.

On stdin and on a pipe of its own: four bytes of length, then as many bytes. The first answers are
the seeds of the target, after their number. Then each case has an answer in JSON: ``kind`` is
"accepted", "refused" or "found", ``what`` says it, and ``where`` is the place in the program.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import traceback
from pathlib import Path
from typing import IO, Any

LENGTH = struct.Struct("<I")
ROOT = Path(__file__).resolve().parents[2]
MOST_LINE = 4000  # characters that a message for users may have
UNEXPECTED = re.compile(r"unexpected \w*(Error|Exception)")  # the command line's word for a bug
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+|/\S+")


def send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(LENGTH.size)
    return pipe.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def place_of(error: BaseException) -> str:
    """The last line of the program that an exception comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if Path(each.filename).is_relative_to(ROOT)]
    ours = [each for each in ours if ".venv" not in each.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""


def outcome(target: Any, case: bytes) -> dict[str, str]:
    """Returns the outcome of a case: accepted, refused in one line, or a fault."""
    import click
    from mutation import FoundError

    from sparsekv_cli.errors import SparseKVError

    try:
        told = target.run(case)
        return {"kind": "accepted", "what": told or "", "where": ""}
    except FoundError as error:
        return {"kind": "found", "what": str(error)[:MOST_LINE], "where": ""}
    except (SparseKVError, click.UsageError) as error:
        text, where = str(error), place_of(error)
        if "\n" in text or len(text) > MOST_LINE or UNEXPECTED.search(text):
            return {"kind": "found", "what": f"no one line: {text[:MOST_LINE]!r}", "where": where}
        return {"kind": "refused", "what": VARYING.sub("#", text)[:100], "where": where}
    except BaseException as error:
        what = "".join(traceback.format_exception(error))[-MOST_LINE:]
        where = f"{type(error).__name__} {place_of(error)}"
        return {"kind": "found", "what": what, "where": where}


def main(name: str, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "fixtures" / "models"))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.chdir(folder)

    # It chooses its folder ahead of HOME.
    import sparsekv_cli.cpu.jit.compiling.kernel_cache  # noqa: F401

    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        os.environ[variable] = str(folder)
    from targets import TARGETS

    target: Any = TARGETS[name](folder)
    seeds = list(target.seeds())
    send(answers, LENGTH.pack(len(seeds)))
    for seed in seeds:
        send(answers, seed)
    while (case := receive(sys.stdin.buffer)) is not None:
        send(answers, json.dumps(outcome(target, case)).encode())
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
