"""Connects to a Ray cluster, checks that it answers, and disconnects. Every error is one line."""

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, TypeVar

from sparsekv_cli.distributed.settings import Room
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.installation import install_command

Result = TypeVar("Result")
SECONDS_TO_ANSWER = 5.0
SECONDS_TO_CONNECT = 30.0
HOW_TO_START = "start one with 'ray start --head' (docs/distributed.md)"


class RayCluster:
    """A connection to a cluster, made by ``connect``."""

    def __init__(self, ray: Any, address: str) -> None:
        self.ray = ray
        self.address = address
        self.is_lost = False

    def room_for(self, room: Room) -> int:
        """Returns how many models fit all live nodes if these do nothing else.

        room: the needs of one model.
        """
        found = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                resources = node["Resources"]
                wanted = {"CPU": room.n_cpus, "GPU": room.n_gpus, "memory": room.n_bytes}
                found += min(
                    int(resources.get(name, 0) // n) for name, n in wanted.items() if n > 0
                )
        return found

    def n_nodes(self) -> int:
        return sum(node["Alive"] for node in self.ray.nodes())

    def check(self) -> None:
        """Raises SparseKVError if the head of the cluster does not answer any more."""
        if not _answers(self.address):
            self.is_lost = True
            raise SparseKVError(
                f"the Ray cluster at {self.address} is lost: its head does not answer any more"
            )


@contextlib.contextmanager
def connect(address: str) -> Iterator[RayCluster]:
    """Yields a connection to the cluster at ``HOST:PORT``; ``auto``: the cluster of this machine.

    Ray prints remarks to ``sys.stdout``, so what the block prints there is discarded. A caller that
    writes results must keep its own reference to the stream. Raises SparseKVError if Ray is missing
    or no cluster answers.
    """
    check_address(address)
    import ray

    def open_connection() -> RayCluster:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return RayCluster(ray, ray.get_runtime_context().gcs_address)

    opening = in_background(open_connection)
    try:
        cluster = opening.result(SECONDS_TO_CONNECT)
    except (ConnectionError, ValueError, RuntimeError, OSError, TimeoutError) as error:
        _leave_at_exit(ray)
        reason = " ".join(str(error).split())[:160] or f"for {SECONDS_TO_CONNECT:.0f} s"
        raise SparseKVError(
            f"--ray {address}: no Ray cluster answers ({reason}): {HOW_TO_START}"
        ) from None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield cluster
    finally:
        if cluster.is_lost:
            _leave_at_exit(ray)
        else:
            ray.shutdown()


def _leave_at_exit(ray: Any) -> None:
    """Lets this process exit without Ray's shutdown, which would wait for the cluster, or crash."""

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)

    atexit.unregister(ray.shutdown)
    atexit.register(leave)


def in_background(call: Callable[[], Result]) -> Future[Result]:
    """Runs ``call`` in a thread and returns its future, because calls of Ray may never return."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def check_address(address: str) -> None:
    """Raises SparseKVError if Ray is missing, the address is wrong, or no cluster answers there."""
    if find_spec("ray") is None:
        raise SparseKVError(f"--ray needs Ray: {install_command('ray')}")
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise SparseKVError(
            f"--ray {address}: expected auto or HOST:PORT, as in 10.0.0.1:6379, the address that "
            "'ray start --head' prints"
        )
    if not _answers(address):
        raise SparseKVError(f"--ray {address}: nobody answers there: {HOW_TO_START}")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_ANSWER):
            return True
    except OSError:
        return False
