"""Run Python programs in processes of their own, with this checkout on their path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    *words: str | Path,
    cwd: Path | None = None,
    timeout: float = 120,
    start: Sequence[str] = (sys.executable,),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS...`` with one thread and return its exit code and output.

    Args:
        words: the arguments, for example a path, or "-c" and a program.
        cwd: the folder to run in.
        timeout: seconds after which the test fails.
        start: what starts Python, for example torchrun.
        environment: variables beside those of this process.

    """
    return subprocess.run(
        [*start, *map(str, words)],
        cwd=cwd,
        env=environment_of_python() | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_python(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start ``python WORDS...`` with one thread; its output and errors come together in ``stdout``."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=environment_of_python() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment_of_python() -> dict[str, str]:
    """Return this process's variables with this checkout on the path, one thread, and no ranks."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "MASTER_PORT")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
