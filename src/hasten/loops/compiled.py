"""The compiled side of a run: its module in place, its steps where the loops bind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.compile.cuda_graphs import CudaGraphSteps, marked_by_us
from hasten.compile.settings import CompileSettings, check_possible
from hasten.compile.user_compiled import users_settings
from hasten.loops.run import Run


def check_compile(run: Run) -> None:
    """Check that what ``compile`` asks for works on this machine.

    Raises:
        ValueError: it does not; the message names the nearest that does.

    """
    settings = _settings(run)
    if settings is None:
        return
    if settings.cuda_graphs and run.arguments.speed.packed:
        asked = f"compile={dict(settings.options)}, " if settings.context is None else ""
        raise ValueError(
            f"Trainer({asked}packed={run.arguments.speed.packed!r}): a CUDA graph is "
            "recorded for one number of tokens, and packed batches have another each time. Use compile=True with "
            "packed, or batching='length' in place of packed: its few widths are recorded once each."
        )
    check_possible("Trainer", settings, run.runtime.device)


def compile_module(run: Run) -> None:
    """Have the module called compiled until the run ends; ``run.undo`` takes it back."""
    settings = _settings(run)
    if settings is None:
        return
    from hasten.compile.model import compiled_model

    speed, runtime = run.arguments.speed, run.runtime
    # Batches made by length have few widths, but not one; packed rows are as long as their tokens are many.
    dims = 1 if speed.batching is None and not speed.packed else 2
    # Another graph than without them.
    changes = (runtime.precision.precision, speed.dropout, speed.memory)
    model = compiled_model(
        run.module, settings, runtime.device, dims=dims, variant=str(changes), packed=bool(speed.packed)
    )
    if settings.cuda_graphs:
        run.undo.enter_context(marked_by_us())
    run.compiled = run.undo.enter_context(model.enabled(writes=runtime.is_global_zero))


def compiled_step(run: Run, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` compiled where the run compiles steps; else ``step`` itself, which costs nothing."""
    return step if run.compiled is None else run.compiled.step(name, step, run.module)


def recorded_steps(run: Run) -> CudaGraphSteps | None:
    """Return what marks where a step begins; None in a run without CUDA graphs."""
    if run.compiled is None or not run.compiled.settings.cuda_graphs:
        return None
    return CudaGraphSteps(run.module.parameters())


def _settings(run: Run) -> CompileSettings | None:
    return run.arguments.speed.compile or users_settings(run.module)
