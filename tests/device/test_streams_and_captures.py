"""What a GPU would object to, without one: see fixtures/device/fake_cuda.py.

Every method decodes on one engine, one after another: a step as it is, its capture, replays. Memory
that streams and the host share is used in an order, captures do nothing that CUDA refuses, capture
and step launch the same, and nothing reads what nobody wrote. test_planted_errors.py shows that
errors of each kind are found.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checked_device import (
    METHODS,
    N_PROMPT,
    N_STEPS,
    Checked,
    check,
    checked,
    come_and_go,
    steps,
    with_drafts,
    write_model,
)
from fake_cuda import FakeCuda

from sparsekv_cli.models.forward import drain
from sparsekv_cli.sampling.chain import make_sampler
from sparsekv_cli.sampling.params import SamplingParams

BATCHES = ("topk", "freekv", "lfps")
DRAFTED = ("full", "topk", "streaming", "quest-q8")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, device: str) -> Path:
    if device == "cuda":
        pytest.skip("a GPU is there")
    return write_model(tmp_path_factory.mktemp("checked"))


@pytest.fixture(scope="module")
def plain(path: Path, request: pytest.FixtureRequest) -> dict[str, list[np.ndarray]]:
    """Logits of prompts and of steps, from the interpreter alone, of the methods to be tested."""
    tests = [item for item in request.session.items if getattr(item, "callspec", None)]
    names = {test.callspec.params.get("method") for test in tests} & set(METHODS)
    with checked(path, None) as engine:
        of_batches = {f"batch of {n}": list(come_and_go(engine, n)) for n in names & {*BATCHES}}
        drafts = {f"drafts of {n}": list(with_drafts(engine, n)) for n in names & {*DRAFTED}}
        return of_batches | drafts | {name: list(steps(engine, name)) for name in names}


@pytest.fixture(scope="module")
def engine(path: Path, plain: dict[str, list[np.ndarray]]) -> Iterator[Checked]:
    """One engine for all methods: captures are dropped, and made again with new caches."""
    with checked(path, FakeCuda()) as engine:
        yield engine


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_steps_and_captures(method, engine, plain):
    check(engine, steps(engine, method), plain[method])


@pytest.mark.parametrize("method", ["full", "lfps"])
def test_tokens_are_chosen_in_the_captures(method, engine, plain):
    """Those that the host's chain draws from the logits, which stay on the device."""
    host, on_device = (make_sampler(SamplingParams(seed=1, temp=2.0)) for _ in range(2))
    decoder, caches, cuda = engine.model.decoder, engine.caches(method), engine.cuda
    engine.prefill(caches)
    found_logits = decoder._buffers._host_logits.numpy()
    found_logits[:] = np.nan
    for i, (logits,) in enumerate(plain[method][1:]):
        n = N_PROMPT + i
        (chosen,) = decoder.choose_batch([on_device], [5 + n], [n], [caches])
        assert chosen == host(logits, [])
    assert not cuda.found
    assert np.isnan(found_logits).all()


@pytest.mark.parametrize("method", BATCHES)
def test_sequences_that_come_and_go(method, engine, plain):
    """Each has its own length; behind a rewind of one, what was captured goes on."""
    launched = check(engine, come_and_go(engine, method), plain[f"batch of {method}"])
    assert (launched[N_STEPS + 1] == []) == (method != "freekv")  # which leaves its pages


@pytest.mark.nightly
@pytest.mark.parametrize("method", DRAFTED)
def test_drafts_and_steps_keep_their_captures(method, engine, plain):
    """They alternate, and each is replayed. Rejected rows leave nothing."""
    launched = check(engine, with_drafts(engine, method), plain[f"drafts of {method}"])
    assert launched[-1] == []


@pytest.mark.parametrize("method", ["full", "sals", "freekv", "lfps"])
def test_rows_go_to_the_disk_and_come_from_it(method, engine):
    """They are copied while the device goes on, and it has them before it attends to them."""
    n_known, decoder, cuda = 48, engine.model.decoder, engine.cuda
    ids = np.random.default_rng(0).integers(3, 259, N_PROMPT).tolist()
    caches, again, kept = engine.caches(method), engine.caches(method), []
    steps = decoder.forward_steps(
        ids, 0, caches, on_rows=lambda _, cache: kept.append(cache.rows_of(0, n_known))
    )
    expected = drain(steps)
    for cache, rows in zip(again, kept, strict=True):

        def write(k, v, rows=rows):
            k[:], v[:] = rows()

        cache.reserve(N_PROMPT)
        cache.store.reserve(N_PROMPT)
        cache.fill_rows(0, n_known, write)
        cache.store.n = n_known
    found = decoder.forward(ids[n_known:], n_known, again)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    if cuda.found:
        raise cuda.found[0]


def test_a_prompt_behind_a_step_that_was_broken_off(engine, monkeypatch):
    """What the step has begun beside is done before it is read, and nothing of it is left."""
    decoder, logits = engine.model.decoder, []
    for breaks in (False, True):
        caches = engine.caches("freekv")
        engine.prefill(caches)
        if breaks:
            with monkeypatch.context() as patch:
                patch.setattr(type(decoder), "_output", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    decoder.decode_batch([5], [N_PROMPT], [caches])
        logits.append(decoder.forward([7, 8, 9], N_PROMPT, caches))
    np.testing.assert_array_equal(*logits)
    assert not engine.cuda.found


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
