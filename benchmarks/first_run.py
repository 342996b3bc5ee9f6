"""A newcomer's first five minutes, timed: install, the program of the README, a plot, a report, in a new environment.

Run: python benchmarks/first_run.py [--wheel dist/hasten-....whl] [--python python3.12] [--json FILE]

Without --wheel it builds one. --installed uses the hasten of this Python instead, and installs nothing: the release
workflow does that. A stage that fails, or in which hasten prints a warning, ends it with code 1.

It prints the seconds that passed, which include downloads and the other programs of the machine, and those of the
processor. More than five minutes of the latter end it with code 1, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 300
EXTRAS = "plots,report"
# What the program of the README imports besides torch and hasten.
PROGRAM_NEEDS = "scikit-learn"
_WARNING = re.compile(r"\b\w*Warning\b|^WARNING|\bdeprecated\b", re.MULTILINE)

# Advice that depends on how busy the machine is: it is shown, and does not count.
_ADVICE = re.compile(r"^.*UserWarning: Training waits for its data:.*$", re.MULTILINE)


class Stages:
    """Runs commands one after the other, and keeps how long each took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        # As on a new machine: no settings for tests, and warnings are shown.
        kept = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "PIP_INDEX_URL")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}

    def run(self, stage: str, *command: str | Path, quiet: bool = True) -> None:
        words = [str(word) for word in command]
        began, used = time.perf_counter(), _cpu_seconds()
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        self.seconds[stage], self.cpu_seconds[stage] = time.perf_counter() - began, _cpu_seconds() - used
        printed = done.stdout + done.stderr
        for line in filter(_ADVICE.search, printed.splitlines()):
            print(f"{stage}: {line}", flush=True)
        printed = _ADVICE.sub("", printed)
        self.show(stage, self.seconds[stage], self.cpu_seconds[stage])
        if done.returncode:
            raise SystemExit(f"{stage} ended with code {done.returncode}:\n{printed}")
        if quiet and _WARNING.search(printed):
            raise SystemExit(f"{stage} printed a warning:\n{printed}")

    @staticmethod
    def show(stage: str, seconds: float, cpu_seconds: float) -> None:
        print(f"{stage:<16}{seconds:7.1f} s {cpu_seconds:7.1f} s of the processor", flush=True)


def _cpu_seconds() -> float:
    """Return the processor's seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def program() -> str:
    """Return the first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise SystemExit("README.md has no Python block.")
    return found[1]


def main() -> int:
    """Run all stages; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="the wheel to install; default: build it")
    parser.add_argument("--python", default=sys.executable, help="the Python of the new environment")
    parser.add_argument("--installed", action="store_true", help="use the packages of this Python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-first-run-") as name:
        stages = Stages(Path(name))
        if options.installed:
            python = Path(sys.executable)
        else:
            wheel = options.wheel or _built(Path(name))
            stages.run("environment", options.python, "-m", "venv", "venv")
            python = Path(name, "venv", "bin", "python")
            install = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
            # pip warns about its own settings.
            stages.run("install", *install, f"{wheel.resolve()}[{EXTRAS}]", PROGRAM_NEEDS, quiet=False)
        Path(name, "train.py").write_text(program(), encoding="utf-8")
        command = python.parent / "hasten"
        stages.run("train", python, "train.py")
        stages.run("hasten plot", command, "plot", "lightning_logs")
        stages.run("hasten report", command, "report", "lightning_logs")
    total, cpu_total = sum(stages.seconds.values()), sum(stages.cpu_seconds.values())
    stages.show("total", total, cpu_total)
    if options.json is not None:
        figures = {
            stage: {"seconds": round(seconds, 1), "cpu_seconds": round(stages.cpu_seconds[stage], 1)}
            for stage, seconds in stages.seconds.items()
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(cpu_total > LIMIT_SECONDS)


def _built(folder: Path) -> Path:
    """Return a wheel of this clone; building it is the work of a release, not of a newcomer."""
    build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder / "dist"))
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next((folder / "dist").glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main())
