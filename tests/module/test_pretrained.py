"""Weights in folders of safetensors files: written from shards, read onto shards, and read by Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hasten.checkpoint import files
from hasten.commands import main as command
from hasten.module.pretrained import load_pretrained, save_pretrained
from tests.checkpoint.test_files import same
from tests.checkpoint.test_sharded import full, names, size_limit
from tests.refusals import refused


def stored(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a folder, as safetensors reads them."""
    safetensors = pytest.importorskip("safetensors.torch")
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.load_file(path)
    return found


def tied(seed: int) -> nn.Module:
    """Return a module with a weight that has two names, numbers of three types, and a scalar."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 7, bias=False).bfloat16(), nn.Linear(7, 7))
    module[3].weight = module[0].weight
    with torch.no_grad():
        module[1].num_batches_tracked += seed
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in module.state_dict().items()}


def test_types_scalars_and_weights_with_two_names_come_back(tmp_path: Path) -> None:
    module, other = tied(3), tied(5)
    save_pretrained(module, tmp_path / "a")
    assert names(tmp_path / "a") == ["model.safetensors"]
    expected = dict(module.state_dict())
    del expected["3.weight"]
    assert same(dict(sorted(stored(tmp_path / "a").items())), dict(sorted(expected.items())))
    load_pretrained(other, tmp_path / "a")
    assert same(state(other), state(module))
    assert other[3].weight is other[0].weight


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_pretrained(nn.Linear(3, 2), tmp_path / "a")
    with refused(ValueError, "folder", fix="Remove it", says="exists"):
        save_pretrained(nn.Linear(3, 2), tmp_path / "a")
    with refused(ValueError, "max_file_bytes"):
        save_pretrained(nn.Linear(3, 2), tmp_path / "b", max_file_bytes=0)
    with refused(ValueError, says=("weight", "complex64")):
        save_pretrained(nn.Linear(3, 2, dtype=torch.complex64), tmp_path / "b")
    assert names(tmp_path) == ["a"]
    with refused(FileNotFoundError, "folder", fix="save_pretrained"):
        load_pretrained(nn.Linear(3, 2), tmp_path)
    with refused(ValueError, "folder", fix="strict=False", says="bias"):
        load_pretrained(nn.Linear(3, 2, bias=False), tmp_path / "a")
    with refused(ValueError, "folder", says="lacks 0.bias"):
        load_pretrained(nn.Sequential(nn.Linear(3, 2)), tmp_path / "a")
    with refused(ValueError, says=("(2, 3)", "(3, 3)")):
        load_pretrained(nn.Linear(3, 3, bias=False), tmp_path / "a", strict=False)
    with refused(ValueError, fix="to_empty"):
        load_pretrained(nn.Linear(3, 2, device="meta"), tmp_path / "a")


@pytest.mark.world_size(2)
def test_shards_are_written_and_read_by_all_processes(tmp_path: Path) -> None:
    module, other, mesh = tied(3), tied(5), init_device_mesh("cpu", (2,))
    for each in (module, other):
        fully_shard(each, mesh=mesh)
    expected = state(module)
    save_pretrained(module, tmp_path / "a", max_file_bytes=200)
    written = names(tmp_path / "a")
    assert len(written) > 3
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {name for name in written if name.endswith(".safetensors")}
    found = stored(tmp_path / "a")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected if name != "3.weight")
    load_pretrained(other, tmp_path / "a")
    assert same(state(other), expected)
    # By one process.
    alone = tied(7)
    load_pretrained(alone, tmp_path / "a")
    assert same(state(alone), expected)
    # An error of one process is raised by all, and nothing is left.
    large = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    fully_shard(large, mesh=mesh)
    with size_limit(100_000 if dist.get_rank() else 100_000_000), refused(OSError):
        save_pretrained(large, tmp_path / "b", max_file_bytes=1)
    dist.barrier()
    assert names(tmp_path) == ["a"]


def test_hugging_face_reads_and_writes_the_same_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    module, other = transformers.BertForMaskedLM(config), transformers.BertForMaskedLM(config)
    read = transformers.BertForMaskedLM.from_pretrained
    save_pretrained(module, tmp_path / "ours", max_file_bytes=2000)
    assert {"config.json", "model.safetensors.index.json"} < set(names(tmp_path / "ours"))
    assert same(state(read(tmp_path / "ours")), state(module))
    module.save_pretrained(tmp_path / "theirs")
    load_pretrained(other, tmp_path / "theirs")
    assert same(state(other), state(module))
    # From a sharded checkpoint, whose module has the model as an attribute.
    weights = {f"model.{name}": value for name, value in module.state_dict().items()}
    files.save_folder({"state_dict": {**weights, "loss.weight": torch.ones(2)}, "epoch": 1}, tmp_path / "last.ckpt")
    capsys.readouterr()
    words = ["consolidate", str(tmp_path / "last.ckpt"), "--format", "safetensors", "--prefix"]
    assert command([*words, "model."]) == 0
    made = tmp_path / "last-consolidated"
    assert capsys.readouterr().out == f"{made}\n"
    config.save_pretrained(made)
    assert same(state(read(made)), state(module))
    assert command([*words, "nodel.", "-o", str(tmp_path / "no")]) == 1
    assert "There are model." in capsys.readouterr().err
