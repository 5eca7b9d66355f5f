"""Jobs for a scheduler, and what they are told."""

import threading
from collections.abc import Callable
from typing import Any

from waiting import PATIENCE

from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.methods import build_method
from sparsekv_cli.serve.jobs import Event, Failed, Finished, Job, NewToken, Request
from sparsekv_cli.serve.scheduler import Scheduler

FULL = build_method("full", {})
METHODS = [FULL, build_method("topk", {}, budget="24"), build_method("snapkv", {}, budget="40")]
GREEDY = SamplingOptions({"temp": 0.0}, ignore_eos=True)


class Asked:
    """A job and what it was told; ``text`` waits for its end."""

    def __init__(self, scheduler: Scheduler, ids: list[int], n: int = 6, **options: Any) -> None:
        self.events: list[Event] = []
        self.began, self.ended = threading.Event(), threading.Event()
        seconds = options.pop("seconds", PATIENCE)
        method = options.pop("method", FULL)
        self._pause: Callable[[], Any] = options.pop("pause", lambda: None)  # after an event
        depth = options.pop("sparse_from", 0)
        request = Request(ids, method, depth, n, options.pop("sampling", GREEDY), **options)
        self.job = Job(request, self._tell, seconds)
        scheduler.submit([self.job])

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self.began.set()
        self._pause()
        if isinstance(event, Finished | Failed):
            self.ended.set()

    @property
    def end(self) -> Event:
        assert self.ended.wait(PATIENCE)
        return self.events[-1]

    @property
    def text(self) -> str:
        assert isinstance(self.end, Finished), self.end
        return "".join(e.text for e in self.events if isinstance(e, NewToken | Finished))
