"""The page in a headless Chromium, on a server that answers with what a test says."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from scripted_page import Page, Scripted
from waiting import wait_for

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="session")
def running() -> Iterator[Scripted]:
    scripted = Scripted()
    config = uvicorn.Config(scripted.app(), port=0, log_level="critical", lifespan="off")
    socket, server = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    wait_for(lambda: server.started)
    scripted.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    yield scripted
    server.should_exit = server.force_exit = True
    thread.join()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no Chromium here")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,850"):
        options.add_argument(argument)
    downloads = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    browser.set_script_timeout(30)
    browser.downloads = downloads
    yield browser
    browser.quit()


@pytest.fixture
def site(chromium: Any, running: Scripted) -> Iterator[Page]:
    """A new visitor's page. At the end nothing may have been refused or have failed in it."""
    running.answers, running.asked, running.key, running.n_open = [], [], "", 0
    running.models, running.gated, running.slow = [Scripted.model("tiny")], set(), 0.0
    running.visitor = object()
    running.method, running.forgets, running.cuts = "full", False, 0
    chromium.get(f"{running.url}/static/vendor/licences.txt")
    chromium.execute_async_script(
        "localStorage.clear(); const done = arguments[0];"
        "indexedDB.deleteDatabase('sparsekv-cli').onsuccess = done;"
    )
    chromium.get_log("browser")
    found = Page(chromium, running)
    found.open()
    yield found
    problems = [e["message"] for e in chromium.get_log("browser") if e["level"] == "SEVERE"]
    expected = ("status of 4", "status of 5")
    assert [p for p in problems if not any(each in p for each in expected)] == []
