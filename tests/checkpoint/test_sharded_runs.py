"""Runs on several processes whose checkpoints are folders: each process restores its shards, on any number of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import hasten as L
from hasten.checkpoint import files, tensor_files
from hasten.checkpoint.places import LocalPlace
from hasten.checkpoint.sharded import split
from hasten.checkpoint.stored import StoredTensor, StoredTensors
from hasten.plugins import AsyncCheckpointIO
from hasten.resolve import runtime
from hasten.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.models import quiet
from tests.programs import call_in_file
from tests.strategies.test_fsdp import Net, fit, loader, whole

Run = tuple[L.Trainer, Net]


def sharded(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(state_dict_type="sharded", **options)


def saving(folder: Path) -> dict[str, Any]:
    return {"enable_checkpointing": True, "callbacks": [L.callbacks.ModelCheckpoint(folder, save_last=True)]}


def resumed(devices: int, strategy: Any, path: Any, *, epochs: int = 4, **options: Any) -> Run:
    """Train to the end from a checkpoint, with ``fit`` of the tests of FSDP."""
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(9.0)  # All of it comes from the checkpoint.
    fitting = L.Trainer.fit

    def from_path(self: L.Trainer, *args: Any) -> None:
        fitting(self, *args, ckpt_path=path)

    L.Trainer.fit = from_path  # type: ignore[method-assign]
    try:
        return fit(devices, strategy, net, max_epochs=epochs, **options)
    finally:
        L.Trainer.fit = fitting  # type: ignore[method-assign]


def state(run: Run) -> dict[str, Tensor]:
    """Return weights and optimizer state, whole."""
    found = whole(run[1])
    for index, entries in run[0].optimizers[0].state_dict()["state"].items():
        found |= {f"{index}.{name}": value for name, value in entries.items()}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def check_same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


@pytest.mark.world_size(2)
def test_a_run_goes_on_from_a_folder_under_every_strategy(tmp_path: Path) -> None:
    one = state(fit(1, "auto", max_epochs=4))
    uninterrupted = state(fit(2, sharded(), max_epochs=4))
    check_same(uninterrupted, one, 1e-5)

    begun = fit(2, sharded(), **saving(tmp_path / "a"))
    folder = tmp_path / "a" / "last.ckpt"
    assert sorted(each.name for each in folder.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    halfway = state(begun)
    check_same(halfway, flat(folder))

    reads: list[StoredTensor] = []
    full = StoredTensor.full

    def noted(self: StoredTensor) -> Tensor:
        reads.append(self)
        return full(self)

    StoredTensor.full = noted  # type: ignore[method-assign]
    try:
        check_same(state(resumed(2, sharded(), folder)), uninterrupted)
        # No process has read a whole weight; the counters of Adam are no shards.
        assert {each.shape for each in reads} <= {torch.Size()}
    finally:
        StoredTensor.full = full  # type: ignore[method-assign]
    check_same(state(resumed(2, FSDPStrategy(), folder)), uninterrupted)
    check_same(state(resumed(2, "ddp", folder)), one, 1e-5)
    # With nothing left to train, bit for bit.
    for strategy, devices in (("ddp", 2), ("auto", 1), (FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), 2)):
        check_same(state(resumed(devices, strategy, folder, epochs=2)), halfway)

    # From files, and to another number of processes.
    for name, strategy, devices in (("ddp", "ddp", 2), ("full", FSDPStrategy(), 2)):
        begun = fit(devices, strategy, **saving(tmp_path / name))
        check_same(state(resumed(2, sharded(), tmp_path / name / "last.ckpt", epochs=2)), state(begun))


@pytest.mark.world_size(2)
def test_last_finds_the_newest_whole_folder_also_when_saved_in_the_background(tmp_path: Path) -> None:
    uninterrupted = state(fit(2, sharded(), max_epochs=4))
    fit(2, sharded(), **saving(tmp_path), plugins=AsyncCheckpointIO())
    # Where the fit of one process ends, another may still have old folders to remove.
    torch.distributed.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    run = resumed(2, sharded(), "last", **saving(tmp_path), plugins=AsyncCheckpointIO())
    check_same(state(run), uninterrupted)
    torch.distributed.barrier()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["epoch=3-step=8.ckpt", "last.ckpt"]
    torch.distributed.barrier()
    if run[0].is_global_zero:
        (tmp_path / "last.ckpt" / "__1_0.distcp").unlink()
    torch.distributed.barrier()
    run = resumed(2, sharded(), "last", epochs=5, **saving(tmp_path))
    assert run[0].current_epoch == 5
    module = Net.load_from_checkpoint(tmp_path / "last.ckpt")
    check_same(dict(module.state_dict()), whole(run[1]))


@pytest.mark.world_size(2)
def test_fabric_saves_and_loads_folders(tmp_path: Path) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=sharded())
    fabric.launch()

    def made() -> tuple[Any, Any]:
        net = Net()
        return fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))

    model, optimizer = made()
    fabric.backward(model(torch.ones(2, 5)).sum())
    optimizer.step()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    fabric.barrier()
    other, other_optimizer = made()
    fabric.backward(other(torch.zeros(2, 5)).sum())
    other_optimizer.step()
    state = {"model": other, "optimizer": other_optimizer, "step": 0}
    assert fabric.load(tmp_path / "a.ckpt", state) == {}
    assert state["step"] == 3
    check_same(whole(other.module), whole(model.module))
    for ours, theirs in zip(other_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert all(
            torch.equal(
                getattr(ours[key], "to_local", lambda v=ours[key]: v)(),
                getattr(theirs[key], "to_local", lambda v=theirs[key]: v)(),
            )
            for key in ours
        )


def flat(folder: Path) -> dict[str, Tensor]:
    """Return weights and optimizer state in a folder."""
    stored = files.load(folder).whole()
    states = stored["optimizer_states"][0]["state"]
    entries = {f"{index}.{name}": value for index, each in states.items() for name, value in each.items()}
    return {**stored["state_dict"], **entries}


@pytest.mark.slow
def test_folders_move_between_numbers_of_processes(tmp_path: Path) -> None:
    def on(count: int, source: str | None, target: str) -> None:
        processes = runtime(accelerator="cpu", devices=count, strategy=DDPStrategy(start_method="forkserver"))
        here = {"source": source and str(tmp_path / source), "target": str(tmp_path / target)}
        processes.launch(call_in_file, str(Path(__file__)), "_go_on", **here)

    on(4, None, "4")
    on(3, "4", "3")
    on(4, "3", "back")
    expected = flat(tmp_path / "4")
    for name in ("3", "back"):
        check_same(flat(tmp_path / name), expected)
    run = resumed(1, "auto", tmp_path / "back", epochs=2)
    check_same(state(run), expected)
    run[0].save_checkpoint(tmp_path / "one.ckpt")
    on(2, "one.ckpt", "2")
    check_same(flat(tmp_path / "2"), expected)


def _go_on(source: str | None, target: str) -> None:
    """Train two epochs, or load what has trained them, and save."""
    count = torch.distributed.get_world_size()
    run = fit(count, sharded()) if source is None else resumed(count, sharded(), source, epochs=2)
    if source is not None and Path(source).is_dir():
        check_same(state(run), flat(Path(source)))
    run[0].save_checkpoint(target)


class Check(L.Callback):
    """Checks that what was restored is what was saved."""

    def __init__(self, expected: dict[str, Tensor]) -> None:
        self.expected = expected

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        check_same(state((trainer, pl_module)), self.expected)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_every_strategy_goes_on_from_the_checkpoint_of_every_other(tmp_path: Path) -> None:
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    strategies: dict[str, tuple[Callable[[], Any], int]] = {
        "one": (lambda: "auto", 1),
        "ddp": (lambda: "ddp", 2),
        "fsdp": (sharded, 2),
        "tp": (lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, plan=plan), 2),
        "zero": (lambda: "ddp_sharded", 2),
    }
    # One process and DDP write and read the same files: each of the other three has to do with one of them.
    goes_on = {
        "one": ("fsdp", "tp", "zero"), "ddp": ("one", "ddp"), "fsdp": tuple(strategies),
        "tp": ("ddp", "fsdp", "tp", "zero"), "zero": ("one", "fsdp", "tp", "zero"),
    }  # fmt: skip

    def train(name: str, epochs: int, path: Path | None = None, *callbacks: L.Callback) -> Run:
        strategy, devices = strategies[name]
        parts = 1 if name in ("one", "tp") else 2
        trainer = quiet(max_epochs=epochs, devices=devices, strategy=strategy(), callbacks=list(callbacks))
        net = Net()
        trainer.fit(net, loader(8 // parts, 32), ckpt_path=path)
        return trainer, net

    expected = state(train("one", 2))
    for source, targets in goes_on.items():
        run = train(source, 1)
        path = tmp_path / str(torch.distributed.get_rank() if source == "one" else 0) / source
        run[0].save_checkpoint(path)
        saved = {name: value.clone() for name, value in state(run).items()} if source != "zero" else None
        torch.distributed.barrier()
        assert path.is_dir() == (source in ("fsdp", "tp"))
        for target in targets:
            checks = [] if saved is None or target == "zero" else [Check(saved)]
            went_on = train(target, 2, path, *checks)
            found = whole(went_on[1]) if target == "zero" else state(went_on)
            check_same(found, {name: expected[name] for name in found}, 1e-5)


@pytest.mark.world_size(2)
def test_callbacks_restore_sharded_and_other_tensors(tmp_path: Path) -> None:
    def train(strategy: Any, devices: int, epochs: int, path: Any = None) -> tuple[Run, Any]:
        best = L.callbacks.ModelCheckpoint(tmp_path, monitor="train_loss", save_last=True)
        average = L.callbacks.EMAWeightAveraging(decay=0.9)
        trainer = quiet(
            max_epochs=epochs,
            devices=devices,
            strategy=strategy,
            callbacks=[best, average],
            enable_checkpointing=True,
            gradient_clip_val=0.5,
        )
        net = Net()
        trainer.fit(net, loader(8 // devices, 32), ckpt_path=path)
        return (trainer, net), best

    uninterrupted = state(train(sharded(), 2, 4)[0])
    torch.distributed.barrier()
    train(sharded(), 2, 2)
    run, best = train(sharded(), 2, 4, "last")
    check_same(state(run), uninterrupted)
    assert type(best.best_model_score) is Tensor
    assert isinstance(files.load(best.best_model_path)["current_model_state"], StoredTensors)
    torch.distributed.barrier()
    check_same(state(train("auto", 1, 4, best.best_model_path)[0]), uninterrupted, 1e-5)


@pytest.mark.world_size(4)
def test_a_shard_that_several_processes_have_is_written_once(tmp_path: Path) -> None:
    def hybrid() -> FSDPStrategy:
        return sharded(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))

    rank, group = torch.distributed.get_rank(), torch.distributed.new_group([0, 1])
    io = AsyncCheckpointIO()
    run = fit(4, hybrid(), max_epochs=1, plugins=io)
    expected = state(run)
    contents = {"state_dict": run[1].state_dict(), "optimizer_states": [run[0].optimizers[0].state_dict()]}
    run[0].save_checkpoint(tmp_path / "trainer.ckpt")
    files.save_folder(contents, tmp_path / "a.ckpt")
    io.teardown()  # The first one is written in the background.
    torch.distributed.barrier()
    for name in ("a.ckpt", "trainer.ckpt"):
        check_same(flat(tmp_path / name), expected)
    # As many bytes as two processes write that have the only shards; all four write a part.
    net = Net()
    pair = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        fully_shard(net, mesh=pair)
        optimizer = torch.optim.AdamW(net.parameters())
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        tensors = split(
            {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}, is_first=not rank
        )
        (tmp_path / "b").mkdir(exist_ok=True)
        tensor_files.save(tensors[1], tensor_files.Writer(LocalPlace(tmp_path / "b")), group)
    torch.distributed.barrier()
    sizes = [path.stat().st_size for path in sorted((tmp_path / "a.ckpt").glob("*.distcp"))]
    assert len(sizes) == 4
    assert sum(sizes) == sum(path.stat().st_size for path in (tmp_path / "b").glob("*.distcp"))
    # Read by four, two and one.
    for strategy in (hybrid(), sharded()):
        check_same(state(resumed(4, strategy, tmp_path / "trainer.ckpt", epochs=1)), expected)
    if rank < 2:
        files.load(tmp_path / "a.ckpt")["state_dict"].read_into(net.state_dict())
        weights = whole(net)
        check_same(weights, {name: expected[name] for name in weights})
    check_same(state(resumed(1, "auto", tmp_path / "trainer.ckpt", epochs=1)), expected)
    torch.distributed.barrier()
