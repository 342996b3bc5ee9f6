"""Run Python programs in processes of their own, with this checkout on their path."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]


def run_python(
    *words: str | Path,
    cwd: Path | None = None,
    timeout: float = 600,
    start: Sequence[str] = (sys.executable,),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS...`` with one thread and return its exit code and output.

    Args:
        words: the arguments, for example a path, or "-c" and a program.
        cwd: the folder to run in.
        timeout: seconds after which the test fails: far more than a program takes, on a loaded machine too.
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


def start_python(*words: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """Start ``python WORDS...`` with one thread; its output and errors come together in ``stdout``."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment_of_python() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment_of_python() -> dict[str, str]:
    """Return this process's variables with this checkout on the path, one thread, and no ranks.

    Nor ``PYTHONUNBUFFERED``, with which the words that two processes print may land in one another's lines.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    dropped = ("LOCAL_RANK", "MASTER_PORT", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def load_script(name: str) -> Any:
    """Import ``scripts/NAME.py``, which is in no package."""
    return _load(ROOT / "scripts" / f"{name}.py", f"scripts_{name}")


def call_in_file(path: str, name: str, *args: object, **kwargs: object) -> Any:
    """Import the file ``path``, whose functions cannot be pickled, and return what its function ``name`` returns."""
    module = _load(Path(path), f"hasten_file_{zlib.crc32(path.encode())}")
    return getattr(module, name)(*args, **kwargs)


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Where dataclasses look for it.
    spec.loader.exec_module(module)
    return module
