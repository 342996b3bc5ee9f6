"""The verbs give bit for bit what torch's own calls give, and step aside where torch's wrappers do something."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from hasten.optim import fast_step
from tests.models import same_weights
from tests.refusals import warned

STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


class Twice(torch.optim.SGD):
    """A step that calls its base's step twice."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


class Custom(Optimizer):
    """Sign descent with a step and a zero_grad of its own, counting both."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = self.zeros = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeros += 1
        super().zero_grad(set_to_none)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "twice": lambda p: Twice(p, lr=0.05, momentum=0.9),
    "custom": lambda p: Custom(p),
}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(8, 5, generator=generator), torch.randn(8, 1, generator=generator)


def train_plainly(module: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
    for x, y in batches():
        loss = nn.functional.mse_loss(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def sgd_and_verbs() -> tuple[torch.optim.SGD, Any, Any]:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    return optimizer, fast_step.make_step(optimizer), fast_step.make_zero_grad(optimizer)


def train_with_verbs(module: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
    step, zero_grad = fast_step.make_step(optimizer), fast_step.make_zero_grad(optimizer)
    for x, y in batches():
        loss = nn.functional.mse_loss(module(x), y)
        zero_grad()
        fast_step.backward(loss)
        step()
        if scheduler is not None:
            scheduler.step()


def halve(optimizer: Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [item for value in state.values() for item in flat(value)]
    if isinstance(state, (list, tuple)):
        return [item for value in state for item in flat(value)]
    return [state.tolist() if isinstance(state, Tensor) else state]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.filterwarnings("error")
def test_weights_and_optimizer_state_equal_the_plain_loops(name: str, scheduled: bool) -> None:
    plain, mine = model(), model()
    plain_optimizer, my_optimizer = (OPTIMIZERS[name](m.parameters()) for m in (plain, mine))
    train_plainly(plain, plain_optimizer, halve(plain_optimizer) if scheduled else None)
    train_with_verbs(mine, my_optimizer, halve(my_optimizer) if scheduled else None)
    assert same_weights(plain, mine)
    assert flat(plain_optimizer.state_dict()) == flat(my_optimizer.state_dict())


def test_a_scheduler_made_after_the_verbs_warns_only_where_it_steps_first() -> None:
    optimizer, step, _ = sgd_and_verbs()
    scheduler = halve(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        scheduler.step()
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    scheduler = halve(optimizer)
    fast_step.make_step(optimizer)
    with warned(UserWarning, says=("`optimizer", "step()`")):
        scheduler.step()


def test_step_hooks_run_whenever_they_are_added() -> None:
    optimizer, step, _ = sgd_and_verbs()
    seen: list[str] = []
    step()
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step()
    before.remove()
    after.remove()
    step()
    for_all = torch_optimizer.register_optimizer_step_post_hook(lambda *_: seen.append("all"))
    step()
    for_all.remove()
    step()
    assert seen == ["before", "after", "all"]
    # A hook may change what the step gets.
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((args[0], lambda: seen.append("closure")), kwargs))
    step()
    assert seen[-1] == "closure"


def test_a_profiler_sees_the_step() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step, zero_grad = fast_step.make_step(optimizer), fast_step.make_zero_grad(optimizer)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        zero_grad()
        fast_step.backward(module(torch.ones(1, 5)).sum())
        step()
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#SGD.step" in names
    assert "Optimizer.zero_grad#SGD.zero_grad" in names


def test_verbs_replaced_on_the_instance_the_class_or_by_another_class_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append("step of Other")

        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("zero_grad of Other")

    optimizer, step, zero_grad = sgd_and_verbs()
    optimizer.step = lambda closure=None: calls.append("step")  # type: ignore[method-assign,assignment]
    optimizer.zero_grad = lambda set_to_none=True: calls.append("zero_grad")  # type: ignore[method-assign]
    step()
    zero_grad()
    del optimizer.step, optimizer.zero_grad
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: calls.append("class"))
    step()
    optimizer.__class__ = Other
    step()
    zero_grad()
    assert calls == ["step", "zero_grad", "class", "step of Other", "zero_grad of Other"]


def test_a_copied_optimizer_steps_its_own_parameters() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fast_step.make_step(optimizer)
    twin_module, twin = copy.deepcopy((module, optimizer))
    twin_module(torch.ones(1, 5)).sum().backward()
    fast_step.make_step(twin)()
    assert same_weights(module, model())
    assert not same_weights(twin_module, module)


def counted(calls: list[str], name: str, function: Any) -> Any:
    """Return ``function`` noting each call, with all the attributes that ``functools.wraps`` copies."""

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return noting


class WrapsItsBase(torch.optim.AdamW):
    """A step that looks like its base's to everyone who reads attributes."""

    steps = 0

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def test_a_step_that_wraps_its_bases_is_called() -> None:
    torch.optim.AdamW(model().parameters())  # With it torch marks AdamW.step as hooked.
    module = model()
    train_with_verbs(module, optimizer := WrapsItsBase(module.parameters()))
    assert optimizer.steps == STEPS


def test_a_step_patched_before_a_scheduler_wraps_it_is_called() -> None:
    module, calls = model(), []

    def step(self: Any, closure: Any = None) -> Any:
        calls.append("patched")
        return type(self).step(self, closure)

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    first = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train_with_verbs(module, optimizer, first)
    assert calls == ["patched"] * STEPS
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = counted(calls, "outer", optimizer.step)  # type: ignore[method-assign]
    calls.clear()
    fast_step.make_step(optimizer)()
    assert calls == ["outer", "patched"]


def test_a_replaced_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, calls = nn.Parameter(torch.tensor(2.0)), []
    for owner, name in ((Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "_engine_run_backward")):
        with monkeypatch.context() as patch:
            label = f"{owner.__name__}.{name}"
            patch.setattr(owner, name, counted(calls, label, getattr(owner, name)))
            fast_step.backward(weight * 2)
        fast_step.backward(weight * 2)
    loss = weight * 2
    loss.backward = counted(calls, "instance", loss.backward)  # type: ignore[method-assign]
    fast_step.backward(loss)
    assert [call.split(".")[-1] for call in calls] == [
        "backward", "backward", "_engine_run_backward", "instance",
    ]  # fmt: skip


def test_the_grad_mode_is_left_as_it_was() -> None:
    class Breaks(torch.optim.SGD):
        @torch_optimizer._use_grad_for_differentiable
        def step(self, closure: Any = None) -> None:
            raise KeyError("broken")

    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 5)).sum().backward()
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            fast_step.make_step(optimizer)()
            assert torch.is_grad_enabled() is grad_enabled
    with pytest.raises(KeyError, match="broken"):
        fast_step.make_step(Breaks(model().parameters(), lr=0.1))()
    assert torch.is_grad_enabled()


def test_a_differentiable_optimizer_keeps_the_graph() -> None:
    weight = torch.ones(2, requires_grad=True).clone()
    weight.retain_grad()
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1), differentiable=True)
    weight.grad = torch.ones(2, requires_grad=True)
    fast_step.make_step(optimizer)()
    assert weight.requires_grad


# -- backward


def gradients_of(run: Callable[[Tensor], Any], loss_of: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
    run(loss_of(x))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    "loss_of",
    [lambda x: x.pow(3).sum(), lambda x: x.pow(2).mean().reshape(1), lambda x: x.exp().sum().float()],
    ids=["no dimensions", "one element", "another type"],
)
def test_backward_equals_torchs(loss_of: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(gradients_of(fast_step.backward, loss_of), gradients_of(Tensor.backward, loss_of))


def test_a_hook_that_changes_the_gradient_in_place_does_not_reach_the_next_backward() -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    for factor in (10.0, 1.0):
        weight.grad = None
        loss = weight * 1.0
        loss.register_hook(lambda gradient, factor=factor: gradient.mul_(factor))
        fast_step.backward(loss)
        assert weight.grad.item() == factor


def test_backward_takes_what_torchs_takes() -> None:
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).sum()
    fast_step.backward(y, retain_graph=True)
    fast_step.backward(y, None, model=None)
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 4.0]
    z = x * 3
    fast_step.backward(z, torch.tensor([1.0, 0.0, 2.0]))
    assert x.grad.tolist() == [7.0, 4.0, 10.0]
    weight = nn.Parameter(torch.tensor(2.0))
    for _ in range(2):
        fast_step.backward(weight)
    assert weight.grad == 2.0


@pytest.mark.parametrize(
    "loss",
    [
        torch.tensor(1.0),
        torch.ones(2, requires_grad=True) * 2,
        (torch.ones((), dtype=torch.complex64, requires_grad=True) * 2),
    ],
    ids=["no gradient", "several elements", "complex"],
)
def test_backward_raises_what_torch_raises(loss: Tensor) -> None:
    with pytest.raises(RuntimeError) as theirs:
        loss.backward()
    with pytest.raises(RuntimeError) as mine:
        fast_step.backward(loss)
    assert str(mine.value) == str(theirs.value)


def test_subclasses_of_tensor_and_function_modes_see_backward() -> None:
    seen: list[str] = []

    class Noted(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(["subclass"] * (func is Tensor.backward))
            return super().__torch_function__(func, types, args, kwargs or {})

    class Notes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(["mode"] * (func is Tensor.backward))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    fast_step.backward((x * 2).sum().as_subclass(Noted))
    loss = (x * 2).sum()
    with Notes():
        fast_step.backward(loss)
    assert seen == ["subclass", "mode"]
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0]


# -- torch without the names the fast ways use

PRIVATE = (
    "_profiler_enabled", "_pre_hooks", "_post_hooks", "_run_backward", "_zero_grad", "_tensor_backward",
)  # fmt: skip
CODES = ("_span_codes", "_guard_codes", "_scheduler_codes")


@pytest.mark.parametrize("missing", PRIVATE + CODES)
def test_without_a_private_name_of_torch_the_results_are_the_same(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_step, missing, frozenset() if missing.endswith("_codes") else None)
    plain, mine = model(), model()
    train_plainly(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
    train_with_verbs(mine, torch.optim.Adam(mine.parameters(), lr=0.01))
    assert same_weights(plain, mine)


def test_the_fast_way_is_taken_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise every test above could pass with the slow one.
    optimizer, step, zero_grad = sgd_and_verbs()
    spans: list[str] = []
    record = torch.autograd.profiler.record_function
    monkeypatch.setattr(
        torch.autograd.profiler, "record_function", lambda name, *a: spans.append(name) or record(name, *a)
    )
    optimizer.step()
    optimizer.zero_grad()
    assert len(spans) == 2
    step()
    zero_grad()
    assert len(spans) == 2
