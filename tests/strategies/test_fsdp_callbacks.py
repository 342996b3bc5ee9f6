"""Callbacks and speed-ups under FSDP: averages of weights, and whatever else reads parameters, as on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.test_fsdp import Net, fit, loader, whole

import hasten as L
from hasten.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from hasten.loops.bad_loss import BadLossError
from hasten.optim import muon
from hasten.strategies import FSDPStrategy
from hasten.tuner import Tuner
from hasten.utilities import grad_norm

AVERAGES: dict[str, Callable[[], Any]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "mean": lambda: WeightAveraging(),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1, annealing_epochs=1),
}


def close(ours: Any, expected: Any, tolerance: float) -> None:
    found = whole(ours)
    for name, value in whole(expected).items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=tolerance)


@pytest.mark.world_size(2)
def test_averages_are_those_of_one_process_and_each_process_holds_its_part() -> None:
    for make in AVERAGES.values():
        (one, expected), (many, ours) = fit(1, "auto", callbacks=make()), fit(2, "fsdp", callbacks=make())
        # The module holds the average; what was validated and logged is that of the average, too.
        close(ours, expected, 1e-6)
        for name, value in one.callback_metrics.items():
            torch.testing.assert_close(many.callback_metrics[name], value, atol=1e-6, rtol=1e-6)
        average = many.callbacks[0]._average_model  # type: ignore[attr-defined]
        tensors = list(average.parameters() if isinstance(average, torch.nn.Module) else average._averages.values())
        assert sum(t.numel() for t in tensors) <= 0.55 * sum(p.numel() for p in ours.parameters())


@pytest.mark.world_size(2)
def test_averages_are_saved_whole_or_in_shards_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    # The mean differs from the other average of all weights in how it adds, not in how it is saved.
    for name, kinds in (("ema", ("full", "sharded")), ("mean", ("sharded",)), ("swa", ("full", "sharded"))):
        make = AVERAGES[name]
        # A step an epoch.
        _, expected = fit(2, "fsdp", callbacks=make(), max_epochs=3, samples=16)
        for kind in kinds:
            path = str(tmp_path / f"{name}-{kind}.ckpt")
            first, averaged = fit(2, FSDPStrategy(state_dict_type=kind), callbacks=make(), max_epochs=2, samples=16)
            first.save_checkpoint(path)
            if name != "swa":
                # Whoever loads the file gets the average, and the training weights are beside it.
                loaded = Net.load_from_checkpoint(path)
                close(loaded, averaged, 1e-7)
            close(resumed(2, "fsdp", path, make(), samples=16), expected, 1e-7)
            # One process reads what two have written.
            close(resumed(1, "auto", path, make(), samples=16), expected, 1e-5)
            first.strategy.barrier()


def resumed(devices: int, strategy: str, path: str, callback: Any, samples: int = 32) -> Net:
    net = Net()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=3, accumulate_grad_batches=2,
        gradient_clip_val=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callback,
    )  # fmt: skip
    trainer.fit(net, loader(8 // devices, samples), loader(8 // devices, 16), ckpt_path=path)
    return net


# -- what else reads or changes parameters


class Growing(Net):
    """Trains its blocks from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Measured(Net):
    """Logs the norm of each gradient."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class Bad(Net):
    """One process has a loss that is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        is_bad = self.current_epoch == 0 and batch_idx == 2 and self.global_rank == self.trainer.world_size - 1
        return loss * torch.nan if is_bad else loss


class Switching(torch.optim.SGD):
    """Evaluates with a running mean of the weights that it trains, which it keeps in its state."""

    trains = True

    @torch.no_grad()
    def _exchange(self, trains: bool) -> None:
        if self.trains != trains:
            self.trains = trains
            for p in self.param_groups[0]["params"]:
                if "mean" in self.state[p]:
                    kept = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"].copy_(kept)

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("mean", p.clone()).lerp_(p, 0.5)
        return result


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp_sharded"])
def test_callbacks_guards_and_norms_are_those_of_one_process(strategy: str) -> None:
    cases: list[tuple[type[Net], dict[str, Any]]] = [
        (Growing, {"callbacks": lambda: BackboneFinetuning(1, lambda epoch: 1.5), "max_epochs": 3}),
        (Net, {"callbacks": lambda: GradientAccumulationScheduler({0: 1, 1: 2}), "accumulate_grad_batches": 1}),
        (Measured, {}),
        (Bad, {"on_bad_loss": "skip"}),
        (Bad, {"on_bad_loss": "rewind"}),
        (Net, {"micro_batch": 2}),
        (Net, {"memory": "full"}),
    ]
    if strategy == "ddp_sharded":
        cases += [(Net, {"callbacks": make}) for make in AVERAGES.values()]
        cases += [(Net, {"callbacks": lambda: ModelPruning("l1_unstructured", amount=0.3)})]
    else:
        cases += [(partial_net(Switching), {})]
    for kind, options in cases:

        def made(options: dict[str, Any] = options) -> dict[str, Any]:
            return {key: value() if callable(value) else value for key, value in options.items()}

        (one, expected), (many, ours) = fit(1, "auto", kind(), **made()), fit(2, strategy, kind(), **made())
        close(ours, expected, 1e-5)
        assert one.callback_metrics.keys() == many.callback_metrics.keys()
        for name, value in one.callback_metrics.items():
            torch.testing.assert_close(many.callback_metrics[name], value, atol=1e-5, rtol=1e-4)


def partial_net(optimizer: type[torch.optim.Optimizer]) -> Any:
    return lambda: Net(optimizer=optimizer)


class Loads(Net):
    batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(self.batch_size, 48)


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.LazyLinear(8)  # type: ignore[assignment]


@pytest.mark.world_size(2)
def test_what_needs_whole_parameters_is_refused_by_name() -> None:
    class ByMuon(Net):
        def configure_optimizers(self) -> Any:
            return muon(self)

    trainer, net = fit(2, "fsdp", max_epochs=1)
    for said, call in (
        ("ModelPruning: with strategy='fsdp'", lambda: fit(2, "fsdp", callbacks=ModelPruning("l1_unstructured"))),
        ("MuonAdamW and strategy='fsdp'", lambda: fit(2, "fsdp", ByMuon())),
        ("'embed.weight', of a lazy layer", lambda: fit(2, "fsdp", Lazy())),
        (r"Trainer\(batch_size='auto'\): with strategy='fsdp'", lambda: fit(2, "fsdp", batch_size="auto")),
        ("scale_batch_size: with strategy='fsdp'", lambda: Tuner(trainer).scale_batch_size(Loads())),
        (r"Net: its parameters are divided over processes", lambda: net.to_onnx("never.onnx", torch.zeros(2, 5))),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    # The gradient is that of all processes.
    with pytest.raises(BadLossError, match=r"is nan|its gradient is not"):
        fit(2, "fsdp", Bad(), on_bad_loss="stop")


class SavesInside(Net):
    """Saves a checkpoint after the last backward of an accumulation."""

    path = ""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 2 and not Path(self.path).exists():
            self.trainer.save_checkpoint(self.path)


@pytest.mark.world_size(2)
def test_a_checkpoint_inside_a_batch_has_what_was_accumulated_before(tmp_path: Path) -> None:
    for strategy in ("fsdp", "ddp_sharded"):
        SavesInside.path = str(tmp_path / f"{strategy}.ckpt")
        _, expected = fit(2, strategy, SavesInside(), max_epochs=3)
        close(resumed(2, strategy, SavesInside.path, None), expected, 1e-7)


class WithRate(Net):
    lr = 0.01

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.world_size(2)
def test_a_search_for_a_learning_rate_leaves_all_as_it_was() -> None:
    for strategy in ("fsdp", "ddp_sharded"):
        _, expected = fit(2, strategy, WithRate())
        searched, before = WithRate(), WithRate().state_dict()
        trainer, _ = fit(2, strategy, max_epochs=1)
        Tuner(trainer).lr_find(searched, loader(4, 48), num_training=8, update_attr=False)
        assert all(torch.equal(value, before[name]) for name, value in searched.state_dict().items())
        _, ours = fit(2, strategy, searched)
        close(ours, expected, 1e-7)
        # Inside of fit, the module is divided already.
        finders = [LearningRateFinder(num_training_steps=8) for _ in range(2)]
        (_, one), (_, two) = (
            fit(devices, name, WithRate(), callbacks=finder)
            for devices, name, finder in zip((1, 2), ("auto", strategy), finders, strict=True)
        )
        assert one.lr == pytest.approx(two.lr)
        close(two, one, 1e-4)
