"""``eval ruler --ray``: samples are answered by sessions on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsekv_cli.commands.eval_encode import encoder
from sparsekv_cli.commands.options import build_method
from sparsekv_cli.commands.terminal import say
from sparsekv_cli.distributed.settings import SessionSettings, room_of, settings_of
from sparsekv_cli.evaluation.ruler.answers import RulerPoint, answer_sample, missing_settings
from sparsekv_cli.evaluation.ruler.records import Key
from sparsekv_cli.evaluation.ruler.samples import RulerPlan
from sparsekv_cli.methods.base import Method

if TYPE_CHECKING:
    from sparsekv_cli.session import Session

SEQUENCES = 2  # full, which leads a prefill, and a method at a time at least


@dataclass(frozen=True)
class RulerSettings:
    """What every node answers samples with; methods by their text."""

    session: SessionSettings
    methods: Mapping[str, Method]
    plan: RulerPlan
    raw: bool


SampleShard = tuple[RulerPoint, list[str]]  # a sample, and the methods that are to answer it


def open_ruler(settings: RulerSettings) -> Callable[[SampleShard], list[dict[str, Any]]]:
    """Opens a session on a node; what it returns answers a sample."""
    session = settings.session.open(settings.methods.values())
    encode = encoder(session, settings.raw)

    def answer(shard: SampleShard) -> list[dict[str, Any]]:
        sample, specs = shard
        missing = {spec: settings.methods[spec] for spec in specs}
        return answer_sample(session, missing, settings.plan, sample, encode)

    return answer


def answer_on_cluster(
    address: str,
    session: Session,
    methods: Mapping[str, Method],
    plan: RulerPlan,
    raw: bool,
    done: Collection[Key],
) -> Iterator[list[dict[str, Any]]]:
    """As ``answer_all`` of ruler/answers.py, on a cluster; session: opened here with ``full``."""
    from sparsekv_cli.distributed.workers import workers_at

    sent = settings_of(session, build_method("full", {}), methods.values())
    settings = RulerSettings(sent, methods, plan, raw)
    shards = [(point, list(missing_settings(methods, point, done))) for point in plan.samples()]
    room = room_of(session, SEQUENCES)
    with workers_at(address, room, open_ruler, settings, say) as workers:
        found = workers.map([shard for shard in shards if shard[1]])
        for _, specs in shards:
            yield next(found) if specs else []
        say(workers.summary())
