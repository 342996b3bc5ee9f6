"""Check optimizers, learning rates, losses and gradients of a fit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from hasten._lib.tree import leaves, parameters_of, remember_modes
from hasten.logged_value import is_metric
from hasten.optim.backward import InBackward
from hasten_tools.preflight.loaders import bad_row
from hasten_tools.preflight.report import Rows

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hasten.loops.run import Run
    from hasten_tools.preflight.plan import Length
    from hasten_tools.preflight.watch import Observations

# Names listed in a row.
_NAMED = 3


def listed(names: Iterable[str]) -> str:
    """Return a few names, and how many more there are.

    Example::

        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'

    """
    found = list(names)
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


# -- before the first step


def check_optimizers(run: Run, length: Length, rows: Rows) -> None:
    """Check which parameters the optimizers train, and with which learning rates."""
    owner, module = type(run.module).__name__, run.module
    if not run.optimizers:
        rows.warning("optimizer", f"{owner}.configure_optimizers() returned no optimizer: nothing is trained.")
        return
    held = {id(parameter) for parameter in parameters_of(*run.optimizers)}
    missing = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    before = len(rows.rows)
    if missing:
        rows.warning(
            "optimizer",
            f"{len(missing)} parameters require gradients and are in no optimizer, so they are never trained: "
            f"{listed(missing)}.",
            f"{type(run.optimizers[0]).__name__}(self.parameters(), ...), or .requires_grad_(False) if that is meant",
        )
    for optimizer in run.optimizers:
        scheduled = any(getattr(config.scheduler, "optimizer", None) is optimizer for config in run.schedulers)
        _check_rates(optimizer, rows, scheduled=scheduled)
    check_schedulers(run, length, rows)
    if len(rows.rows) == before:
        total = sum(p.numel() for p in module.parameters())
        trained = sum(p.numel() for p in module.parameters() if id(p) in held and p.requires_grad)
        parts = [f"{type(one).__name__}{_rates(one)}" for one in run.optimizers]
        parts += [f"{type(config.scheduler).__name__} by {config.interval}" for config in run.schedulers]
        rows.ok("optimizer", f"{'; '.join(parts)}; trains {trained:,} of {total:,} parameters")


def _rates_of(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _check_rates(optimizer: Any, rows: Rows, *, scheduled: bool) -> None:
    name, rates = type(optimizer).__name__, _rates_of(optimizer)
    if rates and not any(rates) and not scheduled:
        rows.error(
            "learning rate", f"{name} has lr=0 and no scheduler: no weight would change.", f"{name}(..., lr=1e-3)"
        )
    if rates and name.startswith(("Adam", "NAdam", "RAdam", "Lion")) and max(rates) >= 0.5:
        what = f"{name} has lr={max(rates):g}: each of its steps changes weights by about that much."
        rows.warning("learning rate", what, f"{name}(..., lr=1e-3)")


def _rates(optimizer: Any) -> str:
    rates = sorted({*_rates_of(optimizer)})
    return f" lr={', '.join(f'{rate:g}' for rate in rates)}" if rates else ""


def check_schedulers(run: Run, length: Length, rows: Rows) -> None:
    """Compare the schedules of learning rates with the length of the fit."""
    if not run.module.automatic_optimization:
        return
    for config in run.schedulers:
        by_step = config.interval == "step"
        if by_step and length.processes > 1:
            # Which number of steps a program counts on depends on the number of processes that it sees.
            rows.skipped("learning rate", f"{type(config.scheduler).__name__} steps with the batches of one process")
            continue
        count = (length.total_steps if by_step else length.epochs) // config.frequency
        if not math.isfinite(count):
            continue
        scheduler, calls = config.scheduler, int(count)
        name = type(scheduler).__name__
        if calls == 0:
            unit = "steps" if by_step else "epochs"
            total = int(length.total_steps if by_step else length.epochs)
            rows.warning(
                "learning rate",
                f"{name} steps every {config.frequency} {unit}, and the fit has {total}: it never does.",
                f'{{"scheduler": ..., "interval": "{config.interval}", "frequency": 1}}',
            )
        elif isinstance(scheduler, schedulers.ReduceLROnPlateau):
            if scheduler.patience >= calls > 1:
                rows.warning(
                    "learning rate",
                    f"ReduceLROnPlateau(patience={scheduler.patience}) waits longer than the {calls} times that it "
                    "steps: it never lowers the learning rate.",
                    f"ReduceLROnPlateau(..., patience={max(1, calls // 5)})",
                )
        else:
            _check_span(name, scheduler, calls, by_step=by_step, length=length, rows=rows)


# By class: the argument with the number of steps that a schedule is made for, and attribute of the same name.
_SPANS = (
    (schedulers.OneCycleLR, "total_steps"),
    (schedulers.CosineAnnealingLR, "T_max"),
    (schedulers.LinearLR, "total_iters"),
    (schedulers.PolynomialLR, "total_iters"),
    (schedulers.StepLR, "step_size"),
)


def _check_span(name: str, scheduler: Any, calls: int, *, by_step: bool, length: Length, rows: Rows) -> None:
    if isinstance(scheduler, schedulers.LambdaLR):
        _check_factors(name, scheduler, calls, by_step, rows)
    span = _span_of(scheduler)
    if span is None:
        return
    made_for, word = span
    how = "after each step" if by_step else "once an epoch"
    if word == "total_steps" and calls > made_for:
        rows.error(
            "learning rate",
            f"OneCycleLR was made for {made_for} steps and steps {calls} times ({how}): step {made_for + 1} raises.",
            "OneCycleLR(..., total_steps=self.trainer.estimated_stepping_batches)",
        )
    elif word == "T_max" and calls > made_for:
        rows.warning(
            "learning rate",
            f"CosineAnnealingLR(T_max={made_for}) steps {calls} times ({how}): after {made_for} the learning rate "
            "rises again.",
            "CosineAnnealingLR(..., T_max=self.trainer.estimated_stepping_batches)" if by_step else f"T_max={calls}",
        )
    elif made_for > calls and (word in ("step_size", "milestones") or calls < 0.5 * made_for):
        what = "does not change in this fit" if word in ("step_size", "milestones") else "stays near its initial value"
        counts_steps = made_for > length.epochs and made_for * 0.5 <= length.total_steps <= made_for * 2
        line = f"{name}(..., {word}={calls})"
        if word == "milestones":
            line = f"MultiStepLR(..., milestones=[{max(1, calls // 2)}])"
        elif counts_steps and not by_step:
            line = '{"scheduler": ..., "interval": "step"}'
        rows.warning(
            "learning rate",
            f"{name}({word}={made_for}) steps {calls} times ({how}), so the learning rate {what}.",
            line,
        )


def _span_of(scheduler: Any) -> tuple[int, str] | None:
    """Return the number of steps that a schedule is made for, and the argument that says so."""
    if isinstance(scheduler, schedulers.MultiStepLR) and scheduler.milestones:
        return int(min(scheduler.milestones)), "milestones"
    for kind, argument in _SPANS:
        if isinstance(scheduler, kind):
            return int(getattr(scheduler, argument)), argument
    return None


def _check_factors(name: str, scheduler: Any, calls: int, by_step: bool, rows: Rows) -> None:
    """Check the factors that a function of the step returns, such as a warm-up."""
    places = sorted({0, calls, *(calls * part // 50 for part in range(50))})
    try:
        factors = [float(scheduler.lr_lambdas[0](place)) for place in places]
    except Exception:
        return
    if (highest := max(factors)) < 0.1:
        how = "after each step" if by_step else "once an epoch"
        line = '{"scheduler": ..., "interval": "step"}' if not by_step else "Make the warm-up shorter than the fit."
        if factors[0] == highest > 0:  # No warm-up: probably the learning rate itself.
            line = f"Let the function of {name} return a factor of lr: 1 for lr itself."
        what = f"{name} steps {calls} times ({how}), and its factor of lr is {highest:.2g} at the most."
        rows.warning("learning rate", what, line)


# -- after the first steps


def check_step(run: Run, seen: Observations, rows: Rows) -> None:
    """Check loss and gradients of the first steps."""
    if seen.bad_input:
        for stage, path in seen.bad_input.items():
            batch = seen.first_batch[0] if seen.first_batch is not None and stage == "train" else None
            where = bad_row(batch) if batch is not None else ""
            what = f"{path} of the first {stage} batch has nan or infinite numbers{where}."
            rows.error("data values", what, "Clean the data, for instance x = torch.nan_to_num(x).")
    for status, text, line in seen.losses:
        rows.add("loss", status, text, line)
    if not seen.trained and seen.loss is None:
        return
    finite = _check_loss(run, seen, rows)
    if run.optimizers and finite:
        finite &= _check_gradients(run, seen, rows)
    if finite and seen.loss is not None:
        classes = seen.targets[1] if seen.targets is not None else 0
        chance = f" (ln {classes} = {math.log(classes):.4g} is chance)" if classes > 1 else ""
        value = float(seen.loss.sum())
        rows.ok("loss", f"{value:.4g} on the first batch{chance}; layers, loss and gradients are finite")


def _check_loss(run: Run, seen: Observations, rows: Rows) -> bool:
    loss = seen.loss
    if loss is None or bool(torch.isfinite(loss).all()):
        return True
    value = float(loss.sum())
    if seen.bad_input:
        why = "The data is not finite."
    elif seen.bad_layer is not None:
        name, kind, is_fine = seen.bad_layer
        why = f"First not finite: the {'output' if is_fine else 'input'} of {name} ({kind})."
    elif bad := [name for name, p in run.module.named_parameters() if not bool(torch.isfinite(p).all())][:1]:
        why = f"The parameter {bad[0]} is not finite."
    else:
        why = "The outputs of all layers are finite: the computation of the loss is the cause."
    fix = "Look at logarithms, divisions, square roots and means over nothing there: torch.log(x.clamp_min(1e-8))."
    rows.error("loss", f"The loss of training_step is {value} on the first batch. {why}", fix)
    return False


def _check_gradients(run: Run, seen: Observations, rows: Rows) -> bool:
    used, idle = _by_use(run, seen)
    held = {id(p) for p in parameters_of(*(used or idle))}
    named = [(name, p) for name, p in run.module.named_parameters() if p.requires_grad and id(p) in held]
    if not named or run.runtime.engine.owns_step or (not seen.with_gradient and not seen.trained):
        return True
    without = [name for name, p in named if id(p) not in seen.with_gradient]
    finite = not seen.bad_gradients or run.runtime.scaler is not None
    if len(without) == len(named):
        _report_no_gradient(run, seen, rows)
        return False
    if without and seen.trained:
        rows.warning(
            "gradients",
            f"{len(without)} of {len(named)} parameters got no gradient in {seen.trained} batches: {listed(without)}. "
            "They are not trained, and DDP waits for them.",
            "Use them in the step, leave them out of the module, or .requires_grad_(False); with DDP "
            'Trainer(strategy="ddp_find_unused_parameters_true")',
        )
    for one in idle:
        rows.skipped("gradients", f"no parameter of {type(one).__name__} got a gradient in {seen.trained} batches")
    _check_gradient_values(run, seen, rows, finite=finite, all_have_one=not without)
    return finite


def _by_use(run: Run, seen: Observations) -> tuple[list[Optimizer], list[Optimizer]]:
    """Return the optimizers with a gradient, and those without: a module that steps by hand may do so rarely."""
    used = [one for one in run.optimizers if not seen.with_gradient.isdisjoint(map(id, parameters_of(one)))]
    return used, [one for one in run.optimizers if one not in used]


def _check_gradient_values(run: Run, seen: Observations, rows: Rows, *, finite: bool, all_have_one: bool) -> None:
    if not finite:
        rows.error(
            "gradients",
            f"The loss is finite and its gradient is not: {listed(seen.bad_gradients)}. {seen.bad_function}".strip(),
            "Look at square roots and norms of 0 there: torch.sqrt(x + 1e-8).",
        )
    elif seen.all_zero and all_have_one and not any(isinstance(one, InBackward) for one in run.optimizers):
        rows.warning(
            "gradients",
            "Every gradient of the first batch is 0.",
            "Look for a ReLU or a clamp before the loss that no input passes, and for a softmax or cross entropy over "
            "one output, which is constant.",
        )


def _report_no_gradient(run: Run, seen: Observations, rows: Rows) -> None:
    manual = not run.module.automatic_optimization
    if manual or seen.loss is not None:
        rows.error(
            "gradients",
            "No parameter of the optimizer got a gradient from the loss.",
            "self.manual_backward(loss) in training_step"
            if manual
            else "Compute the loss from the outputs of the layers, without .detach(), .item() or torch.no_grad().",
        )


# -- the same batch twice


def check_repeatable(run: Run, seen: Observations, rows: Rows) -> None:
    """Call layers twice in eval mode with the same input: what they return should not depend on chance."""
    calls = {name: call for name, call in seen.calls.items() if not is_metric(call[0])}
    restore = remember_modes(run.module)
    run.module.eval()
    try:
        with torch.no_grad():
            found = _differing(run, calls, "")
    finally:
        restore()
    if found is None:
        return
    layer = calls[found][0]
    what = f"{found} ({type(layer).__name__})" if found else f"{type(layer).__name__}.forward"
    rows.warning(
        "eval mode",
        f"{what} gives different outputs for the same input in eval mode.",
        "Make layers in __init__, write nn.functional.dropout(x, p, training=self.training), and draw no random "
        "numbers where not self.training.",
    )


def _differing(run: Run, calls: dict[str, tuple[nn.Module, Any, Any]], parent: str) -> str | None:
    """Return the innermost layer below ``parent`` whose outputs differ, or itself."""
    prefix = f"{parent}." if parent else ""
    children = [name for name in calls if name and name.startswith(prefix) and "." not in name[len(prefix) :]]
    for name in children:
        if _differs(run, calls[name]):
            return _differing(run, calls, name) or name
    if not parent and parent in calls and _differs(run, calls[parent]):
        return parent
    return None


def _differs(run: Run, call: tuple[nn.Module, Any, Any]) -> bool:
    layer, args, kwargs = call

    def outputs() -> list[Any]:
        return [leaf for leaf in leaves(layer(*args, **kwargs)) if isinstance(leaf, Tensor)]

    compute = run.runtime.bind(outputs, module=run.module)
    try:
        pairs = list(zip(compute(), compute(), strict=True))
        return any(
            one.shape == other.shape and one.is_floating_point() and not _alike(one, other) for one, other in pairs
        )
    except Exception:
        # The layer keeps something between calls, or needs what only the step gives it.
        return False


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-2, atol=1e-4, equal_nan=True)
