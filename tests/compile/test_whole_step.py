"""``Trainer(compile="step")``: one graph from the batch to the new weights, and the training of the plain loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD, Adam, AdamW, Optimizer, Rprop

import hasten as L
from hasten._lib import torch_private
from hasten.compile.settings import CompileSettings
from hasten.compile.whole_step import Clipping, Update, _update
from hasten.loops import prepare
from hasten.record import pace
from tests.compile.test_compile import Losses, Net, graphs
from tests.models import loader, quiet, same_weights
from tests.refusals import refused, warned

# Traces as every backend does, and computes with torch's own operations.
WHOLE = {"backend": "eager", "step": True}
# Where the graph of a validation does not matter, which takes as long to trace as a step.
TRAINED = {"limit_val_batches": 0}
# Where neither it nor a second one for a short last batch matters.
SHORT = {"max_epochs": 1, "limit_train_batches": 6, **TRAINED}
Make = Callable[[list[Tensor]], Optimizer]


def momentum(weights: list[Tensor]) -> Optimizer:
    """Return an optimizer that is traced in a fraction of the time of AdamW."""
    return SGD(weights, lr=0.1, momentum=0.9)


class Model(Net):
    """Without dropout, whose draws a compiled run may change; one layer is never used."""

    def __init__(self, make: Make = momentum, *, schedule: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.unused = nn.Linear(2, 2)
        self.make, self.schedule = make, schedule

    def configure_optimizers(self) -> Any:
        optimizer = self.make(list(self.parameters()))
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fitted(make: Callable[[], Net] = Model, **arguments: Any) -> tuple[Any, Any, list[float]]:
    """Train over two epochs with a short last batch and a validation."""
    L.seed_everything(1, verbose=False)
    module, losses = make(), Losses()
    more = arguments.pop("callbacks", [])
    trainer = quiet(**{"max_epochs": 2, "callbacks": [losses, *more], "log_every_n_steps": 2, **arguments})
    trainer.fit(module, loader(42), loader(18))
    return module, trainer, losses.values


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}")


def trained_alike(make: Callable[[], Net] = Model, **arguments: Any) -> tuple[Any, Any]:
    """Train plainly and in whole steps, to the same losses and weights; return module and Trainer of the latter."""
    compile = arguments.pop("compile", WHOLE)
    plain, before, plain_losses = fitted(make, **arguments)
    module, trainer, losses = fitted(make, compile=compile, **arguments)
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert_close(module, plain)
    assert trainer.global_step == before.global_step
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == pytest.approx(
        {name: value.item() for name, value in before.callback_metrics.items()}, rel=1e-3, abs=1e-5
    )
    return module, trainer


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (lambda weights: SGD(weights, lr=0.1), {}),
        (
            lambda weights: SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            {"gradient_clip_val": 0.2},
        ),
        (lambda weights: AdamW(weights, lr=0.01), {"fused_optimizer": True}),
        (
            lambda weights: Adam(weights, lr=0.01, amsgrad=True, weight_decay=0.1, maximize=True),
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ),
        (
            lambda weights: AdamW([{"params": weights[:2], "lr": 0.1}, {"params": weights[2:], "betas": (0.5, 0.9)}]),
            {"resident": True, "profiler": "simple"},
        ),
    ],
)
def test_losses_weights_and_logged_values_are_those_of_the_plain_loop(make: Make, arguments: dict[str, Any]) -> None:
    module, trainer = trained_alike(lambda: Model(make, schedule=True), **arguments)
    # The learning rate changed in each step.
    assert graphs() == 2
    report = trainer.compile_report
    assert (report.graph_breaks, report.recompiles, report.left) == ({}, (), {})
    assert sorted(report.compiled) == ["Model.training_step, backward and step", "Model.validation_step"]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_powers_of_adam_are_not_in_a_graph_of_the_cpu() -> None:
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compile = {"backend": backend, "step": True}
    fitted(lambda: Model(AdamW), compile=compile, max_epochs=1, limit_train_batches=3, limit_val_batches=0)
    assert any("lerp" in name for name in traced)
    assert [name for name in traced if "pow" in name] == []


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_the_arithmetic_of_adam_is_that_of_torch(kind: type[Adam], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in ((7,), (3, 2), ())]
    own, theirs = [[start.clone().requires_grad_() for start in starts] for _ in range(2)]
    optimizers = [kind(weights, lr=0.01, betas=(0.8, 0.99), foreach=False, **options) for weights in (own, theirs)]
    for number in range(5):
        for each in zip(own, theirs, strict=True):
            gradient = torch.randn(each[0].shape)
            for weight in each:
                weight.grad = gradient.clone()
        optimizers[1].step()
        if number == 0:
            optimizers[0].step()
            # Weights of a group may have made different numbers of steps.
            for optimizer in optimizers:
                optimizer.state[optimizer.param_groups[0]["params"][1]]["step"].fill_(10_000)
            continue
        groups = Update(optimizers[0], records=False).inputs()
        assert groups is not None
        with torch.no_grad():
            _update(groups, [weight.grad for weight in own], is_sgd=False)
        torch.testing.assert_close(own, theirs, rtol=2e-7, atol=1e-7)


def test_changes_in_place_survive_the_tracing_of_backward() -> None:
    compile = {"backend": "aot_eager", "step": True}
    trained_alike(lambda: Model(schedule=True), compile=compile, gradient_clip_val=0.5, **TRAINED)


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 8:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, _, losses = fitted(lambda: Model(schedule=True), compile=WHOLE, callbacks=[Save()])
    L.seed_everything(5, verbose=False)
    module, rest = Model(schedule=True), Losses()
    trainer = quiet(max_epochs=2, callbacks=[rest], log_every_n_steps=2, compile=WHOLE)
    trainer.fit(module, loader(42), loader(18), ckpt_path=tmp_path / "middle.ckpt")
    assert rest.values == losses[8:]
    assert same_weights(module, whole)


def test_steps_of_a_run_that_is_recorded_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any other step would be timed in parts, with another rounding.
    monkeypatch.setattr(pace, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(pace, "_SECONDS", 0.0)
    whole, _, losses = fitted(compile="step", **SHORT)
    recorded, trainer, same_losses = fitted(compile="step", logger=L.loggers.CSVLogger(tmp_path), **SHORT)
    assert losses == same_losses
    assert same_weights(recorded, whole)
    assert trainer.compile_report.graphs == 1


def test_a_second_fit_compiles_nothing_again_and_keeps_nothing_alive() -> None:
    module, trainer, _ = fitted(compile=WHOLE)
    assert graphs() == 2
    quiet(max_epochs=1, compile=WHOLE).fit(module, loader(42), loader(18))
    assert graphs() == 2
    kept = weakref.ref(trainer.optimizers[0])
    module.trainer = None
    del trainer
    gc.collect()
    assert kept() is None


# -- steps that are computed in parts


class Indexed(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, "train") * (1 + batch_idx % 2)


class Reading(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, "train")
        assert loss.item() > 0
        return loss


class Weighing(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch, "train"), "loss_weight": 1}


class Passing(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared(batch, batch_idx)

    def shared(self, batch: Any, number: int) -> Any:
        return self.loss(batch, "train")


class Inheriting(Passing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [Passing, Inheriting])
def test_an_index_that_is_only_passed_on_leaves_the_step_whole(make: type[Net]) -> None:
    _, trainer = trained_alike(make, **TRAINED)
    report = trainer.compile_report
    assert (report.graphs, report.recompiles, report.left) == (1, (), {})


class IndexedThere(Passing):
    def shared(self, batch: Any, number: int) -> Any:
        return self.loss(batch, "train") * (1 + number % 2)


@pytest.mark.parametrize("make", [Indexed, IndexedThere, Reading, Weighing])
def test_a_step_that_cannot_be_one_graph_trains_as_with_compile_true_and_says_so(make: type[Net]) -> None:
    with warned(UserWarning, says="cannot be one graph"):
        _, trainer = trained_alike(make, **TRAINED)
    assert f"{make.__name__}.training_step, backward and step" in trainer.compile_report.left


class Measured(Model):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = pytest.importorskip("torchmetrics").classification.MulticlassAccuracy(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        return self.loss(batch, "train")


class Updated(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch, "train"), "scores": self(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.accuracy.update(outputs["scores"], batch[1])
        self.log("accuracy", self.accuracy)


def test_a_metric_that_ends_the_whole_step_is_named_and_stands_in_a_hook_instead() -> None:
    with warned(UserWarning, fix="self.accuracy.update(...)", says="stays Python"):
        trained_alike(Measured, **SHORT)
    _, trainer = trained_alike(Updated, **SHORT)
    assert trainer.compile_report.left == {}


def test_a_hook_between_backward_and_step_that_comes_later_is_called() -> None:
    class Norms(L.Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.norms.append(module.net[0].weight.grad.norm().item())

    class Late(L.Callback):
        def __init__(self) -> None:
            self.late = Norms()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                trainer.callbacks.append(self.late)

    plain, compiled = Late(), Late()
    one, _, _ = fitted(callbacks=[plain], **TRAINED)
    other, _, _ = fitted(callbacks=[compiled], compile=WHOLE, **TRAINED)
    assert len(compiled.late.norms) == len(plain.late.norms) > 0
    assert compiled.late.norms == pytest.approx(plain.late.norms, rel=1e-3)
    assert_close(other, one)


def test_layers_that_are_thawed_later_are_trained() -> None:
    class Thaw(L.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(False)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(trainer.current_epoch > 0)

    before = Model().net[0].weight.detach().clone()
    module, trainer = trained_alike(callbacks=[Thaw()], **TRAINED)
    assert trainer.compile_report.left == {}
    assert not torch.equal(module.net[0].weight, before)
    assert len(module.optimizers().optimizer.state) == 6


def test_options_that_change_each_step_are_left_to_python_or_traced() -> None:
    class Cycle(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.optimizers[0].param_groups[0]["betas"] = (0.8 + 0.01 * batch_idx, 0.999)

    trained_alike(lambda: Model(AdamW), callbacks=[Cycle()], **TRAINED)


def test_an_error_of_the_step_is_shown_as_its_own() -> None:
    class Wrong(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0][:, :3]).mean()

    with pytest.raises(RuntimeError) as caught:
        fitted(Wrong, compile=WHOLE)
    assert "shapes cannot be multiplied" in str(caught.value)


# -- refused before training


class Untouched(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("too late")


class ByHand(Untouched):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(Untouched):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        return None


class Looks(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        return None


def hooked(weights: list[Tensor]) -> Optimizer:
    optimizer = SGD(weights, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (ByHand, {}),
        (Clips, {"gradient_clip_val": 1.0}),
        (Untouched, {"callbacks": [Looks()]}),
        (Untouched, {"accumulate_grad_batches": 2}),
        (Untouched, {"micro_batch": 2}),
        (Untouched, {"precision": "bf16-mixed"}),
        (Untouched, {"on_bad_loss": "skip"}),
        (Untouched, {"detect_anomaly": True}),
        (lambda: Untouched(lambda weights: Rprop(weights)), {}),
        (lambda: Untouched(hooked), {}),
        (lambda: Untouched(lambda weights: SGD(weights, lr=0.1, differentiable=True)), {}),
    ],
)
def test_steps_with_code_within_are_refused_before_training(make: Any, arguments: dict[str, Any]) -> None:
    with refused(ValueError, "compile"):
        quiet(compile=WHOLE, max_epochs=1, **arguments).fit(make(), loader())


def test_the_word_is_checked_at_once() -> None:
    with refused(ValueError, "compile"):
        L.Fabric(accelerator="cpu", compile="step")
    with refused(ValueError, "compile"):
        quiet(compile={"step": True, "regional": True})
    with refused(TypeError, "compile['step']"):
        quiet(compile={"step": "yes"})
    # Evaluations have no such step.
    quiet(compile=WHOLE).validate(ByHand(), loader(18), verbose=False)


@pytest.mark.parametrize("by_value", [False, True])
def test_clipping_is_that_of_torch(by_value: bool) -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    for factor in (0.01, 10.0):
        weights[0].grad, weights[1].grad = torch.arange(3.0) * factor, torch.arange(2.0) * factor
        clipped = Clipping(0.7, by_value=by_value).of([each.grad for each in weights])
        clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
        clip(weights, 0.7)
        assert clipped[2] is None
        torch.testing.assert_close(clipped[:2], [weights[0].grad, weights[1].grad])


def test_recorded_steps_begin_once_each_and_their_tensors_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    marked: list[Tensor] = []
    monkeypatch.setattr(CompileSettings, "cuda_graphs", property(lambda self: True))
    monkeypatch.setattr(prepare, "check_possible", lambda *_: None)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    monkeypatch.setattr(torch_private, "mark_address_as_static", marked.append)
    module, _ = trained_alike(max_epochs=1, limit_train_batches=8, limit_val_batches=0)
    # The first step is computed in parts, of which each begins one.
    assert len(begun) == 8 + 1
    state = module.optimizers().optimizer.state[module.net[0].weight]
    assert {id(tensor) for tensor in state.values()} <= {id(tensor) for tensor in marked}


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["step", {"mode": "reduce-overhead", "step": True}])
def test_whole_steps_on_a_gpu_train_to_the_weights_of_the_plain_loop(compile: Any) -> None:
    trained_alike(
        lambda: Model(schedule=True), compile=compile, fused_optimizer=True, accelerator="gpu", gradient_clip_val=0.5
    )
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.slow
def test_weight_decay_is_what_was_written_in_compiled_code() -> None:
    # Not with another backend: torch's compiler makes one operation of a gradient and its decay, and loses the factor.
    class Line(Model):
        def __init__(self) -> None:
            super().__init__(lambda weights: SGD(weights, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01))
            self.net, self.unused = nn.Linear(8, 2), nn.Identity()

    trained = []
    for compile in (None, "step"):
        L.seed_everything(1, verbose=False)
        trained.append(Line())
        quiet(max_epochs=1, compile=compile).fit(trained[-1], loader(24))
    assert_close(*trained)


@pytest.mark.parametrize(("name", "make"), [("OfSGD", partial(SGD, lr=0.1, momentum=0.9)), ("OfAdamW", AdamW)])
def test_a_schedule_that_cycles_the_momentum_is_named_with_what_to_write(name: str, make: Any) -> None:
    class Cycling(Model):
        cycle_momentum = True

        def configure_optimizers(self) -> Any:
            optimizer = self.make(list(self.parameters()))
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=30, cycle_momentum=self.cycle_momentum
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Steady(Cycling):
        cycle_momentum = False

    # A program is warned once for each step of each class.
    Cycling.__name__ = name
    # What the compiler has learned in an earlier test would need no other graph here.
    torch.compiler.reset()
    with warned(UserWarning, fix="cycle_momentum=False"):
        trained_alike(lambda: Cycling(make), **SHORT)
    _, trainer = trained_alike(lambda: Steady(make), **SHORT)
    assert trainer.compile_report.recompiles == ()


def test_a_metric_whose_code_is_no_graph_is_named() -> None:
    class Gathering(Model):
        def __init__(self) -> None:
            super().__init__()
            metric = pytest.importorskip("torchmetrics").MeanMetric()
            metric.update = lambda value: value.sum().item() > 0 or None
            self.mean = metric

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean.update(batch[0])
            return self.loss(batch, "train")

    with warned(UserWarning, fix="self.mean.update(...)", says=("cannot be one graph", "self.mean of torchmetrics")):
        fitted(Gathering, max_epochs=1, compile=WHOLE)
