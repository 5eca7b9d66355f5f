"""``--speculate mtp`` on the command line: every command writes what it writes without drafts."""

import json
from typing import Any

from next_token_models import knowing

from sparsekv_cli import load

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 4


def test_commands_and_the_library(invoke, tmp_path, monkeypatch):
    """run with rows from disk, jsonl, chat with a context that shifts, bench, and load."""
    path = knowing(tmp_path / "tiny.gguf", "qwen35moe", chat_template=TEMPLATE)
    monkeypatch.delenv("SPARSEKV_NO_CACHE", raising=False)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 2)
    told: list[list[Any]] = []
    for source in ("off", "mtp"):
        common = ["-m", str(path), "-t", "1", "--speculate", source]
        run = ["run", *common, "--raw", "--temp", "0", "-n", "30", "--ignore-eos", "--json"]
        run += ["--cache-dir", str(tmp_path / source)]
        answers = [json.loads(invoke(*run, "-p", TEXT * 4 + end).out) for end in ("", "end")]
        assert answers[1]["cached_tokens"] > 0
        lines = "".join(json.dumps({"prompt": TEXT[i:], "temp": 0}) + "\n" for i in range(3))
        jsonl = ["run", *common, "--jsonl", "--parallel", "2", "-n", "20", "--ignore-eos"]
        chat = ["chat", *common, "--temp", "0", "-c", "200", "-n", "120", "--context-shift"]
        bench = ["bench", *common, "-p", "0", "-n", "20", "-d", "60", "-r", "1", "-O", "json"]
        results = [
            invoke(*jsonl, stdin=lines.encode()),
            invoke(*chat, stdin=f"{TEXT[:200]}\nmore\n".encode()),
            invoke(*bench, "-f", str(text)),
        ]
        assert [result.code for result in results] == [0, 0, 0], [each.err for each in results]
        ledger = json.loads(results[2].out)[0]["ledger"]
        assert ("bytes_host_drafts" in ledger) == ("tokens_drafted" in ledger) == (source == "mtp")
        with load(str(path), threads=1, speculate=source) as library:
            reply = library.generate(TEXT, temperature=0, max_tokens=20)
        told.append([*(each["tokens"] for each in answers), *(r.out for r in results[:2])])
        told[-1].append(reply.tokens)
        timings = (answers[0]["timings"], answers[1]["timings"], reply.timings)
        counts = [each["speculation"]["accepted"] for each in timings if "speculation" in each]
        assert (sum(counts) > 0) == (source == "mtp")
    assert told[0] == told[1]
