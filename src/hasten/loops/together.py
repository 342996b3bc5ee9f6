"""Epochs that end on all processes at once, also where their loaders give different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hasten._lib.rank_zero import warn_once

if TYPE_CHECKING:
    from hasten.loops.run import Run

Batches = Iterator[tuple[Any, bool]]

_END: Any = object()
# What the processes say of the batch in hand; the largest counts.
_MORE, _LAST, _NONE = range(3)


def agree_on_end(run: Run) -> bool:
    """End the epoch to come where the process with the fewest batches does; all processes call it.

    Returns whether the ends are not known beforehand on all processes, so that each batch has to be agreed on.
    """
    mine = run.train.certain_end
    known = -1.0 if mine is None else min(mine, 2.0**52)
    # The smallest of a number and of its negative: all numbers are equal where their sum is 0.
    fewest, most = run.runtime.all_reduce(
        torch.tensor([known, -known], dtype=torch.float64), op="min"
    ).tolist()
    if fewest < 0:
        return True
    if fewest != -most:
        lengths = run.runtime.gather_objects(int(known))
        _warn(lengths.index(min(lengths)), f"has {int(fewest)} batches, and others have up to {int(-most)}")
        run.train.end_at(int(fewest))
    return False


def batch_by_batch(run: Run, batches: Batches) -> Batches:
    """Yield ``(batch, is_last)`` while all processes have a batch; the last of one is the last of all."""
    group = host_group(run)
    try:
        while True:
            batch, is_last = next(batches, (_END, False))
            mine = _NONE if batch is _END else _LAST if is_last else _MORE
            said = torch.tensor(mine)
            # Between the hosts: no device is waited for.
            dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
            if said.item() != _MORE:
                everybody: list[Any] = [None] * run.runtime.world_size
                dist.all_gather_object(everybody, mine, group=group)
                if len(set(everybody)) > 1:
                    first = everybody.index(max(everybody))
                    _warn(
                        first,
                        f"has no more batches after {run.progress.batch + (mine != _NONE)}, and others have",
                    )
            if said.item() == _NONE:
                return
            yield batch, said.item() == _LAST
            if said.item() == _LAST:
                return
    finally:
        batches.close()  # type: ignore[attr-defined]


def host_group(run: Run) -> Any:
    """Return a group whose messages go from host to host; made once a run, by all processes at once."""
    if dist.get_backend() == "gloo":
        return None
    if run.host_group is None:
        run.host_group = dist.new_group(backend="gloo")
        run.undo.callback(dist.destroy_process_group, run.host_group)
    return run.host_group


def _warn(rank: int, what: str) -> None:
    warn_once(
        "batches-differ-by-rank",
        f"The train dataloader of rank {rank} {what}: every epoch ends there on all processes, and what the others "
        "have left is not read. Give each process the same number of batches to train on all of them.",
    )
