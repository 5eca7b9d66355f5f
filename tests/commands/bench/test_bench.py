"""``bench``: which tests run, what is timed, and llama-bench's shape of the output."""

import csv
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparsekv_cli.commands.bench import bench
from sparsekv_cli.commands.bench.report import BenchModel, BenchResult, BenchTest
from sparsekv_cli.prefix.prefixes import STEP
from sparsekv_cli.sequence import N_REFRESH

LLAMA_BENCH_TEXT = """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size
model_n_params n_batch n_ubatch n_threads type_k type_v n_gpu_layers n_prompt n_gen n_depth
test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts
"""
LLAMA_BENCH_ORDER = LLAMA_BENCH_TEXT.split()
OURS = ["method", "method_options", "budget", "ledger"]
ROOFLINE = ["roofline_bytes", "bandwidth", "bound_ts", "fraction"]
OURS += [*ROOFLINE, "n_seqs", "sparse_from", "prefill_attention", "prefill_budget"]
BANDWIDTH = 6.2e6  # bytes a second; the fake model has 3000 bytes and reads 100 of KV a token


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, fake: Any) -> list[Any]:
    """The fake models that bench opens; each knows its method and its configuration."""
    opened: list[Any] = []
    tensor = SimpleNamespace(n_elements=1000, n_bytes=500, type=SimpleNamespace(name="Q4_1"))

    def load(path: Path, method: Any, config: Any) -> Any:
        model = type(fake)(n_ctx=config.ctx_size)
        model.gguf.tensors = {"a": tensor}
        model.metadata["general.size_label"] = "1K"
        model.method, model.config = method, config
        model.counts["bytes_read"] = 0
        decode = model.decode

        def decode_reading(token: int) -> None:
            decode(token)
            model.counts["bytes_read"] += 100

        model.decode = decode_reading
        opened.append(model)
        return model

    monkeypatch.setattr(bench, "load_model", load)
    monkeypatch.setattr(bench, "find_model", lambda name: Path("fake.gguf"))
    monkeypatch.setattr(bench, "measure_bandwidth", lambda n_threads: BANDWIDTH)
    return opened


def test_json_fields_and_order(models, invoke):
    arguments = ["-p", "8", "-n", "4", "-r", "2", "--method", "topk", "--budget", "5%"]
    result = invoke("bench", *arguments, "-O", "json")
    assert result.code == 0, result.err
    rows = json.loads(result.out)
    assert [list(row) for row in rows] == [LLAMA_BENCH_ORDER + OURS] * 2
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(8, 0), (0, 4)]
    prompt, gen = rows
    assert gen["model_type"] == "llama 1K Q4_1"
    assert (gen["model_size"], gen["model_n_params"], gen["n_threads"]) == (500, 1000, 2)
    assert len(gen["samples_ns"]) == len(gen["samples_ts"]) == 2
    assert gen["samples_ts"][0] == pytest.approx(4e9 / gen["samples_ns"][0])
    assert gen["avg_ts"] == pytest.approx(sum(gen["samples_ts"]) / 2)
    assert gen["method"] == "topk" and gen["budget"] == "5%"
    assert gen["method_options"]["recent"] == 16
    # Only the timed steps are counted: 4 rows attended a repetition, none in the prefill.
    assert gen["ledger"]["rows_attended"] == 8 and gen["ledger"]["bytes_host"] == 10
    assert prompt["ledger"]["rows_attended"] == 0


def test_an_old_name_of_an_option_is_taken_with_a_line(models, invoke):
    arguments = ["-p", "8", "-n", "0", "-r", "1", "--method", "lfps,topk", "-O", "json"]
    result = invoke("bench", *arguments, "-o", "dense_rows=70")
    assert result.code == 0, result.err
    assert "warning: option dense_rows of lfps is now called pages_from" in result.err.splitlines()
    lfps, topk = json.loads(result.out)
    assert lfps["method_options"]["pages_from"] == 70
    assert "pages_from" not in topk["method_options"]


def test_order_of_tests_and_labels(models, invoke):
    arguments = ["-p", "8,16", "-n", "4", "-pg", "8,4", "-d", "0,32", "--method", "full,topk"]
    result = invoke("bench", *arguments, "-r", "1")
    table = [line for line in result.out.splitlines() if line.startswith("|")]
    header, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert header[-3:] == ["method", "test", "t/s"] and set("".join(rule)) == {"-", ":"}
    labels = ["pp8", "pp16", "tg4", "pp8+tg4"]
    labels += [f"{label} @ d32" for label in labels]
    assert [row[-2] for row in rows] == labels * 2
    assert [row[-3] for row in rows] == ["full"] * 8 + ["topk 5%"] * 8
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[-1]) for row in rows)
    assert len({len(line) for line in table}) == 1
    assert len(models) == 2
    assert models[0].n_ctx == 32 + 16 + 1


@pytest.mark.parametrize("n_last", [1, 3])
@pytest.mark.parametrize("can_rewind_within", [True, False])
@pytest.mark.parametrize(
    ("test", "before"),
    [
        (BenchTest(8, 0, 0), 0), (BenchTest(0, 4, 0), 1), (BenchTest(8, 0, 200), 200),
        (BenchTest(0, 4, 200), 200), (BenchTest(8, 4, 200), 200), (BenchTest(0, 4, 1), 1),
    ],
)  # fmt: skip
def test_depth_of_what_is_timed(test, before, can_rewind_within, n_last, fake):
    fake.n_ctx = bench.context_size([test])
    fake.can_rewind_within = can_rewind_within
    ids = list(range(fake.n_ctx))
    for _ in range(3):
        n_before = len(fake.decoded)
        for token in bench.prefill_to_depth(fake, ids, test, n_last):
            fake.decode(token)
        assert len(fake.decoded) - n_before == (n_last if test == BenchTest(0, 4, 200) else 0)
        assert fake.tokens == ids[:before]
        n_prefilled, n_decoded = len(fake.prefilled), len(fake.decoded)
        bench.time_once(fake, [fake], [ids], test)
        assert fake.prefilled[n_prefilled:] == ([test.n_prompt] if test.n_prompt else [])
        assert len(fake.decoded) - n_decoded == test.n_gen
    if test.n_depth == 200 and can_rewind_within:
        assert all(n < N_REFRESH + STEP for n in fake.prefilled[1:])


def test_a_run_ahead_of_each_test_is_not_timed(models, invoke, monkeypatch):
    arguments = ["bench", "-p", "8", "-n", "20", "-d", "0,40", "-r", "2", "-O", "json"]
    timed: list[tuple[int, int, int]] = []
    real = bench.time_once

    def time_once(model: Any, sequences: Any, ids: Any, test: BenchTest) -> int:
        timed.append((test.n_prompt, test.n_gen, len(sequences[0].tokens)))
        return real(model, sequences, ids, test)

    monkeypatch.setattr(bench, "time_once", time_once)
    warm = json.loads(invoke(*arguments).out)
    kinds = {(8, 0): (0, 40), (0, 20): (1, 40)}  # and the tokens in the cache ahead of each
    assert timed == [
        run
        for at in (0, 1)
        for (prompt, gen), depths in kinds.items()
        for run in [(prompt, min(gen, 3), depths[at]), *2 * [(prompt, gen, depths[at])]]
    ]
    n_warm = len(timed)
    cold = json.loads(invoke(*arguments, "--no-warmup").out)
    assert len(timed) - n_warm == 8
    for rows in (warm, cold):
        assert [len(row["samples_ns"]) for row in rows] == [2] * 4
        assert [row["ledger"]["rows_attended"] for row in rows] == [0, 40, 0, 40]


def test_a_gpu_is_named_and_has_no_bounds_of_the_host(models, invoke, monkeypatch):
    load = bench.load_model

    def load_on_gpu(*given):
        model = load(*given)
        model.engine.gpu = "NVIDIA H200"
        return model

    monkeypatch.setattr(bench, "load_model", load_on_gpu)
    row = json.loads(invoke("bench", "-p", "0", "-n", "4", "-r", "1", "-O", "json").out)[0]
    assert row["gpu_info"] == "NVIDIA H200" and row["backends"] == "CUDA"
    assert row["n_gpu_layers"] == -1 and row["bandwidth"] is row["fraction"] is None
    assert "| CUDA" in invoke("bench", "-p", "0", "-n", "4", "-r", "1").out


def test_options_go_to_the_methods_that_have_them(models, invoke):
    arguments = ["bench", "-p", "4", "-n", "0", "-r", "1", "--method", "full,topk,streaming"]
    result = invoke(*arguments, "-o", "sinks=2", "--budget", "7", "--dense-layers", "none")
    assert result.code == 0, result.err
    full, topk, streaming = (sequence.method.options() for sequence in models)
    assert "budget" not in full and full["dense_layers"] == ()
    assert topk["budget"] == streaming["budget"] == "7"
    assert streaming["sinks"] == 2
    result = invoke(*arguments, "-o", "nonsense=2")
    assert result.code == 2 and "nonsense" in result.err and result.out == ""
    result = invoke("bench", "--method", "full", "--budget", "5%")
    assert result.code == 2 and "budget" in result.err
    result = invoke("bench", "--method", "full,nonsense")
    assert result.code == 2 and "streaming" in result.err
    result = invoke("bench", "--method", "full,auto", "--cache-type-k", "q8_0")
    assert result.code == 2 and "leave cache_type_k out" in result.err
    result = invoke("bench", "-p", "2147483647")
    assert result.code == 2 and "a context of 2147483648 tokens" in result.err


def test_memory_is_not_added_up_and_counts_are():
    before = {"bytes_host": 3, "bytes_host_window": 2, "bytes_read": 5}
    after = {"bytes_host": 4, "bytes_host_window": 2, "bytes_read": 9}
    total = bench.add_ledger(bench.add_ledger({}, before, after), before, after)
    assert total == {"bytes_host": 4, "bytes_host_window": 2, "bytes_read": 8}


def test_cache_types(models, invoke):
    arguments = ["bench", "-p", "4", "-n", "0", "-r", "1", "--method", "full,topk"]
    result = invoke(*arguments, "-ctk", "q8_0", "--cache-type-v", "f16", "-O", "json")
    rows = json.loads(result.out)
    assert [(row["type_k"], row["type_v"]) for row in rows] == 2 * [("q8_0", "f16")]
    assert [s.method.options()["cache_type_k"] for s in models] == ["q8_0", "q8_0"]
    table = invoke(*arguments, "-ctk", "q8_0").out
    assert " type_k " in table and " q8_0 " in table and "type_v" not in table
    assert "type_k" not in invoke(*arguments).out


def test_roofline_of_tests_that_decode(models, invoke):
    arguments = ["bench", "-p", "8", "-n", "4", "-pg", "8,4", "-d", "0,32", "-r", "3"]
    result = invoke(*arguments, "--method", "full,topk")
    lines = [line for line in result.out.splitlines() if line and not line.startswith("|")]
    what = "0.0 MB weights + 0.0 MB KV a token, 0.0 GB/s measured, bound 2000 t/s, reached"
    assert [line.rpartition(" ")[0] for line in lines] == [
        f"roofline {test} {method}: {what}"
        for method in ("full", "topk")
        for test in ("tg4", "tg4 @ d32")
    ]
    prompt, gen, both = json.loads(invoke(*arguments[:7], "-r", "3", "-O", "json").out)
    for row in (prompt, both):
        assert [row[name] for name in ROOFLINE] == [None] * 4
    assert (gen["roofline_bytes"], gen["bandwidth"], gen["bound_ts"]) == (3100, BANDWIDTH, 2000)
    assert gen["fraction"] == pytest.approx(gen["avg_ts"] / 2000)


def test_csv_and_json_lines(models, invoke):
    arguments = ["bench", "-p", "4", "-n", "4", "-r", "1", "--method", "topk"]
    header, *rows = list(csv.reader(io.StringIO(invoke(*arguments, "-O", "csv").out)))
    assert header == [n for n in LLAMA_BENCH_ORDER if not n.startswith("samples")] + OURS
    assert len(rows) == 2 and all(len(row) == len(header) for row in rows)
    assert json.loads(rows[1][header.index("ledger")])["rows_attended"] == 4
    lines = invoke(*arguments, "-O", "jsonl").out.splitlines()
    assert [json.loads(line)["n_gen"] for line in lines] == [0, 4]


def test_json_is_complete_after_an_error(models, invoke, monkeypatch):
    real = bench.time_once

    def fail_at_decode(model: Any, sequences: Any, ids: Any, test: BenchTest) -> int:
        if test.n_gen:
            raise MemoryError
        return real(model, sequences, ids, test)

    monkeypatch.setattr(bench, "time_once", fail_at_decode)
    result = invoke("bench", "-p", "4", "-n", "4", "-O", "json")
    assert result.code == 1 and "out of memory" in result.err
    assert len(json.loads(result.out)) == 1


def test_seed_makes_the_tokens(models, invoke):
    for seed in ([], [], ["--seed", "7"]):
        invoke("bench", "-p", "0", "-n", "32", "-r", "1", *seed)
    first, second, third = (sequence.decoded for sequence in models)
    assert first == second != third
    assert all(0 <= token < 258 for token in first)


def test_mean_of_rates():
    model = BenchModel(Path("x.gguf"), "llama 2B F16", 3 << 30, 2_500_000_000, 4, 512)
    result = BenchResult(model, BenchTest(0, 10, 0), "full", {}, None, [10**9, 5 * 10**8], {})
    fields = result.fields()
    assert fields["avg_ts"] == pytest.approx(15.0) and fields["avg_ns"] == 750_000_000
    assert fields["stddev_ts"] == pytest.approx(7.0710678)
    columns = result.columns()
    assert columns["t/s"] == "15.00 ± 7.07"
    assert (columns["size"], columns["params"]) == ("3.00 GiB", "2.50 B")


def test_records_name_the_way_of_reading(models, invoke):
    """So figures of sparse and of dense reading are never taken for the same."""
    given = ["bench", "-p", "8", "-n", "0", "-r", "1", "--device", "cpu"]
    for options, named in (
        ([], ("dense", None)),
        (["--prefill-attention", "sparse"], ("sparse", 8192)),
        (["--prefill-attention", "auto", "--prefill-budget", "4096"], ("auto", 4096)),
    ):
        (row,) = json.loads(invoke(*given, *options, "-O", "json").out)
        assert (row["prefill_attention"], row["prefill_budget"]) == named
        shown = invoke(*given, *options).out
        assert (f"{named[0]} {named[1]}" in shown) == (named[1] is not None)


def test_order_of_batches_and_their_rates(models, invoke):
    arguments = ["-p", "8", "-n", "4", "-pg", "8,4", "-b", "1,3", "-d", "32"]
    tests = []

    def run_tests(model: Any, given: Any, *_: Any, **__: Any) -> Any:
        tests.extend(given)
        return ((test, [10**9], {}) for test in given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "run_tests", run_tests)
        rows = json.loads(invoke("bench", *arguments, "-O", "json").out)
    labels = ["pp8", "tg4", "tg4 b3", "pp8+tg4", "pp8+tg4 b3"]
    assert [test.label for test in tests] == [f"{label} @ d32" for label in labels]
    assert [row["n_seqs"] for row in rows] == [1, 1, 3, 1, 3]
    assert [row["avg_ts"] for row in rows] == [8, 4, 12, 12, 36]
    # A token's share of 3000 bytes of weights; nothing was counted as read of K and V.
    assert [row["roofline_bytes"] for row in rows] == [None, 3000, 1000, None, None]


@pytest.mark.parametrize("value", ["0", "1,0", "x", "-1", ""])
def test_a_batch_has_sequences(value, models, invoke):
    result = invoke("bench", f"--batch={value}")
    assert result.code == 2 and "batch" in result.err and not models
