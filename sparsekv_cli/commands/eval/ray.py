"""``eval --ray``: models on the nodes of a Ray cluster answer samples and score chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekv_cli.commands.eval.options import encoder
from sparsekv_cli.commands.options.model import build_method
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.distributed.settings import SessionSettings, room_of, settings_of
from sparsekv_cli.evaluation.perplexity.chunks import Chunk, Chunks
from sparsekv_cli.evaluation.perplexity.kld_file import encode
from sparsekv_cli.evaluation.perplexity.scores import Ways, score_chunk
from sparsekv_cli.evaluation.ruler.answers import RulerPoint, answer_sample, missing_settings
from sparsekv_cli.evaluation.ruler.records import Key
from sparsekv_cli.evaluation.ruler.samples import RulerPlan
from sparsekv_cli.methods.base import Method

if TYPE_CHECKING:
    from sparsekv_cli.model import Model

SEQUENCES = 2  # sequences of a node: full, which prefills, and one method


SampleShard = tuple[RulerPoint, list[str]]  # a sample, and the texts of the methods that answer it


def open_ruler(
    session: SessionSettings, *, methods: Mapping[str, Method], plan: RulerPlan, raw: bool
) -> Callable[[SampleShard], list[dict[str, Any]]]:
    """Opens the model on a node. Returns a function that answers a sample.

    methods: text -> method.
    """
    model = session.open(methods.values())
    encode = encoder(model, raw)

    def answer(shard: SampleShard) -> list[dict[str, Any]]:
        sample, specs = shard
        return answer_sample(model, {spec: methods[spec] for spec in specs}, plan, sample, encode)

    return answer


def answer_on_cluster(
    address: str,
    model: Model,
    methods: Mapping[str, Method],
    plan: RulerPlan,
    raw: bool,
    done: Collection[Key],
) -> Iterator[list[dict[str, Any]]]:
    """Yields the records that ``answer_all`` (ruler/answers.py) would yield, from a cluster.

    model: opened on this machine with ``full``.
    """
    from sparsekv_cli.distributed.workers import workers_at

    sent = settings_of(model, build_method("full", {}), methods.values())
    open_work = partial(open_ruler, methods=methods, plan=plan, raw=raw)
    shards = [(point, list(missing_settings(methods, point, done))) for point in plan.samples()]
    room = room_of(model, SEQUENCES)
    with workers_at(address, room, open_work, sent, say) as workers:
        found = workers.map([shard for shard in shards if shard[1]])
        for _, specs in shards:
            yield next(found) if specs else []
        say(workers.summary())


ChunkPart = tuple[int, Ways]  # a chunk's number, and the ways to score it
# records of the chunk, and its rows of a KLDFile, if these are wanted
ScoredChunk = tuple[list[dict[str, Any]], np.ndarray]


def open_chunks(
    session: SessionSettings, *, ways: Ways, base: str, keeps_rows: bool
) -> Callable[[tuple[Chunk, list[str]]], ScoredChunk]:
    """Opens the model on a node. Returns a function that scores a chunk in the named ways.

    keeps_rows: whether it also returns the chunk's rows of a KLDFile.
    """
    model = session.open(method for method in ways.values() if method)

    def score(shard: tuple[Chunk, list[str]]) -> ScoredChunk:
        chunk, names = shard
        rows: list[np.ndarray] = []
        see = (lambda logits: rows.append(encode(logits))) if keeps_rows else None
        records = score_chunk(model, {way: ways[way] for way in names}, chunk, base, see)
        return records, np.concatenate(rows) if rows else np.zeros(0, np.uint16)

    return score


def score_on_cluster(
    address: str,
    model: Model,
    ways: Ways,
    chunks: Chunks,
    parts: Sequence[ChunkPart],
    base: str,
    keeps_rows: bool,
) -> Iterator[ScoredChunk]:
    """Yields the result of ``score_chunk`` for each part, from a cluster.

    model: opened on this machine with ``full``.
    """
    from sparsekv_cli.distributed.workers import workers_at

    methods = [method for method in ways.values() if method is not None]
    sent = settings_of(model, build_method("full", {}), methods)
    open_work = partial(open_chunks, ways=ways, base=base, keeps_rows=keeps_rows)
    room = room_of(model, SEQUENCES)
    with workers_at(address, room, open_work, sent, say) as workers:
        yield from workers.map((chunks.chunk(i), list(some)) for i, some in parts)
        say(workers.summary())
