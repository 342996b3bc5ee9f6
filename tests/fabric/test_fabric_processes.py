"""Fabric on two processes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.loggers import CSVLogger
from tests.refusals import refused, warned


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).pow(2).mean()

    def training_step(self, x: Tensor) -> Tensor:
        return self.loss(x)


def data(**options: Any) -> DataLoader[Any]:
    values = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(values, torch.arange(16)), **options)


def launched(**options: Any) -> L.Fabric:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp", **options)
    fabric.launch()
    return fabric


def train(fabric: L.Fabric, batch_size: int, call: str = "forward") -> list[float]:
    module = Model()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    if call == "loss":
        model.mark_forward_method("loss")
    for x, _ in fabric.setup_dataloaders(data(batch_size=batch_size)):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean() if call == "forward" else getattr(model, call)(x)
        fabric.backward(loss)
        optimizer.step()
    return [float(value) for value in module.layer.weight.detach().flatten()]


@pytest.mark.world_size(2)
def test_two_processes_train_to_the_weights_of_one() -> None:
    for call in ("forward", "training_step", "loss"):
        weights = train(launched(), batch_size=2, call=call)
        # Process r reads samples r, r + 2, ...: two batches of 2 together are one batch of 4 in the plain order.
        alone = train(L.Fabric(accelerator="cpu"), batch_size=4, call=call)
        assert weights == pytest.approx(alone, abs=1e-6)
    # The module that was given to setup, in place of the one that it returned.
    fabric, module = launched(), Model()
    _, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(module(torch.ones(2, 4)).mean())
    with warned(UserWarning, fix="fabric.setup(model, optimizer)") if fabric.global_rank == 0 else nullcontext():
        optimizer.step()


@pytest.mark.world_size(2)
def test_each_process_reads_its_own_part_in_a_new_order_each_epoch() -> None:
    fabric = launched()
    loader = fabric.setup_dataloaders(data(batch_size=2, shuffle=True))
    epochs = []
    for _ in range(2):
        mine = [int(i) for _, ids in loader for i in ids]
        both = fabric.all_gather(torch.tensor(mine)).flatten().tolist()
        assert sorted(both) == list(range(16))
        epochs.append(both)
    assert epochs[0] != epochs[1]
    whole = fabric.setup_dataloaders(data(batch_size=2), use_distributed_sampler=False)
    assert len(whole) == 8


@pytest.mark.world_size(2)
def test_gradients_wait_for_the_end_of_the_accumulation() -> None:
    fabric = launched()
    module = Model()
    model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.full((2, 4), float(fabric.global_rank + 1))
    with fabric.no_backward_sync(model):
        fabric.backward(model(x).sum())
    first, second = fabric.all_gather(module.layer.weight.grad)
    assert not torch.equal(first, second)
    with refused(ValueError, says="2 of the 2 parameters of SGD"):
        fabric.setup_optimizers(torch.optim.SGD(Model().parameters(), lr=0.1))
    with fabric.no_backward_sync(model, enabled=False):
        fabric.backward(model(x).sum())
    first, second = fabric.all_gather(module.layer.weight.grad)
    assert torch.equal(first, second)


@pytest.mark.world_size(2)
def test_a_method_that_would_train_past_ddp_is_refused_until_it_is_marked() -> None:
    fabric = launched()
    model = fabric.setup(Model())
    with refused(RuntimeError, says="mark_forward_method('loss')"):
        model.loss(torch.ones(2, 4))
    with torch.no_grad():
        assert model.loss(torch.ones(2, 4)).shape == ()
    model.mark_forward_method(model.module.loss)
    fabric.backward(model.loss(torch.full((2, 4), float(fabric.global_rank))))
    first, second = fabric.all_gather(model.layer.weight.grad)
    assert torch.equal(first, second)
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    # Evaluation does not wait for a process with fewer batches.
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = fabric.setup(module)
    model.eval()
    with torch.no_grad():
        for _ in range(1 + 5 * fabric.global_rank):
            model(torch.ones(2, 4))
    fabric.barrier()


@pytest.mark.world_size(2)
def test_processes_talk_and_take_turns(tmp_path: Path) -> None:
    fabric = launched()
    rank = fabric.global_rank
    assert fabric.all_gather({"rank": rank})["rank"].tolist() == [0, 1]
    assert fabric.all_reduce(float(rank), reduce_op="sum").item() == 1.0
    assert fabric.all_reduce(rank).item() == 0.5
    assert fabric.broadcast({"from": rank}, src=1) == {"from": 1}
    file = tmp_path / "downloaded"
    with fabric.rank_zero_first():
        if rank == 0:
            time.sleep(0.1)
            file.touch()
        assert file.exists()
    try:
        with fabric.rank_zero_first(local=True):
            if rank == 0:
                raise KeyError("no network")
    except KeyError:
        assert rank == 0
    assert torch.randn(1).shape == (1,)


@pytest.mark.world_size(1)
def test_a_group_of_one_process_gathers_as_one_of_several() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    weight = torch.ones(2, requires_grad=True)
    gathered = fabric.all_gather({"a": weight, "b": 1.0}, sync_grads=True)
    assert (gathered["a"].shape, gathered["b"].shape) == ((1, 2), (1,))
    gathered["a"].sum().backward()
    assert weight.grad is not None
    assert L.Fabric(accelerator="cpu").all_gather(torch.ones(2)).shape == (2,)


@pytest.mark.world_size(2)
def test_a_checkpoint_is_written_once_and_read_by_all(tmp_path: Path) -> None:
    fabric = launched()
    module = Model()
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "rank": fabric.global_rank})
    expected = module.layer.weight.clone()
    with torch.no_grad():
        module.layer.weight.zero_()
    state = {"model": model, "optimizer": optimizer, "rank": -1}
    assert fabric.load(tmp_path / "a.ckpt", state) == {}
    assert torch.equal(module.layer.weight, expected)
    assert state["rank"] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def in_copies(fabric: L.Fabric, factor: int, trainer: str, owner: str) -> list[float]:
    assert (fabric.world_size, trainer, owner) == (2, "a", "b")
    return [factor * value for value in train(fabric, batch_size=2)]


class Launches(L.Fabric):
    def run(self, batch_size: int) -> list[float]:
        self.log("rank", self.global_rank, step=0)
        return train(self, batch_size)


def test_a_function_is_launched_in_copies(tmp_path: Path) -> None:
    alone = train(L.Fabric(accelerator="cpu"), batch_size=4)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp_notebook")
    doubled = fabric.launch(in_copies, 2, trainer="a", owner="b")
    assert doubled == pytest.approx([2 * value for value in alone], abs=2e-6)
    fabric = Launches(accelerator="cpu", devices=2, strategy="ddp_fork", loggers=CSVLogger(tmp_path))
    assert fabric.run(2) == pytest.approx(alone, abs=1e-6)
    assert (tmp_path / "lightning_logs/version_0/metrics.csv").read_text() == "rank,step\n0,0\n"


@pytest.mark.world_size(2)
def test_parts_of_a_sharded_tensor_are_neither_saved_as_a_whole_nor_copied(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    fabric, module = launched(), nn.Linear(8, 16)
    weight = distribute_tensor(module.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    module.weight = nn.Parameter(weight)
    with refused(TypeError, says="['model']['weight']"):
        fabric.save(tmp_path / "part.ckpt", {"model": module})
    assert not list(tmp_path.iterdir())
    with refused(ValueError, "strategy", says="'weight'"):
        fabric.setup(module)
    fabric.save(tmp_path / "whole.ckpt", {"weight": weight.full_tensor()})
    assert fabric.load(tmp_path / "whole.ckpt")["weight"].shape == (16, 8)
