"""A run on several machines says whom it waits for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hasten.machine.cluster import find_free_port

ROOT = Path(__file__).parents[2]

PROGRAM = """
from hasten.resolve import runtime

if __name__ == "__main__":
    run = runtime(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp")
    print(run.launch(lambda: run.gather_objects(run.global_rank)), flush=True)
"""


def start(program: Path, port: int, node_rank: int) -> subprocess.Popen[str]:
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node_rank)}
    environment = {**os.environ, **places, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(program), "--some", "option"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_machine_says_what_it_waits_for_and_what_to_start_there(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = find_free_port()
    second = start(program, port, 1)
    try:
        assert second.stderr is not None
        said = second.stderr.readline() + second.stderr.readline()
        assert f"NODE_RANK=1 waits for the first of num_nodes=2 machines at 127.0.0.1:{port}" in said
        assert re.search(
            rf"Start there: MASTER_ADDR=\S+ MASTER_PORT={port} NODE_RANK=0 .*program.py --some option", said
        )
        first = start(program, port, 0)
        assert [process.communicate(timeout=60)[0] for process in (first, second)] == ["[0, 1]\n"] * 2
    finally:
        second.kill()


def test_the_first_machine_counts_who_has_come(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = find_free_port()
    first = start(program, port, 0)
    try:
        assert first.stderr is not None
        said = first.stderr.readline() + first.stderr.readline()
        assert (
            f"NODE_RANK=0 waits at 127.0.0.1:{port} for 1 of num_nodes=2 machines: 1 of 2 processes" in said
        )
        assert f"MASTER_PORT={port} NODE_RANK=1 " in said
    finally:
        first.kill()
        first.wait()
