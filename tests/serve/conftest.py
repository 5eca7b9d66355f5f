"""Servers on a tiny model, in this process, for the clients that people use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from tiny_sequences import SHAPE, open_tiny
from waiting import PATIENCE, wait_for

from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.model import Model
from sparsekv_cli.serve.app import Access, make_app
from sparsekv_cli.serve.pool import HostedModel, ModelPool
from sparsekv_cli.serve.requests import RequestLimits, Service
from sparsekv_cli.serve.scheduler import Scheduler
from sparsekv_cli.serve.wire.connections import limited

# Of Qwen's family: it knows tools, and thoughts that may be switched off.
TEMPLATE = (
    "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}. {% endif %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endfor %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)


class Running(NamedTuple):
    """A server that runs."""

    url: str
    service: Service  # of the first model
    log: list[str]
    pool: ModelPool


@pytest.fixture(scope="module")
def serve(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Running]]:
    """Starts servers: limits, access, connections and the scheduler's options by name.

    files: of the models; none: one tiny one. most: bytes of those that are loaded at once.
    """
    stops: list[Callable[[], None]] = []

    def start(
        *,
        access: Access | None = None,
        tokens: int = 64,
        seconds: float = PATIENCE,
        body_bytes: int = 1 << 16,
        ctx_size: int = 512,
        connections: int = 64,
        head_s: float = 10.0,
        template: str = TEMPLATE,
        files: Sequence[Path] = (),
        most: int = 0,
        **options: Any,
    ) -> Running:
        given = {"n_parallel": 4, "n_queue": 8, "kv_bytes": 1 << 28, **options}
        limits, log = RequestLimits(tokens, seconds, body_bytes), []
        shape = {**SHAPE, "chat_template": template, "wtype": "Q8_0"}
        paths = files or [tiny_model(**shape)]

        def load(hosted: HostedModel) -> Service:
            model = open_tiny(lambda **_: hosted.path, "full", ctx_size=ctx_size).model
            scheduler = Scheduler(model, **given, stats=hosted.stats)
            scheduler.start()
            sampling = SamplingOptions({"temp": 0.0})
            return Service(model, scheduler, limits, {}, sampling, name=hosted.name)

        hosted = [HostedModel((path.stem,), path, path.stat().st_size) for path in paths]
        pool = ModelPool(hosted, load, most, limits, "full", log.append)
        pool.load_first()
        config = uvicorn.Config(
            make_app(pool, access or Access(), log.append),
            port=0,
            log_level="critical",
            lifespan="off",
            http=limited(connections, head_s),
        )
        socket, server = config.bind_socket(), uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([socket],))
        thread.start()
        wait_for(lambda: server.started)

        def stop() -> None:
            server.should_exit = True
            thread.join()
            pool.close()

        stops.append(stop)
        service = pool.models[0].loaded.service
        return Running(f"http://127.0.0.1:{socket.getsockname()[1]}", service, log, pool)

    yield start
    for stop in stops:
        stop()


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Iterator[Model]:
    model = open_tiny(tiny_model, "full", ctx_size=1024).model
    yield model
    model.gguf.close()


@pytest.fixture
def start(model: Model) -> Iterator[Callable[..., Scheduler]]:
    started: list[Scheduler] = []

    def open_scheduler(**options: Any) -> Scheduler:
        given = {"n_parallel": 4, "n_queue": 2000, "kv_bytes": 1 << 30, **options}
        started.append(Scheduler(model, **given))
        started[-1].start()
        return started[-1]

    yield open_scheduler
    for scheduler in started:
        scheduler.stop()


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture(scope="module")
def openai() -> Any:
    """Imported when it is needed: it takes two seconds."""
    return import_module("openai")


@pytest.fixture(scope="module")
def client(server: Any, openai: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
