"""The caches on a GPU, a file a method. Shared code finds them here, by what a method says."""

from importlib import import_module
from typing import Any

from sparsekv_cli.device.host import HostCache
from sparsekv_cli.methods.base import Method

DENSE = "full:DeviceDense"  # of the dense layers of every method


def device_cache(method: Method) -> Any:
    """Returns what makes the method's cache on a device from (spec, device, method), or None."""
    return _named(method.device_cache) if method.device_cache else None


def dense_cache() -> Any:
    """Returns the class of a dense layer's cache on a device, made from (spec, device)."""
    return _named(DENSE)


def host_cache(method: Method) -> Any:
    """Returns the class that takes the method's sparse cache on the host into a decoder here."""
    return _named(method.host_cache) if method.host_cache else HostCache


def _named(entry: str) -> Any:
    """A class of a file of this folder, module:class."""
    module, _, name = entry.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)
