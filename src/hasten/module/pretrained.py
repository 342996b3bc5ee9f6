"""Weights in folders that ``from_pretrained`` of Hugging Face reads: written from shards, and read onto shards."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.files import put_in_place, replacing_folder, sync_folder
from hasten._lib.names import did_you_mean
from hasten._lib.optional import need
from hasten._lib.tree import as_bytes
from hasten.machine import collectives

# The size of a file at which Hugging Face begins the next.
FILE_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Described(NamedTuple):
    """A tensor as the head of a file describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The number of its bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def save_pretrained(
    module: nn.Module, folder: str | os.PathLike[str], *, max_file_bytes: int | float = FILE_BYTES
) -> None:
    """Write the weights of a module as a folder that ``from_pretrained`` of Hugging Face reads.

    All processes call it together. They gather one tensor at a time and take turns in writing the files, so that none
    holds the whole model. If the module has a ``config`` of Hugging Face, the folder gets its ``config.json``. A weight
    that the module has under several names is written once. The folder is complete or absent.

    Args:
        module: a module, whose parameters may be shards (of ``strategy="fsdp"`` and ``ModelParallelStrategy``); of a
            LightningModule, the part that Hugging Face made, such as ``self.model``.
        folder: what to write, on a disk that all processes share; it must not exist.
        max_file_bytes: the size at which a new file begins.

    Raises:
        ValueError: ``folder`` exists, or a weight has a type that the format does not know.
        OSError: a process could not write; all processes raise it.

    Example::

        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> save_pretrained(nn.Linear(2, 1), folder)
        >>> sorted(os.listdir(folder))
        ['model.safetensors']

    Source: `Safetensors, format <https://huggingface.co/docs/safetensors/index#format>`_.

    """
    check.number("save_pretrained", "max_file_bytes", max_file_bytes, above=0, unit="bytes")
    target = Path(folder)
    tensors = _each_once(module)
    described = {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    plan = divided(described, max_file_bytes)
    is_first = _rank() == 0
    error: Exception | None = None
    with ExitStack() as held:
        temporary = ""
        try:
            if is_first:
                refuse_existing(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = str(held.enter_context(replacing_folder(target)))
        except (OSError, ValueError) as caught:
            error = caught
        temporary = _together(error, temporary)[0]
        error = _write_own(plan, described, tensors, temporary)
        _together(error, None)
        error = None
        if is_first:
            try:
                write_index(Path(temporary), plan, described)
                config: Any = getattr(module, "config", None)
                if hasattr(config, "save_pretrained"):
                    config.save_pretrained(temporary)
                sync_folder(temporary)
                put_in_place(temporary, target)
            except (OSError, ValueError) as caught:
                error = caught
        _together(error, None)


def load_pretrained(module: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Fill the weights of a module from a folder of safetensors files; each process reads what its shards need.

    No process reads the whole model, and processes need not call it together.

    Args:
        module: the module; its parameters may be shards, and are converted to the types that they have.
        folder: a local folder with ``.safetensors`` files, as ``save_pretrained`` of Hugging Face writes it.
        strict: require that the folder and the module have the same names.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: the folder has no such files.
        ValueError: a weight has another shape or no memory; with ``strict``, a name is on one side only.

    Example::

        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> layer, other = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> save_pretrained(layer, folder)
        >>> load_pretrained(other, folder)
        >>> bool((other.weight == layer.weight).all())
        True

    Source: `torch.distributed.checkpoint <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`_,
    ``HuggingFaceStorageReader``.

    """
    need("safetensors", purpose="load_pretrained")
    if not any(Path(folder).glob("*.safetensors")):
        what = f"load_pretrained(folder={str(folder)!r}): there are no .safetensors files."
        fix = "Give the folder that save_pretrained has written."
        raise make_error(FileNotFoundError, what, fix=fix, argument="folder")
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    from hasten.checkpoint import tensor_files

    reader = HuggingFaceStorageReader(str(folder))
    stored = {name: tuple(found.size) for name, found in _sizes(reader).items()}
    state = module.state_dict(keep_vars=True)
    # A weight with several names is stored under one of them.
    found = {id(value) for name, value in state.items() if name in stored}
    missing = sorted(name for name, value in state.items() if name not in stored and id(value) not in found)
    unknown = sorted(stored.keys() - state.keys())
    if strict and (missing or unknown):
        of_module = f"it lacks {', '.join(missing[:3])}" if missing else f"it has {', '.join(unknown[:3])} besides"
        what = f"load_pretrained(folder={str(folder)!r}): {of_module}."
        fix = did_you_mean(missing[0], unknown) if missing else "Pass strict=False to leave it out."
        raise make_error(ValueError, what, fix=fix, argument="folder")
    targets = {name: value.detach() for name, value in state.items() if name in stored}
    for name, tensor in targets.items():
        if tuple(tensor.shape) != stored[name]:
            raise ValueError(f"{name}: the shape is {stored[name]} in {folder}, and {tuple(tensor.shape)} here.")
        if tensor.is_meta:
            text = f"{name}: a tensor on the meta device has no memory to read into."
            raise make_error(ValueError, text, fix="Call to_empty() first.")
    tensor_files.fill(targets, reader)


def _sizes(reader: Any) -> Mapping[str, Any]:
    sizes: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    return sizes


def _each_once(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module by the first of their names."""
    seen: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    names = {seen.setdefault(id(value), name) for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value.detach() for name, value in state.items() if name in names}


def _rank() -> int:
    return dist.get_rank() if collectives.joined() else 0


def _together(error: Exception | None, own: Any) -> list[Any]:
    """Return the objects of all processes, or raise the first error of one."""
    everything = collectives.gather_objects((error, own))
    for theirs, _ in everything:
        if theirs is not None:
            raise theirs
    return [each for _, each in everything]


def _write_own(
    plan: Mapping[str, list[str]], described: Mapping[str, Described], tensors: Mapping[str, Tensor], folder: str
) -> Exception | None:
    """Gather all tensors, and write those of this process's files; return the error that ended the writing."""
    rank, count = _rank(), collectives.world_size()
    error: Exception | None = None
    for number, (file_name, names) in enumerate(plan.items()):
        left = iter([tensors[name] for name in names])
        if number % count == rank and error is None:
            try:
                write_file(Path(folder, file_name), {name: described[name] for name in names}, map(_whole, left))
            except (OSError, ValueError) as caught:
                error = caught
        # The other processes gather all tensors, also those that this one no longer writes.
        for tensor in left:
            _whole(tensor)
    return error


def _whole(tensor: Tensor) -> Tensor:
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


# -- the format


def refuse_existing(target: Path) -> None:
    """Raise ValueError if there is something at ``target``."""
    if os.path.lexists(target):
        raise make_error(ValueError, f"{target} exists.", fix="Remove it, or give another name.", argument="folder")


def divided(described: Mapping[str, Described], max_file_bytes: float) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, by the names that Hugging Face gives to files."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, each in described.items():
        if parts[-1] and size + each.size_bytes > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += each.size_bytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, start=1)}


def write_file(path: Path, described: Mapping[str, Described], tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file, one tensor at a time, and sync it."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, each in described.items():
        if each.dtype not in _DTYPES:
            raise ValueError(f"{name} is {each.dtype}, which safetensors files do not hold.")
        head[name] = {
            "dtype": _DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [place, place + each.size_bytes],
        }
        place += each.size_bytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            _write_tensor(file, tensor)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: IO[bytes], tensor: Tensor) -> None:
    if tensor.numel():
        data: Any = as_bytes(tensor.detach().cpu()).numpy()
        file.write(data)


def write_index(folder: Path, plan: Mapping[str, list[str]], described: Mapping[str, Described]) -> None:
    """Write which file has which tensor, if there are several files."""
    if len(plan) == 1:
        return
    total = sum([each.size_bytes for each in described.values()])
    places = {name: file for file, names in plan.items() for name in names}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")
