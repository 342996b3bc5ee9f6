"""Batches come to a CUDA device beside the steps before; elsewhere nothing is added."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import hasten as L
from hasten.data.loaders import SideStream
from tests.models import Classifier, loader, quiet, same_weights


class Pair(NamedTuple):
    x: Tensor
    name: str


class SelfMoving:
    """An object of the user's that moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> SelfMoving:
        return SelfMoving(self.x.to(device))


def test_on_the_cpu_batches_are_the_loaders_own() -> None:
    batches = [(torch.randn(4, 8), torch.zeros(4, dtype=torch.long)) for _ in range(3)]
    seen: list[int] = []

    class Noting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(id(batch[0]))
            return super().training_step(batch, batch_idx)

    quiet().fit(Noting(), batches)
    assert seen == [id(batch[0]) for batch in batches]


@pytest.mark.gpu
def test_batch_arrives_as_it_is() -> None:
    device = torch.device("cuda", 0)
    to_device = SideStream(device)
    there = torch.ones(2, device=device)
    batch = {"pair": Pair(torch.arange(3.0).pin_memory(), "a"), "own": SelfMoving(torch.ones(1)), "there": there}
    moved = to_device(batch)
    assert type(moved["pair"]) is Pair
    assert moved["pair"].name == "a"
    assert moved["pair"].x.tolist() == [0.0, 1.0, 2.0]
    assert moved["pair"].x.is_cuda
    assert moved["own"].x.is_cuda
    assert moved["there"] is there
    assert not batch["pair"].x.is_cuda


@pytest.mark.gpu
def test_copy_does_not_wait_for_the_steps_before() -> None:
    device = torch.device("cuda", 0)
    to_device = SideStream(device)
    work = torch.randn(4096, 4096, device=device)
    host = torch.ones(1024, 1024).pin_memory()
    to_device(host)
    torch.cuda.synchronize()
    for _ in range(50):
        work = torch.tanh(work @ work)
    computed = torch.cuda.Event()
    computed.record()
    to_device(host)
    to_device._stream.synchronize()
    assert not computed.query()


@pytest.mark.gpu
def test_values_are_right_though_memory_is_used_again() -> None:
    device = torch.device("cuda", 0)
    to_device = SideStream(device)
    sums = []
    for number in range(200):
        batch = to_device(torch.full((256, 256), float(number)).pin_memory())
        for _ in range(5):
            batch = batch @ torch.eye(256, device=device)
        sums.append(batch.mean())
        del batch
    assert torch.stack(sums).tolist() == [float(number) for number in range(200)]


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [False, True, "device"])
def test_training_is_that_of_batches_moved_by_hand(resident: Any) -> None:
    modules = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        module = Classifier()
        if by_hand:
            module.cuda()
            optimizer = module.configure_optimizers()
            for x, y in loader():
                optimizer.zero_grad()
                module.loss((x.cuda(), y.cuda())).backward()
                optimizer.step()
        else:
            quiet(accelerator="gpu", resident=resident).fit(module, loader())
        modules.append(module.cpu())
    assert same_weights(*modules)


@pytest.mark.gpu
def test_fabric_moves_batches_too() -> None:
    fabric = L.Fabric(accelerator="gpu", devices=1)
    ready = fabric.setup_dataloaders(loader())
    assert all(torch.equal(x.cpu(), y) for (x, _), (y, _) in zip(ready, loader(), strict=True))
