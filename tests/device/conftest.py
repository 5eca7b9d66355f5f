"""Caches and models on a device; the kernels themselves are tested in tests/kernels."""

import pytest


@pytest.fixture(autouse=True)
def quick_products(few_programs: None) -> None:
    """For every test of this folder."""
