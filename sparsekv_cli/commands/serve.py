"""``sparsekv-cli serve``: a server with OpenAI's and Anthropic's protocols, and a page."""

from __future__ import annotations

import ipaddress
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.long_context import warn_of_long_context
from sparsekv_cli.commands.options.method_choice import choose_method
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    build_method,
    find_model,
    gathered,
    load_model,
    method_of,
    model_options,
    prepare_methods,
)
from sparsekv_cli.commands.options.numbers import FiniteRange, WholeRange
from sparsekv_cli.commands.options.prefix import PrefixOptions, prefixes_maker, server_options
from sparsekv_cli.commands.options.sampling import server_sampling_options
from sparsekv_cli.commands.shared.terminal import explain_faults, one_line, say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.serve.forms.volatile import HEADERS
from sparsekv_cli.system.installation import install_command

if TYPE_CHECKING:
    from socket import socket as Socket

    from sparsekv_cli.serve.pool import HostedModel, ModelPool
    from sparsekv_cli.settings.config import SessionConfig

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
KEY = "SPARSEKV_API_KEY"
MODELS_OPTION = click.option(
    "-m", "--model", "models", metavar="FILE|NAME", multiple=True,
    shell_complete=completers.models,
    help="GGUF file, name or OWNER/REPO[:QUANT], as for other commands; repeatable: the others "
    "are loaded when a request names them. [env: SPARSEKV_MODEL]",
)  # fmt: skip
CLOSE_S = 5  # seconds after --drain in which clients get their error


@dataclass(frozen=True)
class Listen:
    """Where the server listens, who may use it, and how long it drains."""

    host: str
    port: int
    api_key: str | None
    cors: tuple[str, ...]
    drain: int

    @property
    def key(self) -> str:
        """The key that requests must have; "": they need none."""
        return os.environ.get(KEY, "") if self.api_key is None else self.api_key


@click.command(cls=GroupedCommand)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="[default: 127.0.0.1]")
@click.option(
    "--port", metavar="N", type=WholeRange(0, 65535), default=8080,
    help="Port; 0 takes a free one. [default: 8080]",
)  # fmt: skip
@click.option("--api-key", metavar="KEY", help=f"Key that clients must send. [env: {KEY}]")
@click.option(
    "--cors", metavar="ORIGIN", multiple=True,
    help="Origin whose pages may use the server, such as https://example.org; repeatable.",
)  # fmt: skip
@click.option(
    "--parallel", metavar="N", type=WholeRange(1, 256), default=8,
    help="Sequences that are decoded together. [default: 8]",
)  # fmt: skip
@click.option(
    "--queue", metavar="N", type=WholeRange(0, 65536), default=64,
    help="Requests that may wait; others get the status 429. [default: 64]",
)  # fmt: skip
@click.option(
    "--kv-memory", metavar="GIB", type=FiniteRange(min=0, min_open=True),
    help="Memory for the rows of all sequences. [default: half of what is available]",
)  # fmt: skip
@click.option(
    "--models-memory", metavar="GIB", type=FiniteRange(min=0, min_open=True),
    help="Memory for several models: beyond it the least recently used one is unloaded. "
    "[default: three quarters of what is available]",
)  # fmt: skip
@click.option(
    "-a", "--alias", "aliases", metavar="NAME,...", multiple=True,
    help="Names of a model in requests, in the order of -m; repeatable. Names may be patterns: '*' "
    "takes all that no model has. [default: the file's]",
)  # fmt: skip
@click.option(
    "--max-tokens", metavar="N", type=WholeRange(1), default=4096,
    help="Most tokens of an answer. [default: 4096]",
)  # fmt: skip
@click.option(
    "--timeout", metavar="SECONDS", type=FiniteRange(min=0, min_open=True), default=600.0,
    help="Most time for a request, waiting included. [default: 600]",
)  # fmt: skip
@click.option(
    "--max-body", metavar="MIB", type=FiniteRange(min=0, min_open=True), default=4.0,
    help="Largest body of a request. [default: 4]",
)  # fmt: skip
@click.option(
    "--volatile-header", "volatile", metavar="TEXT", multiple=True, default=HEADERS,
    help="Lines of system prompts that begin with TEXT are left out, since they change with each "
    f"request; repeatable, '' leaves out none. [default: {HEADERS[0]}]",
)  # fmt: skip
@click.option(
    "--prepare", metavar="NAME,...", default="",
    help="Methods that are compiled and calibrated before the first request.",
)  # fmt: skip
@click.option(
    "--drain", metavar="SECONDS", type=WholeRange(0), default=60,
    help="Time for running answers when the server ends. [default: 60]",
)  # fmt: skip
@model_options(models=MODELS_OPTION)
@server_options
@server_sampling_options
@gathered("listen", lambda v: Listen(*(v.pop(each.name) for each in fields(Listen))), [])
@gathered("memory", lambda v: (v.pop("models_memory"), v.pop("kv_memory")), [])
@gathered("limits", lambda v: tuple(v.pop(n) for n in ("max_tokens", "timeout", "max_body")), [])
def command(
    models: tuple[str, ...],
    aliases: tuple[str, ...],
    options: ModelOptions,
    prefix: PrefixOptions,
    sampling: SamplingOptions,
    listen: Listen,
    memory: tuple[float | None, float | None],
    limits: tuple[int, float, float],
    parallel: int,
    queue: int,
    volatile: tuple[str, ...],
    prepare: str,
) -> None:
    """Serve models: /v1/chat/completions, /v1/responses, /v1/messages, and a page at /.

    A request that names no method or no sampling option gets the one given here. With several -m, a
    request's "model" names one, which is then loaded.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise SparseKVError(f"serve needs {' and '.join(missing)}: {install_command('serve')}")
    from sparsekv_cli.serve.wire.connections import most_connections

    n_connections = most_connections(parallel + queue)
    if not listen.key and not is_loopback(listen.host):
        say(f"warning: other machines can reach {listen.host}, and there is no --api-key")
    method = method_of(options)
    prepared = [build_method(name, {}, {}) for name in prepare.split(",") if name]
    # before the slow steps, so that a port in use is found early
    socket = listening(listen.host, listen.port)

    from sparsekv_cli.serve.pool import ModelPool, share_of_rows, shares
    from sparsekv_cli.serve.requests import RequestLimits, Service
    from sparsekv_cli.serve.scheduler import Scheduler

    hosted = hosted_models(models, aliases, options)
    models_bytes, kv_bytes = (None if gib is None else int(gib * 2**30) for gib in memory)
    most, rows = shares([each.n_bytes for each in hosted], models_bytes, kv_bytes)
    max_tokens, timeout, max_body = limits
    request_limits = RequestLimits(max_tokens, timeout, int(max_body * 2**20))
    named = {name: text for name, text in options.named.items() if text is not None}

    def load(asked: Any) -> Service:
        model = load_model(asked.path, method, asked.config)
        try:
            warn_of_long_context(model)
            model, chosen = choose_method(model, options)
            prepare_methods(model, prepared)
            scheduler = Scheduler(
                model,
                n_parallel=parallel,
                n_queue=queue,
                kv_bytes=share_of_rows(model.engine.room, len(hosted), rows, kv_bytes),
                disk_of=prefixes_maker(model, prefix),
                repair=prefix.repair,
                stats=asked.stats,
                tell=say,
            )
            given = {**chosen.method_options, **named}
            service = Service(
                model,
                scheduler,
                request_limits,
                given,
                sampling,
                options.seed,
                asked.name,
                volatile,
            )
        except BaseException:
            model.close()
            raise
        service.grammars.start()
        scheduler.start()
        return service

    pool = ModelPool(hosted, load, most, request_limits, options.method, say)
    pool.load_first()
    run(pool, listen, socket, n_connections)


def hosted_models(
    given: Sequence[str], aliases: Sequence[str], options: ModelOptions
) -> list[HostedModel]:
    """Returns the models that -m and --alias name, with fields from their headers.

    Raises click.UsageError if two models have one name, or if there are too many aliases.
    """
    from sparsekv_cli.models.sources.naming import split_name
    from sparsekv_cli.serve.pool import HostedModel, is_pattern

    paths = [find_model(name) for name in given] if given else [find_model(None)]
    if len(aliases) > len(paths):
        raise click.UsageError(
            f"found {len(aliases)} of --alias for {len(paths)} of -m: give one for each -m at most"
        )
    stems = [split_name(path.name)[0] for path in paths]
    asked = [[name for name in alias.split(",") if name] for alias in aliases]
    asked += [[] for _ in paths[len(asked) :]]
    named = [
        [name for name in names if not is_pattern(name)] or [stem]
        for names, stem in zip(asked, stems, strict=True)
    ]
    chosen = [name for names in named for name in dict.fromkeys(names)]
    if twice := [name for name, n in Counter(chosen).items() if n > 1]:
        raise click.UsageError(f"two models are named {twice[0]}: name each with --alias")
    counts = Counter(stems)
    hosted = []
    for i, (stem, typed, path) in enumerate(zip(stems, given or stems, paths, strict=True)):
        others = [stem] * (counts[stem] == 1) + [typed] * (Path(typed) != path)
        own = [*named[i], *(each for each in others if each not in chosen)]
        patterns = tuple(name for name in asked[i] if is_pattern(name))
        config = own_config(path, options.config, len(paths))
        hosted.append(
            HostedModel(tuple(dict.fromkeys(own)), path, patterns=patterns, config=config)
        )
        describe(hosted[-1], options)
        if problem := hosted[-1].problem:
            if not path.exists():
                raise SparseKVError(problem)
            if hosted[1:]:  # the first model is loaded at once, which reports its problem
                say(one_line(f"warning: {hosted[-1].name} cannot be loaded: {problem}"))
    used = {key for each in hosted for key in each.config.overrides()}
    if unused := [key for key in options.config.overrides() if key not in used]:
        raise click.UsageError(f"--override-kv {unused[0]}: no model has this architecture")
    explain_faults(" or ".join(str(path) for path in paths))
    return hosted


def own_config(path: Path, config: SessionConfig, n_models: int) -> SessionConfig:
    """Returns the settings for one of several models, without keys of other architectures."""
    if n_models == 1 or not config.override_kv:
        return config
    from sparsekv_cli.models.gguf.file import open_gguf

    try:
        with open_gguf(path, header_only=True) as file:
            name = str(file.metadata.get("general.architecture"))
    except SparseKVError:  # ``describe`` reports the error
        return config
    return replace(config, override_kv=config.of_architecture(name))


def describe(hosted: HostedModel, options: ModelOptions) -> None:
    """Sets the fields of ``hosted`` for /v1/models from the model's header, or its problem."""
    from sparsekv_cli.calibration.calibrations import Calibrations
    from sparsekv_cli.generation.conversation import chat_template
    from sparsekv_cli.methods import usable_methods
    from sparsekv_cli.models.chat.thinking import switch_of
    from sparsekv_cli.models.gguf.file import open_gguf
    from sparsekv_cli.models.hparams import read_hparams
    from sparsekv_cli.models.identity import identity_in

    config = hosted.config
    sidecar = Path(config.calibration) if config.calibration else None
    try:
        with open_gguf(hosted.path) as file:
            file.change(config)
            hparams, hosted.n_bytes = read_hparams(file), file.size
            identity = identity_in(file, hparams, config.ctx_size)
            calibrations = Calibrations(file, hparams, identity, None, lambda text: [], sidecar)
            hosted.about = {
                "context_length": config.ctx_size or hparams.n_ctx_train,
                "methods": usable_methods(hparams.layers, options.method, calibrations.has),
                "thinking_switch": switch_of(chat_template(file)),
            }
    except SparseKVError as error:
        hosted.problem = str(error)
        hosted.n_bytes = hosted.path.stat().st_size if hosted.path.is_file() else 0


def listening(host: str, port: int) -> Socket:
    """Returns a socket that listens at host and port. Raises SparseKVError if it cannot."""
    import socket

    from sparsekv_cli.serve.wire.connections import BACKLOG

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise SparseKVError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from None


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def draining(config: Any, drain: int, pool: ModelPool) -> Any:
    """Returns a server of uvicorn that lets answers finish for ``drain`` seconds at its end.

    Then it ends all other answers.
    """
    import asyncio

    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            timer = asyncio.get_running_loop().call_later(drain, pool.end_all)
            await super().shutdown(sockets)
            timer.cancel()

    return Server(config)


def run(pool: ModelPool, listen: Listen, socket: Socket, n_connections: int) -> None:
    """Serves until a signal ends the process. Running answers may finish first."""
    import uvicorn

    from sparsekv_cli.serve.app import Access, make_app
    from sparsekv_cli.serve.wire.connections import BACKLOG, limited

    host, drain = listen.host, listen.drain
    access = Access(listen.key, listen.cors, is_loopback(host))
    app = make_app(pool, access, lambda line: say(line))
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, lifespan="off",
        http=limited(n_connections), backlog=BACKLOG, ws="none",
        timeout_graceful_shutdown=drain + CLOSE_S, server_header=False,
    )  # fmt: skip
    at = f"[{host}]" if ":" in host else host
    server = draining(config, drain, pool)
    # uvicorn drains, then raises the signal again. The code after it must still run.
    signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        names = ", ".join(model.name for model in pool.models)
        say(one_line(f"{names}: http://{at}:{socket.getsockname()[1]}/"))
        server.run([socket])
    finally:
        say("the server ends")
        failure = pool.close()
    if failure is not None:
        raise failure
