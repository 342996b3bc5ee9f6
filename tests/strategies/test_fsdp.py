"""FSDP on several processes: the numbers of one process, with a part of the parameters on each."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import quiet
from tests.refusals import refused
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard, wrap
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import OnExceptionCheckpoint
from hasten.optim import in_backward
from hasten.plugins import AsyncCheckpointIO, FSDPPrecision, MixedPrecision
from hasten.strategies import FSDPStrategy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(L.LightningModule):
    """A model with repeated blocks, whose step calls its parts and not itself."""

    def __init__(self, width: int = 8, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
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
        self.norms.append(self.trainer.runtime.engine.clip_norm(self.parameters(), how["gradient_clip_val"] or 1e9))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), lr=0.01)


def loader(batch_size: int, samples: int) -> DataLoader[Any]:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def fit(
    devices: int, strategy: Any, net: Net | None = None, *, samples: int = 32, **options: Any
) -> tuple[L.Trainer, Net]:
    """Train on the same batches, whatever the number of devices."""
    net = Net() if net is None else net
    arguments = {
        "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    } | options  # fmt: skip
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **arguments)
    trainer.fit(net, loader(8 // devices, samples), loader(8 // devices, 16))
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


class Poisoned(Net):
    """In one step, the gradients of one process alone are infinite."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and self.trainer.global_rank == 1:
            for parameter in self.parameters():
                parameter.grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights = [*getattr(self, "weights", []), whole(self)["head.weight"]]


class InBackwardNet(Net):
    configure_gradient_clipping = L.LightningModule.configure_gradient_clipping

    def configure_optimizers(self) -> Any:
        return in_backward(torch.optim.SGD, self.parameters(), lr=0.05)


@pytest.mark.world_size(2)
def test_precisions_compiled_blocks_and_optimizers() -> None:
    one = fit(1, "auto")
    # What is divided and traced, without the C++ of inductor, which two processes would compile.
    compiled = fit(2, "fsdp", compile={"backend": "aot_eager"})
    assert_equal(one, compiled)
    assert compiled[0].compile_report.compiled == ("Block",)
    assert not compiled[0].compile_report.graph_breaks
    assert_equal(fit(1, "auto", precision="64-true"), fit(2, "fsdp", precision="64-true"))

    sgd = fit(1, "auto", Net(optimizer=torch.optim.SGD))
    short = fit(2, "fsdp", Net(optimizer=torch.optim.SGD), precision="bf16-mixed")
    assert_equal(sgd, short, 2e-2)
    assert {parameter.dtype for parameter in short[1].parameters()} == {torch.float32}
    assert short[1].losses[0].dtype == torch.float32

    once = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    clipped = fit(2, "fsdp", InBackwardNet(), **once)
    torch.testing.assert_close(whole(clipped[1]), whole(fit(1, "auto", InBackwardNet(), **once)[1]))

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = FSDPPrecision("16-mixed", scaler, device="cpu")
    _, net = fit(2, "fsdp", Poisoned(), plugins=plugin, max_epochs=1, limit_train_batches=3, **once)
    weights = net.weights
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert scaler.get_scale() == 2.0


class Gan(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 5))
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, losses = batch[0], (lambda: -self.critic(self.generator(batch[0])).mean(), self.critic_loss)
        assert x.shape[1] == 5
        self.batch = x
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def critic_loss(self) -> Tensor:
        return self.critic(self.generator(self.batch).detach()).mean() - self.critic(self.batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]


class EvaluatesTwice(Net):
    """Its evaluation calls itself, and then its parts again."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        again = self.head(self.blocks(self.embed(x)))
        self.log("val_loss", nn.functional.mse_loss(self(x) + again, y), sync_dist=True)


class OnMeta(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.head, self.blocks

    def configure_model(self) -> None:
        torch.manual_seed(3)
        with self.trainer.init_module(empty_init=True):
            self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 1)
            self.blocks = nn.Sequential(*(Block(8) for _ in range(3)))
        assert self.embed.weight.is_meta


@pytest.mark.world_size(2)
def test_manual_optimization_uneven_evaluation_and_the_start() -> None:
    options: Any = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}
    expected = fit(1, "auto", Gan(), **options)[1]  # type: ignore[arg-type]
    gan = fit(2, "fsdp", Gan(), **options)[1]  # type: ignore[arg-type]
    torch.testing.assert_close(whole(gan), whole(expected))

    one, net = fit(1, "auto", max_epochs=1)
    many, sharded = fit(2, "fsdp", max_epochs=1)
    for samples in (17, 9, 5):
        theirs, ours = (t.validate(m, loader(4, samples), verbose=False) for t, m in ((one, net), (many, sharded)))
        assert ours[0]["val_loss"] == pytest.approx(theirs[0]["val_loss"], abs=1e-5)
    # The second process has no batch, and has never had one.
    theirs, ours = (
        quiet(devices=devices, strategy=strategy).validate(EvaluatesTwice(), loader(4, 1), verbose=False)
        for devices, strategy in ((1, "auto"), (2, "fsdp"))
    )
    assert ours[0]["val_loss"] == pytest.approx(theirs[0]["val_loss"], abs=1e-5)
    # A second fit with the weights of the first.
    torch.testing.assert_close(whole(fit(2, "fsdp", sharded)[1]), whole(fit(1, "auto", net)[1]))

    # Values are drawn as on one process, also where the module was made on the meta device; and the first process's
    # count where they differ.
    assert_equal(fit(1, "auto"), fit(2, "fsdp", OnMeta()))
    other = Net()
    if many.global_rank == 1:
        with torch.no_grad():
            other.head.weight.add_(1.0)
    assert_equal(fit(1, "auto"), fit(2, "fsdp", other))


class ShardsItself(Net):
    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block)


class Tied(Net):
    """The weights of the embedding are those of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.Sequential(Block(5), Block(5))


class BareParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.world_size(2)
def test_what_is_gathered_together_can_be_chosen() -> None:
    one = fit(1, "auto")
    for policy in (
        functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=200),
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        wrap.ModuleWrapPolicy({Block}),
        wrap.CustomPolicy(lambda module: isinstance(module, Block)),
        [Block],
    ):
        many = fit(2, FSDPStrategy(auto_wrap_policy=policy, forward_prefetch=True))
        assert_equal(one, many)
        assert many[0].strategy.plan.blocks
    assert_equal(one, fit(2, "fsdp", ShardsItself()))
    assert_equal(one, fit(2, "fsdp_cpu_offload"))
    everywhere = FSDPStrategy(auto_wrap_policy={Block, nn.Linear})
    assert_equal(fit(1, "auto", Tied()), fit(2, everywhere, Tied()))
    assert "embed.weight" in everywhere.plan.root

    net = Net()
    with pytest.raises(ValueError, match=r"'embed\.(weight|bias)' trains"):
        fit(2, FSDPStrategy(ignored_modules=[net.embed]), net)
    net = Net()
    net.embed.requires_grad_(False)
    _, net = fit(2, FSDPStrategy(ignored_modules=[net.embed]), net)
    assert not hasattr(net.embed.weight, "full_tensor")
    other = Net()
    with torch.device("meta"):
        other.extra = BareParameter()
    with refused(ValueError, says=("'extra.weight'", "BareParameter.reset_param")):
        fit(2, "fsdp", other)


class SavesInside(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0 and trainer.fit_loop.batch_idx == 4:
            trainer.save_checkpoint(self.path)


@pytest.mark.world_size(2)
def test_a_file_saved_within_an_accumulation_resumes_under_every_strategy(tmp_path: Path) -> None:
    path = tmp_path / "inside.ckpt"
    whole_run = whole(fit(1, "auto", samples=48, accumulate_grad_batches=4)[1])
    for saves in ("fsdp", "ddp", FSDPStrategy(state_dict_type="sharded")):
        # Folders, in the background.
        plugins = AsyncCheckpointIO() if isinstance(saves, FSDPStrategy) else None
        saved = fit(2, saves, samples=48, accumulate_grad_batches=4, callbacks=[SavesInside(path)], plugins=plugins)
        torch.testing.assert_close(whole(saved[1]), whole_run)
        for resumes in ("fsdp", "ddp"):
            trainer, net = quiet_trainer(resumes), Net()
            with torch.no_grad():
                net.head.weight.add_(1.0)
            trainer.fit(net, loader(4, 48), loader(4, 16), ckpt_path=path)
            torch.testing.assert_close(whole(net), whole_run)
        assert Net.load_from_checkpoint(path).state_dict().keys() == whole_run.keys()


class FailsInside(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0 and trainer.fit_loop.batch_idx == 4:
            raise RuntimeError("on purpose")


@pytest.mark.world_size(2)
def test_a_file_saved_after_an_error_has_the_gradients_of_its_accumulation(tmp_path: Path) -> None:
    whole_run = whole(fit(1, "auto", samples=48, accumulate_grad_batches=4)[1])
    saves = OnExceptionCheckpoint(tmp_path)
    options = {"callbacks": [FailsInside(), saves], "enable_checkpointing": True}
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(2, "fsdp", samples=48, accumulate_grad_batches=4, **options)
    trainer, net = quiet_trainer("fsdp"), Net()
    trainer.fit(net, loader(4, 48), loader(4, 16), ckpt_path=saves.ckpt_path)
    torch.testing.assert_close(whole(net), whole_run)


def quiet_trainer(strategy: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=0.5,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.blocks = nn.Linear(5, 8), nn.Sequential(Block(8), Block(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x))

    def score(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x))


def train_with_fabric(devices: int, strategy: Any, folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    module = Plain()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    model.mark_forward_method("score")
    norms = []
    for index, (x, y) in enumerate(fabric.setup_dataloaders(loader(8 // devices, 48))):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward((model(x) if index % 3 else model.score(x)).sub(y).pow(2).mean() / 2)
        if index % 2:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5))
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "steps": 3}
    fabric.save(folder / f"{devices}.ckpt", state)
    before = whole(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    # Also what the other run has written.
    fabric.load(next(iter(sorted(folder.iterdir()))), state | {"steps": 0})
    torch.testing.assert_close(whole(module), before)
    return before, norms  # type: ignore[return-value]


@pytest.mark.world_size(2)
def test_fabric_trains_saves_and_loads(tmp_path: Path) -> None:
    expected = train_with_fabric(2, "ddp", tmp_path)
    torch.testing.assert_close(train_with_fabric(2, "fsdp", tmp_path), expected)


@pytest.mark.world_size(2)
def test_an_optimizer_that_has_a_state_from_the_start_is_made_after_the_module_is_set_up() -> None:
    def trained(strategy: str) -> dict[str, Tensor]:
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        before = torch.optim.Adagrad(module.parameters(), lr=0.1)
        model = fabric.setup_module(module)
        if strategy == "fsdp":
            with refused(ValueError, fix="of the module that fabric.setup_module() returns"):
                fabric.setup_optimizers(before)
        optimizer = fabric.setup_optimizers(torch.optim.Adagrad(model.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(2, 3)).pow(2).sum())
        optimizer.step()
        return whole(module)

    torch.testing.assert_close(trained("fsdp"), trained("ddp"))


@pytest.mark.world_size(2)
def test_gradients_are_clipped_by_any_norm_where_a_process_has_no_part_of_one() -> None:
    def clipped(strategy: str, norm_type: Any) -> tuple[dict[str, Tensor], Tensor]:
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        module = nn.Linear(3, 1)  # One row, which the first process has.
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(2, 3)).pow(2).sum())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.1, norm_type=norm_type)
        optimizer.step()
        return whole(module), norm

    for norm_type in (math.inf, "inf", 1):
        torch.testing.assert_close(clipped("fsdp", norm_type), clipped("ddp", norm_type))


@pytest.mark.parametrize(
    ("arguments", "error", "argument"),
    [
        ({"sharding_strategy": "FULL_SHART"}, ValueError, "sharding_strategy"),
        ({"auto_wrap_polisy": {Block}}, TypeError, "auto_wrap_polisy"),
        ({"auto_wrap_policy": {"Block"}}, TypeError, "auto_wrap_policy"),
        ({"use_orig_params": False}, ValueError, "use_orig_params"),
        ({"param_init_fn": len}, TypeError, "param_init_fn"),
        ({"backward_prefetch": "BACKWARD_POST"}, ValueError, "backward_prefetch"),
        ({"device_mesh": (2, 2)}, ValueError, "device_mesh"),
        ({"device_mesh": (2, 2, 2), "sharding_strategy": "HYBRID_SHARD"}, ValueError, "device_mesh"),
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload"),
        ({"mixed_precision": "bf16"}, TypeError, "mixed_precision"),
        ({"state_dict_type": "local"}, ValueError, "state_dict_type"),
        ({"ignored_modules": [torch.ones(1)]}, TypeError, "ignored_modules"),
        ({"ignored_modules": nn.Linear(1, 1)}, TypeError, "ignored_modules"),
        ({"activation_checkpointing": True}, TypeError, "activation_checkpointing"),
        ({"find_unused_parameters": True}, TypeError, "find_unused_parameters"),
        ({"timeout": 5}, TypeError, "timeout"),
    ],
)
def test_arguments_that_fsdp2_does_not_have_are_refused(arguments: Any, error: type, argument: str) -> None:
    with refused(error, argument):
        FSDPStrategy(**arguments)


def test_the_precision_of_fsdp1_reduces_in_the_type_it_computes_in() -> None:
    for given, reduced in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        precision = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=given)
        policy = FSDPStrategy(mixed_precision=precision).shards.mixed_precision  # type: ignore[arg-type]
        assert policy.reduce_dtype == reduced


def test_an_offload_policy_that_offloads_nothing_is_no_offload() -> None:
    for nothing in (fsdp.CPUOffload(offload_params=False), fsdp.OffloadPolicy(), False, None):
        assert not FSDPStrategy(cpu_offload=nothing).cpu_offload  # type: ignore[arg-type]
    for everything in (fsdp.CPUOffload(offload_params=True), fsdp.CPUOffloadPolicy(), True):
        assert FSDPStrategy(cpu_offload=everything).cpu_offload  # type: ignore[arg-type]


def hooked() -> Net:
    net = Net()
    net.embed.weight.register_hook(torch.zeros_like)
    return net


class EarlyOptimizer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.AdamW(self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class ReplacesLayers(MixedPrecision):
    """As 8-bit floats do."""

    can_be_sharded = False


def of_matrices(parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr)


def of_few_bits(module: str) -> type[torch.optim.AdamW]:
    """Return an optimizer of the name that another package has."""
    return type("AdamW8bit", (torch.optim.AdamW,), {"__module__": module})


@pytest.mark.parametrize(
    ("strategy", "net", "options", "says"),
    [
        (FSDPStrategy(auto_wrap_policy={nn.LSTM}), Net, {}, r"auto_wrap_policy=\{LSTM\}.* has no such module"),
        ("fsdp", lambda: Net(optimizer=torch.optim.Adafactor), {}, "Adafactor and strategy='fsdp'"),
        ("fsdp", lambda: Net(optimizer=of_matrices), {}, "Muon and strategy='fsdp': it computes with whole"),
        ("fsdp", lambda: Net(optimizer=of_few_bits("bitsandbytes.optim.adamw")), {}, "its kernels take plain tensors"),
        ("fsdp", lambda: Net(optimizer=of_few_bits("torchao.optim.adam")), {}, "depends on the number of processes"),
        ("fsdp", Net, {"precision": "bf16-true"}, "Use 'bf16-mixed'"),
        ("fsdp", Net, {"plugins": MixedPrecision("bf16-mixed", "cpu")}, r"FSDPPrecision\('bf16-mixed'\)"),
        ("fsdp", Net, {"plugins": ReplacesLayers("bf16-mixed", "cpu")}, "whose parameters fully_shard gathers"),
        (FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), Net, {}, "a mesh of 4 processes"),
        ("fsdp", hooked, {}, "'embed.weight' has a hook.*on_after_backward"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_training(strategy: Any, net: Any, options: Any, says: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=says):
        fit(1, strategy, model, **options)
    assert not model.losses


@pytest.mark.world_size(2)
def test_what_processes_cannot_do_together_is_refused_by_name() -> None:
    with refused(RuntimeError, says=("training_step", "batch 1")):
        fit(2, "fsdp", Skips())
    with pytest.raises(ValueError, match="memory='auto'"):
        fit(2, "fsdp", memory="auto")
    with pytest.raises(ValueError, match=r"make optimizers and lists of parameters there, not in __init__\(\)"):
        fit(2, "fsdp", EarlyOptimizer())
    sharded = fit(2, "fsdp", max_epochs=1)[1]
    with refused(ValueError, "strategy", says="part of the parameter"):
        fit(2, "ddp", sharded)


class Tagged(Net):
    """Parameters have attributes that say how they are trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.weight.is_fixed = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fixed = [parameter for parameter in self.parameters() if getattr(parameter, "is_fixed", False)]
        others = [parameter for parameter in self.parameters() if not getattr(parameter, "is_fixed", False)]
        return torch.optim.AdamW([{"params": fixed, "lr": 0.0}, {"params": others}], lr=0.01)


class TaggedOnMeta(Tagged):
    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


def test_attributes_of_parameters_are_those_of_their_shards() -> None:
    for net in (Tagged(), TaggedOnMeta()):
        trainer = fit(1, "fsdp", net, max_epochs=1)[0]
        assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [3, 19]
        torch.testing.assert_close(whole(net)["blocks.0.norm.weight"], torch.ones(8))


class ReadsPart(Net):
    """Does with a shard what only a whole tensor can."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.does = does

    def on_train_batch_end(self, *args: Any) -> None:
        self.does(self)


def test_errors_of_torch_on_shards_say_what_to_do() -> None:
    for does, says in (
        (lambda net: net.embed.weight.detach().numpy(), "full_tensor"),
        (lambda net: copy.deepcopy(net), "Copy it in setup"),
        (lambda net: net.embed(torch.ones(1, 5)), r"Call a part itself, part\(x\)"),
    ):
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            fit(1, "fsdp", ReadsPart(does))
        assert re.search(says, "".join(caught.value.__notes__))


class Fails(Net):
    """Raises once, in the middle of a forward or of an accumulation."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where: str | None = where

    def fail(self, where: str) -> None:
        if self.where == where and self.trainer.total_batch_idx == 2:
            self.where = None
            raise RuntimeError("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.blocks[0](self.embed(batch[0]))
        self.fail("forward")
        return nn.functional.mse_loss(self.head(self.blocks[2](self.blocks[1](hidden))), batch[1])

    def on_after_backward(self) -> None:
        self.fail("backward")


class LeavesEpoch(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


def after_failure(devices: int, strategy: str, where: str) -> dict[str, Tensor]:
    net = Fails(where)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(devices, strategy, net)
    return whole(fit(devices, strategy, net)[1])


@pytest.mark.world_size(2)
def test_nothing_is_left_of_a_step_that_failed_or_an_accumulation_that_was_dropped() -> None:
    for where in ("forward", "backward"):
        torch.testing.assert_close(after_failure(2, "fsdp", where), after_failure(1, "auto", where))
    assert_equal(fit(1, "auto", LeavesEpoch()), fit(2, "fsdp", LeavesEpoch()))
