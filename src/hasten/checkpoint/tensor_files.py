"""Write and read tensors of folders by torch.distributed.checkpoint: with checksums, without unpickling.

Importing it takes about as long as importing torch, so other modules import this file only when they need it.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult

from hasten._lib import torch_private
from hasten.checkpoint.flat import in_rectangles
from hasten.checkpoint.places import INDEX_FILE, PLACEHOLDER, Place
from hasten.machine.collectives import joined

if TYPE_CHECKING:
    from hasten.types import Group

# For each tensor: {"dtype": "float32", "shape": [...], "chunks": [[offsets, sizes, file, start, length], ...]}, as JSON
Layout = dict[str, dict[str, Any]]
# For each file: (bytes, CRC-32)
Sums = dict[str, tuple[int, int]]


class Writer(FileSystemWriter):
    """Writes the tensors of this process into a folder that the first process has made."""

    def __init__(self, place: Place) -> None:
        super().__init__(str(place), sync_files=place.needs_sync, overwrite=False)
        self.fs = self._files = _SummedFiles(place)
        self._place = place
        # Set on the first process, once everything is written.
        self.layout: Layout = {}

    @property
    def sums(self) -> Sums:
        """Size and checksum of each file that this process has written."""
        return self._files.sums

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self._place.exists():
            raise RuntimeError(not_shared(os.path.dirname(str(self._place))))
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception:
            # torch's writer in C++ hides the error of the system.
            if self._files.error is not None:
                raise self._files.error from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # torch 2.9 sets this on a copy only.
        metadata.storage_data = {written.index: written.storage_data for of_rank in results for written in of_rank}
        self.layout = _layout(metadata)

    def storage_meta(self) -> StorageMeta | None:
        # Otherwise the files would contain the temporary path.
        return None


def not_shared(folder: str) -> str:
    """Return the message for missing shards of other processes."""
    return f"{folder} is not the same folder on all machines; write sharded checkpoints to a folder that they share"


class _SummedFiles(FileSystem):
    """The files of a folder; it records size and checksum of each file that is written."""

    def __init__(self, place: Place) -> None:
        self.sums: Sums = {}
        self.error: OSError | None = None
        self._place = place

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The folder is there."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        # The folder is new.
        return False

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._place.open(os.path.basename(path), mode) as file:
            stream = _Summed(file)
            try:
                yield stream
            except BaseException:
                self.error = self.error or stream.error
                raise
        self.sums[os.path.basename(path)] = (stream.size_bytes, stream.checksum)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        old, new = os.path.basename(path), os.path.basename(new_path)
        self._place.rename(old, new)
        self.sums[new] = self.sums.pop(old)


class _Summed:
    """A file that adds up the checksum of what is written to it, and keeps the error that ended the writing."""

    def __init__(self, file: Any) -> None:
        self._file, self._write = file, file.write
        self.checksum = self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        # Called about 40 times for each tensor.
        try:
            count: int = self._write(data)
        except OSError as error:
            self.error = error
            raise
        self.checksum = zlib.crc32(data, self.checksum)
        self.size_bytes += count
        return count

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.error = error
            raise

    def tell(self) -> int:
        return self.size_bytes

    def fileno(self) -> int:
        return cast("int", self._file.fileno())

    def close(self) -> None:
        self.flush()


def save(tensors: dict[str, Tensor], writer: Writer, group: Group) -> None:
    """Write the tensors of all processes; each writes its own shards, and the first one unsharded tensors.

    Tensors stand by the key under which they are stored. The group has the processes; None for all.

    Raises:
        CheckpointException: on all processes, if one could not write.

    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Only if torch would warn: all threads share the warning filters, and this may run in another thread.
    with nullcontext() if joined() else _without_warnings():
        stored = {key: in_rectangles(tensor) for key, tensor in tensors.items()}
        save_tensors(cast("Any", stored), storage_writer=writer, planner=planner, process_group=group)


def stager(earlier: DefaultStager | None) -> DefaultStager:
    """Return an object that copies tensors to the host, and keeps the memory of its copies for the next time."""
    if earlier is not None and not torch_private.is_closed(earlier):
        return earlier
    pinned = torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
        )
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the warning that one process reads or writes alone, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the lowest rank that failed, and its exception."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


# -- reading


class _TensorReader(FileSystemReader):
    """Reads tensors at places given as plain data, so that nothing is unpickled.

    ``check`` is called with the name of each file that is about to be read.
    """

    def __init__(self, place: Place, metadata: Metadata, check: Callable[[str], None]) -> None:
        super().__init__(str(place))
        self.fs = _CheckedFiles(place, check)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


class _CheckedFiles(FileSystem):
    def __init__(self, place: Place, check: Callable[[str], None]) -> None:
        self._place, self._check = place, check

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        name = os.path.basename(path)
        self._check(name)
        with self._place.open(name, mode) as stream:
            yield stream


def read(targets: Mapping[str, Tensor], place: Place, layout: Layout, check: Callable[[str], None]) -> None:
    """Fill tensors in place, DTensors by the shard of this process; processes need not call it together."""
    fill(targets, _TensorReader(place, _metadata({key: layout[key] for key in targets}), check))


def fill(targets: Mapping[str, Tensor], reader: FileSystemReader) -> None:
    """Fill tensors in place, DTensors by the shard of this process, with what ``reader`` reads under their keys."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with torch.no_grad(), _without_warnings():
            parts: dict[str, Any] = {key: in_rectangles(target) for key, target in targets.items()}
            load_tensors(parts, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise first_failure(error)[1] from None


def _layout(metadata: Metadata) -> Layout:
    layout: Layout = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            place: torch_private.StorageInfo = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            chunks.append([offsets, sizes, place.relative_path, place.offset, place.length])
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        layout[key] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
    return layout


def _metadata(layout: Layout) -> Metadata:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, torch_private.StorageInfo] = {}
    for key, stored in layout.items():
        chunks = []
        for index, (offsets, sizes, file, start, length) in enumerate(stored["chunks"]):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            # Only the name is used: a path could lead out of the folder.
            places[MetadataIndex(key, offsets, index)] = torch_private.storage_info(
                os.path.basename(file), start, length
            )
        tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, stored["dtype"])), torch.Size(stored["shape"]), chunks
        )
    return Metadata(tensors, storage_data=places)


# -- folders that were written by torch.distributed.checkpoint itself

# Everything that an index may contain: unpickling anything else could run code.
_IN_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"}, "torch.serialization": {"_get_layout"}, "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
}  # fmt: skip


def _joined(*parts: str) -> str:
    return "/".join(parts)


class _IndexReader(pickle.Unpickler):
    """Reads an index, and refuses anything that an index does not contain."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # Paths of Python 3.13 are of pathlib._local.
        module = module.removesuffix("._local")
        if name not in _IN_INDEX.get(module, ()):
            raise ValueError(f"its index holds {module}.{name}")
        if module == "pathlib":
            return _joined  # of another system, maybe
        return super().find_class(module, name)


def read_foreign(place: Place, contents: Any) -> tuple[Layout, dict[str, Any]]:
    """Return layout and contents of a folder that Lightning's sharded strategies wrote.

    Raises:
        ValueError: another program wrote it.
        OSError: a file is missing.

    """
    if not isinstance(contents, dict):
        raise ValueError(f"beside the tensors is {type(contents).__name__}")
    try:
        with place.open(INDEX_FILE, "rb") as file:
            metadata: Metadata = _IndexReader(file).load()
        paths = metadata.planner_data
        tensors: dict[str, Any] = {
            k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)
        }
        layout = _layout(Metadata(tensors, storage_data=metadata.storage_data))
        parts: dict[Any, Any] = {}
        for key in metadata.state_dict_metadata:
            *outer, last = paths[key]
            inner = parts
            for name in outer:
                inner = inner.setdefault(name, {})
            inner[last] = (
                {PLACEHOLDER: key} if key in tensors else _value(place, metadata.storage_data[MetadataIndex(key)])
            )
        parts = {name: _with_numbers(_with_lists(part)) for name, part in parts.items()}
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its index makes no sense ({type(error).__name__}: {error})") from error
    if "pytorch-lightning_version" in contents:
        for name in [name for name in parts if name in ("model", "state_dict")]:
            parts["state_dict"] = parts.pop(name)
        states = [parts.pop(f"optimizer_{i}") for i in range(len(parts)) if f"optimizer_{i}" in parts]
        if states or "loops" in contents:
            parts["optimizer_states"] = states
    return layout, {**contents, **parts}


def _value(place: Place, stored: torch_private.StorageInfo) -> Any:
    """Return a value that is not a tensor."""
    with place.open(os.path.basename(stored.relative_path), "rb") as file:
        file.seek(stored.offset)
        return torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)


def _with_lists(value: Any) -> Any:
    """Return nested dicts with lists in place of those whose keys are the indices of one."""
    if not isinstance(value, dict):
        return value
    if value and list(value) == list(range(len(value))):
        return [_with_lists(each) for each in value.values()]
    return {key: each if key == "state" and each == {} else _with_lists(each) for key, each in value.items()}


def _with_numbers(part: Any) -> Any:
    """Return an optimizer's state with parameters by number, not by name; return other values unchanged."""
    if not isinstance(part, dict) or "param_groups" not in part:
        return part
    numbers: dict[str, int] = {}
    groups = []
    for group in part["param_groups"]:
        own = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": own})
    return {"state": {numbers[name]: state for name, state in part.get("state", {}).items()}, "param_groups": groups}
