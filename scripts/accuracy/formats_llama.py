"""llama.cpp by llama-cpp-python: its quantiser, its tokens and its logits."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparsekv_cli.errors import SparseKVError


class LlamaLibrary:
    """The library; its own messages are dropped."""

    def __init__(self, n_threads: int) -> None:
        import llama_cpp

        self.api, self.n_threads = llama_cpp, n_threads
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive: C calls it
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        """Writes ``source`` in a file type such as Q4_K_M; SparseKVError when that fails."""
        api = self.api
        params = api.llama_model_quantize_default_params()
        params.nthread = self.n_threads
        params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
        status = api.llama_model_quantize(
            str(source).encode(), str(target).encode(), ctypes.byref(params)
        )
        if status:
            raise SparseKVError(f"llama.cpp cannot quantise {source.name} to {kind}")


class LlamaModel:
    """A model and one sequence: f16 KV cache, no flash attention."""

    def __init__(self, library: LlamaLibrary, path: Path, n_ctx: int) -> None:
        self._api = api = library.api
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise SparseKVError(f"llama.cpp cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = library.n_threads
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SparseKVError(f"llama.cpp cannot make a context of {n_ctx} tokens")
        self._batch = api.llama_batch_init(n_ctx, 0, 1)
        self._vocab = api.llama_model_get_vocab(self._model)
        self._n_vocab = api.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, with BOS if the model adds it."""
        given = text.encode()
        tokens = (self._api.llama_token * (len(given) + 2))()
        n = self._api.llama_tokenize(
            self._vocab, given, len(given), tokens, len(tokens), True, False
        )
        return list(tokens[:n])

    def evaluate(self, ids: Sequence[int], n_past: int, n_last: int) -> np.ndarray:
        """Adds ``ids`` after ``n_past`` tokens: logits f32 (n_last, n_vocab) of the last ones."""
        api, batch = self._api, self._batch
        api.llama_memory_seq_rm(api.llama_get_memory(self._context), 0, n_past, -1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, n_past + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i >= len(ids) - n_last
        if status := api.llama_decode(self._context, batch):
            raise SparseKVError(f"llama.cpp: llama_decode gave {status} at {n_past} tokens")
        logits = api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(n_last, self._n_vocab)).copy()
