"""A Ray cluster that is there: found, checked, and left; what goes wrong is one line."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from sparsekv_cli.distributed.settings import Room
from sparsekv_cli.errors import SparseKVError

COMMAND = "pip install 'sparsekv-cli[ray]'"
SECONDS_TO_ANSWER = 5.0
HOW_TO_START = "start one with 'ray start --head' (docs/distributed.md)"


class RayCluster:
    """A connection to a cluster. ``connect`` makes it."""

    def __init__(self, ray: Any, address: str) -> None:
        self.ray = ray
        self.address = address

    def room_for(self, room: Room) -> int:
        """How many sessions the nodes hold that are alive, whatever else they do."""
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
        """SparseKVError if the head of the cluster does not answer any more."""
        if not _answers(self.address):
            raise SparseKVError(f"the Ray cluster at {self.address} is lost: its head is gone")


@contextlib.contextmanager
def connect(address: str) -> Iterator[RayCluster]:
    """A connection to the cluster at ``HOST:PORT``; ``auto`` finds one that this machine is in.

    SparseKVError if Ray is missing, or no cluster is there.
    """
    check_address(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of what it keeps
    import ray

    try:
        told = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SparseKVError(
            f"--ray {address}: no Ray cluster answers ({reason[:160]}): {HOW_TO_START}"
        ) from None
    try:
        yield RayCluster(ray, told.address_info["gcs_address"])
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """SparseKVError if Ray is missing, for what is no address, or where nobody answers."""
    if find_spec("ray") is None:
        raise SparseKVError(f"--ray needs Ray: {COMMAND}")
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
