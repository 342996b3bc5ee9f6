"""8-bit floats in several processes, compared with one: torchao multiplies in 32 bits what it has rounded to 8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import dataset, loader, quiet
from tests.refusals import refused
from tests.strategies.test_model_parallel import Llama, Recorded, tokens, trained, weights
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, Subset

import hasten as L
from hasten._lib.optional import installed
from hasten.plugins import Float8Precision
from hasten.precision.float8 import RECIPES
from hasten.strategies import FSDPStrategy, MeshStrategy

pytestmark = pytest.mark.skipif(not installed("torchao"), reason="needs torchao")

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SAMPLES, BATCH = 40, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(Recorded):
    """Two blocks whose layers have sides of multiples of 16, between two layers that have not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 2)
        self.blocks = nn.ModuleList([Block(), Block()])
        # The linear layers that multiply in 8 bits while the module trains.
        self.in_8_bits: list[str] = []

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), batch[1])

    def on_train_start(self) -> None:
        self.in_8_bits = [name for name, part in self.named_modules() if type(part).__name__ == "Float8Linear"]


class Adam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


LAYERS = [f"blocks.{index}.{name}" for index in range(2) for name in ("up", "down")]


def in_8_bits(recipe: Any = "tensorwise", **options: Any) -> Float8Precision:
    return Float8Precision(recipe, emulate=True, **options)


def of_two_processes() -> DataLoader[Any]:
    """Return the batches of two processes, one after the other: an activation is scaled by the largest of its batch."""
    order = [
        first + process + 2 * index
        for first in range(0, SAMPLES, 2 * BATCH)
        for process in range(2)
        for index in range(BATCH)
    ]
    return DataLoader(Subset(dataset(SAMPLES), order), BATCH)


def fit(strategy: Any = "auto", devices: int = 1, data: Any = None, **options: Any) -> Any:
    """Train a module on the batches of a process; in 8-bit floats unless ``plugins`` says otherwise."""
    module = options.pop("module", None) or Net()
    options = {"plugins": in_8_bits(), **options}
    return trained(module, loader(SAMPLES, BATCH) if data is None else data, strategy, devices, **options)


def alone(processes: int, **options: Any) -> Any:
    """Train on one device, with the batches of one process, or of two that read data of their own."""
    return fit(**options) if processes == 1 else fit(data=of_two_processes(), accumulate_grad_batches=2, **options)


def distance(one: Recorded, other: Recorded) -> float:
    """Return the largest difference of a weight, a gradient norm or the mean loss."""
    theirs = weights(other)
    found = [float((value - theirs[name]).abs().max()) for name, value in weights(one).items()]
    found += [abs(a - b) for a, b in zip(one.norms, other.norms, strict=True)]
    return max(*found, abs(float(one.logged["train_loss_epoch"]) - float(other.logged["train_loss_epoch"])))


def split() -> MeshStrategy:
    return MeshStrategy(tensor=2, plan=PLAN)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.world_size(2)
def test_two_processes_train_as_one_in_8_bit_floats(recipe: str) -> None:
    for processes, strategy, options in (
        (2, "ddp", {}),
        (2, "fsdp", {}),
        # Each linear layer is gathered by itself.
        (2, FSDPStrategy(auto_wrap_policy={nn.Linear}), {"memory": "selective"}),
        (2, MeshStrategy(2, 1), {"memory": "full"}),
        (1, split(), {}),
        (1, split(), {"memory": "selective"}),
    ):
        one, exact = alone(processes, plugins=in_8_bits(recipe)), alone(processes, plugins=[])
        many = fit(strategy, 2, plugins=in_8_bits(recipe), **options)
        assert many.in_8_bits == one.in_8_bits == LAYERS
        # Sums are rounded in another order, and a number between two of 8 bits may then become the other one. That is
        # far less than what 8 bits change.
        changed = distance(one, exact)
        assert changed > 1e-3
        assert distance(one, many) < 0.1 * changed
        # After the run, the layers are those that the program has made.
        assert not any("linear_mm_config" in vars(part) for part in many.modules())


@pytest.mark.world_size(2)
def test_a_language_model_with_its_own_plan_trains_as_one_in_8_bit_floats() -> None:
    # Of these, a process has 8 or 24 features: they would stay in 16 bits.
    narrow = [
        f"model.model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp", "self_attn.k_proj", "self_attn.v_proj")
    ]
    for options in ({}, {"sequence_parallel": True, "loss_parallel": True}):
        one, many = (
            fit(*how, data=tokens(4), module=Llama(), plugins=in_8_bits(ignore_modules=narrow))
            for how in ((), (MeshStrategy(tensor=2, plan="auto", **options), 2))
        )
        changed = distance(one, fit(data=tokens(4), module=Llama(), plugins=[]))
        assert distance(one, many) < 0.1 * changed


@pytest.mark.world_size(4)
def test_four_processes_train_as_one_in_8_bit_floats() -> None:
    one, exact = alone(2), alone(2, plugins=[])
    for replicate, shard in ((1, 2), (2, 1)):
        many = fit(MeshStrategy(replicate, shard, 2, plan=PLAN), 4)
        assert many.in_8_bits == LAYERS
        assert distance(one, many) < 0.1 * distance(one, exact)


@pytest.mark.world_size(2)
def test_checkpoints_are_in_full_precision_and_resume_anywhere(tmp_path: Path) -> None:
    def until(
        epochs: int, strategy: Any, devices: int = 2, plugins: Any = None, **options: Any
    ) -> tuple[Any, L.Trainer]:
        torch.manual_seed(5)
        net, plugins = Adam(), in_8_bits() if plugins is None else plugins
        trainer = quiet(devices=devices, strategy=strategy, max_epochs=epochs, gradient_clip_val=0.1, plugins=plugins)
        trainer.fit(net, loader(SAMPLES, BATCH), **options)
        return net, trainer

    for name, make in (
        ("file", lambda: "fsdp"),
        ("folder", lambda: FSDPStrategy(state_dict_type="sharded")),
        ("split", split),
    ):
        path = tmp_path / name
        until(1, make())[1].save_checkpoint(path)
        whole, resumed = weights(until(2, make())[0]), weights(until(2, make(), ckpt_path=path)[0])
        for key, value in whole.items():
            assert torch.equal(resumed[key], value), (name, key)
        for strategy, devices, plugins in (("ddp", 2, None), ("fsdp", 2, None), (split(), 2, None), ("auto", 1, [])):
            net, _ = until(2, strategy, devices, plugins, ckpt_path=path)
            assert len(net.norms) == SAMPLES // BATCH // (1 if devices == 1 or strategy not in ("ddp", "fsdp") else 2)
    stored = torch.load(tmp_path / "file", weights_only=True)
    assert stored["state_dict"].keys() == Adam().state_dict().keys()
    states = [value for state in stored["optimizer_states"][0]["state"].values() for value in state.values()]
    assert len(states) == 3 * len(stored["state_dict"])
    assert {(type(value), value.dtype) for value in (*states, *stored["state_dict"].values())} == {
        (Tensor, torch.float32)
    }


@pytest.mark.world_size(2)
def test_shards_may_be_gathered_in_16_bits_and_rounded_afterwards() -> None:
    # As on a GPU, where parameters are gathered in the type of autocast.
    def in_half(**options: Any) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fit(FSDPStrategy(mixed_precision=policy), 2, **options)

    many, halves, one = in_half(), in_half(plugins=[]), alone(2)
    assert many.in_8_bits == LAYERS
    assert distance(one, many) < distance(one, halves)


class Apart(Net):
    """Optimizes manually: its children are gathered by themselves, and one of them is a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.wide = nn.Linear(32, 32)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.wide(batch[0].repeat(1, 4)).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Narrow(Net):
    """Of the 48 features of a layer, each of two processes has 24."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(32, 48), nn.Linear(48, 32)  # type: ignore[union-attr]


class Few(Net):
    """Keeps the state of its optimizer in 8 bits."""

    def configure_optimizers(self) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=0.01)


@pytest.mark.world_size(2)
def test_every_layer_that_can_computes_in_8_bits_and_the_rest_is_refused_by_name() -> None:
    assert fit("fsdp", 2, module=Apart(), gradient_clip_val=None).in_8_bits == [*LAYERS, "wide"]
    assert fit("ddp_sharded", 2, module=Few()).in_8_bits == LAYERS
    for strategy in ("fsdp", split()):
        with refused(ValueError, fix="ddp_sharded", says="AdamW8bit"):
            fit(strategy, 2, module=Few())
    assert fit("fsdp", 2, module=Narrow()).in_8_bits == LAYERS
    with refused(ValueError, "precision", fix="bf16-mixed", says="multiples of 16 in each process"):
        fit(split(), 2, module=Narrow())
    with refused(ValueError, "ignore_modules", says="no module of that name"):
        fit("fsdp", 2, plugins=in_8_bits(ignore_modules={"layers"}))


def test_a_layer_alone_computes_in_8_bit_floats_and_its_hooks_are_called() -> None:
    layer, seen = nn.Linear(32, 32), []
    layer.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    exact = layer(torch.ones(3, 32))
    output = L.Fabric(accelerator="cpu", plugins=in_8_bits()).setup(layer)(torch.ones(3, 32))
    assert 0 < (output - exact).abs().max() < 0.2
    assert seen == ["Linear", "Float8Linear"]
