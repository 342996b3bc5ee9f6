"""Steps and methods of optimisation that a module overrides."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten.optim import HastenOptimizer
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused


def test_parts_that_are_missing_raise_by_name() -> None:
    model = L.LightningModule()
    for name in ("training_step", "validation_step", "test_step", "configure_optimizers", "train_dataloader"):
        with refused(NotImplementedError, says=("LightningModule", name)):
            getattr(model, name)()
    assert model.configure_callbacks() == []


def test_forward_is_the_prediction_by_default() -> None:
    class Doubles(L.LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Plain(L.LightningModule):
        pass

    outputs = quiet().predict(Doubles(), [torch.ones(2), torch.zeros(2)])
    assert outputs is not None
    assert [output.tolist() for output in outputs] == [[2.0, 2.0], [0.0, 0.0]]
    with refused(ValueError, says=("predict_step()", "`forward`")):
        quiet().predict(Plain(), [torch.ones(2)])


class Recorded(Classifier):
    """Writes down what its overridden methods are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append(("zero_grad", epoch, batch_idx, type(optimizer).__name__))
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("backward", float(loss.detach())))
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.calls.append(("clip", type(optimizer).__name__, gradient_clip_val, kwargs))
        self.clip_gradients(optimizer, gradient_clip_val, kwargs["gradient_clip_algorithm"])


class Stepped(Recorded):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert isinstance(optimizer, HastenOptimizer)
        result = optimizer.step(closure=optimizer_closure)
        self.calls.append(("step", epoch, batch_idx, type(optimizer.optimizer).__name__, tuple(result.shape)))


def names(calls: list[Any]) -> list[Any]:
    return [call[0] if call[0] in ("backward", "clip") else call[:3] for call in calls]


def test_overridden_methods_are_called_in_order_with_their_arguments() -> None:
    model, plain = Stepped(), Classifier()
    plain.load_state_dict(model.state_dict())
    options: dict[str, Any] = {
        "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value",
    }  # fmt: skip
    quiet(**options).fit(model, loader(12))
    quiet(**options).fit(plain, loader(12))
    epoch = [
        [
            *[("zero_grad", e, 0), "backward", "backward", "clip", ("step", e, 1)],
            *[("zero_grad", e, 2), "backward", "clip", ("step", e, 2)],
        ]
        for e in (0, 1)
    ]
    assert names(model.calls) == epoch[0] + epoch[1]
    assert model.calls[0][3] == "SGD"
    assert model.calls[3] == ("clip", "SGD", 0.05, {"gradient_clip_algorithm": "value"})
    assert model.calls[4][3:] == ("SGD", ())
    assert same_weights(model, plain)


def test_overridden_methods_that_call_super_give_the_same_weights() -> None:
    class Calls(Recorded):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            L.LightningModule.backward(self, 2 * loss / 2, *args, **kwargs)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            L.LightningModule.optimizer_zero_grad(self, epoch, batch_idx, optimizer)
            assert all(p.grad is None for p in self.parameters())

    model, plain = Calls(), Classifier()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        quiet(gradient_clip_val=0.05).fit(each, loader(12))
    assert same_weights(model, plain)


def test_an_override_of_clipping_replaces_that_of_the_trainer() -> None:
    class Own(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            nn.utils.clip_grad_norm_(self.layers[0].parameters(), 0.01)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.before = self.layers[0].weight.grad.norm().item()

        def on_train_batch_end(self, *_: Any) -> None:
            norms = [p.grad.norm() for p in self.layers[0].parameters()]
            assert torch.stack(norms).norm().item() == pytest.approx(0.01, rel=1e-3)
            assert self.before > 0.011

    class Clips(Classifier):
        """Clips with the Trainer's arguments."""

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer)

        def on_train_batch_end(self, *_: Any) -> None:
            assert max(float(p.grad.abs().max()) for p in self.parameters()) == pytest.approx(0.001)

    quiet(gradient_clip_val=1e-9).fit(Own(), loader(8))
    quiet(gradient_clip_val=0.001, gradient_clip_algorithm="value").fit(Clips(), loader(8))


@pytest.mark.parametrize("steps_on", ["even", "never", "twice"])
def test_an_optimizer_step_counts_once_however_often_it_steps(steps_on: str) -> None:
    class Sometimes(Classifier):
        steps = 0

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if steps_on == "never" or (steps_on == "even" and batch_idx % 2):
                optimizer_closure()
                return
            optimizer.step(closure=optimizer_closure)
            self.steps += 1
            if steps_on == "twice":
                optimizer.step()

    model = Sometimes()
    before = copy.deepcopy(model)
    trainer = quiet(max_epochs=-1, max_steps=7)
    trainer.fit(model, loader())
    assert trainer.global_step == 7
    assert model.steps == {"even": 4, "never": 0, "twice": 7}[steps_on]
    assert same_weights(model, before) == (steps_on == "never")


def test_manual_backward_passes_arguments_on_to_an_overridden_backward() -> None:
    class Manual(Classifier):
        given: Any = ()

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.given += ((args, kwargs),)
            loss.backward(*args, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.manual_backward(loss, None, retain_graph=True)
            once = self.layers[0].weight.grad.clone()
            self.manual_backward(loss)
            assert torch.equal(self.layers[0].weight.grad, 2 * once)

    model = Manual()
    quiet(limit_train_batches=1).fit(model, loader())
    assert model.given == (((None,), {"retain_graph": True}), ((), {}))


def test_lr_scheduler_step_override_is_given_the_scheduler_and_the_metric() -> None:
    class Own(Classifier):
        given: Any = ()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            self.halves = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [
                {"scheduler": self.plateau, "monitor": "train_loss"},
                {"scheduler": self.halves, "interval": "step"},
            ]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.given += ((scheduler, metric),)

    model = Own()
    trainer = quiet(limit_train_batches=2)
    trainer.fit(model, loader())
    expected = [(model.halves, None), (model.halves, None), (model.plateau, trainer.callback_metrics["train_loss"])]
    assert list(model.given) == expected
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1


def test_optimizers_and_schedulers_from_the_module() -> None:
    seen: list[Any] = []

    class Asks(Classifier):
        many = 1

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((self.optimizers(), self.optimizers(use_pl_optimizer=False), self.lr_schedulers()))

        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.many)]
            return made, [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in made if self.scheduled]

    for Asks.many, Asks.scheduled in ((1, False), (1, True), (2, True)):  # type: ignore[attr-defined]
        quiet(limit_train_batches=1).fit(Asks(), loader())
    (wrapped, bare, none), (_, _, one), (two_wrapped, two_bare, two) = seen
    assert isinstance(wrapped, HastenOptimizer)
    assert wrapped.optimizer is bare
    assert none is None
    assert isinstance(one, torch.optim.lr_scheduler.StepLR)
    assert [optimizer.optimizer for optimizer in two_wrapped] == two_bare
    assert [type(scheduler).__name__ for scheduler in two] == ["StepLR", "StepLR"]


@pytest.mark.parametrize(
    "name",
    [
        "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "on_train_batch_start",
        "on_train_batch_end",
    ],
)  # fmt: skip
def test_methods_replaced_on_the_base_class_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner: Any = L.Callback if name == "on_train_batch_end" else L.LightningModule
    calls: list[str] = []
    function = getattr(owner, name)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    quiet(gradient_clip_val=1.0, callbacks=L.Callback()).fit(Classifier(), loader())
    assert calls == [name] * 10
