"""Which chips of a TPU a run takes, and how gradients are averaged there; torch_xla is replaced."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import nn

from hasten.strategies import XLAStrategy
from hasten_xla import devices


@pytest.fixture
def eight_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "tpu_chips", lambda: 8)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")


@pytest.mark.usefixtures("eight_chips")
def test_one_chip_or_all_of_them() -> None:
    kind = devices.XLAAccelerator
    assert (kind.parse_devices(1), kind.parse_devices([7])) == (1, [7])
    assert kind.parse_devices(8) == kind.parse_devices(-1) == kind.auto_device_count() == 8
    assert kind.get_parallel_devices([7]) == [torch.device("xla", 7)]
    for given in (3, [0, 1], [8], 0):
        with refused(ValueError, "devices", fix="devices="):
            kind.parse_devices(given)


def test_a_machine_without_tpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "tpu_chips", lambda: 0)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert devices.XLAAccelerator.auto_device_count() == 0


@pytest.mark.usefixtures("eight_chips")
def test_each_backward_averages_what_it_reached_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, float]] = []

    def all_reduce(operation: str, gradients: list[Any], *, scale: float) -> None:
        calls.append((len(gradients), scale))

    model = SimpleNamespace(all_reduce=all_reduce, REDUCE_SUM="sum")
    for name in ("torch_xla", "torch_xla.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torch_xla.core"], "xla_model", model, raising=False)
    strategy = XLAStrategy(sync_module_states=False)
    strategy.parallel_devices = [torch.device("xla", index) for index in range(8)]
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert strategy.wrap(net) is net
    with strategy.no_sync(net):
        net(torch.ones(1, 2)).sum().backward()
    assert not calls
    net(torch.ones(1, 2)).sum().backward()
    net[0](torch.ones(1, 2)).sum().backward()
    strategy.teardown()
    net(torch.ones(1, 2)).sum().backward()
    assert calls == [(4, 1 / 8), (2, 1 / 8)]
