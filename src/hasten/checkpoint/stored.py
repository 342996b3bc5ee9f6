"""Tensors in a checkpoint folder, read when they are needed: whole, or the shard of a DTensor."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hasten._lib.errors import CheckpointDamaged, make_error
from hasten._lib.torch_private import take_versions, with_versions
from hasten._lib.tree import copy_into, rebuilt
from hasten.checkpoint.places import INDEX_FILE, PLACEHOLDER, Place

# The file with everything that is not a tensor.
CONTENTS_FILE = "meta.pt"
SHARD_ENDING = ".distcp"
# The version of the format, under this key of the contents file.
FORMAT = "hasten_folder"
# The folder in it that holds the other files; "" if they are in the same folder as the contents.
SHARDS = "shards"

INSTEAD_OF_DAMAGED = "Copy or download it again, or take an earlier checkpoint."
_FOREIGN = (
    "If torch.distributed.checkpoint alone wrote it, convert its weights: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE."
)


def is_checkpoint_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a folder that holds a checkpoint, or a part of one."""
    if not os.path.isdir(path):
        return False
    names = os.listdir(path)
    return CONTENTS_FILE in names or INDEX_FILE in names or any(name.endswith(SHARD_ENDING) for name in names)


def differs(where: Place | str | os.PathLike[str], part: str) -> CheckpointDamaged:
    """Return the error for a part of a checkpoint whose checksum is not that of what was written."""
    what = f"{where} is damaged: {part} differs from what was written, by its checksum."
    return CheckpointDamaged(what, fix=INSTEAD_OF_DAMAGED)


class Folder:
    """A checkpoint folder.

    ``read_file`` reads a file by its path or URL; whole tensors go to ``device``.
    """

    def __init__(
        self, place: Place, read_file: Callable[[str], Any], *, device: torch.device | str | None = None
    ) -> None:
        self.place, self._device = place, device
        try:
            stored = read_file(f"{place}/{CONTENTS_FILE}")
        except FileNotFoundError:
            raise CheckpointDamaged(
                f"{place} is not a whole checkpoint: {CONTENTS_FILE} is missing.", fix=_FOREIGN
            ) from None
        if not isinstance(stored, dict) or FORMAT not in stored:
            self._take_foreign(stored)
            return
        self._checked: set[str] = set()
        try:
            # Only a name is used: a path could lead elsewhere.
            inner = os.path.basename(stored.get(SHARDS, ""))
            self._shards = place.inside(inner) if inner else place
            self._contents = dict(stored["contents"])
            # JSON: it is read faster than nested values are unpickled without running code.
            self.layout: dict[str, dict[str, Any]] = json.loads(stored["tensors"])
            self._sums: dict[str, tuple[int, int]] = {
                name: (int(size), int(checksum)) for name, (size, checksum) in stored["files"].items()
            }
            problem = missing(self._shards, self._sums) or _misfit(self.layout, self._sums)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            problem = f"{CONTENTS_FILE} makes no sense ({type(error).__name__}: {error})"
        if problem is not None:
            raise CheckpointDamaged(f"{place} is damaged: {problem}.", fix=INSTEAD_OF_DAMAGED)

    def _take_foreign(self, stored: Any) -> None:
        """Read what Lightning's sharded strategies wrote; there are no checksums."""
        from hasten.checkpoint import tensor_files

        self._shards, self._checked = self.place, set()
        try:
            self.layout, self._contents = tensor_files.read_foreign(self.place, stored)
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(
                f"{self.place} was not written by hasten, nor as a whole by Lightning: {error}.", fix=_FOREIGN
            ) from error
        ends: dict[str, int] = {}
        for tensor in self.layout.values():
            for _, _, file, start, length in tensor["chunks"]:
                name = os.path.basename(file)
                ends[name] = max(ends.get(name, 0), start + length)
        sizes = self.place.sizes(ends)
        for name in sorted(ends):
            if sizes.get(name, 0) < ends[name]:
                raise CheckpointDamaged(
                    f"{self.place} is damaged: {name} is {'too short' if name in sizes else 'missing'}.",
                    fix=INSTEAD_OF_DAMAGED,
                )
        self._sums = {}
        self._checked.update(ends)

    def contents(self) -> StoredCheckpoint:
        """Return the checkpoint; its tensors are read when they are needed."""
        contents = {key: _with_tensors(value, self) for key, value in self._contents.items()}
        for name, value in contents.items():
            has_tensors = isinstance(value, dict) and any(isinstance(each, StoredTensor) for each in value.values())
            if has_tensors or (name == "state_dict" and isinstance(value, dict)):
                contents[name] = StoredTensors(value)
        return StoredCheckpoint(contents)

    def check(self, share: tuple[int, int]) -> None:
        """Read all files, or with ``(index, count)`` a part of them; raise CheckpointDamaged if one has changed."""
        index, count = share
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(self.check_file, sorted(self._sums)[index::count]))

    def check_file(self, name: str) -> None:
        """Raise CheckpointDamaged if a file differs from what was written; each is read for that once."""
        if name in self._checked:
            return
        if name not in self._sums or checksum_of(self._shards, name) != self._sums[name][1]:
            raise differs(self.place, name)
        self._checked.add(name)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by their key in place, DTensors by the shard that this process has."""
        for key, target in targets.items():
            shape = tuple(self.layout[key]["shape"])
            if tuple(target.shape) != shape:
                raise ValueError(f"{key}: the shape is {shape} in {self.place}, and {tuple(target.shape)} here.")
            if target.is_meta:
                what = f"{key}: a tensor on the meta device has no memory to read into."
                raise make_error(ValueError, what, fix="Call to_empty() first.")
        if targets:
            from hasten.checkpoint import tensor_files

            tensor_files.read(targets, self._shards, self.layout, self.check_file)

    def empty(self, key: str) -> Tensor:
        """Return an empty tensor for the whole tensor of ``key``."""
        return torch.empty(self.layout[key]["shape"], dtype=self.dtype_of(key), device=self._device)

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the type of a tensor."""
        dtype: torch.dtype = getattr(torch, self.layout[key]["dtype"])
        return dtype


def _misfit(layout: Mapping[str, Mapping[str, Any]], files: Mapping[str, Any]) -> str | None:
    """Return a tensor that is not in the files, or has no shape or type; None if all are."""
    for key, tensor in layout.items():
        is_type = isinstance(getattr(torch, tensor["dtype"], None), torch.dtype)
        is_type &= type(tensor["shape"]) is list and all(type(size) is int and size >= 0 for size in tensor["shape"])
        # Where no file has a part of a tensor, reading does not change that part.
        is_type &= math.prod(tensor["shape"]) <= sum(math.prod(sizes) for _, sizes, *_ in tensor["chunks"])
        for offsets, sizes, file, start, length in tensor["chunks"]:
            torch.Size([*offsets, *sizes])
            is_type &= len(offsets) == len(sizes) == len(tensor["shape"]) and os.path.basename(file) in files
            is_type &= 0 <= start <= start + length <= files[os.path.basename(file)][0]
        if not is_type:
            return f"the layout of {key} makes no sense"
    return None


def missing(place: Place, sums: Mapping[str, tuple[int, int]]) -> str | None:
    """Return a file that is missing or has another size than was written; None if all are there."""
    present = place.sizes(map(os.path.basename, sums))
    for name, (size, _) in sums.items():
        if name not in present:
            return f"{name} is missing"
        if present[name] != size:
            return f"{name} has {present[name]} bytes instead of {size}"
    return None


def checksum_of(place: Place, name: str) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with place.open(name, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


class StoredTensor:
    """A tensor in a checkpoint folder, which is read when it is needed."""

    def __init__(self, folder: Folder, key: str) -> None:
        self.folder, self.key = folder, key

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.folder.layout[self.key]["shape"])

    @property
    def dtype(self) -> torch.dtype:
        """The type it was saved in."""
        return self.folder.dtype_of(self.key)

    def full(self) -> Tensor:
        """Read the whole tensor."""
        tensor = self.folder.empty(self.key)
        self.folder.read({self.key: tensor})
        return tensor

    def read_into(self, target: Tensor) -> None:
        """Fill ``target``, of the same shape, in place; a DTensor, by reading the shard that this process has.

        It may be of any type, and on any device but meta.

        Raises:
            ValueError: it has another shape, or no memory.

        """
        self.folder.read({self.key: target})

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


class StoredTensors(MutableMapping[str, Any]):
    """Names and tensors in a checkpoint folder: a tensor is read whole when it is asked for.

    Entries may be replaced, added and removed, as in the dict of a checkpoint file; that does not change the folder.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = dict(entries)
        take_versions(self, entries)

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        return value.full() if isinstance(value, StoredTensor) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def stored(self) -> ItemsView[str, Any]:
        """Return names and entries, without reading: tensors are ``StoredTensor`` objects, which have a shape."""
        return self._entries.items()

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same shapes in place, by name; DTensors by reading the shard that this process has.

        Raises:
            KeyError: one of the names is not here.
            ValueError: a tensor has another shape, or no memory.

        """
        read_into([(self._entries[name], target) for name, target in targets.items()])


class StoredCheckpoint(dict[str, Any]):
    """The contents of a checkpoint folder: like the dict of a file, but its tensors are read when they are needed."""

    def whole(self) -> dict[str, Any]:
        """Return a dict of the same contents in which all tensors are read."""
        read: dict[str, Any] = whole(dict(self))
        return read


def read_into(pairs: list[tuple[Any, Tensor]]) -> None:
    """Fill tensors in place from ``StoredTensor``s or whole tensors; DTensors by the shard that this process has."""
    by_folder: dict[Folder, list[tuple[str, Tensor]]] = {}
    for source, target in pairs:
        if isinstance(source, StoredTensor):
            by_folder.setdefault(source.folder, []).append((source.key, target))
        else:
            copy_into(target, source)
    for folder, wanted in by_folder.items():
        # One pass, unless a tensor is requested twice.
        while wanted:
            folder.read(dict(wanted))
            done = set(map(id, dict(wanted).values()))
            wanted = [(key, target) for key, target in wanted if id(target) not in done]


def whole(data: Any) -> Any:
    """Return ``data`` (nested dicts, lists and tuples) with every stored tensor in it read whole."""
    found: list[StoredTensor] = []
    _mapped(data, found.append)
    tensors = {(id(each.folder), each.key): each.folder.empty(each.key) for each in found}
    read_into([(each, tensors[id(each.folder), each.key]) for each in found])
    return _mapped(data, lambda each: tensors[id(each.folder), each.key])


def _mapped(value: Any, function: Callable[[StoredTensor], Any]) -> Any:
    if isinstance(value, StoredTensor):
        return function(value)
    if isinstance(value, StoredTensors):
        return with_versions({name: _mapped(each, function) for name, each in value.stored()}, value)
    return _rebuilt(value, lambda each: _mapped(each, function))


def _with_tensors(value: Any, folder: Folder) -> Any:
    if type(value) is dict and len(value) == 1:
        key = value.get(PLACEHOLDER)
        if isinstance(key, str) and key in folder.layout:
            return StoredTensor(folder, key)
    return _rebuilt(value, lambda each: _with_tensors(each, folder))


def _rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a dict, list or tuple with ``function`` applied to its items; return other values unchanged."""
    if isinstance(value, dict):
        return rebuilt(value, [function(each) for each in value.values()])
    if type(value) is list or type(value) is tuple:
        return type(value)(function(each) for each in value)
    return value
