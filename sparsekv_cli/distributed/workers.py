"""Gives shards of work to actors, each of which has opened a model.

Ray starts an actor's process on a node. An idle actor gets the next shard. If an actor is lost,
another actor gets its shard, and a new actor starts if a node has room.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from sparsekv_cli.distributed.cluster import RayCluster, connect, in_background
from sparsekv_cli.distributed.settings import Room
from sparsekv_cli.errors import SparseKVError

SECONDS_BETWEEN_CHECKS = 2.0
MOST_LOSSES = 3  # after so many lost actors the shard is seen as the cause
Open = Callable[[Any], Callable[[Any], Any]]  # (settings) -> a function from a shard to its result


class Worker:
    """An actor that opens a model and works on shards. It returns errors as texts."""

    def __init__(self) -> None:
        self._work: Callable[[Any], Any] | None = None

    def open(self, open_work: Open, settings: Any) -> tuple[str, str]:
        """Opens the model. Returns the node's name and an error; "" if it can work."""
        import socket

        try:
            self._work = open_work(settings)
        except Exception as error:
            return socket.gethostname(), _told(error)
        return socket.gethostname(), ""

    def work(self, shard: Any) -> tuple[Any, str]:
        """Returns the result of a shard and an error; "" if there is a result."""
        assert self._work is not None
        try:
            return self._work(shard), ""
        except Exception as error:
            return None, _told(error)


@dataclass
class Shard:
    """A piece of work, its number, and how many actors were lost while they worked on it."""

    number: int
    work: Any
    n_lost: int = 0


class Workers:
    """The actors on a cluster. ``map`` gives them shards.

    room: what an actor needs. open_work: opens the model on a node with ``settings``. tell: called
    with remarks for the user. Raises SparseKVError if a node cannot work.
    """

    def __init__(
        self,
        cluster: RayCluster,
        room: Room,
        open_work: Open,
        settings: Any,
        tell: Callable[[str], None],
    ) -> None:
        self._cluster, self._room, self._tell = cluster, room, tell
        self._ray = cluster.ray
        self._open_work, self._settings = open_work, cluster.ray.put(settings)
        self._actor_class = self._ray.remote(
            num_cpus=room.n_cpus, num_gpus=room.n_gpus, memory=room.n_bytes, max_restarts=0,
            scheduling_strategy="SPREAD",
        )(Worker)  # fmt: skip
        self._starting: dict[Any, Any] = {}  # future of ``open`` -> actor
        self._busy: dict[Any, tuple[Any, Shard]] = {}
        self._idle: list[Any] = []
        self._again: deque[Shard] = deque()
        self.n_lost = self._n_start_lost = 0

    @property
    def n_actors(self) -> int:
        return len(self._starting) + len(self._busy) + len(self._idle)

    def map(self, work: Iterable[Any]) -> Iterator[Any]:
        """Yields the results of all shards, in order. Raises SparseKVError for a lost cluster."""
        results: SimpleQueue[Any] = SimpleQueue()

        def run() -> None:
            try:
                for result in self._results(work):
                    results.put((result,))
            finally:
                results.put(())

        running = in_background(run)
        while True:
            try:
                result = results.get(timeout=SECONDS_BETWEEN_CHECKS)
            except Empty:
                self._cluster.check()
                continue
            if not result:
                break
            yield from result
        running.result()

    def _results(self, work: Iterable[Any]) -> Iterator[Any]:
        shards = (Shard(number, each) for number, each in enumerate(work))
        following = next(shards, None)
        done: dict[int, Any] = {}
        n_given = 0  # number of results that were returned
        while following is not None or self._again or self._busy:
            self._grow()
            while self._idle and (self._again or following is not None):
                if self._again:
                    self._start(self._again.popleft())
                else:
                    assert following is not None
                    self._start(following)
                    following = next(shards, None)
            self._wait(done)
            while n_given in done:
                yield done.pop(n_given)
                n_given += 1

    def summary(self) -> str:
        """Returns a line such as ``2 workers on 2 nodes, 1 lost``."""
        n_nodes = self._cluster.n_nodes()
        return f"{self.n_actors} workers on {n_nodes} nodes, {self.n_lost} lost"

    def close(self) -> None:
        """Ends all actors, unless the cluster is lost."""
        if self._cluster.is_lost:
            return
        actors = [*self._starting.values(), *(actor for actor, _ in self._busy.values())]
        for actor in [*actors, *self._idle]:
            self._kill(actor)

    def _grow(self) -> None:
        """Starts as many actors as the nodes have room for.

        Raises SparseKVError if there is no actor.
        """
        n_room = self._cluster.room_for(self._room)
        for _ in range(n_room - self.n_actors):
            actor = self._actor_class.remote()
            self._starting[actor.open.remote(self._open_work, self._settings)] = actor
        if not self.n_actors:
            room = self._room
            gpus = f", {room.n_gpus} GPU" * bool(room.n_gpus)
            raise SparseKVError(
                f"no node of the Ray cluster has room for the model: it takes {room.n_cpus} CPUs"
                f"{gpus} and {room.n_bytes / 2**30:.1f} GiB; lower --threads, --ctx-size or "
                "--parallel, or add nodes"
            )

    def _start(self, shard: Shard) -> None:
        actor = self._idle.pop()
        self._busy[actor.work.remote(shard.work)] = actor, shard

    def _wait(self, done: dict[int, Any]) -> None:
        """Waits until an actor has opened its model or ended its shard, but not for ever."""
        pending = [*self._starting, *self._busy]
        ready, _ = self._ray.wait(pending, num_returns=1, timeout=SECONDS_BETWEEN_CHECKS)
        for future in ready:
            if future in self._starting:
                self._opened(self._starting.pop(future), future)
            else:
                self._worked(*self._busy.pop(future), future, done)

    def _opened(self, actor: Any, future: Any) -> None:
        try:
            node, problem = self._ray.get(future)
        except self._ray.exceptions.RayError as error:
            self._lose(actor, error)
            self._n_start_lost += 1
            if self._n_start_lost == MOST_LOSSES:
                raise SparseKVError(
                    f"{MOST_LOSSES} workers were lost while they opened the model: {_reason(error)}"
                ) from None
            return
        self._n_start_lost = 0
        if problem:
            raise SparseKVError(f"node {node}: {problem}")
        self._idle.append(actor)

    def _worked(self, actor: Any, shard: Shard, future: Any, done: dict[int, Any]) -> None:
        try:
            result, problem = self._ray.get(future)
        except self._ray.exceptions.RayError as error:
            self._lose(actor, error)
            shard.n_lost += 1
            if shard.n_lost == MOST_LOSSES:
                raise SparseKVError(
                    f"shard {shard.number + 1} was given to {MOST_LOSSES} workers, and all were "
                    f"lost: {_reason(error)}"
                ) from None
            self._again.append(shard)
            return
        if problem:
            raise SparseKVError(problem)
        done[shard.number] = result
        self._idle.append(actor)

    def _lose(self, actor: Any, error: Exception) -> None:
        self.n_lost += 1
        self._kill(actor)
        self._tell(f"a worker was lost, another one does its part: {_reason(error)}")

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # the actor and its node may be gone
            self._ray.kill(actor)


@contextlib.contextmanager
def workers_at(
    address: str, room: Room, open_work: Open, settings: Any, tell: Callable[[str], None]
) -> Iterator[Workers]:
    """Yields workers on the cluster at ``address``. They end with the block."""
    with connect(address) as cluster:
        workers = Workers(cluster, room, open_work, settings, tell)
        try:
            yield workers
        finally:
            workers.close()


def _told(error: Exception) -> str:
    if isinstance(error, SparseKVError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
