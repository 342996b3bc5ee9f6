"""The folders of checkpoints, such as ``checkpoint-500``: ``hasten.ckpt``, and the files of ``save_model`` beside it.

The weights are in the files of ``save_model`` only. ``hasten.ckpt`` says, in its entry "elsewhere", where each of them
is, and has the size and the checksum of each file that it needs: no file of another run is taken for one of this.
"""

from __future__ import annotations

import glob
import importlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hasten._lib.errors import CheckpointDamaged, CheckpointRefused
from hasten._lib.rank_zero import rank_zero_warn
from hasten.callbacks.checkpoint_files import first_whole, found_by_first
from hasten.checkpoint import files
from hasten.checkpoint.places import LocalPlace
from hasten.checkpoint.stored import checksum_of, missing

if TYPE_CHECKING:
    from hasten import Trainer

STATE_FILE = "hasten.ckpt"
_ELSEWHERE = "elsewhere"
# What a folder is called while it is removed.
_REMOVED = ".*.removed"


def frozen_weights(model: nn.Module) -> set[str]:
    """Return the names of the parameters that an adapter leaves as they are; none of a model that trains whole."""
    if not hasattr(model, "peft_config"):
        return set()
    return {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}


def leave_out(checkpoint: dict[str, Any], folder: str, frozen: Iterable[str], *, prefix: str) -> None:
    """Leave out of a checkpoint the weights that the files of ``save_model`` in a folder have, and frozen ones.

    Args:
        checkpoint: what ``hasten.ckpt`` will have.
        folder: the folder with the files.
        frozen: the names of weights that the model has when it is made.
        prefix: what the names of weights in ``checkpoint`` begin with, and those in the files do not.

    """
    weights, place = checkpoint["state_dict"], LocalPlace(folder)
    frozen_names = [name for each in sorted(frozen) if (name := f"{prefix}{each}") in weights]
    sums: dict[str, tuple[int, int]] = {}
    # Tied weights have several names, of which a file has one.
    places: dict[Any, tuple[str, str]] = {}
    for path in Path(folder).glob("*.safetensors"):
        with _opened(path) as saved:
            for name in sorted(saved.keys()):
                mine, written = weights.get(f"{prefix}{name}"), saved.get_tensor(name)
                if isinstance(mine, Tensor) and mine.dtype == written.dtype and torch.equal(mine.cpu(), written):
                    places[_memory_of(mine)] = path.name, name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sums[path.name] = path.stat().st_size, checksum_of(place, path.name)
    trained = {name: each for name, each in weights.items() if isinstance(each, Tensor) and name not in frozen_names}
    found = {name: places[memory] for name, each in trained.items() if (memory := _memory_of(each)) in places}
    checkpoint[_ELSEWHERE] = {
        "files": {file: sums[file] for file, _ in found.values()},
        "weights": found,
        "frozen": {name: _sample(weights[name]) for name in frozen_names},
    }
    for name in (*found, *frozen_names):
        del weights[name]


def put_back(checkpoint: dict[str, Any], folder: str, module: nn.Module) -> set[str]:
    """Put the weights into a checkpoint that ``leave_out`` has left out; return the names of those that are frozen.

    Args:
        checkpoint: what ``hasten.ckpt`` has; that of hasten 0.2 has all weights.
        folder: the folder that it is in.
        module: what the checkpoint is for: frozen weights are taken from there.

    Raises:
        CheckpointDamaged: a file is missing, or differs from what was written.

    """
    left = checkpoint.get(_ELSEWHERE)
    if left is None:
        return set()
    _check_files(left["files"], folder)
    weights = checkpoint["state_dict"]
    opened = {file: _opened(Path(folder, file)) for file in left["files"]}
    for name, (file, name_there) in left["weights"].items():
        weights[name] = opened[file].get_tensor(name_there)
    others, present = [], module.state_dict() if left["frozen"] else {}
    for name, sample in left["frozen"].items():
        if name in present:
            weights[name] = present[name]
            if _sample(weights[name]) != sample:
                others.append(name)
    if others:
        rank_zero_warn(
            f"{folder} has an adapter of a model with other weights than this one, such as {others[0]}.",
            fix="Make the model of the weights, and of the type, that it had when it was trained.",
        )
    return set(left["frozen"])


def verify(path: str, *, share: tuple[int, int] = (0, 1)) -> None:
    """Check that ``hasten.ckpt``, or another checkpoint, is whole, and what is beside it.

    The arguments and errors are those of ``hasten.checkpoint.files.verify``.
    """
    if os.path.isdir(path):
        # Several processes have written it, with all weights.
        files.verify(path, share=share)
        return
    # What may not be read is whole; reading it says why.
    with suppress(CheckpointRefused), files.mapped_tensors():
        if share[0] == 0 and (left := files.load(path).get(_ELSEWHERE)) is not None:
            _check_files(left["files"], os.path.dirname(path))


def newest(folder: Path, trainer: Trainer) -> str | None:
    """Return the newest checkpoint in a folder that is whole, or the only one; warn of damaged ones.

    All processes call it together.

    Raises:
        CheckpointDamaged: there are several, and none is whole.

    """

    def look() -> list[str]:
        return by_age([*folder.glob("*.ckpt"), *folder.glob(f"checkpoint-*/{STATE_FILE}")])[::-1]

    found, failure = found_by_first(trainer.strategy, look)
    if failure:
        raise OSError(f"The checkpoints in {folder} cannot be read: {failure}")
    if len(found) < 2:
        # Reading it says what is wrong with it.
        return found[0] if found else None
    start = first_whole(found, trainer.runtime.checkpoint_io, trainer.strategy, verify=verify)
    if start is None:
        what = f"None of the {len(found)} checkpoints in {folder} is whole."
        raise CheckpointDamaged(what, fix="Leave resume_from_checkpoint out, to begin anew.")
    older = [path for path in found[found.index(start) + 1 :] if _step_of(path) > _step_of(start) >= 0]
    if older:
        rank_zero_warn(
            f"The run continues from {start}, which is newer than {older[0]}.",
            fix="If these are copies, whose times mean nothing, give train(resume_from_checkpoint=...) a folder.",
        )
    return start


def folders(parent: str) -> list[str]:
    """Return the folders of checkpoints, the oldest first."""
    return [os.path.dirname(path) for path in by_age(glob.glob(f"{glob.escape(parent)}/checkpoint-*/{STATE_FILE}"))]


def by_age(paths: Iterable[str | Path]) -> list[str]:
    """Return paths, the oldest first."""
    return sorted(map(str, paths), key=lambda path: (os.path.getmtime(path), _step_of(path)))


def remove(folder: str) -> None:
    """Remove the folder of a checkpoint; at no moment is a part of it taken for one, and no part stays."""
    path = Path(folder)
    removed = path.with_name(_REMOVED.replace("*", path.name))
    for left in path.parent.glob(_REMOVED):
        shutil.rmtree(left, ignore_errors=True)  # A run was killed there.
    with suppress(OSError):  # On Windows a file of it may be open; the next save tries it again.
        os.rename(path, removed)
        shutil.rmtree(removed, ignore_errors=True)


def _step_of(path: str) -> int:
    found = re.search(r"checkpoint-(\d+)[/\\][^/\\]*$", path)
    return -1 if found is None else int(found[1])


def _check_files(sums: Mapping[str, tuple[int, int]], folder: str) -> None:
    place = LocalPlace(folder or ".")
    # A path that leads out of the folder counts as missing.
    problem = missing(place, sums)
    for name, (_, checksum) in sums.items() if problem is None else ():
        if checksum_of(place, name) != checksum:
            problem = f"{name} differs from what was written, by its checksum"
    if problem is not None:
        fix = "Resume from another checkpoint. Copy such folders whole, and save models of your own to other ones."
        raise CheckpointDamaged(f"{place} is damaged: {problem}.", fix=fix)


def _opened(path: Path) -> Any:
    return importlib.import_module("safetensors").safe_open(path, "pt")


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _sample(weight: Tensor) -> list[float]:
    """Return the first numbers of a weight: two models hardly share those of all their weights."""
    return weight.detach().flatten()[:8].float().cpu().tolist()
