"""Several sequences on the device: of several methods, and what each draws."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from opened import decode_together, generated

from sparsekv_cli.device.step import StepBuffers
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.sampling.chain import make_sampler
from sparsekv_cli.sampling.params import SamplingParams
from sparsekv_cli.serve.jobs import Failed, Finished, Job, NewToken, Request
from sparsekv_cli.serve.scheduler import Scheduler
from sparsekv_cli.settings.config import SessionConfig

PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 400, 120)]
# The interpreter is slow.
SIZES = {"n_embd": 32, "n_ff": 32, "n_vocab": 400, "head_dim": 32, "n_head": 2, "n_head_kv": 1}
# Pairs that decode together, and layers of their model: what lies on the device and on the host,
# and what both attend to densely.
PAIRS = (
    (("full", {}), ("lfps", {"budget": "24", "dense_layers": "0"}), 2),
    (("topk", {"budget": "500"}), ("quest", {"budget": "500"}), 1),
    (("snapkv", {"budget": "40", "dense_layers": "none"}), ("topk", {"budget": "24"}), 1),
)


@pytest.fixture
def open_model(tiny_model) -> Callable[[int], Model]:
    """Opens a model of so many layers."""
    config = SessionConfig(threads=1, device="cuda", prefill_dtype="f32", ctx_size=256)
    full = build_method("full", {})
    return lambda n_layer: load_model(
        tiny_model(wtype="F32", n_layer=n_layer, **SIZES), full, config
    )


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_sequences_of_several_methods(pair, open_model):
    """As each alone."""
    *methods, n_layer = pair
    model, sequences, expected = open_model(n_layer), [], []
    for (name, options), n in zip(methods, (60, 75), strict=True):
        sequence = model.sequence(model.attention_of(build_method(name, options), 0))
        sequence.prefill(PROMPT[:n])
        expected.append(sequence.decode(5))
        sequence.rewind(n)
        sequences.append(sequence)
    logits = decode_together(sequences[::-1], [5, 5])
    np.testing.assert_allclose(logits, expected[::-1], atol=1e-4)
    assert [[cache.n for cache in each.caches] for each in sequences] == [
        [61] * n_layer, [76] * n_layer
    ]  # fmt: skip


def test_sequences_draw_together_what_each_draws_alone(open_model, monkeypatch):
    """By their own settings and seeds; some on the host, and again behind a step that failed."""
    model = open_model(1)
    params = SamplingParams(seed=7, temp=1.5), SamplingParams(seed=8, top_k=0, top_p=0.8)
    prompts, alone = (PROMPT[:20], PROMPT[30:80]), []
    for prompt, each in zip(prompts, params, strict=True):
        alone.append(list(generated(model.sequence(), prompt, make_sampler(each).sample, 4)))
    sequences, samplers = [model.sequence() for _ in prompts], [make_sampler(p) for p in params]
    found = []
    for sequence, prompt, sample in zip(sequences, prompts, samplers, strict=True):
        found.append([sample(sequence.prefill(prompt), [])])
    outcomes = StepBuffers.outcomes

    def fail(*args):
        monkeypatch.setattr(StepBuffers, "outcomes", outcomes)
        raise MemoryError

    for step in range(3):
        samples = [samplers[0], samplers[1] if step != 1 else samplers[1].sample]
        rows = [tokens[-1:] for tokens in found]
        if step == 2:
            monkeypatch.setattr(StepBuffers, "outcomes", fail)
            with pytest.raises(MemoryError):
                model.engine.decode(sequences, rows, samples)
        given = [each for (each,) in model.engine.decode(sequences, rows, samples)]
        assert [isinstance(each, int) for each in given] == [True, step != 1]
        for tokens, sample, each in zip(found, samples, given, strict=True):
            tokens.append(each if isinstance(each, int) else sample(each, []))
    assert found == alone
    buffers = model.decoder._buffers
    buffers._host_chosen[:] = torch.tensor([[3.0, 1.0], [0.0, np.nan]])
    damaged, token = buffers.outcomes([1, 0], [True, True])
    assert token == 3
    with pytest.raises(SparseKVError, match="highest logit is nan"):
        samplers[0](damaged, [])


def test_serve_draws_where_the_logits_are(open_model, monkeypatch):
    """An answer that joins when another has ended needs them on the host, for its logprobs."""
    model = open_model(1)
    requests = [
        Request(PROMPT[20 * i : 30 + 25 * i], model.method, 0, n, SamplingOptions(options), seed=i,
                logprobs=1 if i == 2 else None, n_bins=4 * i)
        for i, (n, options) in enumerate([(3, {"temp": 1.5}), (5, {"top_k": 9}), (2, {})])
    ]  # fmt: skip
    outcomes, seen = StepBuffers.outcomes, set()

    def watched(buffers, order, are_chosen):
        seen.add(tuple(are_chosen))
        return outcomes(buffers, order, are_chosen)

    monkeypatch.setattr(StepBuffers, "outcomes", watched)

    def texts(n_parallel: int) -> list[str]:
        events = [[] for _ in requests]
        jobs = [Job(r, each.append, 60.0) for r, each in zip(requests, events, strict=True)]
        scheduler = Scheduler(model, n_parallel=n_parallel, n_queue=8, kv_bytes=1 << 30)
        scheduler.submit(jobs)
        scheduler.start()
        scheduler.stop()
        assert all(isinstance(each[-1], Finished) for each in events)
        return ["".join(e.text for e in each if isinstance(e, NewToken | Finished))
                for each in events]  # fmt: skip

    decode = model.engine.decode
    with monkeypatch.context() as patched:  # no step is told how its tokens are chosen
        patched.setattr(model.engine, "decode", lambda sequences, rows, _: decode(sequences, rows))
        alone = texts(1)
    assert not seen and all(alone)
    assert texts(2) == alone
    assert seen >= {(True, True), (True, False)}


@pytest.mark.parametrize("method", ["full", "lfps"])
def test_serve_with_rows_on_the_host(method, tiny_model):
    """A sequence is kept after its answer, and the next prompt goes on from it."""
    config = SessionConfig(threads=1, device="cuda", prefill_dtype="f32", ctx_size=256, kv="host")
    made = build_method(method, {})
    model = load_model(tiny_model(wtype="F32", n_layer=1, **SIZES), made, config)
    scheduler = Scheduler(model, n_parallel=2, n_queue=8, kv_bytes=1 << 30)
    scheduler.start()
    for n in (30, 40):
        events, is_over = [], threading.Event()

        def tell(event, events=events, is_over=is_over):
            events.append(event)
            if isinstance(event, Finished | Failed):
                is_over.set()

        scheduler.submit([Job(Request(PROMPT[:n], made, -1, 2), tell, 60.0)])
        assert is_over.wait(60) and isinstance(events[-1], Finished), events
    scheduler.stop()
