"""How a batch comes to the device: the user's hooks, or none at all where nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.data.prefetch import SideStream
from hasten.hooks import overrides
from hasten.loops.run import Run
from hasten.loops.run_data import Source
from hasten.module.datamodule import DataHooks


def make_transfer(run: Run, source: Source, loader_idx: int = 0) -> Callable[[Any], Any] | None:
    """Return the function that moves a batch, or None when batches stay as they are."""
    transfer = _chosen(run, source, loader_idx)
    return transfer if transfer is None else run.watch("batch_to_device", transfer)


def _chosen(run: Run, source: Source, loader_idx: int) -> Callable[[Any], Any] | None:
    device = run.runtime.device
    module, datamodule = run.module, source.datamodule

    def owner_of(name: str) -> Any:
        for owner in (datamodule, module):
            if owner is not None and overrides(owner, DataHooks, name):
                return owner
        return None

    before, move, after = (
        owner_of(name)
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    )
    to_device = run.runtime.to_device if device.type != "cuda" else SideStream(device)
    if before is None and move is None and after is None:
        return None if device.type == "cpu" else to_device

    def transfer(batch: Any) -> Any:
        if before is not None:
            batch = before.on_before_batch_transfer(batch, loader_idx)
        if move is not None:
            batch = move.transfer_batch_to_device(batch, device, loader_idx)
        else:
            batch = to_device(batch)
        if after is not None:
            batch = after.on_after_batch_transfer(batch, loader_idx)
        return batch

    return transfer
