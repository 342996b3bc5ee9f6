"""torch's Adam and AdamW as DeepSpeedCPUAdam, which ZeRO-Offload steps on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.optim import Adam, AdamW, Optimizer

from hasten._lib.errors import make_error
from hasten.extend.origin import comes_from

_CPU_ADAM = "deepspeed.ops.adam.DeepSpeedCPUAdam"
# What torch's Adam can do and DeepSpeedCPUAdam cannot. ``foreach``, ``fused`` and ``capturable`` choose a kernel, with
# the same results.
_NOT_CARRIED_OVER = ("amsgrad", "maximize", "differentiable")


def is_cpu_adam(optimizer: Optimizer) -> bool:
    """Return whether DeepSpeed can step this optimizer on the host."""
    kind = type(optimizer)
    return comes_from(kind, "deepspeed") and "CPU" in kind.__name__


def check_offloaded(optimizer: Optimizer, keep: str) -> None:
    """Refuse an optimizer whose state DeepSpeed keeps on the host, and that ``as_cpu_adam`` cannot replace.

    ``keep`` is the strategy that steps the optimizer unchanged, as a program would write it.
    """
    kind = type(optimizer)
    if is_cpu_adam(optimizer):
        return
    kept = f"or keep {kind.__name__}, which steps more slowly on the host, with strategy={keep}"
    if kind not in (Adam, AdamW):
        base = next((each.__name__ for each in (AdamW, Adam) if isinstance(optimizer, each)), None)
        what = f"a subclass of torch.optim.{base}, which may step in another way" if base else "not one of them"
        raise make_error(
            ValueError,
            f"{kind.__name__} with offload_optimizer: DeepSpeed steps Adam and AdamW on the host, and {kind.__name__} "
            f"is {what}.",
            fix=f"Use torch.optim.{base or 'AdamW'}, {kept}.",
        )
    for argument in _NOT_CARRIED_OVER:
        if any(group.get(argument) for group in optimizer.param_groups):
            # torch cannot step what ZeRO gives it with differentiable=True either.
            instead = "." if argument == "differentiable" else f", {kept}."
            raise make_error(
                ValueError,
                f"{kind.__name__}({argument}=True) with offload_optimizer: {_CPU_ADAM}, which steps on the host, "
                "cannot do that.",
                fix=f"Leave {argument} out{instead}",
            )
    if len({bool(group["decoupled_weight_decay"]) for group in optimizer.param_groups}) > 1:
        raise make_error(
            ValueError,
            f"{kind.__name__} with offload_optimizer: decoupled_weight_decay differs by parameter group, and "
            f"{_CPU_ADAM}, which steps on the host, has one value for all.",
            fix=f"Give the groups the same, {kept}.",
        )


def as_cpu_adam(optimizer: Optimizer, schedulers: Iterable[object], *, in_16_bits: bool) -> tuple[Optimizer, str]:
    """Return a DeepSpeedCPUAdam with the parameter groups of torch's Adam or AdamW, and a message about it.

    Both share the list of groups and the state, so that schedulers and programs that hold the user's optimizer read and
    change what is stepped. Only the new one steps.

    ``check_offloaded`` has let the optimizer pass. ``schedulers`` belong to the new one from now on. ``in_16_bits``
    keeps the state in the type of the weights, as ``bf16_optimizer_states`` in DeepSpeed's configuration says.

    Source: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021;
    `DeepSpeed, optimizers <https://deepspeed.readthedocs.io/en/latest/optimizers.html>`_.

    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kind, groups = type(optimizer), optimizer.param_groups
    decoupled, first = bool(groups[0]["decoupled_weight_decay"]), groups[0]
    made: Any = DeepSpeedCPUAdam(
        groups,
        # The groups hold the values of each step.
        lr=float(first["lr"]),
        betas=tuple(map(float, first["betas"])),
        eps=first["eps"],
        weight_decay=first["weight_decay"],
        amsgrad=False,
        adamw_mode=decoupled,
        fp32_optimizer_states=not in_16_bits,
    )
    made.defaults = {**made.defaults, **optimizer.defaults}
    made.param_groups = groups
    optimizer.state = made.state
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(made, hooks, getattr(optimizer, hooks))
    made.step = _step_on_host(made, optimizer)
    for scheduler in schedulers:
        _move(scheduler, optimizer, made)
    replaced: Any = optimizer
    refuse = functools.partial(_refuse_step, kind.__name__)
    # As schedulers mark it: otherwise they warn that another function has taken its place.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    replaced.step = refuse
    said = (
        f"offload_optimizer: torch.optim.{kind.__name__} was replaced by {_CPU_ADAM}, which steps on the host, with "
        "the same parameter groups and hyper-parameters. To write it yourself, return "
        f"DeepSpeedCPUAdam(self.parameters(), lr={float(first['lr']):g}, weight_decay={first['weight_decay']:g}, "
        f"adamw_mode={decoupled}) from configure_optimizers()."
    )
    return made, said


def check_resumed(optimizer: Optimizer) -> None:
    """Refuse what the groups of a checkpoint ask of an optimizer of ``as_cpu_adam``; others pass."""
    adam: Any = optimizer
    if not is_cpu_adam(optimizer) or "decoupled_weight_decay" not in adam.defaults:
        return  # Not of torch's.
    for group in adam.param_groups:
        if adam.adam_w_mode:
            group["decoupled_weight_decay"] = True  # As torch's AdamW does with any state.
        names = [name for name in _NOT_CARRIED_OVER if group.get(name)]
        names += ["decoupled_weight_decay"] if group["decoupled_weight_decay"] and not adam.adam_w_mode else []
        if names:
            by_class = names[0] == "decoupled_weight_decay"
            fix = "Return torch.optim.AdamW from configure_optimizers(), or resume" if by_class else "Resume"
            raise make_error(
                ValueError,
                f"The optimizer's state in the checkpoint has {names[0]}=True, and {_CPU_ADAM}, which steps here in "
                f"place of torch.optim.{'AdamW' if adam.adam_w_mode else 'Adam'}, does not compute that.",
                fix=f"{fix} without offload_optimizer, or load the weights alone.",
            )


def _step_on_host(made: Any, replaced: Any) -> Callable[..., Any]:
    """Return a step that torch's schedulers of both optimizers recognize, and that a resumed run repeats exactly."""
    weak, step, update = ref(made), type(made).step, made.ds_opt_adam.adam_update
    nothing = [torch.zeros(1) for _ in range(4)]

    def counted(*args: Any, **kwargs: Any) -> Any:
        own: Any = weak()
        replaced._opt_called = own._opt_called = True
        # The kernel updates powers of the betas from step to step, and computes them again after other betas. It always
        # does now: otherwise a resumed run would round in another way.
        update(own.opt_id, 1, 0.0, 0.0, 0.0, 1.0, 0.0, True, *nothing)
        return step(own, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted


def _move(scheduler: Any, replaced: Optimizer, made: Optimizer) -> None:
    """Make a scheduler, and the schedulers inside it, belong to another optimizer."""
    for each in _with_parts(scheduler):
        if getattr(each, "optimizer", None) is replaced:
            each.optimizer = made


def _with_parts(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)


def _refuse_step(name: str, *args: object, **kwargs: object) -> None:
    what = f"{name}.step() with strategy='deepspeed' and offload_optimizer: {_CPU_ADAM} has taken its place."
    raise make_error(RuntimeError, what, fix="Step what self.optimizers() or fabric.setup() returns.")
