"""What is known about the computer."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from hasten.machine import host


def test_cores_and_memory_are_those_that_this_process_may_use() -> None:
    assert 1 <= host.usable_cores() <= (os.cpu_count() or 1)
    assert host.cpu_name()
    total, free, now = host.total_memory_bytes(), host.available_memory_bytes(), host.process_memory_bytes()
    if sys.platform == "linux":
        assert 0 < (free or 0) <= (total or 0)
        assert 0 < (now or 0) <= (host.process_memory_bytes(peak=True) or 0)


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CONTROL_GROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert host.usable_cores() == 1
    assert host.available_memory_bytes() == 3000


def test_prompts_and_notebooks_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not host.is_interactive()
    shell = types.SimpleNamespace(config={})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[misc]
    assert host.is_interactive()
    assert not host.in_notebook()
    shell.config["IPKernelApp"] = {}
    assert host.in_notebook()
