"""``run --jsonl --ray`` on a cluster of two nodes, one of which is lost in the middle."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from sparsekv_cli.cli import main

N_LINES = 120


@pytest.mark.slow
def test_a_node_is_lost(tiny_model, tmp_path):
    from ray.cluster_utils import Cluster

    model, prompts, one, many = str(tiny_model()), *(tmp_path / name for name in "pom")
    lines = [{"prompt": f"number {i} " * 8, "n_predict": 30 + i % 7} for i in range(N_LINES)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    command = ["run", "--jsonl", "-m", model, "-f", str(prompts), "-t", "1", "--temp", "0", "--raw"]
    with pytest.raises(SystemExit) as left:
        main([*command, "--output", str(one)])
    assert not left.value.code

    def lines_of(path: Path) -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        node = cluster.add_node(**small)
        running = subprocess.Popen(
            [sys.executable, "-m", "sparsekv_cli", *command, "--output", str(many)]
            + ["--ray", cluster.address],
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: lines_of(many) >= 10 or running.poll() is not None)
        assert 10 <= lines_of(many) < N_LINES
        cluster.remove_node(node, allow_graceful=False)
        _, said = running.communicate(timeout=240)
    finally:
        cluster.shutdown()
    assert running.returncode == 0 and f"{N_LINES} lines in" in said, said
    assert many.read_bytes() == one.read_bytes()
