"""The commands on a GPU beside the same commands on the CPU, and what a user does to them.

    python scripts/gpu/gpu_commands.py -m model.gguf [--json FILE] [--tiny]

A text of the GPU should be that of the CPU: both take the most likely token, and prefills are f32.
Where two logits are closer than rounding, texts part. The row says after how many characters. Each
other check holds or fails. --tiny: a small model and short texts, for Triton's interpreter.
"""

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soaking.server import Server

TEXT = Path(__file__).resolve().parents[1] / "accuracy" / "texts" / "mixed.txt"
METHODS = (
    "full", "topk", "streaming", "quest", "fasa", "fasa:variant=m", "sals", "freekv", "lfps",
    "faedkv", "snapkv", "h2o",
)  # fmt: skip
LIMIT = 90.0  # seconds of one command


class Commands:
    """Runs commands on one model; n_prompt characters of text and n_answer tokens each."""

    def __init__(self, model: Path, tiny: bool) -> None:
        self.model, self.tiny = model, tiny
        self.n_prompt, self.n_answer = (300, 4) if tiny else (8000, 48)
        self.text = TEXT.read_text(encoding="utf-8")
        self.common = ["-m", str(model), "-c", "4096", "-t", "2"]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "sparsekv_cli", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **{**pipes, **options})

    def run(self, *arguments: str, text: str = "", ends: int = 0) -> tuple[str, str]:
        """Returns what a command wrote to stdout and stderr; it must end with status ``ends``."""
        process = self.start(*arguments)
        try:
            out, said = process.communicate(text, timeout=LIMIT)
        except subprocess.TimeoutExpired as error:
            process.kill()
            said = process.communicate()[1]
            raise AssertionError(f"no end after {LIMIT:.0f} s: {said[-500:]}") from error
        assert process.returncode == ends, f"status {process.returncode}: {said[-1500:]}"
        assert "Traceback" not in said, said[-1500:]
        return out, said

    def greedy(self, method: str, device: str, *more: str) -> str:
        name, _, option = method.partition(":")
        options = ["-o", option] if option else []
        out, _ = self.run(
            "run", *self.common, "--device", device, "--method", name, *options, "--raw", "--temp",
            "0", "-n", str(self.n_answer), "--ignore-eos", "--no-cache", "--prefill-dtype", "f32",
            "--activations", "16", "--sparse-from", "0", "--json",
            *more, text=self.text[: self.n_prompt],
        )  # fmt: skip
        return json.loads(out)["text"]

    # --- checks -----------------------------------------------------------------------------------

    def same_text(self, method: str) -> str:
        """The GPU's text beside the CPU's."""
        return alike(self.greedy(method, "cpu"), self.greedy(method, "cuda"))

    def on_host(self, method: str) -> str:
        """K and V on the host beside K and V on the GPU."""
        return alike(*(self.greedy(method, "cuda", "--kv", kv) for kv in ("device", "host")))

    def bf16_weights(self) -> str:
        assert self.greedy("quest", "cuda", "--gpu-weights", "bf16")
        return "ran"

    def seeds(self) -> str:
        """One seed, one text; with settings that the GPU and that the host samples."""
        for more in ([], ["--repeat-penalty", "1.1"]):
            texts = [
                self.run("run", *self.common, "--device", "cuda", "--raw", "--no-cache", "-s", seed,
                         "-n", str(self.n_answer), *more, text=self.text[:200])[0]
                for seed in ("1", "1", "2")
            ]  # fmt: skip
            assert texts[0] == texts[1], f"one seed gave {texts[0]!r} and {texts[1]!r}"
            assert texts[0] != texts[2] or self.tiny, "two seeds gave one text"
        return "same"

    def lines(self) -> str:
        """Eight lines of other lengths together, beside one after another."""
        rows = [
            {"prompt": self.text[100 * i : 100 * i + self.n_prompt * (i + 1) // 8],
             "n_predict": self.n_answer - i, "temperature": 0, "ignore_eos": True}
            for i in range(2 if self.tiny else 8)
        ]  # fmt: skip
        given = "".join(json.dumps(row) + "\n" for row in rows)
        found = []
        for parallel in ("1", "8"):
            out, _ = self.run(
                "run", *self.common, "--device", "cuda", "--method", "quest", "--raw", "--no-cache",
                "--prefill-dtype", "f32", "--jsonl", "--parallel", parallel, text=given,
            )  # fmt: skip
            found.append([json.loads(line)["text"] for line in out.splitlines()])
        assert len(found[0]) == len(found[1]) == len(rows), [len(each) for each in found]
        return f"{sum(a == b for a, b in zip(*found, strict=True))} of {len(rows)} alike"

    def chat(self) -> str:
        """Three turns, one of them again, through a pipe."""
        said = "Tell me of whales.\n/regen\nAnd of ships?\n/undo\nOf the sea?\n"
        out, _ = self.run("chat", *self.common, "--device", "cuda", "--method", "lfps", "-n",
                          str(self.n_answer), "--temp", "0", text=said)  # fmt: skip
        assert out.strip()
        return f"{len(out)} characters"

    def bench(self) -> str:
        out, _ = self.run(
            "bench", *self.common[:2], "--device", "cuda", "--method", "full,quest", "-p", "512",
            "-n", "32", "-d", "0,3000", "-r", "2", "-O", "json",
        )  # fmt: skip
        rows = json.loads(out)
        kinds = [f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}" for row in rows]
        return ", ".join(
            f"{row['method']} {kind} at {row['n_depth']}: {row['avg_ts']:.0f}"
            for row, kind in zip(rows, kinds, strict=True)
        )

    def compare(self) -> str:
        out, _ = self.run(
            "compare", *self.common, "--device", "cuda", "--methods", "full,quest,fasa", "--steps",
            "8", "--raw", "--json", text=self.text[: self.n_prompt],
        )  # fmt: skip
        return f"{len(out)} characters"

    def doctor(self) -> str:
        out, _ = self.run("doctor")
        return next((line.strip() for line in out.splitlines() if "NVIDIA" in line), "no GPU named")

    def refusals(self) -> str:
        """A refused command ends with one line."""
        cases = [["-c", "4096", "--vram-limit", "0.001"], ["-c", "4096", "-ctk", "q8_0"]]
        for more in cases:
            _, said = self.run(
                "run", "-m", str(self.model), "--device", "cuda", "--kv", "device", "-n", "4",
                "-p", "x", "--no-cache", *more, ends=1,
            )  # fmt: skip
            lines = [line for line in said.splitlines() if line.startswith("error")]
            assert len(lines) == 1, said[-1500:]
        return f"{len(cases)} refused"

    def interrupt(self) -> str:
        """Ctrl-C in the middle of an answer."""
        process = self.start(
            "run", *self.common, "--device", "cuda", "--raw", "--no-cache", "-n", "4000", "--temp",
            "0", "--ignore-eos", "-p", self.text[:200], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 130, f"status {process.returncode}: {said[-1500:]}"
        assert "Traceback" not in said, said[-1500:]
        return f"ended after {time.monotonic() - begin:.1f} s"

    def serve(self) -> str:
        """Clients together, of which some leave; then one alone; then Ctrl-C."""
        process = self.start(
            "serve", *self.common, "--device", "cuda", "--port", "0", "--prefill-dtype", "f32",
            "--no-cache", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert process.stderr
            said = ""
            while not (found := re.search(r"http://[^:]+:(\d+)/", said)):
                line = process.stderr.readline()
                assert line, f"no address: {said[-1500:]}"
                said += line
            rest = threading.Thread(target=process.stderr.read)
            rest.start()
            counts = self._clients(Server(int(found[1]), process.pid))
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT)
            rest.join()
            assert process.returncode in (0, 130), f"status {process.returncode}"
            return counts
        finally:
            process.kill()

    def _clients(self, server: Server) -> str:
        n = 2 if self.tiny else 16
        methods = ("quest", "full") if self.tiny else ("quest", "full", "fasa", "lfps")

        def ask(i: int) -> str:
            fields = {
                "prompt": self.text[50 * i : 50 * i + self.n_prompt // 4], "temperature": 0,
                "max_tokens": self.n_answer, "method": methods[i % len(methods)],
            }  # fmt: skip
            if i % 4 == 3:  # it leaves
                with contextlib.closing(server.send({**fields, "stream": True})) as link:
                    link.getresponse().read(30)
                return ""
            status, told = server.ask(fields)
            assert status == 200, told
            return str(told["choices"][0]["text"])

        with ThreadPoolExecutor(n) as pool:
            together = list(pool.map(ask, range(n)))
        alone = [ask(i) for i in range(n)]
        same = sum(a == b for a, b in zip(together, alone, strict=True))
        return f"{same} of {n} alike"

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Names and checks; each is a process or some of its own."""
        for method in METHODS[:1] if self.tiny else METHODS:
            yield f"run {method}", lambda method=method: self.same_text(method)
        for method in () if self.tiny else ("full", "quest", "streaming"):
            yield f"run {method} --kv host", lambda method=method: self.on_host(method)
        few = (self.serve, self.lines, self.refusals, self.doctor)  # interpreted, all are too slow
        rest = (self.seeds, self.chat, self.bench, self.compare, self.interrupt, self.bf16_weights)
        for each in few if self.tiny else (*few, *rest):
            yield each.__name__.replace("_", " "), each


def alike(expected: str, found: str) -> str:
    """How far two texts are the same; they must begin alike."""
    if expected == found:
        return "same"
    pairs = zip(expected, found, strict=False)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    assert n > 0, f"{found!r}, not {expected!r}"
    return f"same for {n} of {len(expected)} characters"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--match", default="", help="checks whose names have one of these")
    parser.add_argument("--workers", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.model is None:
            from gpu_models import tiny_model

            options.model = Path(tiny_model(name))
        commands = Commands(options.model, options.tiny)
        rows: list[dict[str, Any]] = []

        def check(named: tuple[str, Callable[[], str]]) -> None:
            what, each = named
            begin = time.monotonic()
            try:
                result, ok = each(), True
            except Exception as error:
                result, ok = f"{type(error).__name__}: {error}", False
            took = time.monotonic() - begin
            rows.append({"command": what, "result": result, "s": took, "ok": ok})
            print(f"{'ok    ' if ok else 'FAILED'} {took:5.1f} s  {what}: {result}", flush=True)
            if options.json:
                with contextlib.suppress(OSError):
                    options.json.write_text(json.dumps({"commands": rows}, indent=1), "utf-8")

        wanted = options.match.split(",")
        chosen = [each for each in commands.checks() if any(text in each[0] for text in wanted)]
        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(check, chosen))
    failed = [row for row in rows if not row["ok"]]
    print(f"{len(rows)} checks, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
