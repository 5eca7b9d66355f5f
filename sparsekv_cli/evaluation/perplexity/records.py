"""The records of ``eval perplexity`` and ``eval kld``: a line for each chunk and way of scoring."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.evaluation.perplexity.kld import Divergence
from sparsekv_cli.evaluation.perplexity.scores import Ways, setting_of
from sparsekv_cli.evaluation.records import Records
from sparsekv_cli.evaluation.rows_read import RowsRead
from sparsekv_cli.methods.base import Method


class PerplexityRecords(Records):
    """Records by chunk and way. A record has -ln p of each scored token."""

    command = "eval perplexity"
    columns: ClassVar[tuple[str, ...]] = ("nll",)

    @staticmethod
    def key_of(record: Mapping[str, Any]) -> tuple[int, str, str]:
        return record["chunk"], record["name"], json.dumps(record["options"], sort_keys=True)

    @classmethod
    def check(cls, record: Mapping[str, Any]) -> None:
        RowsRead(int(record["rows_attended"]), int(record["head_steps"]))
        np.array([record[name] for name in cls.columns], np.float64)

    def missing(self, ways: Ways, chunk: int) -> dict[str, Method | None]:
        """Returns the ways in which ``chunk`` has not been scored yet."""
        return {
            way: method
            for way, method in ways.items()
            if self.key_of({"chunk": chunk, **setting_of(method)}) not in self.by_key
        }

    def of(self, method: Method | None, n_chunks: int) -> list[dict[str, Any]]:
        """Returns a method's records of the first ``n_chunks`` chunks. method: None: a prefill."""
        what = setting_of(method)
        return [self.by_key[self.key_of({"chunk": i, **what})] for i in range(n_chunks)]

    def scores(self, method: Method | None, n_chunks: int) -> dict[str, np.ndarray]:
        """Returns name -> scores f64 (n_tokens,) of all scored tokens of the first chunks."""
        records = self.of(method, n_chunks)
        return {
            name: np.concatenate([np.array(each[name], np.float64) for each in records])
            for name in self.columns
        }

    def rows(self, method: Method | None, n_chunks: int) -> RowsRead:
        """Returns the rows that the steps of the first ``n_chunks`` chunks attended to."""
        records = self.of(method, n_chunks)
        names = "rows_attended", "head_steps"
        return RowsRead(*(sum(each[name] for each in records) for name in names))


class DivergenceRecords(PerplexityRecords):
    """PerplexityRecords that also have scores of each token against a base."""

    command = "eval kld"
    columns = ("nll", "nll_base", "kld", "same_top")

    def divergence(self, method: Method | None, n_chunks: int) -> Divergence:
        return Divergence(**self.scores(method, n_chunks))
