"""Sweeps: methods once with each of several values of an option."""

import pytest

from sparsekv_cli.evaluation.compare import parse_methods
from sparsekv_cli.evaluation.sweep import parse_sweep


def test_sweeps():
    sweeps = [parse_sweep("budget=1%,5%"), parse_sweep("recent = 8;16")]
    methods = parse_methods("topk:budget=7,lfps:preset=paper,quest", {"budget": "9"}, sweeps)
    assert list(methods) == [
        "full",
        "topk:budget=7;recent=8",
        "topk:budget=7;recent=16",
        *(f"lfps:preset=paper;budget={b};recent={r}" for b in ("1%", "5%") for r in (8, 16)),
        *(f"quest:budget={b}" for b in ("1%", "5%")),
    ]
    assert methods["quest:budget=5%"].options()["budget"] == "5%"
    assert parse_sweep("dense_layers=0,1;none") == ("dense_layers", ["0,1", "none"])
    for wrong in ("budget", "=1", "budget=1,", "budget=1,1"):
        with pytest.raises(ValueError):
            parse_sweep(wrong)
    for option in ("bugdet", "recent"):
        with pytest.raises(ValueError, match=f"none of the methods takes an option '{option}'"):
            parse_methods("quest", None, [(option, ["1"])])
