"""``strategy="ddp_sharded"``: each process keeps and steps its part of the optimizer state, and trains as one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import loader, quiet
from tests.programs import call_in_file
from tests.refusals import refused
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler

import hasten as L
from hasten.optim import muon
from hasten.precision.base import Precision
from hasten.resolve import runtime
from hasten.strategies import DDPStrategy
from hasten.strategies.optimizer_shard import shard_of

Made = Callable[[nn.Module], Any]


class Net(L.LightningModule):
    """A classifier that notes its losses and the norms of its gradients; the optimizer is the test's."""

    def __init__(self, make: Made) -> None:
        super().__init__()
        torch.manual_seed(0)
        # One parameter has most of the elements.
        self.layers = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 24), nn.Linear(24, 2))
        self.make = make
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))

    def configure_optimizers(self) -> Any:
        return self.make(self)


class Scaled(Precision):
    """32-bit numbers and a gradient scaler, which the CPU has too."""

    def __init__(self, scale: float) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)


class Closes(Net):
    """Steps with the closure it is given."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class Manual(Net):
    """Steps two optimizers by itself, the first with every batch and the second with every other."""

    def __init__(self, make: Made) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        return loss


def adamw(module: nn.Module, **options: Any) -> Any:
    layers: Any = module.layers
    groups = [{"params": layers[0].parameters()}, {"params": layers[2:].parameters(), "weight_decay": 0.3, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def with_schedule(module: nn.Module) -> Any:
    optimizer = adamw(module)
    schedule = lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01], total_steps=20)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def two(module: nn.Module) -> Any:
    layers: Any = module.layers
    return torch.optim.Adam(layers[0].parameters(), lr=1e-2), torch.optim.SGD(layers[2:].parameters(), 0.1, 0.9)


def batches(parts: int) -> list[list[list[Tensor]]]:
    """Return the batches of each process, or with 1 those of all together."""
    own = list(loader(48))
    if parts == 1:
        pairs = zip(own[::2], own[1::2], strict=True)
        return [[[torch.cat(two) for two in zip(*pair, strict=True)] for pair in pairs]]
    return [own[rank::parts] for rank in range(parts)]


def trained(
    kind: type[Net], make: Made, *, strategy: Any = None, ckpt_path: Any = None, scale: Any = None, **options: Any
) -> Any:
    """Train with one process, or with ``strategy`` in those that run; return the Trainer."""
    if scale is not None:
        options["plugins"] = Scaled(scale)
    if strategy is None:
        trainer = quiet(**{"max_epochs": 2, **options})
        trainer.fit(kind(make), batches(1)[0], ckpt_path=ckpt_path)
        return trainer
    size = torch.distributed.get_world_size()
    options = {"max_epochs": 2, "devices": size, "use_distributed_sampler": False, **options}
    trainer = quiet(strategy=strategy, **options)
    trainer.fit(kind(make), batches(size)[trainer.global_rank], ckpt_path=ckpt_path)
    return trainer


def held(optimizer: Any) -> int:
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if getattr(v, "ndim", 0))


def assert_alike(ours: Any, expected: Any, **tolerances: float) -> None:
    tolerances = tolerances or {"rtol": 1e-5, "atol": 1e-5}
    one, other = ours.lightning_module, expected.lightning_module
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, **tolerances)
    losses = ours.strategy.all_reduce(torch.stack(one.losses))
    torch.testing.assert_close(losses, torch.stack(other.losses), **tolerances)
    torch.testing.assert_close(torch.stack(one.norms), torch.stack(other.norms), **tolerances)
    assert [g["lr"] for o in ours.optimizers for g in o.param_groups] == [
        g["lr"] for o in expected.optimizers for g in o.param_groups
    ]


@pytest.mark.world_size(2)
def test_two_processes_train_as_one_with_half_the_state_each() -> None:
    cases: dict[str, tuple[type[Net], Made, dict[str, Any], float]] = {
        "schedule": (Net, with_schedule, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, 0.55),
        "fused": (Net, lambda m: adamw(m, fused=True), {"gradient_clip_val": 0.1}, 0.55),
        "fused later": (Net, adamw, {"fused_optimizer": True}, 0.55),
        "scaler": (Net, adamw, {"scale": 2.0**127}, 0.55),
        "fused scaler": (Net, lambda m: adamw(m, fused=True), {"scale": 2.0**127}, 0.55),
        "bf16": (Net, adamw, {"precision": "bf16-true"}, 0.55),
        "eager state": (Net, lambda m: torch.optim.Adagrad(m.parameters(), 0.05), {}, 0.55),
        "whole": (Net, lambda m: torch.optim.Adafactor(m.parameters()), {}, 1.0),
        "muon": (Net, lambda m: muon(m, lr=1e-2), {}, 1.0),
        "closure": (Closes, adamw, {}, 0.55),
        "manual": (Manual, two, {}, 0.55),
        "frozen": (Net, lambda m: adamw(m.requires_grad_(True) and _without(m)), {}, 0.55),
    }
    for name, (kind, make, options, share) in cases.items():
        strategy = "DDP_Sharded" if name == "schedule" else "ddp_sharded"
        # Muon's iteration magnifies how the gradients are rounded, so it is compared with the same gradients.
        ours = trained(kind, make, strategy=strategy, **options)
        expected = trained(kind, make, strategy="ddp" if name == "muon" else None, **options)
        if name == "muon":
            for value, other in zip(
                ours.lightning_module.parameters(), expected.lightning_module.parameters(), strict=True
            ):
                assert torch.equal(value, other)
            continue
        assert_alike(ours, expected, **({"rtol": 3e-2, "atol": 3e-2} if "precision" in options else {}))
        assert ours.strategy.name == "ddp_sharded"
        for one, other in zip(ours.optimizers, expected.optimizers, strict=True):
            assert type(one) is type(other)
            assert shard_of(one) is not None
            assert 0 < held(one) <= share * held(other), name


def _without(module: Any) -> Any:
    module.layers[2].bias.requires_grad_(False)
    return module


@pytest.mark.world_size(2)
def test_hooks_of_a_step_see_all_parameters_before_and_after_it() -> None:
    seen: list[list[int]] = []

    def make(module: nn.Module) -> Any:
        optimizer = adamw(module)
        before = [p.detach().clone() for p in module.parameters()]

        def compare(optimizer: Any, *_: Any) -> None:
            now = [p for group in optimizer.param_groups for p in group["params"]]
            seen.append([int((p.detach() != old).sum()) for p, old in zip(now, before, strict=True)])

        optimizer.register_step_pre_hook(compare)
        optimizer.register_step_post_hook(compare)
        return optimizer

    trained(Net, make, strategy="ddp_sharded", max_steps=1)
    assert seen[0] == [0] * 6
    assert [count > 0 for count in seen[1]] == [True] * 6


@pytest.mark.world_size(2)
def test_what_cannot_be_divided_is_refused_before_training() -> None:
    class Free(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    for make, said in (
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS computes with all parameters at once"),
        (lambda m: Free(m.parameters(), 0.1), "Free computes the weights to evaluate with from its state"),
        (lambda m: L.optim.in_backward(torch.optim.SGD, m.parameters(), lr=0.1), "Use one process, or torch.optim.SGD"),
    ):
        with pytest.raises(ValueError, match=said):
            trained(Net, make, strategy="ddp_sharded")
    with refused(RuntimeError, "strategy", says="Twice"):
        trained(Net, lambda m: Twice(m.parameters(), 0.1), strategy="ddp_sharded")
    trainer = trained(Net, adamw, strategy="ddp_sharded", max_steps=1)
    with refused(RuntimeError, says=("AdamW.state_dict()", "strategy='ddp_sharded'")):
        trainer.optimizers[0].state_dict()
    with pytest.raises(TypeError, match="True or False"):
        DDPStrategy(shard_optimizer="yes")  # type: ignore[arg-type]


# -- checkpoints


def saved(path: str, strategy: Any, make: Made = with_schedule) -> None:
    trained(Net, make, strategy=strategy, max_epochs=1).save_checkpoint(path)


def states(path: str) -> Any:
    return torch.load(path, weights_only=False)["optimizer_states"][0]


def assert_same_state(one: Any, other: Any) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, entries in one["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, other["state"][index][key]), (index, key)


@pytest.mark.world_size(2)
def test_checkpoints_are_those_of_ddp_and_training_goes_on_from_either(tmp_path: Path) -> None:
    plain, sharded, again = (str(tmp_path / name) for name in ("plain.ckpt", "sharded.ckpt", "again.ckpt"))
    saved(plain, "ddp")
    saved(sharded, "ddp_sharded")
    # Same gradients, same steps: the states are those of plain DDP, element by element.
    one, other = torch.load(plain, weights_only=False), torch.load(sharded, weights_only=False)
    assert one.keys() == other.keys()
    assert_same_state(one["optimizer_states"][0], other["optimizer_states"][0])
    torch.distributed.barrier()
    for path in (plain, sharded):
        for strategy in ("ddp", "ddp_sharded", None):
            # Nothing is trained: what was loaded is written again.
            trainer = trained(Net, with_schedule, strategy=strategy, ckpt_path=path, max_epochs=1)
            copy = again if strategy else f"{again}.{torch.distributed.get_rank()}"
            trainer.save_checkpoint(copy)
            assert_same_state(states(copy), states(path))
            torch.distributed.barrier()
    expected = trained(Net, with_schedule, max_epochs=3)
    for path, strategy in ((plain, "ddp_sharded"), (sharded, "ddp"), (sharded, "ddp_sharded")):
        ours = trained(Net, with_schedule, strategy=strategy, ckpt_path=path, max_epochs=3)
        for name, value in expected.lightning_module.state_dict().items():
            torch.testing.assert_close(ours.lightning_module.state_dict()[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.world_size(2)
def test_a_zero_redundancy_optimizer_of_the_user_is_saved_and_resumed(tmp_path: Path) -> None:
    def make(module: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)

    path = str(tmp_path / "zero.ckpt")
    expected = trained(Net, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    for strategy in ("ddp", "ddp_sharded"):
        saved(path, strategy, make)
        torch.distributed.barrier()
        assert len(states(path)["state"]) == 6
        assert_alike_weights(trained(Net, make, strategy=strategy, ckpt_path=path), expected)
        alone = trained(Net, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), ckpt_path=path)
        assert_alike_weights(alone, expected)
        torch.distributed.barrier()


def assert_alike_weights(ours: Any, expected: Any) -> None:
    for name, value in expected.lightning_module.state_dict().items():
        torch.testing.assert_close(ours.lightning_module.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_a_state_saved_by_two_processes_is_divided_over_three(tmp_path: Path) -> None:
    path, again = str(tmp_path / "two.ckpt"), str(tmp_path / "three.ckpt")

    def launch(devices: int, name: str, *args: Any) -> None:
        run = runtime(accelerator="cpu", devices=devices, strategy=DDPStrategy(start_method="forkserver"))
        run.launch(call_in_file, __file__, name, *args)

    launch(2, "saved", path, "ddp_sharded")
    launch(3, "saved_again", path, again)
    assert_same_state(states(path), states(again))
    back = str(tmp_path / "back.ckpt")
    launch(2, "saved_again", again, back)
    assert_same_state(states(path), states(back))


def saved_again(path: str, again: str) -> None:
    trainer = trained(Net, with_schedule, strategy="ddp_sharded", ckpt_path=path, max_epochs=1)
    sizes: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(sizes, held(trainer.optimizers[0]))
    assert max(sizes) <= 1.1 * sum(sizes) / len(sizes)
    trainer.save_checkpoint(again)


# -- Fabric


@pytest.mark.world_size(2)
def test_fabric_trains_saves_and_loads(tmp_path: Path) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp_sharded")
    fabric.launch()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def made() -> Any:
        module = Net(adamw).layers
        holder: Any = nn.Module()
        holder.layers = module
        return module, adamw(holder)

    def steps(model: Any, optimizer: Any, rows: Tensor, backward: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(rows).pow(2).mean())
            optimizer.step()

    plain, reference = made()
    module, optimizer = made()
    model, wrapped = fabric.setup(module, optimizer)
    steps(model, wrapped, x[fabric.global_rank :: 2], fabric.backward)
    fabric.save(tmp_path / "f.ckpt", {"model": model, "optimizer": wrapped})
    steps(model, wrapped, x[fabric.global_rank :: 2], fabric.backward)
    steps(plain, reference, x, Tensor.backward)
    steps(plain, reference, x, Tensor.backward)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # Into a new program, which goes on to the same weights; and into one process.
    module, optimizer = made()
    model, wrapped = fabric.setup(module, optimizer)
    fabric.load(tmp_path / "f.ckpt", {"model": model, "optimizer": wrapped})
    alone, single = made()
    stored = torch.load(tmp_path / "f.ckpt", weights_only=False)
    alone.load_state_dict(stored["model"])
    single.load_state_dict(stored["optimizer"])
    steps(model, wrapped, x[fabric.global_rank :: 2], fabric.backward)
    steps(alone, single, x, Tensor.backward)
    for one, two, other in zip(module.parameters(), alone.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(two, other, rtol=1e-5, atol=1e-5)
