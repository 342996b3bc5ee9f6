"""What differs on Windows and macOS, as far as Linux can show it."""

from __future__ import annotations

import ast
import errno
import io
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten import strategies
from hasten._lib import files, torch_private
from hasten.commands import main
from hasten.data import preload
from hasten.loggers import CSVLogger, csv
from hasten.record import file as record
from hasten_tools.speed.trial_processes import TrialStarter
from tests.models import Classifier, loader, quiet
from tests.refusals import refused
from tests.rules.trees import nodes, parsed

SOURCES = Path(__file__).resolve().parents[2] / "src"
# Windows has none of them; https://docs.python.org/3/library/unix.html
UNIX_ALONE = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
BINARY = 1 << 30


def test_modules_that_windows_lacks_are_imported_where_they_are_used_and_text_is_utf_8() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {what}"
        for path in SOURCES.rglob("*.py")
        for line, what in _unix_alone(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def _unix_alone(source: str) -> Iterator[tuple[int, str]]:
    for node in parsed(source).body:
        if isinstance(node, ast.Import) and (names := UNIX_ALONE & {each.name for each in node.names}):
            yield node.lineno, f"import {', '.join(names)}"
    for node in nodes(source):
        match node:
            case ast.Call(ast.Name("open"), args):
                mode = args[1] if len(args) > 1 else ast.Constant("r")
                is_text = isinstance(mode, ast.Constant) and "b" not in str(mode.value)
            case ast.Call(ast.Attribute(_, "read_text"), args):
                is_text = not args
            case ast.Call(ast.Attribute(_, "write_text"), args):
                is_text = len(args) < 2
            case _:
                continue
        if is_text and "encoding" not in {each.arg for each in node.keywords}:
            yield node.lineno, "a text without encoding="


class Windows(types.ModuleType):
    """The module ``os`` of Windows: open files cannot be renamed, and newlines become two bytes."""

    name, O_BINARY = "nt", BINARY

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        assert flags & BINARY or not flags & (os.O_WRONLY | os.O_RDWR), f"{path} is opened as text"
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "a folder")
        return os.open(path, flags & ~BINARY, mode)

    def replace(self, old: str, new: str) -> None:
        for number in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{number}") in (os.path.realpath(old), os.path.realpath(new)):
                raise PermissionError(errno.EACCES, "another process uses the file", old)
        os.replace(old, new)


def test_a_fit_writes_its_files_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, csv, record):
        monkeypatch.setattr(module, "os", Windows("os"))
    arguments: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, "log_every_n_steps": 1}
    quiet(logger=CSVLogger(tmp_path), **arguments).fit(Classifier(), loader(), loader())
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"metrics.csv", "hparams.yaml", "run.jsonl"} < written
    assert [name for name in written if name.endswith(".ckpt")]


def test_a_start_method_that_the_system_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies.parallel, "START_METHODS", ("popen", "spawn"))
    with refused(ValueError, "start_method", says=("fork", "'popen', 'spawn'")):
        quiet(strategy="ddp_fork", devices=2)


def test_what_needs_linux_or_unix_sockets_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with refused(RuntimeError, says="preload()", fix="Trainer(resident=True)"):
        preload(loader().dataset)
    monkeypatch.delattr(socket, "AF_UNIX")
    with refused(OSError, says="Unix sockets"), TrialStarter():
        pass


def test_a_program_that_eject_prints_is_utf_8_as_python_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="cp1252"))
    assert main(["eject", str(tmp_path / "train.py")]) == 0
    sys.stdout.flush()
    assert "a step \u2192 a loss" in printed.getvalue().decode()


PROGRAM = """
import torch, hasten as L

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        '''a step \u2192 a loss'''
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

L.Trainer(max_epochs=1, logger=False).fit(Model(), torch.utils.data.DataLoader(torch.zeros(4, 2)))
"""


def test_a_torch_without_onednn_multiplies_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Apple's processors."""
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not torch_private.cpu_multiplies_bfloat16()
