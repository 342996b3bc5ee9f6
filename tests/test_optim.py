"""configure_optimizers: every form it may return, and when its schedulers step."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hasten as L
from hasten.callbacks import GradientAccumulationScheduler
from hasten.optim import HastenOptimizer, LRSchedulerConfig
from tests.models import Classifier, Manual, loader, quiet, same_weights
from tests.refusals import refused, warned


class Configured(Classifier):
    """Returns what ``make`` makes of an SGD with lr=1, and writes down its rate after each batch."""

    def __init__(self, make: Callable[[Any], Any], val: list[float] | None = None) -> None:
        super().__init__()
        self.make, self.val, self.rates = make, val or [1.0], []

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return self.make(self.optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_value", float(batch_idx))
        return 0.0 * self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.val is not None and self.val[0] is not None:
            self.log("val_value", self.val[min(self.current_epoch, len(self.val) - 1)])

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.optimizer.param_groups[0]["lr"])


class With(Classifier):
    """Trains with the optimizer that ``make`` makes."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def rates(make: Callable[[Any], Any], *, val: Any = None, **arguments: Any) -> list[float]:
    """Return the rate in each batch of 3 epochs of 4 batches, and the last one."""
    model = Configured(make, val)
    trainer = quiet(**{"max_epochs": 3, "limit_train_batches": 4, "num_sanity_val_steps": 0, **arguments})
    trainer.fit(model, loader(), loader(8))
    return [*model.rates, model.optimizer.param_groups[0]["lr"]]


def halve(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


ALWAYS = [1.0] * 13
EPOCHS = [1.0] * 3 + [0.5] * 4 + [0.25] * 4 + [0.125] * 2
STEPS = [0.5**k for k in range(1, 13)] + [0.5**12]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: o, ALWAYS),
        (lambda o: [o], ALWAYS),
        (lambda o: (o,), ALWAYS),
        (lambda o: ([o], []), ALWAYS),
        (lambda o: {"optimizer": o}, ALWAYS),
        (lambda o: {"optimizer": o, "lr_scheduler": None}, ALWAYS),
        (lambda o: ([o], [halve(o)]), EPOCHS),
        (lambda o: [[o], [halve(o)]], EPOCHS),
        (lambda o: ((o,), (halve(o),)), EPOCHS),
        (lambda o: ([o], halve(o)), EPOCHS),
        (lambda o: ([o], {"scheduler": halve(o)}), EPOCHS),
        (lambda o: {"optimizer": o, "lr_scheduler": halve(o)}, EPOCHS),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o)}}, EPOCHS),
        (lambda o: [{"optimizer": o, "lr_scheduler": halve(o)}], EPOCHS),
        (lambda o: ({"optimizer": o, "lr_scheduler": halve(o), "frequency": 1},), EPOCHS),
        (lambda o: ([o], [LRSchedulerConfig(halve(o))]), EPOCHS),
        (lambda o: ([o], [LRSchedulerConfig(halve(o), interval="step")]), STEPS),
        (lambda o: ([o], [{"scheduler": halve(o), "interval": "step"}]), STEPS),
        (lambda o: ([o], [{"scheduler": halve(o), "frequency": 2}]), [1.0] * 7 + [0.5] * 6),
        (
            lambda o: ([o], [{"scheduler": halve(o), "interval": "step", "frequency": 3}]),
            [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125],
        ),
        (
            lambda o: ([o], [halve(o), {"scheduler": lr_scheduler.ExponentialLR(o, 0.1), "frequency": 2}]),
            [1.0] * 3 + [0.5] * 4 + [0.025] * 4 + [0.0125] * 2,
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_forms(make: Any, expected: list[float]) -> None:
    assert rates(make) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_several_optimizers_and_schedulers_for_manual_optimization() -> None:
    class Several(Manual):
        def configure_optimizers(self) -> Any:
            self.made = [torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.1, 0.2, 0.3)]
            self.schedulers = [halve(optimizer) for optimizer in self.made]
            third = {"scheduler": self.schedulers[2], "name": "third"}
            return (
                {"optimizer": self.made[0], "lr_scheduler": self.schedulers[0]},
                {"optimizer": self.made[1]},
                {"optimizer": self.made[2], "lr_scheduler": third},
            )

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.lr_schedulers()[1].step()

    model = Several()
    trainer = quiet(limit_train_batches=2, max_epochs=2)
    trainer.fit(model, loader())
    assert trainer.optimizers == model.made
    assert [config.scheduler for config in trainer.lr_scheduler_configs] == model.schedulers[::2]
    assert [config.name for config in trainer.lr_scheduler_configs] == [None, "third"]
    # Only the user steps them.
    assert [o.param_groups[0]["lr"] for o in model.made] == pytest.approx([0.1, 0.2, 0.3 / 16])


def test_defaults_of_a_scheduler_config() -> None:
    watch = {"monitor": "train_value", "strict": False, "name": "n", "frequency": 2}
    model = Configured(lambda o: ([o], [halve(o), {"scheduler": lr_scheduler.ReduceLROnPlateau(o), **watch}]))
    trainer = quiet(limit_train_batches=1)
    trainer.fit(model, loader())
    plain, plateau = trainer.lr_scheduler_configs
    assert (plain.interval, plain.frequency, plain.monitor, plain.strict) == ("epoch", 1, None, True)
    assert (plain.reduce_on_plateau, plain.name) == (False, None)
    assert (plateau.reduce_on_plateau, plateau.monitor, plateau.strict) == (True, "train_value", False)
    assert (plateau.name, plateau.frequency) == ("n", 2)


# -- accumulation


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ({"interval": "step"}, {"accumulate_grad_batches": 3}, [1, 1, 0.5, 0.25] * 1),
        ({"interval": "step", "frequency": 2}, {"accumulate_grad_batches": 2}, [1, 0.5, 0.5, 0.25]),
        ({"interval": "epoch"}, {"accumulate_grad_batches": 3}, [1, 1, 1, 0.5]),
        ({"interval": "epoch"}, {"max_steps": 3}, [1, 1, 1, 1]),
    ],
)
def test_steps_are_those_of_the_optimizer(config: Any, arguments: Any, expected: list[float]) -> None:
    found = rates(lambda o: ([o], [{"scheduler": halve(o), **config}]), **{"max_epochs": 1, **arguments})
    assert found[: len(expected)] == expected[: len(found)]
    assert found[-1] == expected[-1]


# -- schedulers that watch a value


BY_STEP = {"interval": "step"}


def plateau(**config: Any) -> Callable[[Any], Any]:
    """Halve the rate at each value that is not better."""

    def make(optimizer: Any) -> Any:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": scheduler, "monitor": "val_value", **config}]

    return make


@pytest.mark.parametrize(
    ("config", "val", "arguments", "expected"),
    [
        # The first value is the best so far; then one that is better, one that is not.
        ({}, [1.0, 0.5, 2.0], {}, [1.0] * 12 + [0.5]),
        ({}, [1.0], {}, [1.0] * 8 + [0.5] * 4 + [0.25]),
        ({"monitor": "train_value"}, [1.0], {}, [1.0] * 8 + [0.5] * 4 + [0.25]),
        ({"frequency": 2}, [1.0], {"max_epochs": 4}, [1.0] * 16 + [0.5]),
        # train_value is 0, 1, 2, 3: no value is better than the first.
        ({**BY_STEP, "monitor": "train_value"}, [1.0], {"max_epochs": 1}, [1.0, 1.0, 0.5, 0.25, 0.125]),
        ({**BY_STEP, "monitor": "train_value", "frequency": 2}, [1.0],
         {"max_epochs": 1, "limit_train_batches": 6}, [1.0] * 4 + [0.5] * 2 + [0.25]),
        ({**BY_STEP, "monitor": "train_value"}, [1.0], {"max_epochs": 1, "accumulate_grad_batches": 2},
         [1.0] * 4 + [0.5]),
        ({**BY_STEP, "frequency": 2}, [1.0], {"val_check_interval": 2},
         [1.0] * 4 + [0.5] * 2 + [0.25] * 2 + [0.125] * 2 + [0.0625] * 2 + [0.03125]),
        ({}, [1.0], {"limit_val_batches": 0, "max_epochs": 1}, None),
        ({}, [None], {"max_epochs": 1}, None),
        ({}, [1.0], {"check_val_every_n_epoch": 2}, None),
        ({"frequency": 2}, [1.0], {"check_val_every_n_epoch": 2, "max_epochs": 4}, [1.0] * 16 + [0.5]),
    ],
)  # fmt: skip
def test_reduce_on_plateau(config: Any, val: Any, arguments: Any, expected: list[float] | None) -> None:
    if expected is not None:
        assert rates(plateau(**config), val=val, **arguments) == pytest.approx(expected)
        return
    with refused(ValueError, "monitor", fix="self.log('val_value', ...)", says="'train_value'") as e:
        rates(plateau(**config), val=val, **arguments)
    assert "Available metrics are: ['train_value']." in str(e.value)
    assert "Did you mean" not in str(e.value)  # It is of another stage.
    assert "interval and frequency" in str(e.value)


def test_a_value_that_is_absent_is_a_warning_where_asked() -> None:
    with warned(RuntimeWarning, says="conditioned on metric nothing"):
        assert rates(plateau(monitor="nothing", strict=False)) == ALWAYS


def test_monitor_beside_the_scheduler() -> None:
    def make(optimizer: Any, scheduler: Any = None, monitor: str = "val_value") -> Any:
        scheduler = scheduler or lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": monitor}

    in_a_dict = lambda o: make(o, {"scheduler": make(o)["lr_scheduler"]})  # noqa: E731
    in_a_config = lambda o: make(o, LRSchedulerConfig(make(o)["lr_scheduler"]))  # noqa: E731
    nearer = lambda o: make(o, plateau()(o)[1][0], monitor="nothing")  # noqa: E731
    for kind in (make, in_a_dict, in_a_config, nearer):
        assert rates(kind) == [1.0] * 8 + [0.5] * 4 + [0.25]


def test_a_frequency_beside_the_scheduler_is_named() -> None:
    def make(optimizer: Any, frequency: int) -> Any:
        scheduler = lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "frequency": frequency}

    line = '{"scheduler": scheduler, "frequency": 3}'
    with warned(RuntimeWarning, says="'frequency' beside the scheduler", fix=line):
        every = rates(lambda optimizer: make(optimizer, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert rates(lambda optimizer: make(optimizer, 1)) == every
    with warned(RuntimeWarning, says="the key 'frequency'"):
        rates(lambda optimizer: {"optimizer": optimizer, "frequency": 3})


class Own:
    """A scheduler that is none of torch's."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def step(self, *args: Any) -> None:
        self.given.append(args)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": len(self.given)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = [()] * state["steps"]


@pytest.mark.filterwarnings("ignore:The hyper-parameters")
def test_schedulers_that_are_not_torchs(tmp_path: Any) -> None:
    own, watching = Own(), Own()

    def make(optimizer: Any) -> Any:
        watch = {"scheduler": watching, "reduce_on_plateau": True, "monitor": "val_value"}
        return [optimizer], [own, watch]

    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Configured(make, [3.0, 4.0]), loader(8), loader(8))
    assert own.given == [(), ()]
    assert [float(value) for (value,) in watching.given] == [3.0, 4.0]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    own, watching = Own(), Own()
    quiet(max_epochs=3).fit(Configured(make, [5.0]), loader(8), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert len(own.given) == 3
    assert len(watching.given) == 3


# -- optimizers that run the closure themselves


def test_lbfgs_with_clipping_counts_batches() -> None:
    class Counts(With):
        closures = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.closures += 1
            return self.loss(batch)

    torch.manual_seed(0)  # Where gradients are tiny from the start it needs fewer.
    model = Counts(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))
    trainer = quiet(gradient_clip_val=0.1, max_epochs=2)
    trainer.fit(model, loader(10))
    assert trainer.global_step == 6
    assert model.closures >= 12


def test_a_closure_that_is_optional_is_left_out() -> None:
    """Optimizers whose step asks for a closure get one; others step after backward, with the same result."""

    class Asks(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    asks = With(lambda parameters: Asks(parameters, lr=0.1))
    plain = copy.deepcopy(asks)
    plain.make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    for model in (asks, plain):
        trainer = quiet(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
        trainer.fit(model, loader(20))
        assert trainer.global_step == 6
    assert same_weights(asks, plain)


class Noisy(torch.optim.SGD):
    """Changes the gradients it finds, as gradient noise or centralisation do."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad += 0.1 * parameter.grad.sign()
        return super().step(closure)


class SharpnessAware(torch.optim.SGD):
    """Moves the weights by the gradient it finds, and takes the step with the gradient there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.5)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        return super().step()


def by_hand(model: With, samples: int = 40, window: int = 1) -> With:
    """Return a copy of ``model``, trained by the loop that the optimizers' pages show."""
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()

    for i, batch in enumerate(loader(samples)):

        def closure(batch: Any = batch) -> Any:
            loss = model.loss(batch) / window
            loss.backward()
            return loss

        closure()
        if (i + 1) % window == 0:
            optimizer.step(closure if isinstance(optimizer, SharpnessAware) else None)
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("kind", "window"), [(Noisy, 1), (Noisy, 2), (SharpnessAware, 1)])
def test_an_optimizer_finds_the_gradients_as_in_a_loop_by_hand(kind: Any, window: int) -> None:
    model = With(lambda parameters: kind(parameters, lr=0.1))
    expected = by_hand(model, window=window)
    quiet(accumulate_grad_batches=window).fit(model, loader())
    assert same_weights(model, expected)


@pytest.mark.parametrize(
    "arguments", [{"accumulate_grad_batches": 2}, {"callbacks": GradientAccumulationScheduler({0: 1, 3: 2})}]
)
def test_accumulation_with_a_step_that_computes_the_loss_again_is_refused(arguments: Any) -> None:
    model = With(lambda parameters: torch.optim.LBFGS(parameters))
    before = copy.deepcopy(model)
    with refused(ValueError, says=("2", "LBFGS")):
        quiet(max_epochs=4, **arguments).fit(model, loader())
    assert same_weights(model, before)
    if "accumulate_grad_batches" in arguments:  # Whose optimizer is known when it asks.
        asks = With(lambda parameters: SharpnessAware(parameters, lr=0.1))
        with refused(ValueError, says=("accumulate_grad_batches=2", "SharpnessAware")):
            quiet(**arguments).fit(asks, loader())


class ByHand(Manual, With): ...


@pytest.mark.parametrize("kind", [With, ByHand])
def test_methods_of_torch_replaced_in_the_middle_of_a_run_are_called(kind: Any, monkeypatch: Any) -> None:
    calls: list[str] = []

    def replace(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    class Replaces(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                replace(torch.optim.SGD, "step")
                replace(torch.optim.Optimizer, "zero_grad")
                replace(torch.Tensor, "backward")

    quiet(callbacks=Replaces()).fit(kind(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), loader())
    assert sorted(calls) == ["backward"] * 5 + ["step"] * 5 + ["zero_grad"] * 5


@pytest.mark.parametrize("gives_loss", [True, False])
def test_none_trains_nothing_with_a_warning_and_needs_no_loss(gives_loss: bool) -> None:
    class NoGradient(With):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if gives_loss else None

    model = NoGradient(lambda parameters: None)
    before = copy.deepcopy(model)
    trainer = quiet(max_epochs=2)
    with warned(UserWarning, says="NoGradient.configure_optimizers()"):
        trainer.fit(model, loader())
    assert same_weights(model, before)
    assert (trainer.global_step, trainer.current_epoch, trainer.optimizers) == (20, 2, [])
    assert (model.layers[0].weight.grad is not None) is gives_loss


# -- what is refused


def configured(**config: Any) -> Callable[[Any], Any]:
    return lambda o: ([o], [{"scheduler": halve(o), **config}])


def other() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: [], r"Configured\.configure_optimizers\(\) returned an empty list\. Return an optimizer, a list of"),
        (lambda o: "adam", r"returned a str\. Return an optimizer"),
        (lambda o: (o, halve(o)), r"returned a tuple of SGD, StepLR\. Return \[optimizer\], \[scheduler\]"),
        (lambda o: ([3], []), r"returned an int where an optimizer is expected"),
        (lambda o: ([o, [o]], []), r"returned a list of SGD where an optimizer is expected"),
        (lambda o: {"lr_scheduler": halve(o)}, r'returned a dict without the key "optimizer"'),
        (lambda o: {"optimizer": o, "lr_schedulers": 1}, r"key 'lr_schedulers'; .*Did you mean 'lr_scheduler'"),
        (lambda o: {"optimizer": [o]}, r"returned a list of SGD where an optimizer"),
        (lambda o: {"optimizer": o, "lr_scheduler": [halve(o)]}, r"lr_scheduler is a list of StepLR, which is no"),
        (lambda o: ([o], [{"sched": halve(o)}]), r"the key 'sched'; known are \['scheduler', 'name', 'interval'"),
        (lambda o: ([o], [{"interval": "step"}]), r'the lr scheduler dict must have the key "scheduler"'),
        (lambda o: {"optimizer": o, "lr_scheduler": "cosine"}, r"is a str, .*Make one: torch.optim.lr_scheduler\.Step"),
        (lambda o: ([o], [object()]), r"lr_scheduler is an object, which is not a learning-rate scheduler"),
        (configured(interval="steps"), r"interval='steps'.*Did you mean 'step'"),
        (configured(interval=None), r"interval=None\): use one of 'epoch', 'step'"),
        (configured(frequency=0), r"frequency=0\): use a whole number of at least 1"),
        (configured(frequency=1.5), r"frequency=1\.5"),
        (configured(name=3), r"name=3\): use a string"),
        (configured(monitor=["val_loss"]), r"monitor=\['val_loss'\]\): use the name of a logged value"),
        (configured(strict="false"), r"strict='false'\): use True or False"),
        (
            lambda o: ([o], [{"scheduler": lr_scheduler.ReduceLROnPlateau(o), "reduce_on_plateau": False}]),
            r"reduce_on_plateau=False\).*Leave it out",
        ),
        (lambda o: ([o], [LRSchedulerConfig(halve(o), interval="steps")]), r"Did you mean 'step'"),
        (lambda o: ([o], [LRSchedulerConfig(halve(o), frequency=0)]), r"frequency=0\): use a whole number"),
        (lambda o: ([o], [LRSchedulerConfig(lr_scheduler.ReduceLROnPlateau(o))]), r"must include a monitor"),
        (
            lambda o: ([o], [lr_scheduler.ReduceLROnPlateau(o)]),
            r"must include a monitor when a `ReduceLROnPlateau`",
        ),
        (lambda o: ([o], [{"scheduler": Own(), "reduce_on_plateau": True}]), r"`Own`.*\"monitor\": \"val_loss\""),
        (lambda o: [o, other()], r"returned 2 optimizers. Training with multiple optimizers is only .*automatic_optim"),
        (lambda o: ([o], [halve(other())]), r"the scheduler StepLR is attached with an optimizer that wasn't returned"),
        (lambda o: torch.optim.SGD([{"params": []}], lr=1.0), r"The SGD has no parameters to train"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    model = Configured(make)
    with pytest.raises(ValueError, match=message):
        quiet().fit(model, loader())
    assert model.rates == []


def test_an_optimizer_that_is_none_of_torchs() -> None:
    class Signs:
        """Goes a fixed step against the sign of the gradient."""

        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters), "lr": 0.01}]

        def step(self, closure: Any = None) -> None:
            if closure is not None:
                closure()
            for p in self.param_groups[0]["params"]:
                p.data -= 0.01 * p.grad.sign()

        def zero_grad(self, set_to_none: bool = True) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = None

        def state_dict(self) -> dict[str, Any]:
            return {}

    model = With(Signs)
    expected = by_hand(model, 12)
    trainer = quiet()
    trainer.fit(model, loader(12))
    assert same_weights(model, expected)
    assert trainer.global_step == 3


def test_the_wrapper_looks_like_its_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([parameter], lr=0.5)
    steps: list[Any] = []
    wrapped = HastenOptimizer(inner, lambda closure, **options: steps.append((closure, options)))
    wrapped.step()
    wrapped.step(print, grad_scaler=3)
    assert steps == [(None, {}), (print, {"grad_scaler": 3})]
    assert wrapped.state_dict() == inner.state_dict()
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing
    copied = copy.deepcopy(HastenOptimizer(inner))
    assert copied.optimizer is not inner
    assert copied.param_groups[0]["lr"] == 0.5


def test_a_scheduler_that_the_module_steps_itself_needs_no_step_and_no_monitor() -> None:
    class Bare:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Steps(Configured):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            stepped.append(scheduler)

    class Manual(Configured):
        def on_train_epoch_end(self) -> None:
            schedulers: Any = self.lr_schedulers()
            schedulers[1].step(torch.tensor(0.0))

    stepped: list[Any] = []
    bare = Bare()
    quiet().fit(Steps(lambda optimizer: ([optimizer], [bare])), loader(8))
    assert stepped == [bare]
    manual = Manual(lambda o: ([o], [bare, lr_scheduler.ReduceLROnPlateau(o)]))
    manual.automatic_optimization = False
    trainer = quiet()
    trainer.fit(manual, loader(8))
    assert trainer.lr_scheduler_configs[1].monitor is None
    manual = Manual(lambda o: ([o], [bare, {"scheduler": lr_scheduler.ReduceLROnPlateau(o), "monitor": "loss"}]))
    manual.automatic_optimization = False
    with warned(RuntimeWarning, says="['monitor']"):
        quiet().fit(manual, loader(8))
    with refused(TypeError, fix="state_dict()"):
        quiet().fit(Configured(lambda o: ([o], [type("Step", (), {"step": print})()])), loader(8))


def test_only_a_scheduler_that_the_loop_steps_is_said_to_step_once_per_epoch() -> None:
    def one_cycle(optimizer: Any) -> Any:
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)]

    manual = Configured(one_cycle)
    manual.automatic_optimization = False
    manual.on_train_epoch_end = lambda: manual.lr_schedulers().step()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*OneCycleLR")
        quiet().fit(manual, loader(8))
    with warned(RuntimeWarning, says="OneCycleLR"):
        quiet().fit(Configured(one_cycle), loader(8))


def test_a_sparse_gradient_in_a_fused_step_is_answered_with_its_parameter() -> None:
    class Looks(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(10, 4))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen = torch.nn.functional.embedding(torch.arange(3), self.table, sparse=True)
            return super().training_step(batch, batch_idx) + seen.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(RuntimeError) as told:
        quiet(max_epochs=1, fused_optimizer=True).fit(Looks(), loader())
    assert "The gradient of table is sparse" in "\n".join(told.value.__notes__)
    assert "Trainer(fused_optimizer=True)" in "\n".join(told.value.__notes__)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_a_run_in_float64_resumes_with_the_float32_numbers_of_its_optimizer(kind: Any, tmp_path: Path) -> None:
    def train(steps: int, ckpt_path: Path | None = None) -> tuple[Classifier, L.Trainer]:
        L.seed_everything(0, verbose=False)
        model, trainer = (
            With(functools.partial(kind, lr=0.05)),
            quiet(max_steps=steps, max_epochs=-1, precision="64-true"),
        )
        trainer.fit(model, loader(16), ckpt_path=ckpt_path)
        return model, trainer

    whole, _ = train(12)
    train(4)[1].save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = train(12, tmp_path / "half.ckpt")
    assert same_weights(whole, resumed)
