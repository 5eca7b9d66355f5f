"""One program of scripts/bench/peer in a process of its own: does what its parent asks.

The two programs do not share a process, because both would share one OpenMP library and so its
settings, its pool of threads and a peak of memory. A worker that is not asked sleeps in a read; the
parent waits until its threads have gone to sleep too. All timing happens in here, so that neither
the pipe nor Python's start is part of it.

Protocol, a JSON object a line. In: {"run": [n_prompt, n_gen, n_depth]}, {"fill": n_depth} or
{"peak": true}. Out: {"ns": ...}, {"filled": n}, {"bytes": ...}, or {"error": "..."}; first of all
{"ready": {...}} about the program.
"""

import ctypes
import json
import os
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from sparsekv_cli.prefix.prompt_rows import PromptRows

N_BATCH = 512  # rows a batch of a prefill, in both programs
N_WARM = 3  # tokens decoded before anything is timed
KEPT_GIB = 16.0  # rows of depths on disk, while a worker runs
COPIED_FROM = 2048  # tokens that llama.cpp prefills; a deeper cache is filled with copies of them
PAUSE = 0.05  # seconds before a timed part: spinning threads of the other program go to sleep


class Program(Protocol):
    """What is compared. Tokens are ``random_ids``; position p always holds the same one."""

    def about(self) -> dict[str, Any]: ...
    def warm_up(self) -> None: ...
    def fill(self, n_depth: int) -> None: ...
    def go_to(self, n_prompt: int, n_gen: int, n_depth: int) -> None: ...
    def run(self, n_prompt: int, n_gen: int) -> int: ...


def whole_steps(n: int) -> int:
    """Tokens of a sequence's own cache in llama.cpp, which are a multiple of 256."""
    return -(-n // 256) * 256


def random_ids(n_vocab: int, n: int, seed: int) -> list[int]:
    """The same ids in every worker."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, n_vocab, size=n).tolist()


class Ours:
    """sparsekv-cli with one method: what ``sparsekv-cli bench`` does, call by call."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from sparsekv_cli.commands.bench import bench
        from sparsekv_cli.commands.bench.report import BenchTest
        from sparsekv_cli.commands.options.model import load_model
        from sparsekv_cli.commands.options.prefix import PrefixOptions, prefixes_maker
        from sparsekv_cli.evaluation.compare import build_spec
        from sparsekv_cli.settings.config import SessionConfig

        self._bench, self._test = bench, BenchTest
        method = build_spec(setup["method"])
        config = SessionConfig(ctx_size=setup["n_ctx"], threads=setup["threads"], chunk=N_BATCH)
        self._model = model = load_model(Path(setup["model"]), method, config)
        self._sequences = [model.sequence() for _ in range(setup["n_seqs"])]
        self._ids = random_ids(model.hparams.n_vocab, setup["n_ctx"], setup["seed"])
        self._rows: PromptRows | None = None  # those of a depth are computed once
        if setup["folder"]:
            options = PrefixOptions(Path(setup["folder"]), KEPT_GIB, False, None)
            self._rows = prefixes_maker(model, options)(method)

    def about(self) -> dict[str, Any]:
        options = self._sequences[0].method.options()
        return {"version": version("sparsekv-cli"), "method_options": options}

    def warm_up(self) -> None:
        self.run(min(N_BATCH, len(self._ids) - N_WARM), N_WARM)

    def fill(self, n_depth: int) -> None:
        self.go_to(0, 1, n_depth)

    def go_to(self, n_prompt: int, n_gen: int, n_depth: int) -> None:
        test, n = self._test(n_prompt, n_gen, n_depth), len(self._sequences)
        for sequence in self._sequences:
            left = self._bench.prefill_to_depth(sequence, self._ids, test, rows=self._rows)
        for token in left:
            self._model.engine.decode(self._sequences, [[token]] * n)

    def run(self, n_prompt: int, n_gen: int) -> int:
        test, n = self._test(n_prompt, n_gen, 0), len(self._sequences)
        return self._bench.time_once(self._model, self._sequences, [self._ids] * n, test)


class LlamaCpp:
    """llama.cpp through its C interface: the calls of its own llama-bench, and no others.

    Flash attention, f16 KV cache, batches of 512, logits of the last token only. Several sequences
    have a cache of their own each, as those of llama-batched-bench.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        import llama_cpp

        self._api = api = llama_cpp
        self._quiet = api.llama_log_callback(lambda *_: None)  # kept alive: C calls it
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(setup["model"].encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {setup['model']}")
        params = api.llama_context_default_params()
        self._n_seqs = n_seqs = setup["n_seqs"]
        params.n_ctx = setup["n_ctx"] if n_seqs == 1 else n_seqs * whole_steps(setup["n_ctx"])
        # One sequence has a second one, to copy through.
        params.n_seq_max, params.kv_unified = max(2, n_seqs), n_seqs == 1
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = setup["threads"]
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = api.GGML_TYPE_F16
        params.no_perf = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {setup['n_ctx']} tokens")
        self._memory = api.llama_get_memory(self._context)
        self._is_recurrent = any(
            of(self._model) for of in (api.llama_model_is_recurrent, api.llama_model_is_hybrid)
        )
        n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        ids = random_ids(n_vocab, setup["n_ctx"], setup["seed"])
        self._ids = (api.llama_token * len(ids))(*ids)
        self._n_past = 0
        self._kept: tuple[int, Any] | None = None  # tokens and their state, of a recurrent model

    def about(self) -> dict[str, Any]:
        system = self._api.llama_print_system_info().decode().strip()
        return {"version": version("llama-cpp-python"), "system": system}

    def warm_up(self) -> None:
        self._decode(min(N_BATCH, len(self._ids) - N_WARM), N_BATCH)
        self._decode(N_WARM, 1)

    def fill(self, n_depth: int) -> None:
        """``go_to``, but what a decode step takes does not depend on what the rows hold, and to
        prefill 32768 tokens takes a quarter of an hour: far rows are copies of the first ones.
        """
        first = n_depth
        while first > COPIED_FROM and self._n_seqs == 1:
            first //= 2
        self.go_to(0, 1, first)
        while 2 * self._n_past <= n_depth:
            self._double()
        self.go_to(0, 1, n_depth)

    def _double(self) -> None:
        """Copies all rows behind them, to the positions that follow."""
        api, memory, n = self._api, self._memory, self._n_past
        self._restore(self._state(), 1)
        api.llama_memory_seq_add(memory, 1, 0, -1, n)
        api.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        api.llama_memory_seq_rm(memory, 1, -1, -1)
        self._n_past = 2 * n

    def _state(self) -> Any:
        """What its cache holds."""
        size = self._api.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data(self._context, state, size, 0) != size:
            raise RuntimeError(f"llama.cpp cannot give its cache of {self._n_past} tokens")
        return state

    def _restore(self, state: Any, sequence: int) -> None:
        size = len(state)
        if self._api.llama_state_seq_set_data(self._context, state, size, sequence) != size:
            raise RuntimeError(f"llama.cpp cannot take back a cache of {self._n_past} tokens")

    def go_to(self, n_prompt: int, n_gen: int, n_depth: int) -> None:
        """Ours decodes after one token at least, so that is the smallest depth of decoding.

        A recurrent model goes back to the depth where it was last, and else begins again.
        """
        n_depth = max(n_depth, 0 if n_prompt else 1)
        if self._n_past > n_depth:
            kept = self._kept
            if not self._api.llama_memory_seq_rm(self._memory, 0, n_depth, -1):
                self._api.llama_memory_clear(self._memory, True)
                self._n_past = 0
                if kept is not None and kept[0] == n_depth:
                    self._restore(kept[1], 0)
                    self._n_past = n_depth
            else:
                self._n_past = n_depth
        if self._n_past < n_depth:
            self._decode(n_depth - self._n_past, N_BATCH)
            if self._is_recurrent:
                self._kept = n_depth, self._state()
        for i in range(1, self._n_seqs):
            self._api.llama_memory_seq_rm(self._memory, i, -1, -1)
            self._api.llama_memory_seq_cp(self._memory, 0, i, -1, -1)

    def run(self, n_prompt: int, n_gen: int) -> int:
        begin = time.perf_counter_ns()
        self._decode(n_prompt, N_BATCH)
        if self._n_seqs == 1:
            self._decode(n_gen, 1)
        else:
            self._decode_together(n_gen)
        return time.perf_counter_ns() - begin

    def _decode_together(self, n: int) -> None:
        """Decodes the next n tokens in all sequences, with logits of each."""
        api = self._api
        batch = api.llama_batch_init(self._n_seqs, 0, 1)
        batch.n_tokens = self._n_seqs
        for _ in range(n):
            for i in range(self._n_seqs):
                batch.token[i], batch.pos[i] = self._ids[self._n_past], self._n_past
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, i, True
            self._take(batch, 1)
        api.llama_batch_free(batch)

    def _take(self, batch: Any, n: int) -> None:
        """Decodes a batch of the next n tokens."""
        result = self._api.llama_decode(self._context, batch)
        if result != 0:
            raise RuntimeError(f"llama_decode gave {result} at {self._n_past} tokens")
        self._api.llama_synchronize(self._context)
        self._n_past += n

    def _decode(self, n: int, n_batch: int) -> None:
        """Decodes the next n tokens, ``n_batch`` at a time, as llama-bench does."""
        api, start = self._api, ctypes.addressof(self._ids)
        stop = self._n_past + n
        while self._n_past < stop:
            step = min(n_batch, stop - self._n_past)
            tokens = ctypes.cast(start + 4 * self._n_past, ctypes.POINTER(api.llama_token))
            self._take(api.llama_batch_get_one(tokens, step), step)


def peak_bytes() -> int:
    """Most memory this process ever had resident (VmHWM), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM, so peak memory cannot be told")


def serve(program: Program, requests: TextIO, replies: TextIO) -> None:
    """Answers requests until there are no more."""

    def reply(**values: Any) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    reply(ready=program.about())
    for line in requests:
        request = json.loads(line)
        if "run" in request:
            n_prompt, n_gen, n_depth = request["run"]
            program.go_to(n_prompt, n_gen, n_depth)
            time.sleep(PAUSE)
            reply(ns=program.run(n_prompt, n_gen))
        elif "fill" in request:
            program.fill(request["fill"])
            reply(filled=request["fill"])
        else:
            reply(bytes=peak_bytes())


def main() -> None:
    """The setup is the only argument, as JSON. Whoever else prints, prints to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: the parent says what there is to say
    setup = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        program: Program = Ours(setup) if setup["method"] else LlamaCpp(setup)
        program.warm_up()
        serve(program, sys.stdin, replies)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        replies.write(json.dumps({"error": text}) + "\n")
        replies.flush()
        sys.exit(1)


if __name__ == "__main__":
    main()
