"""A checkpoint of any strategy goes on under any other, with the weights and optimizer states that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.test_fsdp import Net, loader
from torch import Tensor

import hasten as L
from hasten.checkpoint import files
from hasten.strategies import FSDPStrategy, ModelParallelStrategy


def tensor_parallel() -> ModelParallelStrategy:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, plan=plan)


def folder() -> FSDPStrategy:
    return FSDPStrategy(state_dict_type="sharded")


# Each with its number of processes, and of those that read different data.
KINDS: dict[str, tuple[int, int, Any]] = {
    "one": (1, 1, lambda: "auto"),
    "ddp": (2, 2, lambda: "ddp"),
    "ddp_sharded": (2, 2, lambda: "ddp_sharded"),
    "fsdp": (2, 2, FSDPStrategy),
    "fsdp-folder": (2, 2, folder),
    "tensor-parallel": (2, 1, tensor_parallel),
}


class SavesAtStart(L.Callback):
    def __init__(self, path: Path | None) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.path is not None:
            trainer.save_checkpoint(self.path)


def run(kind: str, epochs: int, path: Path | None = None, at_start: Path | None = None) -> L.Trainer:
    devices, readers, strategy = KINDS[kind]
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy(), max_epochs=epochs, gradient_clip_val=0.5,
        callbacks=[SavesAtStart(at_start)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters() if path is not None else ():
            parameter.fill_(9.0)  # All of it comes from the checkpoint.
    trainer.fit(net, loader(8 // readers, 24), ckpt_path=path)
    return trainer


def content(path: Path) -> dict[str, Tensor]:
    """Return weights and optimizer state of a checkpoint, whole."""
    stored = files.load(path)
    found: dict[str, Any] = dict(stored["state_dict"])
    for index, entries in stored["optimizer_states"][0]["state"].items():
        found |= {f"{index}.{name}": value for name, value in entries.items()}
    return {name: value.full() if hasattr(value, "read_into") else value for name, value in found.items()}


@pytest.mark.world_size(2)
def test_every_pair(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()

    def place(name: str, kind: str) -> Path:
        # A process that runs alone has a file of its own.
        return tmp_path / (f"{name}.{rank}" if kind == "one" else name)

    def saved(trainer: L.Trainer, path: Path) -> dict[str, Tensor]:
        trainer.save_checkpoint(path)
        torch.distributed.barrier()
        return content(path)

    expected = saved(run("one", 2), place("expected", "one"))
    for source in KINDS:
        path = place(source, source)
        before = saved(run(source, 1), path)
        for target in ("one", "ddp", "fsdp", "tensor-parallel"):
            pair = f"{source} to {target}"
            start = place(f"{pair}, start", target)
            # All processes of a run read one file.
            trainer = run(target, 2, tmp_path / "one.0" if source == "one" else path, at_start=start)
            after = saved(trainer, place(f"{pair}, end", target))
            begun = content(start)
            assert begun.keys() == before.keys()
            for name, value in begun.items():
                assert torch.equal(value, before[name]), (pair, name)
            for name, value in expected.items():
                torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-4, msg=f"{pair}: {name}")
