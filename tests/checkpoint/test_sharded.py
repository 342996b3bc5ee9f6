"""Checkpoints that are folders: whole or not there, read by any number of processes, without running code."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hasten as L
from hasten._lib import files as local_files
from hasten._lib.errors import CheckpointDamaged
from hasten.callbacks import checkpoint_files
from hasten.checkpoint import files
from hasten.checkpoint.stored import StoredTensor, StoredTensors, read_into
from hasten.commands import main as command
from hasten.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from hasten.strategies import SingleDeviceStrategy
from tests.checkpoint.test_files import CONTENTS, Payload, same
from tests.models import Classifier
from tests.refusals import refused, warned

STATE = OrderedDict(weight=torch.arange(3000.0).view(30, 100), bias=torch.ones(2, dtype=torch.bfloat16))


def saved(folder: Any, name: str = "a.ckpt", number: int = 1) -> Any:
    path = folder / name if isinstance(folder, Path) else f"{folder}/{name}"
    files.save_folder({"state_dict": {"weight": torch.full((30, 100), float(number))}, "number": number}, path)
    return path


def newest(folder: str, reader: CheckpointIO | None = None) -> str | None:
    return checkpoint_files.newest(folder, ".ckpt", reader or TorchCheckpointIO(), SingleDeviceStrategy())


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# -- the format, in one process


def test_contents_come_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.ckpt"
    files.save_folder({**CONTENTS, "state_dict": STATE, "a.b": [{"x": STATE}], "a": {"b": [{"x": STATE}]}}, path)
    files.verify(path)
    assert names(path) == [".metadata", "__0_0.distcp", "meta.pt"]
    assert names(path.parent) == ["a.ckpt"]
    read = files.load(path)
    weights = read["state_dict"]
    assert isinstance(weights, StoredTensors)
    assert list(weights) == list(STATE)
    stored = dict(weights.stored())["bias"]
    assert (stored.shape, stored.dtype) == ((2,), torch.bfloat16)
    assert torch.equal(weights["weight"], STATE["weight"])
    whole = read.whole()
    assert same(whole["state_dict"], dict(STATE))
    assert same(whole["a"]["b"][0]["x"], STATE)
    assert all(same(whole[name], value) for name, value in CONTENTS.items() if name != "state_dict")
    # Changes are as in a dict, and not written.
    weights["new"] = weights.pop("bias")
    del weights["weight"]
    assert dict(weights).keys() == {"new"}
    assert "bias" in files.load(path)["state_dict"]


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    files.save_folder(
        {"state_dict": STATE, "optimizer_states": [{"state": {0: {"exp_avg": STATE["weight"]}}}]}, tmp_path / "a"
    )
    read = files.load(tmp_path / "a")
    model = nn.Linear(100, 30, dtype=torch.float64)
    read["state_dict"].read_into({"weight": model.weight})
    assert torch.equal(model.weight, STATE["weight"].double())
    stored = read["optimizer_states"][0]["state"][0]["exp_avg"]
    assert isinstance(stored, StoredTensor)
    target = torch.zeros(100, 30).T
    stored.read_into(target)
    assert torch.equal(target, stored.full())
    with refused(ValueError, says=("(30, 100)", "(2,)")):
        stored.read_into(torch.zeros(2))
    with refused(ValueError, says="to_empty"):
        stored.read_into(torch.zeros(30, 100, device="meta"))
    with refused(KeyError, says="wieght"):
        read["state_dict"].read_into({"wieght": torch.zeros(1)})


def test_a_folder_replaces_files_links_and_folders_and_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    files.save({"number": 0}, path)
    for number in (1, 2):
        saved(tmp_path, number=number)
        assert files.load(path)["number"] == number
    files.save({"number": 3}, path)
    assert files.load(path)["number"] == 3
    path.unlink()
    path.symlink_to("nowhere")
    saved(tmp_path, number=4)
    assert files.load(path).whole()["state_dict"]["weight"][0, 0] == 1 * 4
    assert names(tmp_path) == ["a.ckpt"]
    (tmp_path / "data").mkdir()
    saved(tmp_path, "data")  # Empty.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for save in (files.save_folder, files.save):
        with refused(IsADirectoryError, says=str(tmp_path / "mine")):
            save({"number": 5}, tmp_path / "mine")
    with refused(TypeError, says=("checkpoint['f']", "builtin_function")):
        files.save_folder({"f": len}, path)
    assert files.load(path)["number"] == 4
    assert names(tmp_path) == ["a.ckpt", "data", "mine"]


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path, "last.ckpt", 1)
    aside = tmp_path / f".last.ckpt.0123abcd{local_files.SET_ASIDE}"

    def killed_between_the_renames() -> None:
        path.rename(aside)

    killed_between_the_renames()
    assert files.load(path)["number"] == 1
    assert names(tmp_path) == ["last.ckpt"]
    killed_between_the_renames()
    assert checkpoint_files.find(str(tmp_path), ".ckpt") == [str(path)]
    killed_between_the_renames()
    assert files.clean(tmp_path) == []
    assert files.load(path)["number"] == 1
    killed_between_the_renames()
    saved(tmp_path, "last.ckpt", 2)
    assert files.clean(tmp_path) == [aside]
    assert files.load(path)["number"] == 2
    # A reader gives the old one its name back while the writer is between its renames.
    rename = os.rename

    def meddling(old: Any, new: Any) -> None:
        rename(old, new)
        os.rename = rename
        if str(new).endswith(local_files.SET_ASIDE):
            assert files.present(path)

    os.rename = meddling
    try:
        saved(tmp_path, "last.ckpt", 3)
    finally:
        os.rename = rename
    assert files.load(path)["number"] == 3
    assert names(tmp_path) == ["last.ckpt"]


def test_folders_behind_urls(tmp_path: Path) -> None:
    for root in (f"memory://{tmp_path.name}", f"local://{tmp_path}/run"):
        url = f"{root}/a.ckpt"
        system, inner = fsspec.core.url_to_fs(url)
        for number in (1, 2):
            saved(root, number=number)
            files.verify(url)
            assert files.load(url).whole()["state_dict"]["weight"][0, 0] == number
            assert files.load(url)["number"] == number
            # What killed writers leave.
            system.makedirs(f"{inner}/shards-0123abcd", exist_ok=True)
            for name in ("shards-0123abcd/__0_0.distcp", "meta.pt.0123abcd.hasten-tmp"):
                system.pipe_file(f"{inner}/{name}", b"half")
        saved(root, number=2)
        (shards,) = (each for each in system.ls(inner, detail=False) if "shards-" in each)
        assert sorted(each.rpartition("/")[2] for each in system.ls(shards, detail=False)) == [
            ".metadata",
            "__0_0.distcp",
        ]
        files.save({"number": 3}, f"{root}/b.ckpt")
        for save, name, message in ((files.save, "a", "is a folder"), (files.save_folder, "b", "a file is there")):
            with pytest.raises(OSError, match=message):
                save({"number": 4}, f"{root}/{name}.ckpt")
        with pytest.raises(IsADirectoryError, match=r"is a folder with other files \(.+\); a checkpoint needs a name"):
            files.save_folder({"number": 4}, root)
        with refused(TypeError, says="builtin_function"):
            files.save_folder({"f": len}, url)
        found = checkpoint_files.find(root, ".ckpt")
        assert sorted(each.rpartition("/")[2] for each in found) == ["a.ckpt", "b.ckpt"]
        assert newest(root) in found
        system.rm(f"{shards}/__0_0.distcp")
        with refused(CheckpointDamaged, says="__0_0"):
            files.load(url)
        files.remove(url)
        assert not files.present(url)
        assert checkpoint_files.find(root, ".ckpt") == [each for each in found if each.endswith("b.ckpt")]


def test_temporary_folders_of_dead_writers_are_cleaned(tmp_path: Path) -> None:
    left = tmp_path / ".last.ckpt.123-abcdef01.hasten-tmp"
    left.mkdir()
    (left / "__0_0.distcp").touch()
    with local_files.replacing_folder(tmp_path / "a.ckpt") as folder:
        assert files.clean(tmp_path) == [left]
        assert folder.is_dir()
    assert names(tmp_path) == []
    (tmp_path / ".b.ckpt.123-abcdef01.hasten-tmp").symlink_to(saved(tmp_path))
    files.clean(tmp_path)
    files.verify(tmp_path / "a.ckpt")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose_a_part(path: Path) -> None:
    stored = torch.load(path, weights_only=True)
    layout = json.loads(stored["tensors"])
    next(iter(layout.values()))["chunks"].pop()
    torch.save({**stored, "tensors": json.dumps(layout)}, path)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (".metadata", Path.unlink, ".metadata is missing"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        ("__0_0.distcp", cut, r"__0_0.distcp has \d+ bytes instead of \d+"),
        ("__0_0.distcp", flip, "__0_0.distcp differs from what was written"),
        ("meta.pt", Path.unlink, "meta.pt is missing"),
        ("meta.pt", cut, "meta.pt is damaged"),
        ("meta.pt", lose_a_part, "the layout of .* makes no sense"),
        ("meta.pt", lambda path: torch.save({"epoch": 1}, path), "was not written by hasten"),
    ],
)
def test_damaged_folders_are_named_and_passed_over(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    older, newer = saved(tmp_path, "older.ckpt", 1), saved(tmp_path, "newer.ckpt", 2)
    os.utime(older, (1, 1))
    assert newest(str(tmp_path)) == str(newer)
    damage(newer / name)
    with pytest.raises(CheckpointDamaged, match=f"newer.ckpt.*{message}"):
        files.verify(newer)
    with pytest.raises(CheckpointDamaged, match=message):
        files.load(newer).whole()
    for reader in (TorchCheckpointIO(), AsyncCheckpointIO()):
        with pytest.warns(UserWarning, match=f"A checkpoint is skipped: .*newer.ckpt.*{message}"):
            assert newest(str(tmp_path), reader) == str(older)


def test_no_code_in_a_folder_runs(tmp_path: Path) -> None:
    path = saved(tmp_path)
    ran = tmp_path / "ran"
    payload = pickle.dumps(Payload(ran))
    size = (path / ".metadata").stat().st_size
    (path / ".metadata").write_bytes(payload + bytes(size - len(payload)))
    assert files.load(path).whole()["number"] == 1
    with pytest.raises(CheckpointDamaged):
        files.verify(path)
    with open(path / "meta.pt", "wb") as file:
        torch.save({"hasten_folder": 1, "contents": Payload(ran)}, file)
    with pytest.raises(files.CheckpointRefused):
        files.load(path)
    assert not ran.exists()


def test_a_removed_folder_is_gone_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path)
    checkpoint_files.link(str(path), str(tmp_path / "last.ckpt"))
    files.remove(tmp_path / "last.ckpt")
    files.verify(path)
    files.remove(path)
    files.remove(path)
    assert names(tmp_path) == []


# -- several processes


def trained(module: nn.Module) -> torch.optim.Adam:
    """Train a module for two steps, on the same data in all processes."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        module(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def tensors_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(module.state_dict())
    for index, entries in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value for name, value in entries.items()}
    return found


@pytest.mark.world_size(4)
def test_a_folder_of_four_is_read_by_one_two_and_three(tmp_path: Path) -> None:
    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    optimizer = trained(module)
    values = {name: full(value) for name, value in tensors_of(module, optimizer).items()}
    # Shards of other kinds: both dimensions, with copies, and none at all on some processes.
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    grid = torch.arange(35.0).view(5, 7)
    others = {
        "hybrid": distribute_tensor(grid, square, [Replicate(), Shard(0)]),
        "both": distribute_tensor(grid, square, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(grid, square, [Replicate(), Replicate()]),
        "few": distribute_tensor(grid[:2], init_device_mesh("cpu", (4,)), [Shard(0)]),
    }
    path = tmp_path / "a.ckpt"
    contents = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "others": {**others, "plain": grid},
        "rank": dist.get_rank(),
        "mine": torch.tensor(dist.get_rank()),
    }
    files.save_folder(contents, path)
    files.save_folder(contents, path)
    assert names(tmp_path) == ["a.ckpt"]
    dist.barrier()
    read = files.load(path)
    assert (read["rank"], int(read["mine"])) == (0, 0)
    assert all(torch.equal(read["others"][name], grid[: 2 if name == "few" else None]) for name in read["others"])
    stored = dict(read["others"].stored())
    for name, target in others.items():
        for placements in ([Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(1), Replicate()]):
            # Read from the folder, and from a whole tensor.
            for source in (stored[name], read["others"][name]):
                other = torch.distributed.tensor.zeros(*target.shape, device_mesh=square, placements=placements)
                read_into([(source, other)])
                assert torch.equal(other.full_tensor(), grid[: 2 if name == "few" else None])
    for world in (3, 2, 1):
        mesh = DeviceMesh("cpu", list(range(world)))
        if dist.get_rank() >= world:
            continue
        other = model()
        fully_shard(other, mesh=mesh)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        again = trained(other)
        targets = other.state_dict()
        read["state_dict"].read_into(targets)
        states = read["optimizer_states"][0]["state"]
        for index, entries in again.state_dict()["state"].items():
            for name, target in entries.items():
                states[index][name].read_into(target)
        for name, value in tensors_of(other, again).items():
            if "running" not in name:  # The buffers of the first process count.
                assert torch.equal(full(value), values[name]), name


def test_one_process_reads_what_four_have_written(tmp_path: Path) -> None:
    """The test above leaves no process group behind, so the folder is written anew by two processes."""
    _in_processes(2, "_write_and_leave", target=str(tmp_path / "a.ckpt"))
    alone = model()
    optimizer = trained(alone)
    whole = files.load(tmp_path / "a.ckpt").whole()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(whole["state_dict"][name], value, rtol=1e-6, atol=1e-6)
    optimizer.load_state_dict(whole["optimizer_states"][0])
    assert whole["optimizer_states"][0]["state"][0]["exp_avg"].shape == (5, 7)


def _in_processes(count: int, function: str, **arguments: Any) -> None:
    from hasten.resolve import runtime
    from hasten.strategies import DDPStrategy
    from tests.programs import call_in_file

    runtime(accelerator="cpu", devices=count, strategy=DDPStrategy(start_method="forkserver")).launch(
        call_in_file, str(Path(__file__)), function, **arguments
    )


def _write_and_leave(target: str) -> None:
    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = trained(module)
    files.save_folder({"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}, target)


@contextmanager
def size_limit(size_bytes: int) -> Iterator[None]:
    """Let this process write files of at most that size."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def everything(number: int, rows: int = 50_000) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "number": number,
        "state_dict": {"weight": DTensor.from_local(torch.full((rows, 2), float(number)), mesh, [Shard(0)])},
        "list": [torch.full((3,), float(number))],
    }


@pytest.mark.world_size(2)
def test_an_error_of_one_process_is_raised_by_all_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    path, rank = tmp_path / "a.ckpt", dist.get_rank()
    files.save_folder(everything(1), path)
    for failing in (0, 1):
        limit = 100_000 if rank == failing else 100_000_000
        with (
            size_limit(limit),
            refused(OSError, says=f"rank {failing}") as caught,
        ):
            files.save_folder(everything(2), path)
        assert caught.value.errno == 27  # EFBIG
    for wrong in ({"f": len}, {"state_dict": {"odd": everything(2)["state_dict"]["weight"]}} if rank else {}):
        contents = {**everything(2), **wrong}
        with pytest.raises((TypeError, RuntimeError), match=r"builtin_function|other sharded tensors, for instance"):
            files.save_folder(contents, path)
    # The errors of saves in the background come with the next one, and at the end.
    io = AsyncCheckpointIO()
    with size_limit(100_000 if rank else 100_000_000):
        io.save_folder(everything(3), path)
        io._folders._pending.exception()
    with refused(OSError, says="rank 1"):
        io.save_folder(everything(4), path)
    io.save_folder(everything(5), path)
    io._folders._pending.exception()
    with size_limit(100_000 if rank else 100_000_000):
        io.save_folder(everything(6), tmp_path / "b.ckpt")
        with refused(OSError, says="nothing is left of it"):
            io.teardown()
    io.teardown()
    dist.barrier()
    assert names(tmp_path) == ["a.ckpt"]
    files.verify(path)
    assert files.load(path)["number"] == 5
    dist.barrier()
    # Behind a URL, too. The memory of each process is another place.
    url = f"local://{tmp_path}/b.ckpt"
    files.save_folder(everything(6), url)
    with (
        size_limit(100_000 if rank else 100_000_000),
        refused(OSError, says="rank 1"),
    ):
        files.save_folder(everything(7), url)
    with pytest.raises(RuntimeError, match="not the same folder on all machines"):
        files.save_folder(everything(8), "memory://a.ckpt")
    whole = files.load(url).whole()
    assert whole["number"] == 6
    assert (whole["state_dict"]["weight"] == 6).all()
    assert len(names(tmp_path / "b.ckpt")) == 2
    dist.barrier()


@pytest.mark.world_size(2)
def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    io, rank = AsyncCheckpointIO(), dist.get_rank()
    contents = everything(0)
    for number in range(1, 4):
        contents["state_dict"]["weight"].to_local().fill_(number)
        contents["list"][0].fill_(number)
        contents["number"] = number
        io.save_folder(contents, tmp_path / f"{number}.ckpt")
        contents["state_dict"]["weight"].to_local().fill_(-1)
        contents["list"][0].fill_(-1)
        contents["list"].append(-1)
        if number > 1 and rank == 0:
            # Once the one that replaces it is complete.
            io.remove_checkpoint(tmp_path / f"{number - 1}.ckpt")
        contents["list"].pop()
    assert io.load_checkpoint(tmp_path / "3.ckpt")["number"] == 3
    io.teardown()
    dist.barrier()
    assert names(tmp_path) == ["3.ckpt"]
    whole = files.load(tmp_path / "3.ckpt").whole()
    assert (whole["state_dict"]["weight"] == 3).all()
    assert same(whole["list"], [torch.full((3,), 3.0)])
    # It can be used again.
    io.save_folder(everything(4), tmp_path / "4.ckpt")
    io.teardown()
    files.verify(tmp_path / "4.ckpt")
    dist.barrier()


# -- Trainer, Fabric and the command line


def in_folders() -> SingleDeviceStrategy:
    """Return a strategy of one process that saves folders."""
    strategy = SingleDeviceStrategy()
    strategy.state.saves_folders = True
    return strategy


def data() -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)


def fit(folder: Path, epochs: int, *, seed: int = 0, resume: str | None = None, **options: Any) -> L.Trainer:
    L.seed_everything(seed)
    keep = L.callbacks.ModelCheckpoint(
        folder, save_top_k=2, monitor="train_loss", save_last=options.pop("save_last", None)
    )
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        strategy=options.pop("strategy", None) or in_folders(),
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Classifier(dropout=0.5)
    trainer.fit(module, data(), ckpt_path=resume)
    return trainer


def weights_of(trainer: L.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO])
def test_a_run_resumes_exactly_from_folders(tmp_path: Path, plugin: Any) -> None:
    options = {} if plugin is None else {"plugins": plugin()}
    expected = weights_of(fit(tmp_path / "whole", 4, **options))
    fit(tmp_path / "parts", 2, save_last="link", **options)
    parts = names(tmp_path / "parts")
    assert parts[-1] == "last.ckpt"
    assert len(parts) == 3
    assert (tmp_path / "parts" / "last.ckpt" / "meta.pt").exists()
    options = {} if plugin is None else {"plugins": plugin()}
    resumed = fit(tmp_path / "parts", 4, seed=1, resume="last", save_last="link", **options)
    assert same(weights_of(resumed), expected)
    assert len(names(tmp_path / "parts")) == 3
    # Files and folders replace each other.
    again = fit(tmp_path / "parts", 5, resume="last", save_last=True, strategy="auto")
    assert (tmp_path / "parts" / "last.ckpt").is_file()
    assert again.current_epoch == 5
    fit(tmp_path / "parts", 6, resume="last", save_last=True)
    assert (tmp_path / "parts" / "last.ckpt").is_dir()


def as_lightning_saves(path: Path, folder: Path, weights: str) -> None:
    """Write a checkpoint file as a folder of Lightning's sharded strategies: with names in place of numbers."""
    contents = files.load(path)
    names = [name for name, _ in Classifier().named_parameters()]
    parts = {weights: contents["state_dict"]}
    for index, state in enumerate(contents["optimizer_states"]):
        parts[f"optimizer_{index}"] = {
            "state": {names[number]: entries for number, entries in state["state"].items()},
            "param_groups": [{**each, "params": [names[i] for i in each["params"]]} for each in state["param_groups"]],
        }
    dcp.save(parts, checkpoint_id=folder)
    kept = ("epoch", "global_step", "lr_schedulers", "hyper_parameters", "callbacks")
    beside = {name: contents[name] for name in kept if name in contents}
    torch.save({**beside, "loops": {}, "pytorch-lightning_version": "2.6.6"}, folder / "meta.pt")


@pytest.mark.parametrize("weights", ["state_dict", "model"])  # of ModelParallelStrategy and of FSDPStrategy
def test_a_run_goes_on_from_a_folder_that_lightning_wrote(weights: str, tmp_path: Path) -> None:
    fit(tmp_path / "parts", 2, save_last=True, strategy="auto")
    file, folder = tmp_path / "parts" / "last.ckpt", tmp_path / "theirs.ckpt"
    contents = files.load(file)
    del contents["hasten"]  # Lightning keeps no random states.
    torch.save(contents, tmp_path / "file.ckpt")
    as_lightning_saves(file, folder, weights)
    torch.manual_seed(0)
    expected = fit(tmp_path / "a", 4, seed=1, resume=str(tmp_path / "file.ckpt"), strategy="auto")
    resumed = fit(tmp_path / "b", 4, seed=1, resume=str(folder), strategy="auto")
    assert resumed.global_step == expected.global_step
    assert same(weights_of(resumed), weights_of(expected))
    own, theirs = (each.optimizers[0].state_dict() for each in (expected, resumed))
    assert own["param_groups"] == theirs["param_groups"]
    assert all(same(own["state"][i], theirs["state"][i]) for i in own["state"])

    cut(folder / "__0_0.distcp")
    with refused(CheckpointDamaged, says="__0_0.distcp"):
        files.load(folder)


def test_no_code_in_the_index_of_a_foreign_folder_runs(tmp_path: Path) -> None:
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "meta.pt")

    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with refused(CheckpointDamaged, says="posix.mkdir"):
        files.load(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_run_saves_and_resumes_behind_a_url(tmp_path: Path) -> None:
    expected = weights_of(fit(tmp_path / "here", 3))
    url: Any = f"memory://{tmp_path.name}"
    fit(url, 2, save_last=True)
    assert same(weights_of(fit(url, 3, seed=1, resume="last", save_last=True)), expected)
    assert len(checkpoint_files.find(url, ".ckpt")) == 3


def test_a_damaged_folder_is_passed_over_when_a_run_resumes(tmp_path: Path) -> None:
    trainer = fit(tmp_path, 2, save_last=True)
    cut(tmp_path / "last.ckpt" / "__0_0.distcp")
    with warned(UserWarning, says="last.ckpt is damaged"):
        resumed = fit(tmp_path, 2, resume="last")
    assert same(weights_of(resumed), weights_of(trainer))


def test_modules_and_fabric_read_folders(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "run", 1)
    path = trainer.checkpoint_callback.best_model_path
    module = Classifier.load_from_checkpoint(path, lr=0.5)
    assert module.hparams.lr == 0.5
    assert same(dict(module.state_dict()), weights_of(trainer))
    trainer.validate(Classifier(), data(), ckpt_path=path, verbose=False)

    fabric = L.Fabric(accelerator="cpu", strategy=in_folders())
    layer = nn.Linear(3, 2)
    model, optimizer = fabric.setup(layer, torch.optim.Adam(layer.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fabric.save(tmp_path / "fabric.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    fabric.save(tmp_path / "raw.ckpt", model.state_dict())
    assert (tmp_path / "fabric.ckpt").is_dir()
    for strategy in (in_folders(), "auto"):
        other = L.Fabric(accelerator="cpu", strategy=strategy)
        fresh = nn.Linear(3, 2)
        state = {"model": fresh, "optimizer": torch.optim.Adam(fresh.parameters()), "step": 0}
        assert other.load(tmp_path / "fabric.ckpt", state) == {}
        assert state["step"] == 3
        assert same(dict(fresh.state_dict()), dict(layer.state_dict()))
        assert same(state["optimizer"].state_dict()["state"], optimizer.state_dict()["state"])
        raw = nn.Linear(3, 2)
        other.load_raw(tmp_path / "raw.ckpt", raw)
        assert torch.equal(raw.weight, layer.weight)


class Uploading(CheckpointIO):
    """Writes elsewhere."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None: ...
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any: ...
    def remove_checkpoint(self, path: Any) -> None: ...


class Reporting(TorchCheckpointIO):
    """Reports each file."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("plugin", [Uploading(), Reporting(), AsyncCheckpointIO(Uploading())])
def test_plugins_that_write_files_only_are_refused(plugin: Any) -> None:
    with refused(ValueError, "plugins", fix="()"):
        L.Trainer(strategy=in_folders(), accelerator="cpu", plugins=plugin)
    with refused(TypeError, says="AsyncCheckpointIO"):
        CheckpointIO.save_folder(plugin, {}, "a")


def test_consolidated_checkpoints_equal_whole_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = fit(tmp_path / "folders", 1)
    two = fit(tmp_path / "files", 1, strategy="auto")
    folder, file = (Path(trainer.checkpoint_callback.best_model_path) for trainer in (one, two))
    assert command(["consolidate", str(folder)]) == 0
    made = folder.with_name("epoch=0-step=8-consolidated.ckpt")
    assert capsys.readouterr().out == f"{made}\n"
    expected, found = files.load(file), files.load(made)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "hyper_parameters", "epoch"):
        assert same(found[key], expected[key] if key != "state_dict" else dict(expected[key])), key
    resumed = fit(tmp_path / "again", 2, resume=str(made), strategy="auto")
    assert same(weights_of(resumed), weights_of(fit(tmp_path / "again", 2, resume=str(file), strategy="auto")))

    output = tmp_path / "weights.ckpt"
    assert command(["consolidate", str(folder), "--weights-only", "-o", str(output)]) == 0
    assert "optimizer_states" not in files.load(output)
    assert same(dict(Classifier.load_from_checkpoint(output).state_dict()), weights_of(one))
    safetensors = pytest.importorskip("safetensors.torch")
    assert command(["consolidate", str(folder), "-o", str(tmp_path / "weights.safetensors")]) == 0
    assert same(
        dict(sorted(safetensors.load_file(tmp_path / "weights.safetensors").items())),
        dict(sorted(weights_of(one).items())),
    )
    capsys.readouterr()

    files.save_folder({"a": {"w": torch.ones(1)}, "b": 3}, tmp_path / "other.ckpt")
    for words, message in (
        ([folder.with_name("epoch=0-step=9.ckpt")], "does not exist. Did you mean"),
        ([file], "is one file already"),
        ([folder.parent], "is not a sharded checkpoint. Did you mean"),
        ([folder], "exists. Remove it, or name another file with -o."),
        ([folder, "--prefix", "net.", "-o", tmp_path / "part.ckpt"], "Add --format safetensors."),
        ([tmp_path / "other.ckpt", "--weights-only"], "has no 'state_dict' (it has 'a', 'b')"),
        (["memory://a.ckpt"], "name the file to write with -o"),
    ):
        assert command(["consolidate", *map(str, words)]) == 1
        assert message in capsys.readouterr().err, message
    url = f"local://{tmp_path}/remote.ckpt"
    files.save_folder({"state_dict": STATE}, url)
    assert command(["consolidate", url, "-o", str(tmp_path / "local.ckpt")]) == 0
    assert same(files.load(tmp_path / "local.ckpt")["state_dict"], dict(STATE))
    (folder / ".metadata").unlink()
    assert command(["consolidate", str(folder), "-o", str(tmp_path / "no.ckpt")]) == 1
    assert ".metadata is missing" in capsys.readouterr().err
