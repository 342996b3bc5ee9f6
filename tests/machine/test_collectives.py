"""What processes say to each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.refusals import refused

from hasten.machine import agreement, collectives
from hasten.resolve import runtime

CPU = torch.device("cpu")


def test_one_process_gets_its_input_back() -> None:
    tensor = torch.tensor([1, 2])
    for op in ("mean", "sum", "max", "min", "product", "avg", torch.distributed.ReduceOp.MAX, None):
        assert collectives.all_reduce(tensor, op, device=CPU) is tensor
    assert collectives.all_gather(tensor, device=CPU) is tensor
    assert collectives.broadcast("a", device=CPU) == "a"
    assert collectives.gather_objects("a") == ["a"]
    with refused(ValueError, "reduce_op", fix="'mean'"):
        collectives.all_reduce(torch.ones(1), "meen", device=CPU)


@pytest.mark.world_size(2)
def test_two_processes_exchange_tensors_objects_and_failures(tmp_path: Path) -> None:
    run = runtime(accelerator="cpu", devices=2, strategy="ddp")
    rank = run.launch(lambda: run.global_rank)
    mine = {"value": torch.tensor([1.0, 10.0]) * (rank + 1), "count": torch.tensor(rank), "name": "x"}
    with torch.inference_mode():
        mine["every second"] = torch.arange(4.0)[::2] * (rank + 1)
    reduced = run.all_reduce(mine)
    assert reduced["name"] == "x"
    # In place, in the type of the tensor.
    assert reduced["value"] is mine["value"]
    assert mine["value"].tolist() == [1.5, 15.0]
    assert mine["every second"].tolist() == [0.0, 3.0]
    assert run.strategy.all_reduce(torch.tensor([2 * rank + 1, rank])).tolist() == [2, 0]
    assert run.all_reduce(torch.tensor([True, rank == 0, False]), op="sum").tolist() == [True, True, False]
    loss = torch.tensor([1.0 + rank], requires_grad=True)
    assert run.all_reduce(loss, op="sum") is loss
    assert loss.item() == 3.0
    for op, result in {"sum": 3, "max": 2, "product": 2}.items():
        assert run.all_reduce(torch.tensor(rank + 1), op=op).item() == result
    for op, truth in {"max": True, "min": False}.items():
        assert run.all_reduce(torch.tensor(rank == 1), op=op).item() is truth
        assert run.strategy.reduce_boolean_decision(rank == 0, all=op == "min") is truth

    gathered = run.all_gather((torch.tensor([rank, rank]), [torch.tensor(rank)]))
    assert gathered[0].tolist() == [[0, 0], [1, 1]]
    assert gathered[1][0].tolist() == [0, 1]
    assert run.strategy.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert run.broadcast([rank, "a"], src=1) == [1, "a"]

    # Both processes compute the sum, so each part gets its factor twice.
    part = torch.tensor([2.0 + rank], requires_grad=True)
    (run.all_gather(part, sync_grads=True) * torch.tensor([[3.0], [5.0]])).sum().backward()
    assert part.grad is not None
    assert part.grad.tolist() == [2 * (3.0, 5.0)[rank]]

    # A write that fails on the first process fails on all.
    blocked = tmp_path / "file"
    if rank == 0:
        blocked.touch()
    run.barrier()
    with pytest.raises((OSError, RuntimeError)):
        run.save(f"{blocked}/a.ckpt", {"step": 1})
    run.save(f"{tmp_path}/b.ckpt", {"step": rank})
    assert run.load(f"{tmp_path}/b.ckpt")["step"] == 0


def test_a_program_may_end_its_process_group_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # As without a group; this process may be in that of another test.
    monkeypatch.setattr("torch.distributed.distributed_c10d.is_initialized", lambda: False)
    agreement.announce_leaving()


def test_an_error_at_the_top_of_a_program_names_the_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(f"{kind.__name__}: {error}"))
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    for name in ("begin_run", "publish_exit_error"):
        monkeypatch.setattr(agreement, name, lambda *_: None)
    monkeypatch.setattr(agreement, "find_dead_peer", lambda _: "the process of rank 1 left the run with ValueError.")
    collectives.name_who_ended_at_the_top()
    for error in (RuntimeError("gloo: Connection closed by peer"), ValueError("mine")):
        sys.excepthook(type(error), error, None)
    assert "rank 1 left the run with ValueError" in shown[0]
    assert shown[1:] == ["ValueError: mine"]
