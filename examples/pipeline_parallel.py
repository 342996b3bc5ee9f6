"""Pipeline parallel: each of two processes has half of the layers. python examples/pipeline_parallel.py gpipe 1f1b."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

import hasten as L

STAGES, MICRO_BATCHES, CLASSES = 2, 4, 3
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def layers() -> OrderedDict[str, nn.Module]:
    torch.manual_seed(0)
    hidden = {f"block{i}": nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for i in range(5)}
    return OrderedDict(hidden, head=nn.Linear(16, CLASSES))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 16, generator=generator), torch.randint(CLASSES, (64,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=generator, drop_last=True)


def train(fabric: L.Fabric, schedule_name: str) -> torch.Tensor:
    rank, named = fabric.global_rank, list(layers().items())
    each = len(named) // STAGES
    own = nn.Sequential(OrderedDict(named[rank * each : (rank + 1) * each])).to(fabric.device)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    stage = PipelineStage(own, rank, STAGES, fabric.device)
    schedule = SCHEDULES[schedule_name](stage, MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
    # All stages read the same batches: the first needs the inputs, the last the targets.
    batches = fabric.setup_dataloaders(loader(), use_distributed_sampler=False)
    loss = torch.zeros((), device=fabric.device)
    for _epoch in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            inputs = (x,) if stage.is_first else ()
            # Forward and backward of all micro-batches, whose gradients are averaged.
            schedule.step(*inputs, **({"target": y, "losses": losses} if stage.is_last else {}))
            optimizer.step()
            loss = torch.stack(losses).mean().detach() if stage.is_last else loss
    parts = fabric.strategy.gather_objects(own.state_dict())
    fabric.save(f"pipeline-{schedule_name}.ckpt", {"model": {name: part[name] for part in parts for name in part}})
    return fabric.broadcast(loss, src=STAGES - 1)


def main(schedules: list[str]) -> None:
    # The strategy starts the processes; no model is set up with it, since each process trains other layers.
    fabric = L.Fabric(devices=STAGES, strategy="ddp")
    fabric.launch()
    found = [f"{name} {train(fabric, name):.6f}" for name in schedules]
    fabric.print(f"result: loss {', '.join(found)}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["1f1b"])
