"""``sparsekv-cli serve``: a server with OpenAI's and Anthropic's protocols, and a page."""

from __future__ import annotations

import ipaddress
import os
import signal
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.method_choice import choose_method
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    build_method,
    gathered,
    model_options,
    open_model,
    prepare_methods,
)
from sparsekv_cli.commands.options.numbers import FiniteRange
from sparsekv_cli.commands.options.prefix import PrefixOptions, prefix_options, prefixes_maker
from sparsekv_cli.commands.options.sampling import sampling_options
from sparsekv_cli.commands.shared.terminal import one_line, say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions

if TYPE_CHECKING:
    from sparsekv_cli.serve.requests import Service
    from sparsekv_cli.serve.scheduler import Scheduler

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
KEY = "SPARSEKV_API_KEY"
LEAST_OPEN_FILES = 64  # the model, the event loop, and a connection a client
CLOSE_S = 5  # after --drain, for clients to be told that there is no answer


@dataclass(frozen=True)
class Listen:
    """Where the server listens, to whom, and for how many seconds it drains at its end."""

    host: str
    port: int
    api_key: str | None
    cors: tuple[str, ...]
    drain: int

    @property
    def key(self) -> str:
        """The key that requests must carry; empty: none."""
        return os.environ.get(KEY, "") if self.api_key is None else self.api_key


@click.command(
    cls=GroupedCommand, short_help="Serve OpenAI's and Anthropic's protocols, and a page."
)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="[default: 127.0.0.1]")
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=8080,
    help="0 takes a free one. [default: 8080]",
)  # fmt: skip
@click.option("--api-key", metavar="KEY", help=f"Clients must send it. [env: {KEY}]")
@click.option(
    "--cors", metavar="ORIGIN", multiple=True,
    help="Pages from there may use the server, such as https://example.org; repeatable.",
)  # fmt: skip
@click.option(
    "--parallel", metavar="N", type=click.IntRange(1, 256), default=8,
    help="Sequences that are decoded together. [default: 8]",
)  # fmt: skip
@click.option(
    "--queue", metavar="N", type=click.IntRange(0, 65536), default=64,
    help="Requests that may wait; others get the status 429. [default: 64]",
)  # fmt: skip
@click.option(
    "--kv-memory", metavar="GIB", type=FiniteRange(min=0, min_open=True),
    help="Memory for the rows of all sequences. [default: half of what is available]",
)  # fmt: skip
@click.option(
    "--max-tokens", metavar="N", type=click.IntRange(1), default=4096,
    help="Most tokens of an answer. [default: 4096]",
)  # fmt: skip
@click.option(
    "--timeout", metavar="SECONDS", type=FiniteRange(min=0, min_open=True), default=600.0,
    help="Most time of a request, waiting included. [default: 600]",
)  # fmt: skip
@click.option(
    "--max-body", metavar="MIB", type=FiniteRange(min=0, min_open=True), default=4.0,
    help="Most that a request's body may have. [default: 4]",
)  # fmt: skip
@click.option(
    "--prepare", metavar="NAME,...", default="",
    help="Methods that are compiled and calibrated before the first request.",
)  # fmt: skip
@click.option(
    "--drain", metavar="SECONDS", type=click.IntRange(0), default=60,
    help="At the end, the time that answers have to become whole. [default: 60]",
)  # fmt: skip
@model_options()
@prefix_options
@sampling_options
@gathered("listen", lambda v: Listen(*(v.pop(each.name) for each in fields(Listen))), [])
def command(
    options: ModelOptions,
    prefix: PrefixOptions,
    sampling: SamplingOptions,
    listen: Listen,
    parallel: int,
    queue: int,
    kv_memory: float | None,
    max_tokens: int,
    timeout: float,
    max_body: float,
    prepare: str,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/responses, /v1/messages, and a page at /.

    The method, its options and those of sampling are what requests have that name no others.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise SparseKVError(
            f"serve needs {' and '.join(missing)}: pip install 'sparsekv-cli[serve]'"
        )
    check_open_files()
    if prefix.session is not None:
        raise click.UsageError("--session is for one prompt: leave it out")
    if sampling.grammar is not None:
        raise click.UsageError(f"--{sampling.grammar.kind} is a request's: leave it out")
    if not listen.key and not is_loopback(listen.host):
        say(f"warning: {listen.host} is reached from other machines, and there is no --api-key")

    from sparsekv_cli.serve.requests import RequestLimits, Service
    from sparsekv_cli.serve.rows import default_limit
    from sparsekv_cli.serve.scheduler import Scheduler

    prepared = [build_method(name, {}, {}) for name in prepare.split(",") if name]
    model = open_model(options)
    model, options = choose_method(model, options)
    prepare_methods(model, prepared)
    scheduler = Scheduler(
        model,
        n_parallel=parallel,
        n_queue=queue,
        kv_bytes=default_limit() if kv_memory is None else int(kv_memory * 2**30),
        disk_of=prefixes_maker(model, prefix),
    )
    limits = RequestLimits(tokens=max_tokens, seconds=timeout, body_bytes=int(max_body * 2**20))
    named = {name: text for name, text in options.named.items() if text is not None}
    service = Service(
        model, scheduler, limits, {**options.method_options, **named}, sampling, options.seed
    )
    run(service, listen, parallel + queue)


def check_open_files() -> None:
    """Raises SparseKVError where the process may open too few files to answer a few clients."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < LEAST_OPEN_FILES and most != resource.RLIM_INFINITY:
        raise SparseKVError(
            f"serve may open {most} files, too few for a few clients: allow at least "
            f"{LEAST_OPEN_FILES} with 'ulimit -n 1024'"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def draining(config: Any, drain: int, scheduler: Scheduler) -> Any:
    """uvicorn's server.

    Told to end, it lets answers become whole for so many seconds, and then has the scheduler end
    the others.
    """
    import asyncio

    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            timer = asyncio.get_running_loop().call_later(drain, scheduler.end_all)
            await super().shutdown(sockets)
            timer.cancel()

    return Server(config)


def run(service: Service, listen: Listen, n_requests: int) -> None:
    """Serves until the process is told to end; answers that have begun become whole first.

    n_requests: that may run or wait.
    """
    import uvicorn

    from sparsekv_cli.serve.app import Access, make_app
    from sparsekv_cli.serve.wire.connections import BACKLOG, limited, most_connections

    host, port, drain = listen.host, listen.port, listen.drain
    access = Access(listen.key, listen.cors, is_loopback(host))
    app = make_app(service, access, lambda line: say(line))
    config = uvicorn.Config(
        app, host=host, port=port, log_level="critical", access_log=False, lifespan="off",
        http=limited(most_connections(n_requests)), backlog=BACKLOG, ws="none",
        timeout_graceful_shutdown=drain + CLOSE_S, server_header=False,
    )  # fmt: skip
    try:
        socket = config.bind_socket()
    except SystemExit:
        raise SparseKVError(
            f"{host}:{port} cannot be listened on: choose another --host or --port"
        ) from None
    at = f"[{host}]" if ":" in host else host
    scheduler = service.scheduler
    scheduler.start()
    server = draining(config, drain, scheduler)
    # uvicorn drains, then raises the signal again: what follows must still run.
    signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        socket.listen(config.backlog)  # whoever reads the address may connect at once
        say(one_line(f"{service.name}: http://{at}:{socket.getsockname()[1]}/"))
        server.run([socket])
    finally:
        say("the server ends")
        scheduler.stop()
        service.grammars.close()
    if scheduler.failure is not None:
        raise scheduler.failure
