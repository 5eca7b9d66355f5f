"""The caches on a GPU, a file a method. Shared code finds them by what a method says."""

from importlib import import_module
from typing import Any

from sparsekv_cli.device.host import HostCache
from sparsekv_cli.methods.base import Method

DENSE = "full:DeviceDense"  # of the dense layers of every method


def device_cache(method: Method) -> Any:
    """Returns the maker of the method's device cache, from (spec, device, method); or None."""
    return _named(method.device_cache) if method.device_cache else None


def dense_cache() -> Any:
    """Returns the class of a dense layer's cache on a device, made from (spec, device)."""
    return _named(DENSE)


def host_cache(method: Method) -> Any:
    """Returns the class for the method's sparse cache on the host, in a decoder on the device."""
    return _named(method.host_cache) if method.host_cache else HostCache


def _named(entry: str) -> Any:
    """Returns a class of a file of this folder, from module:class."""
    module, _, name = entry.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)
