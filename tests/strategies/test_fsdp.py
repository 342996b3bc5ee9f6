"""FSDP on several processes: the numbers of one process, with a part of the parameters on each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.strategies import FSDPStrategy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(L.LightningModule):
    """A model with repeated blocks, whose step calls its parts and not itself."""

    def __init__(self, width: int = 8, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer_class = optimizer
        self.embed, self.head = nn.Linear(5, width), nn.Linear(width, 1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.blocks(self.embed(x))), y)
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        self.losses.append(self.all_gather(loss.detach()).mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, **how: Any) -> None:
        self.norms.append(self.trainer.runtime.clip_norm(self.parameters(), how["gradient_clip_val"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), lr=0.01)


def loader(batch_size: int, samples: int) -> DataLoader[Any]:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def fit(devices: int, strategy: Any, net: Net | None = None, **options: Any) -> tuple[L.Trainer, Net]:
    """Train on the same batches, whatever the number of devices."""
    net = Net() if net is None else net
    arguments = {
        "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    } | options  # fmt: skip
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **arguments)
    trainer.fit(net, loader(8 // devices, 48), loader(8 // devices, 16))
    return trainer, net


def whole(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def assert_equal(one: tuple[L.Trainer, Net], many: tuple[L.Trainer, Net], tolerance: float = 1e-5) -> None:
    weights, expected = whole(many[1]), whole(one[1])
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=tolerance, rtol=tolerance)
    for series in ("losses", "norms"):
        ours, theirs = getattr(many[1], series), getattr(one[1], series)
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=tolerance, rtol=tolerance)
    for name, value in one[0].callback_metrics.items():
        torch.testing.assert_close(many[0].callback_metrics[name], value, atol=tolerance, rtol=tolerance)


def share(trainer: L.Trainer, net: Net) -> tuple[float, float]:
    """Return the part of the parameters, and of the optimizer's elements, that this process holds."""

    def part(tensors: list[Any]) -> float:
        sharded = [tensor for tensor in tensors if hasattr(tensor, "to_local")]
        return sum(t.to_local().numel() for t in sharded) / sum(t.numel() for t in sharded)

    states = trainer.optimizers[0].state.values()
    return part(list(net.parameters())), part([value for state in states for value in state.values()])


@pytest.mark.world_size(2)
def test_two_processes_train_as_one_and_each_holds_half() -> None:
    one = fit(1, "auto")
    for options in (
        {},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}},
    ):
        many = fit(2, FSDPStrategy(**options))
        assert_equal(one, many)
        assert max(share(*many)) <= 0.55
        plan = many[0].strategy.plan
        assert plan.blocks == ("blocks.0", "blocks.1", "blocks.2")
        assert "embed.weight" in plan.root
        assert type(many[1]).__name__ == "Net"


@pytest.mark.world_size(4)
def test_four_processes_train_as_one_also_on_a_mesh_of_replicas() -> None:
    one = fit(1, "auto")
    assert_equal(one, fit(4, "FSDP2"))
    many = fit(4, FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)))
    assert_equal(one, many)
    assert min(share(*many)) > 0.45
    assert many[0].strategy.plan.mesh == (2, 2)
