"""What the speed arguments change about a run: its loaders, its module, its optimizers; undone at its end."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_info
from hasten.arguments import SpeedArguments
from hasten.batching.rebatch import rebatch
from hasten.data.memory.resident import is_resident, resident
from hasten.data.worker_count import auto_workers, with_workers
from hasten.loops import numbers, split_sizes
from hasten.loops.run import Run
from hasten.loops.states import TrainerFn
from hasten.machine import allocator


def remake_loader(
    speed: SpeedArguments, loader: Any, stage: str, name: str, *, device: torch.device | None = None
) -> Any:
    """Return the loader that is read instead of the user's; the same object where nothing is asked.

    Args:
        speed: the arguments.
        loader: as the user gave it.
        stage: "train", "validate", "test" or "predict".
        name: what to call the loader in messages.
        device: where the run computes.

    """
    # "auto" is a number once it was found; until then the size is the loader's.
    if isinstance(speed.batch_size, int) and stage == "train":
        loader = split_sizes.rebatched(loader, speed.batch_size, name=name)
    if isinstance(speed.num_workers, int):
        loader = with_workers(loader, speed.num_workers, stage=stage, name=name)
    if speed.resident:
        # Before batching, which then cuts padding off whole batches. With "auto" what cannot be held is read as
        # before, as it always is where nothing is trained.
        held_on = device if speed.resident == "device" else None
        as_stage = "validate" if speed.resident == "auto" else stage
        loader = resident(loader, device=held_on, stage=as_stage, name=name)
    if speed.batching is not None:
        loader = rebatch(loader, speed.batching, stage=stage, name=name, few_shapes=bool(speed.compile))
    if speed.num_workers == "auto" and not is_resident(loader):
        loader = auto_workers(loader, stage=stage, name=name)
    return loader


def change_module(run: Run) -> None:
    """Change how the module computes, before the strategy wraps it; ``run.undo`` takes it back."""
    speed, module = run.arguments.speed, run.module
    if speed.allocator is not None:
        run.undo.enter_context(allocator.kept(speed.allocator))
    # Without gradients it would change nothing.
    if speed.packed and run.state.fn == TrainerFn.FITTING:
        # Only where it is asked for: what torch does to make its operations known takes a tenth of a first fit.
        from hasten.packed.blocks import packed_blocks

        asked = f"Trainer(packed={speed.packed!r})"
        first_token = speed.packed == "first_token"
        run.undo.enter_context(packed_blocks(module, first_token=first_token, asked=asked))
    if speed.dropout is not None:
        change_dropout(run)
    split_sizes.change_module(run)


def change_dropout(run: Run) -> None:
    """Have the dropout layers draw their masks from random bytes.

    Raises:
        MisconfigurationException: this run is not on the CPU, or no layer drops anything.

    """
    from hasten.packed.dropout import fast_dropout

    if run.runtime.device.type != "cpu":
        raise MisconfigurationException(
            f"Trainer(dropout='fast'): on {run.runtime.device.type} dropout is one kernel already. Leave it out."
        )
    if not run.undo.enter_context(fast_dropout(run.module)) and not run.arguments.speed.packed:
        raise MisconfigurationException(
            f"Trainer(dropout='fast'): {type(run.module).__name__} has no nn.Dropout layer. Leave it out; dropout "
            "within attention is made cheap by packed=True."
        )


def go_on_with_batch_size(run: Run, checkpoint: dict[str, Any], datamodule: Any) -> None:
    """Give a run with ``batch_size="auto"`` the size of its checkpoint, before its loaders are made."""
    from hasten.tuner.probe import TunedValue

    ranks = (checkpoint.get("hasten") or {}).get("ranks") or [{}]
    size = ranks[min(run.runtime.global_rank, len(ranks) - 1)].get("batch_size")
    if not isinstance(size, int):
        rank_zero_info(
            "Trainer(batch_size='auto'): the checkpoint has no batch size; it stays that of the loader."
        )
        return
    speed = dataclasses.replace(run.arguments.speed, batch_size=size)
    run.arguments = dataclasses.replace(run.arguments, speed=speed)
    run.train.remake_with(functools.partial(remake_loader, speed, device=run.runtime.device))
    TunedValue(run.module, datamodule, "batch_size").set(size)


def change_optimizers(run: Run, optimizers: list[Any]) -> list[Any]:
    """Return the optimizers such that they compute as asked, before the loop binds their steps."""
    numbers.fuse(run, optimizers)
    numbers.step_in_backward(run, optimizers)
    return optimizers
