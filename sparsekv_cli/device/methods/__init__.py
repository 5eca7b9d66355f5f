"""The caches on a GPU, a file a method. Shared code finds them here by the method's fields."""

from importlib import import_module
from typing import Any

from sparsekv_cli.device.host import HostCache
from sparsekv_cli.methods.base import Method

DENSE = "full:DeviceDense"  # of the dense layers of every method


def device_cache(method: Method) -> Any:
    """Returns the maker of the method's cache on a device, (spec, device, method), or None."""
    return _named(method.device_cache) if method.device_cache else None


def dense_cache() -> Any:
    """Returns the class of a dense layer's cache on a device, made from (spec, device)."""
    return _named(DENSE)


def host_cache(method: Method) -> Any:
    """Returns the class that wraps the method's sparse cache on the host for a device's decoder."""
    return _named(method.host_cache) if method.host_cache else HostCache


def _named(entry: str) -> Any:
    """Returns a class of this folder by its name, module:class."""
    module, _, name = entry.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)
