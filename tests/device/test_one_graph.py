"""Once captured, a step is one graph, whatever the number of its sequences.

The device gets no launch and no copy beside the graph. The device is fixtures/device/fake_cuda.py.
"""

from collections.abc import Iterator

import pytest
from checked_device import Checked, checked, write_model
from fake_cuda import FakeCuda
from fake_cuda_graphs import Graph

pytestmark = pytest.mark.usefixtures("one_thread")
N_ROWS = 40  # more than the methods' budget
N_WARM = 4  # steps until one is replayed: freekv's first step has a plan of its own


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Checked]:
    if device == "cuda":
        pytest.skip("a GPU is there")
    with checked(write_model(tmp_path_factory.mktemp("one")), FakeCuda()) as engine:
        yield engine


@pytest.mark.parametrize("n", [1, 3, pytest.param(8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("method", ["full", "quest", "freekv"])
def test_a_step_is_one_graph(method: str, n: int, engine: Checked, monkeypatch) -> None:
    replay, launch, inside, done = Graph.replay, FakeCuda.launch, [], []

    def counted(graph: Graph) -> None:
        done.append("graph")
        inside.append(graph)
        replay(graph)
        inside.pop()

    def noted(cuda: FakeCuda, name: str, *args: object) -> None:
        if not inside:
            done.append(name)
        launch(cuda, name, *args)

    monkeypatch.setattr(Graph, "replay", counted)
    monkeypatch.setattr(FakeCuda, "launch", noted)
    batch = [engine.caches(method) for _ in range(n)]
    for i, caches in enumerate(batch):
        engine.prefill(caches, N_ROWS + 2 * i)
    for _ in range(N_WARM):
        engine.step(batch)
    done.clear()
    engine.step(batch)
    assert done == ["graph"]
    assert engine.cuda is not None and not engine.cuda.found
