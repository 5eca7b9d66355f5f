"""No watchdog: on a busy machine it would end the tests. test_watchdog.py calls it itself."""

import contextlib

import pytest

from sparsekv_cli.models.chat import template


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "watched", contextlib.nullcontext)
