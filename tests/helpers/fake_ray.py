"""A Ray whose actors are objects of this process; tests end them as a lost node does."""

import pickle
from collections.abc import Callable
from typing import Any


class FakeRay:
    """Each call of an actor is done when it is waited for, the last one first.

    nodes: CPUs of each. lose: whether a call with these arguments ends its actor.
    """

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, cpus: list[int], lose: Callable[[tuple[Any, ...]], bool]) -> None:
        self.cpus, self.lose = cpus, lose
        self.n_made = self.n_killed = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": n > 0, "Resources": {"CPU": n, "memory": 1 << 40}} for n in self.cpus]

    def put(self, value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    def remote(self, **_options: Any) -> Callable[[type], Any]:
        def wrapped(of: type) -> Any:
            ray = self

            class FakeActorClass:
                @staticmethod
                def remote() -> Any:
                    ray.n_made += 1
                    return FakeActor(ray, of())

            return FakeActorClass

        return wrapped

    def wait(self, pending: list[Any], **_options: Any) -> tuple[list[Any], list[Any]]:
        return pending[-1:], pending[:-1]

    def get(self, call: Callable[[], Any]) -> Any:
        return call()

    def kill(self, _actor: Any) -> None:
        self.n_killed += 1


class FakeActor:
    """``actor.method.remote(...)`` of an object."""

    def __init__(self, ray: FakeRay, target: Any) -> None:
        self._ray, self._target = ray, target

    def __getattr__(self, name: str) -> Any:
        method, ray = getattr(self._target, name), self._ray

        class FakeMethod:
            @staticmethod
            def remote(*arguments: Any) -> Callable[[], Any]:
                def call() -> Any:
                    if ray.lose(arguments):
                        raise FakeRay.exceptions.RayError("node died")
                    return method(*arguments)

                return call

        return FakeMethod
