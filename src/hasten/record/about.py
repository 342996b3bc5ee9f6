"""Facts about a run for its record: program, versions, machine, and the state of the program's git repository."""

from __future__ import annotations

import functools
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hasten._lib import VERSION
from hasten.machine.host import cpu_name, process_age_seconds, total_memory_bytes, usable_cores

# Results of Trainer(speed=...), by Trainer: an ``Advice``, which the record of its run repeats.
verdicts: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# Packages whose version may explain a result; each only where the program has imported it.
_PACKAGES = (
    "torchmetrics", "torchvision", "torchaudio", "transformers", "datasets", "accelerate", "peft", "timm", "lightning",
    "deepspeed", "numpy",
)  # fmt: skip
_SECRET = re.compile(r"(api.?key|token|secret|password|passwd|credential)", re.IGNORECASE)
# How long git may take, in the background, to say whether files were changed; then the record is written without it.
_GIT_SECONDS = 5.0


def versions() -> dict[str, str]:
    """Return the versions of hasten, torch, Python, and of what the program has imported so far.

    Example::

        >>> sorted(versions())[:3] == ["hasten", "python", "torch"] or "torch" in versions()
        True

    """
    found = {"hasten": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


@functools.cache
def host() -> dict[str, Any]:
    """Return what does not change while a program runs: name, system, processor, cores and memory in bytes."""
    return {
        "host": platform.node(),
        "system": platform.platform(terse=True),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": total_memory_bytes(),
    }


def device_names(devices: Iterable[torch.device]) -> list[str]:
    """Return what each device is called: the product's name for a GPU."""
    return [torch.cuda.get_device_name(one) if one.type == "cuda" else one.type for one in devices]


@functools.cache
def command() -> list[str]:
    """Return the command of this program; what follows an option for a key or a password is left out."""
    # A process that another one has started (strategy="ddp_spawn") has the words of that one in sys.argv.
    own = [sys.executable, *sys.argv] if multiprocessing.parent_process() is not None else sys.orig_argv
    return hidden([str(word) for word in own])


def hidden(words: Sequence[str]) -> list[str]:
    """Return ``words`` with the values of secrets replaced.

    Example::

        >>> hidden(["train.py", "--api-key=abc", "--token", "abc", "--lr", "0.1"])
        ['train.py', '--api-key=***', '--token', '***', '--lr', '0.1']

    """
    shown: list[str] = []
    hides_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = word.startswith("-") and _SECRET.search(name) is not None
        if hides_next and not word.startswith("-"):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if is_secret and equals else word)
        hides_next = is_secret and not equals
    return shown


@functools.cache
def program() -> str | None:
    """Return the path of the program; None at a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if path is None else os.path.abspath(path)


@functools.cache
def process_began() -> float | None:
    """Return when this process was started, in seconds since 1970; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return time.time() - process_age_seconds()
    return None


@functools.cache
def _in_repository(folder: str) -> bool:
    return any((one / ".git").exists() for one in (Path(folder), *Path(folder).parents))


class GitState:
    """The commit, branch and changes of the repository that a folder is in.

    git starts at once and works in the background: ``read`` is called later, and waits for it a few seconds at most.

    Example::

        >>> state = GitState("/").read()
        >>> state is None or sorted(state) == ["branch", "commit", "dirty"]
        True

    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._found: dict[str, Any] | None = None
        self._until = time.monotonic() + _GIT_SECONDS
        self._folder = os.fspath(folder)
        if not _in_repository(self._folder):
            return
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        with suppress(OSError):
            self._process = subprocess.Popen(
                ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, errors="replace",
            )  # fmt: skip

    def ready(self) -> bool:
        """Return whether ``read`` does not wait."""
        return self._process is None or self._process.poll() is not None or time.monotonic() >= self._until

    def read(self) -> dict[str, Any] | None:
        """Return commit, branch (None if detached) and whether tracked files were changed; None outside of git."""
        process, self._process = self._process, None
        if process is None:
            return self._found
        try:
            output, _ = process.communicate(timeout=max(0.1, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        if process.returncode != 0:
            return None
        lines = output.splitlines()
        facts = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# ") and " " in line[2:])
        commit, branch = facts.get("branch.oid"), facts.get("branch.head")
        self._found = {
            "commit": None if commit == "(initial)" else commit,
            "branch": None if branch == "(detached)" else branch,
            "dirty": any(not line.startswith("# ") for line in lines),
        }
        return self._found
