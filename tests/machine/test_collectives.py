"""What processes say to each other."""

from __future__ import annotations

import pytest
import torch

from hasten.machine import collectives
from hasten.resolve import runtime

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "op", ["mean", "sum", "max", "min", "product", "avg", torch.distributed.ReduceOp.MAX]
)
def test_one_process_gets_back_what_it_gave(op: object) -> None:
    tensor = torch.tensor([1, 2])
    assert collectives.all_reduce(tensor, op, device=CPU) is tensor
    assert collectives.all_gather(tensor, device=CPU) is tensor
    assert collectives.broadcast("a", device=CPU) == "a"
    assert collectives.gather_objects("a") == ["a"]


def test_an_unknown_operation_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        collectives.all_reduce(torch.ones(1), "meen", device=CPU)


@pytest.mark.world_size(2)
def test_reductions_over_two_processes() -> None:
    run = runtime(accelerator="cpu", devices=2, strategy="ddp")
    rank = run.launch(lambda: run.global_rank)
    mine = {"value": torch.tensor([1.0, 10.0]) * (rank + 1), "count": torch.tensor(rank), "name": "x"}
    reduced = run.all_reduce(mine)
    assert reduced["value"].tolist() == [1.5, 15.0]
    assert reduced["count"].item() == 0.5
    assert reduced["name"] == "x"
    assert mine["value"].tolist() == [1.0 * (rank + 1), 10.0 * (rank + 1)]
    assert run.all_reduce(torch.tensor(rank + 1), op="sum").item() == 3
    assert run.all_reduce(torch.tensor(rank + 1), op="max").item() == 2
    assert run.all_reduce(torch.tensor(rank + 1), op="product").item() == 2
    assert run.all_reduce(torch.tensor(rank == 1), op="max").item() is True
    assert run.all_reduce(torch.tensor(rank == 1), op="min").item() is False


@pytest.mark.world_size(2)
def test_gathering_over_two_processes() -> None:
    run = runtime(accelerator="cpu", devices=2, strategy="ddp")
    rank = run.launch(lambda: run.global_rank)
    gathered = run.all_gather((torch.tensor([rank, rank]), [torch.tensor(rank)]))
    assert gathered[0].tolist() == [[0, 0], [1, 1]]
    assert gathered[1][0].tolist() == [0, 1]
    assert run.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert run.broadcast([rank, "a"], src=1) == [1, "a"]
    assert run.strategy.reduce_boolean_decision(rank == 0, all=True) is False
    assert run.strategy.reduce_boolean_decision(rank == 0, all=False) is True
    run.barrier()


@pytest.mark.world_size(2)
def test_gradients_flow_back_through_a_gather() -> None:
    run = runtime(accelerator="cpu", devices=2, strategy="ddp")
    rank = run.launch(lambda: run.global_rank)
    mine = torch.tensor([2.0 + rank], requires_grad=True)
    gathered = run.all_gather(mine, sync_grads=True)
    (gathered * torch.tensor([[3.0], [5.0]])).sum().backward()
    assert mine.grad is not None
    # Both processes computed the sum, so each part gets its factor twice.
    assert mine.grad.tolist() == [2 * (3.0, 5.0)[rank]]


@pytest.mark.world_size(2)
def test_a_failed_write_is_known_to_all_processes(tmp_path: object) -> None:
    run = runtime(accelerator="cpu", devices=2, strategy="ddp")
    run.launch(lambda: None)
    blocked = f"{tmp_path}/file"
    if run.global_rank == 0:
        open(blocked, "w").close()
    run.barrier()
    with pytest.raises((OSError, RuntimeError)):
        run.save(f"{blocked}/a.ckpt", {"step": 1})
    run.save(f"{tmp_path}/b.ckpt", {"step": run.global_rank})
    assert run.load(f"{tmp_path}/b.ckpt")["step"] == 0
