"""The models of a server. One is loaded when a request asks for it, and unloaded for another one.

Only the event loop changes the data here. A thread loads and unloads, one model at a time. Requests
for loaded models go on meanwhile. A model may have to wait for memory that others use. Then later
requests wait for that model, because otherwise it might wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from sparsekv_cli.errors import NoRoomError, SparseKVError
from sparsekv_cli.generation.fields import shown
from sparsekv_cli.generation.sampler import forget_vocabularies
from sparsekv_cli.models.decoder import give_back_memory
from sparsekv_cli.serve.jobs import TimeLimitError
from sparsekv_cli.serve.requests import RequestError, RequestLimits, Service
from sparsekv_cli.serve.rows import default_limit, gib
from sparsekv_cli.serve.running import Stats
from sparsekv_cli.settings.config import SessionConfig

LOOK_S = 1.0  # seconds between two checks whether anybody still waits


class NotLoadedError(SparseKVError):
    """A model cannot be loaded. The next request for it will try again."""


@dataclass(eq=False)
class Loaded:
    """A model in memory."""

    service: Service
    n_held: int = 0  # requests that it is answering
    used: float = field(default_factory=time.monotonic)

    @property
    def is_current(self) -> bool:
        """Whether it works and its files have not changed."""
        parts = self.service.model.gguf.parts
        return self.service.scheduler.failure is None and all(part.is_current() for part in parts)


@dataclass(eq=False)
class HostedModel:
    """A model that requests can name."""

    names: tuple[str, ...]  # the names that requests may use; responses have the first one
    path: Path
    n_bytes: int = 0  # the size of its files
    # facts of its header: context, methods, and the variable that switches thinking
    about: dict[str, Any] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)  # since the start of the server, loaded or not
    loaded: Loaded | None = None
    n_loads: int = 0
    problem: str = ""  # why the last attempt to load it failed
    patterns: tuple[str, ...] = ()  # of further names, such as claude-*
    config: SessionConfig = field(default_factory=SessionConfig)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def used(self) -> float:
        """The time at which it was used last."""
        return 0.0 if self.loaded is None else self.loaded.used

    @property
    def status(self) -> str:
        """``loaded``, ``unloaded`` or ``failed``."""
        if self.loaded is not None:
            return "loaded" if self.loaded.service.scheduler.failure is None else "failed"
        return "failed" if self.problem else "unloaded"

    def listed(self, created: int) -> dict[str, Any]:
        """Returns the model's entry in /v1/models."""
        entry = {"id": self.name, "object": "model", "created": created, "owned_by": "local"}
        entry |= {"aliases": [*self.names[1:], *self.patterns], "status": self.status}
        entry |= self.about if self.loaded is None else about(self.loaded.service)
        return entry | ({"problem": self.problem} if self.problem else {})


class ModelPool:
    """The models of a server, the default one first.

    load: opens a model and starts its scheduler, in a thread. most: bytes of the models that are
    loaded at once. A single model may be larger. tell: called with a line for each event.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        load: Callable[[HostedModel], Service],
        most: int,
        limits: RequestLimits,
        method: str,
        tell: Callable[[str], None],
    ) -> None:
        self.models, self.limits, self._method = models, limits, method
        self._load, self._most, self._tell = load, most, tell
        self._by_name = {name: each for each in models for name in each.names}
        self._thread = ThreadPoolExecutor(1, "models")
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self._lacks_memory = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.ends: list[Callable[[], None]] = []  # called when all jobs are ended

    @property
    def method(self) -> str:
        """The default model's method, which requests without a method get."""
        loaded = self.models[0].loaded
        return self._method if loaded is None else loaded.service.model.method.name

    def named(self, name: str) -> HostedModel | None:
        """Returns the model of a name, or the first one with a pattern that the name fits."""
        fitting = (each for each in self.models if any(fnmatchcase(name, p) for p in each.patterns))
        return self._by_name.get(name) or next(fitting, None)

    def find(self, name: str) -> HostedModel:
        """Returns a model by name. Without a name, or if there is only one model: the first one.

        Raises RequestError for an unknown name.
        """
        found = self.models[0] if not name or len(self.models) == 1 else self.named(name)
        if found is None:
            names = ", ".join(each.name for each in self.models)
            raise RequestError(
                f"the model {shown(name)} does not exist: this server has {names}; with --alias "
                "'NAME,*' a model answers to all other names",
                status=404,
                param="model",
                code="model_not_found",
            )
        return found

    async def hold(self, name: str, held: ExitStack) -> Service:
        """Returns a model's service, which stays loaded until ``held`` is closed.

        Raises RequestError for an unknown name, NotLoadedError, or TimeLimitError.
        """
        model = self.find(name)
        if self._is_ready(model) and not self._lacks_memory:
            loaded = self._taken(model)
        else:
            loaded = await self._wait_for(model)
        held.callback(self._release, loaded)
        return loaded.service

    def load_first(self) -> None:
        """Loads the default model before the first request. Raises its error if that fails."""
        self._loaded(self.models[0], self._load(self.models[0]))

    def end_all(self) -> None:
        """Tells the jobs of all models that the server is ending, and ends them."""
        for end in self.ends:
            end()
        for loaded in self._all_loaded():
            loaded.service.scheduler.end_all()

    def close(self) -> Exception | None:
        """Unloads all models. Returns why a model failed, if one did."""
        self._thread.shutdown()
        failure = None
        for loaded in self._all_loaded():
            loaded.service.close()
            failure = failure or loaded.service.scheduler.failure
        return failure

    def _all_loaded(self) -> list[Loaded]:
        return [each.loaded for each in self.models if each.loaded is not None]

    def _is_ready(self, model: HostedModel) -> bool:
        """Returns whether requests may use the loaded model: it is current, or others use it."""
        loaded = model.loaded
        return loaded is not None and (loaded.is_current or loaded.n_held > 0)

    def _taken(self, model: HostedModel) -> Loaded:
        assert model.loaded is not None
        model.loaded.n_held += 1
        return model.loaded

    def _release(self, loaded: Loaded) -> None:
        """Counts a request as answered."""
        loaded.n_held -= 1
        loaded.used = time.monotonic()
        self._released.set()

    # --- loading ----------------------------------------------------------------------------------

    async def _wait_for(self, model: HostedModel) -> Loaded:
        """Waits until it is the model's turn. Returns the model, loaded and held."""
        place: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._give(model, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(self.limits.seconds):
                try:
                    return await place
                except asyncio.CancelledError:  # the time limit raises it, too
                    if place.done() and not place.cancelled() and place.exception() is None:
                        self._release(place.result())  # it was given at the same moment
                    raise
        except TimeoutError:
            raise TimeLimitError(
                f"{model.name} was not loaded within {self.limits.seconds:g} s, the limit"
            ) from None

    async def _give(self, model: HostedModel, place: asyncio.Future[Loaded]) -> None:
        """Loads a model if necessary, and gives it to the request that waits in ``place``."""
        try:
            async with self._turn:
                if not self._is_ready(model):
                    await self._make_room(model, place)
                    if place.cancelled():
                        return
                    await self._load_now(model)
                if not place.cancelled():
                    place.set_result(self._taken(model))
        except Exception as error:
            if not place.done():
                place.set_exception(error)

    async def _make_room(self, model: HostedModel, place: asyncio.Future[Loaded]) -> None:
        """Unloads idle models, the least recently used first, until there is room for one more.

        Returns at once, without room, if nobody waits any more.
        """
        if model.loaded is not None:  # it failed, or its file changed
            await self._unload(model)
        while not place.cancelled():
            others = [each for each in self.models if each.loaded is not None]
            if not others or sum(each.n_bytes for each in others) + model.n_bytes <= self._most:
                return
            if idle := self._idle():
                await self._unload(idle[0])
                continue
            self._lacks_memory = True
            self._released.clear()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._released.wait()
            finally:
                self._lacks_memory = False

    def _idle(self) -> list[HostedModel]:
        """Returns the loaded models that nobody uses, the least recently used first."""
        idle = [each for each in self.models if each.loaded and not each.loaded.n_held]
        return sorted(idle, key=lambda each: each.used)

    async def _load_now(self, model: HostedModel) -> None:
        """Loads a model in the thread. Raises NotLoadedError."""
        self._tell(f"loading {model.name} ({gib(model.n_bytes)})")
        loop, started = asyncio.get_running_loop(), time.monotonic()
        try:
            while model.loaded is None:
                try:
                    service = await loop.run_in_executor(self._thread, self._load, model)
                    self._loaded(model, service)
                except NoRoomError:  # a GPU has less memory than is counted here
                    idle = self._idle()
                    if not idle:
                        raise
                    await self._unload(idle[0])
        except Exception as error:
            words = getattr(error, "message", f"unexpected {type(error).__name__}")
            words = str(error) if isinstance(error, SparseKVError) else words
            model.problem = words
            self._tell(f"{model.name} cannot be loaded: {words}")
            raise NotLoadedError(f"{model.name} cannot be loaded: {words}") from None
        self._tell(f"{model.name} is loaded after {time.monotonic() - started:.1f} s")

    def _loaded(self, model: HostedModel, service: Service) -> None:
        model.loaded, model.problem = Loaded(service), ""
        model.n_bytes, model.n_loads = service.model.n_bytes, model.n_loads + 1

    async def _unload(self, model: HostedModel) -> None:
        """Ends a model's threads and frees its memory."""
        loop, loaded, model.loaded = asyncio.get_running_loop(), model.loaded, None
        assert loaded is not None
        model.about = about(loaded.service)
        await loop.run_in_executor(self._thread, loaded.service.close)
        del loaded  # the last reference
        await loop.run_in_executor(self._thread, free_memory)
        self._tell(f"{model.name} is unloaded")


def is_pattern(name: str) -> bool:
    """Returns whether a name of --alias is a pattern of names."""
    return any(mark in name for mark in "*?[")


def about(service: Service) -> dict[str, Any]:
    """Returns the facts about a loaded model in /v1/models."""
    told = {"context_length": service.model.n_ctx, "methods": service.methods()}
    told["thinking_switch"] = service.thinking_switch
    return told | service.described_method()


def free_memory() -> None:
    """Returns the memory of unloaded models to the system."""
    forget_vocabularies()
    gc.unfreeze()  # loading froze all objects
    gc.collect()
    give_back_memory()


def shares(sizes: Sequence[int], models_bytes: int | None, kv_bytes: int | None) -> tuple[int, int]:
    """Returns the bytes of models that are loaded at once, and the bytes of one model's rows.

    sizes: bytes of each model. models_bytes: None allows three quarters of the available memory.
    kv_bytes: None allows half of what the models leave. Each model that fits gets an equal part.
    """
    most = default_limit() * 3 // 2 if models_bytes is None else models_bytes
    if models_bytes is not None and max(sizes) > most:
        raise SparseKVError(
            f"--models-memory {gib(most)}: a model takes {gib(max(sizes))}; allow that, or leave "
            "the model out"
        )
    together = list(accumulate(sorted(sizes)))
    taken = min(together[-1], max(most, max(sizes)))
    rows = max(0, default_limit() - taken // 2) if kv_bytes is None else kv_bytes
    return most, rows // max(1, sum(each <= most for each in together))


def share_of_rows(room: int | None, n_models: int, rows: int, stated: int | None) -> int:
    """Returns the bytes of one model's rows: ``rows`` in the host's memory, else those of a GPU.

    room: see DecoderEngine. stated: the limit that the user has given, if any.
    """
    if room is None:
        return rows
    own = room // n_models
    return own if stated is None else min(own, stated)
