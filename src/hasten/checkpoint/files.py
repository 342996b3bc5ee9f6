"""Checkpoint files: written atomically with a checksum, and read without running code.

Subclass ``CheckpointIO`` for another way to write and read them.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import itertools
import operator
import os
import pickle
import pickletools
import secrets
import shutil
import struct
import sys
import tempfile
import types
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.errors import CheckpointDamaged as CheckpointDamaged
from hasten._lib.errors import CheckpointRefused as CheckpointRefused
from hasten._lib.errors import make_error, with_article
from hasten._lib.files import (
    TEMPORARY,
    in_the_way,
    is_named,
    is_url,
    local,
    recover,
    remove_abandoned,
    remove_all,
    replacing,
    sync_folder,
    why_not_written,
)
from hasten._lib.names import did_you_mean, did_you_mean_file
from hasten._lib.optional import need
from hasten._lib.rank_zero import warn_once
from hasten._lib.tree import is_sharded, map_tensors
from hasten.checkpoint import objects
from hasten.checkpoint.places import NO_COPIES, Copies, LocalPlace, Place, RemotePlace
from hasten.checkpoint.stored import CONTENTS_FILE, INSTEAD_OF_DAMAGED, Folder, differs, is_checkpoint_folder
from hasten.elsewhere import conventions

if TYPE_CHECKING:
    from hasten.checkpoint.background import BackgroundWriter
    from hasten.types import MapLocation, PathLike, StorageOptions

T = TypeVar("T")


def save(contents: dict[str, Any], path: str | os.PathLike[str], *, storage_options: StorageOptions = None) -> None:
    """Write a checkpoint; at any moment ``path`` is the old file or the new one, whole.

    The file is what ``torch.save`` writes, with a checksum at its end; ``torch.load`` reads it.
    It is written under another name in the same folder (``TMPDIR`` is not used), synced to the disk and renamed.
    A symbolic link at ``path`` is replaced, not followed; so is a checkpoint folder.

    Args:
        contents: tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of them; numpy
            numbers and arrays.
        path: a path, or a URL that fsspec understands (``"s3://bucket/run/last.ckpt"``).
        storage_options: passed to fsspec; only for a URL.

    Raises:
        TypeError: something in ``contents`` could only be read back by running code; the message says where.
        OSError: the file could not be written. A file that was at ``path`` before is unchanged.

    Example::

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save({"step": 3}, f"{folder}/a.ckpt")
        >>> load(f"{folder}/a.ckpt")
        {'step': 3}

    Source: `fsync(2) <https://man7.org/linux/man-pages/man2/fsync.2.html>`_ and
    `rename(2) <https://man7.org/linux/man-pages/man2/rename.2.html>`_.

    """
    check_storable(contents)
    save_unchecked(contents, path, storage_options=storage_options)


def save_unchecked(
    contents: dict[str, Any], path: str | os.PathLike[str], *, storage_options: StorageOptions = None
) -> None:
    """Write what was read from another file; see ``save``."""
    if is_url(path):
        write_remote(str(path), functools.partial(_write, contents), storage_options)
        return
    _refuse_options(path, storage_options)
    target = _local(path)
    with _explained(target):
        is_folder = target.is_dir() and not target.is_symlink()
        if is_folder and not is_checkpoint_folder(target):
            raise IsADirectoryError(errno.EISDIR, f"{target} is a folder; a checkpoint needs a name", str(target))
        _make_folder(target.parent)
        with replacing(target, over_folder=is_folder) as file:
            _write(contents, file)
            # A program that replaces torch.save may write another format.
            if zipfile.is_zipfile(file):
                add_checksum(file)


def save_folder(
    contents: dict[str, Any], path: str | os.PathLike[str], *, storage_options: StorageOptions = None
) -> None:
    """Write a checkpoint as a folder, each process its own shards; all processes call it together.

    At any moment ``path`` is the old checkpoint or the new one, whole. An error of one process is raised by all.

    Args:
        contents: as for ``save``, and DTensors. Unsharded values are taken from the first process.
        path: a path or a URL that all machines share.
        storage_options: passed to fsspec; only for a URL.

    Raises:
        TypeError: something in ``contents`` could only be read back by running code; the message says where.
        OSError: a process could not write.
        RuntimeError: the processes do not hold the same sharded tensors.

    Example::

        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/a.ckpt"
        >>> save_folder({"state_dict": {"weight": torch.ones(2)}}, folder)
        >>> load(folder)["state_dict"]["weight"]
        tensor([1., 1.])

    Source: `torch.distributed.checkpoint <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`_.

    """
    from hasten.checkpoint import sharded

    sharded.save(contents, *folder_target(path, storage_options))


def _refuse_options(path: str | os.PathLike[str], storage_options: StorageOptions) -> None:
    if storage_options:
        what = f"storage_options={storage_options!r}: {os.fspath(path)} is a local path, which has no options."
        fix = "Leave storage_options out, or write a CheckpointIO of your own that uses them."
        raise make_error(TypeError, what, fix=fix, argument="storage_options")


def folder_target(path: str | os.PathLike[str], storage_options: StorageOptions) -> tuple[Any, Any]:
    """Return the target of a folder and the functions that write files, for ``sharded.py``."""
    from hasten.checkpoint import sharded

    save_file = functools.partial(save, storage_options=storage_options)
    functions = sharded.FileFunctions(check_storable, _make_folder, save_file)
    if is_url(path):
        return sharded.RemoteTarget(str(path), *_file_system(str(path), storage_options), functions), functions
    _refuse_options(path, storage_options)
    return sharded.LocalTarget(_local(path), functions), functions


def upload(path: str, url: str) -> None:
    """Copy a checkpoint, a file or a folder, to a URL; at any moment the copy is the old one or the new one, whole.

    Raises:
        CheckpointDamaged: a file of the folder has changed since it was written.
        OSError: it could not be read or written; a file system may raise its own errors.

    """
    source = _local(path)
    system, inner = _file_system(url, None)
    is_folder = source.is_dir()
    if system.isfile(inner) if is_folder else system.isdir(inner):
        remove(url)
    if not is_folder:
        with open(source, "rb") as file:
            write_remote(url, lambda target: shutil.copyfileobj(file, target, _BLOCK_BYTES))
        return
    from hasten.checkpoint import sharded

    with open(source / CONTENTS_FILE, "rb") as file:
        # This program has written it.
        stored = load_open(file, weights_only=not objects_allowed())
    sharded.copy(LocalPlace(source), stored, folder_target(url, None)[0])


def load(
    path: str | os.PathLike[str], *, map_location: MapLocation = "cpu", weights_only: bool | None = True
) -> dict[str, Any]:
    """Read a checkpoint after checking that it is whole.

    The tensors of a folder are read when they are needed: ``load(folder)["state_dict"]`` is a mapping that reads a
    tensor when it is asked for, and ``load(folder).whole()`` is a dict of the same contents in which all are read.

    Args:
        path: a path or a URL that fsspec understands.
        map_location: where tensors go, as for ``torch.load``.
        weights_only: refuse files that need code to be run. Only pass False for a file you trust like a program. None
            refuses them too, unless the environment has ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1``, as for ``torch.load``.

    Raises:
        FileNotFoundError: it does not exist; the message names a similar one in the folder.
        CheckpointDamaged: it is incomplete or changed.
        CheckpointRefused: reading it would run code; the message names the function or class.

    Example::

        >>> import tempfile
        >>> name = tempfile.mkdtemp() + "/a.ckpt"
        >>> save({"weight": torch.ones(2)}, name)
        >>> load(name)["weight"]
        tensor([1., 1.])

    Source: `torch.load <https://docs.pytorch.org/docs/stable/generated/torch.load.html>`_.

    """
    place = _folder_at(path)
    if place is None:
        return _load_file(path, map_location, weights_only=weights_only)
    device = map_location if isinstance(map_location, (str, torch.device)) else None
    # On the CPU: tensors that are not stored in other files are small, and the devices of a run differ.
    read = functools.partial(_load_file, map_location="cpu", weights_only=weights_only)
    return Folder(place, read, device=device).contents()


def load_open(file: IO[bytes], *, map_location: MapLocation = "cpu", weights_only: bool | None = True) -> Any:
    """Read an open file of ``torch.save``; the arguments are the same as of ``load``."""
    try:
        with numpy_allowed():
            return torch.load(file, map_location=cast("Any", map_location), weights_only=weights_only)
    except pickle.UnpicklingError as error:
        return _read_by_name(file, "the file", map_location, error)


def _folder_at(path: str | os.PathLike[str]) -> Place | None:
    """Return the place of a checkpoint folder; None if it does not exist, or is a file."""
    if is_url(path):
        system, inner = _file_system(str(path), None)
        return RemotePlace(str(path), system, inner) if system.exists(f"{inner}/{CONTENTS_FILE}") else None
    target = _local(path)
    return LocalPlace(target) if recover(target) and target.is_dir() and is_checkpoint_folder(target) else None


def _load_file(path: str | os.PathLike[str], map_location: MapLocation, *, weights_only: bool | None) -> dict[str, Any]:
    with _opened(path) as file, _checked_meanwhile(file, path):
        is_mapped = _mapped.get() and not is_url(path) and zipfile.is_zipfile(file)
        file.seek(0)
        try:
            with numpy_allowed(), warnings.catch_warnings():
                # An unusual pickle protocol is reported by the error, if there is one.
                warnings.filterwarnings("ignore", "Detected pickle protocol")
                source, place = cast("Any", _local(path) if is_mapped else file), cast("Any", map_location)
                read: dict[str, Any]
                read = torch.load(source, map_location=place, weights_only=weights_only, mmap=is_mapped)
                if is_mapped:
                    # What is small is kept: it must not depend on a file that may be removed.
                    read = map_tensors(_copied_if_small, read)
                return read
        except pickle.UnpicklingError as error:
            return _read_by_name(file, path, map_location, error)
        except Exception as error:
            if "restore data location" in str(error):
                what = f"{path}: map_location={map_location!r} is not a device that torch knows: {first_line(error)}."
                fix = "Use map_location='cpu' or 'cuda'."
                raise make_error(ValueError, what, fix=fix, argument="map_location") from error
            if (
                weights_only is False
                or isinstance(error, torch.OutOfMemoryError)
                or "Attempting to deserialize" in str(error)
            ):
                raise
            what = f"{path} is not a checkpoint, or is damaged: {first_line(error).rstrip('.')}."
            raise CheckpointDamaged(what, fix=INSTEAD_OF_DAMAGED) from error


@contextmanager
def set_in_context(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Return a context in which a variable has another value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_mapped: ContextVar[bool] = ContextVar("mapped", default=False)
_SMALL_BYTES = 1 << 20


def mapped_tensors() -> AbstractContextManager[None]:
    """Make ``load`` map large tensors of local files from disk, for callers that copy a part of each and drop it.

    Several processes on a machine that each need a part then have the file in memory once, in the system's cache.
    """
    return set_in_context(_mapped, True)


def _copied_if_small(tensor: Tensor) -> Tensor:
    return tensor.clone() if type(tensor) is Tensor and tensor.nbytes < _SMALL_BYTES else tensor


def verify(path: str | os.PathLike[str], *, share: tuple[int, int] = (0, 1)) -> None:
    """Check that a checkpoint is whole, without building its tensors.

    Where ``count`` processes check it together, ``share`` is ``(index, count)``: the first reads a file, each reads
    some files of a folder.

    Raises:
        CheckpointDamaged: it is incomplete or changed.
        FileNotFoundError: it does not exist.

    Example::

        >>> import tempfile
        >>> name = tempfile.mkdtemp() + "/a.ckpt"
        >>> save({"step": 3}, name)
        >>> verify(name)

    Source: `hashlib <https://docs.python.org/3/library/hashlib.html>`_.

    """
    place = _folder_at(path)
    if place is not None:
        with suppress(CheckpointRefused):
            # Python objects in it are not read here, and their sizes are not known.
            Folder(place, functools.partial(_load_file, map_location="cpu", weights_only=True)).check(share)
        return
    if share[0] == 0:
        with _opened(path) as file:
            check_whole(file, path)


def may_resume(path: str | os.PathLike[str]) -> bool:
    """Return whether a run may continue from a checkpoint: False if it has weights alone. No tensors are read.

    Example::

        >>> import tempfile
        >>> name = tempfile.mkdtemp() + "/a.ckpt"
        >>> save({"state_dict": {}}, name)
        >>> may_resume(name)
        False

    """
    # Whether it can be read, and is whole, is for ``verify`` to say.
    with suppress(Exception):
        place = _folder_at(path)
        with _opened(path) if place is None else place.open(CONTENTS_FILE, "rb") as file:
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                    return any(b"optimizer_states" in archive.read(name) for name in pickled)
    return True


def clean(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove temporary files and folders of writers that have died; return their paths.

    A checkpoint that such a writer was replacing gets its name back.

    Example::

        >>> clean("no/such/folder")
        []

    Source: `flock(2) <https://man7.org/linux/man-pages/man2/flock.2.html>`_.

    """
    return [] if is_url(folder) else remove_abandoned(_local(folder))


def remove(path: str | os.PathLike[str], *, storage_options: StorageOptions = None) -> None:
    """Remove a checkpoint (a file, link or folder) if it exists.

    Example::

        >>> remove("no/such/file.ckpt")

    """
    if is_url(path):
        system, inner = _file_system(str(path), storage_options)
        if system.exists(f"{inner}/{CONTENTS_FILE}"):
            # This file first: without it, a partly removed folder does not count as a checkpoint.
            system.rm(f"{inner}/{CONTENTS_FILE}")
        if system.exists(inner):
            system.rm(inner, recursive=True)
        return
    remove_all(_local(path))


def present(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint, after restoring the name of one that a killed writer was replacing.

    Example::

        >>> present("no/such/file.ckpt")
        False

    """
    if is_url(path):
        system, inner = _file_system(str(path), None)
        return bool(system.exists(inner))
    return recover(_local(path))


# -- writing


class _RecordingFile(io.RawIOBase):
    """A file that records why writing failed; torch's writer in C++ hides the operating system's error."""

    def __init__(self, file: IO[bytes]) -> None:
        self.error: OSError | None = None
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.error is not None:
            # A buffer tries once more when it is removed.
            raise self.error
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        return memoryview(data).nbytes


class _CheckpointPickler(pickle.Pickler):
    """The pickler that ``torch.save`` derives its own from: torch is asked about storages alone.

    The bytes are the same. Without this, torch's Python functions are called for every number and string.
    """

    def __init_subclass__(cls) -> None:
        of_torch: Any = cls
        ask_torch = of_torch.persistent_id

        locations = _locations.get()

        def persistent_id(self: pickle.Pickler, value: Any) -> Any:
            if not isinstance(value, _STORAGES):
                return None
            if not locations:
                return ask_torch(self, value)
            *begin, location, count = ask_torch(self, value)
            return (*begin, locations.get(torch_private.identity_of(value), location), count)

        of_torch.persistent_id = persistent_id


class _PickleModule:
    """What ``torch.save`` takes from the module ``pickle``."""

    Pickler = _CheckpointPickler


_locations: ContextVar[Mapping[int, str]] = ContextVar("locations", default=types.MappingProxyType({}))


def located_as(locations: Mapping[int, str]) -> AbstractContextManager[None]:
    """Write storages as if they were elsewhere: ``torch_private.identity_of(storage)`` -> ``location_tag``."""
    return set_in_context(_locations, locations)


_BUFFER_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 22
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


def _write(contents: dict[str, Any], file: IO[bytes]) -> None:
    recording = _RecordingFile(file)
    try:
        # A function that a program has put in place of torch.save may not know the argument.
        options: dict[str, Any] = {"pickle_module": _PickleModule} if torch.save is torch.serialization.save else {}
        # torch writes a few bytes at a time.
        buffered = io.BufferedWriter(recording, _BUFFER_BYTES)
        torch.save(contents, buffered, **options)
        buffered.flush()
    except Exception:
        if recording.error is not None:
            raise recording.error from None
        raise


def _make_folder(folder: Path) -> None:
    missing = list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise in_the_way(error, folder) from None
    for each in missing:
        sync_folder(each.parent)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, NotADirectoryError) and not is_named(error):
            raise in_the_way(error, target.parent) from error
        if isinstance(error, (FileExistsError, NotADirectoryError, IsADirectoryError)):
            raise
        kept = "what was there before is untouched" if os.path.exists(target) else "nothing is left of it"
        why = why_not_written(error, target.parent)
        raise type(error)(error.errno, f"could not write the checkpoint ({kept}): {why}", str(target)) from error


# -- what a file may contain: only what can be read back without running code

_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device}
)
_TENSORS = frozenset({Tensor, nn.Parameter})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})
_NUMBERS = ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


def check_plain(contents: object, name: str = "checkpoint") -> None:
    """Raise unless ``torch.load(..., weights_only=True)`` can read ``contents`` back.

    It has nested dicts, lists, tuples and sets, and is called ``name`` in the message.

    Raises:
        TypeError: something in it is another Python object; the message says where and what to do.

    Example::

        >>> check_plain({"step": 3, "weight": torch.ones(2)})
        >>> check_plain({"hparams": {"activation": len}})
        Traceback (most recent call last):
        ...
        TypeError: checkpoint['hparams']['activation'] is a builtin_function_or_method, which a checkpoint does \
not hold: reading it back would run code. Store numbers, strings, tensors and dicts or lists of them instead.

    Source: `torch.load <https://docs.pytorch.org/docs/stable/generated/torch.load.html>`_.

    """
    _check(contents, name, set())


def objects_allowed() -> bool:
    """Return whether checkpoints may hold Python objects, which packages written for Lightning put there."""
    return conventions.current().saves_objects


def check_storable(contents: object) -> None:
    """Raise unless ``contents`` may be written: it is plain, or objects are allowed; see ``check_plain``."""
    try:
        check_plain(contents)
    except TypeError as error:
        if not objects_allowed():
            raise
        place = str(error).partition(", which")[0]
        warn_once(
            "objects in a checkpoint",
            f"{place}: the checkpoint can be read back with weights_only=False only, which runs code in it.",
        )


def is_plain(contents: object) -> bool:
    """Return whether ``check_plain`` accepts ``contents``."""
    try:
        check_plain(contents)
    except TypeError:
        return False
    return True


@contextmanager
def numpy_allowed() -> Iterator[None]:
    """Let ``torch.load(..., weights_only=True)`` read numpy's numbers and arrays of numbers, which are plain data."""
    if "numpy" not in sys.modules:
        yield
        return
    import numpy

    # The module has different names in numpy 1 and 2; a file may be from either.
    multiarray = sys.modules.get("numpy._core.multiarray") or sys.modules["numpy.core.multiarray"]
    known: list[Any] = [numpy.ndarray, numpy.dtype]
    known += [type(numpy.dtype(number)) for number in _NUMBERS]
    for function in ("scalar", "_reconstruct"):
        for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
            known.append((getattr(multiarray, function), f"{module}.{function}"))
    with torch.serialization.safe_globals(known):
        yield


def _check(value: Any, place: str, above: set[int]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        return
    if kind in _TENSORS:
        attributes = vars(value)
        if attributes:
            _check(attributes, f"the attributes of {place}", above)
    elif kind in _MAPPINGS or kind in _SEQUENCES:
        if id(value) in above:
            raise TypeError(f"{place} contains itself, which a checkpoint does not hold.")
        above.add(id(value))
        if kind in _MAPPINGS:
            for key, inner in value.items():
                # Most values are numbers and strings: avoid a call for them.
                if type(key) not in _LEAVES:
                    _check(key, f"a key of {place}", above)
                if type(inner) not in _LEAVES:
                    _check(inner, f"{place}[{key!r}]", above)
        else:
            for index, inner in enumerate(value):
                if type(inner) not in _LEAVES:
                    _check(inner, f"{place}[{index}]", above)
        above.discard(id(value))
    else:
        _check_other(value, place)


def _check_other(value: Any, place: str) -> None:
    """Raise if a value that is not a number, string, tensor, dict or list cannot be read back."""
    kind = type(value)
    if is_sharded(value):
        what = f"{place} is a DTensor, of which this process has a part: the file would hold only that part."
        fix = "Save its full_tensor(), which all processes call, or write it with torch.distributed.checkpoint."
        raise make_error(TypeError, what, fix=fix)
    if not _can_be_loaded(value):
        advice = "Store numbers, strings, tensors and dicts or lists of them instead"
        if hasattr(value, "as_posix"):
            advice = "Store str(path) instead"
        elif hasattr(value, "value") and hasattr(value, "name"):
            advice = "Store its .value instead"
        raise make_error(
            TypeError,
            f"{place} is {with_article(kind)}, which a checkpoint does not hold: reading it back would run code.",
            fix=f"{advice}.",
        )


def _can_be_loaded(value: Any) -> bool:
    """Return whether another object can be read back: a tensor subclass, a numpy array, a type the user allowed."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        with numpy_allowed():
            try:
                torch.load(buffer, weights_only=True)
            except pickle.UnpicklingError:
                buffer.seek(0)
                return not objects.read(buffer, "cpu", data=False)[1]
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError, ValueError):
        return False
    return True


# -- reading


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    if is_url(path):
        system, inner = _file_system(str(path), None)
        if str(path).startswith(("http://", "https://")):
            # Many servers send files only from their beginning, and a checkpoint is not read in order.
            with system.open(inner, "rb", block_size=0) as sent, tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(sent, copy)
                copy.seek(0)
                yield copy
            return
        with system.open(inner, "rb") as file:
            yield file
        return
    local = _local(path)
    try:
        file = open(local, "rb")  # noqa: SIM115  (closed below; only opening it is explained)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, not_found(local).rstrip("."), str(local)) from None
    except IsADirectoryError:
        if not str(path):
            what = "The path of the checkpoint is empty:"
            fix = "a ModelCheckpoint's best_model_path is, until it has saved one."
            raise make_error(FileNotFoundError, what, fix=fix) from None
        raise CheckpointDamaged(f"{local} is a folder, not a checkpoint file.", fix=_newest_in(local)) from None
    with file:
        yield file


def _newest_in(folder: Path) -> str:
    """Return the sentence that names the newest checkpoint in a folder."""
    found = [*folder.glob("*.ckpt"), *folder.glob("checkpoints/*.ckpt")]
    if not found and (folder / "config.json").exists():
        return f"It is a model of transformers: write AutoModel.from_pretrained({str(folder)!r}) in __init__."
    if not found:
        return "There is no .ckpt file in it: give the path of a file that trainer.save_checkpoint has written."
    return f"Give the file: {str(max(found, key=lambda each: each.stat().st_mtime))!r} is the newest in it."


def not_found(path: Path, *words: str) -> str:
    """Return the message for a file that does not exist, with the nearest name in its folder or among ``words``."""
    if path.parts[:1] == ("~",):
        return "'~' is not expanded here: write os.path.expanduser(...)."
    if not path.parent.is_dir():
        near = did_you_mean(path.parent.name, [each.name for each in path.parent.parent.glob("*")])
        return f"the folder {str(path.parent)!r} does not exist.{near}{_nearest_below_parents(path)}"
    others = sorted(each.name for each in path.parent.iterdir())
    hint = did_you_mean(path.name, words) or did_you_mean_file(path.name, others)
    return f"the file does not exist.{hint}"


# How many folders above a missing one are searched for checkpoints, and how deep.
_PARENTS, _DEEP = 3, 3


def _nearest_below_parents(path: Path) -> str:
    """Return a sentence that names the newest checkpoint near a missing folder; "" if there is none."""
    for folder in list(path.parent.parents)[:_PARENTS]:
        if not folder.is_dir() or folder == folder.parent:
            continue
        found = [file for depth in range(1, _DEEP + 1) for file in folder.glob("*/" * depth + "*.ckpt")]
        if found:
            same = [file for file in found if file.name == path.name] or found
            return f" The newest checkpoint near it is {str(max(same, key=lambda each: each.stat().st_mtime))!r}."
        if folder.parts:
            break
    return ""


_leaves_out: ContextVar[bool] = ContextVar("leaves_out", default=False)


def hyper_parameters_left_out() -> AbstractContextManager[None]:
    """Return a context in which ``load`` puts ``objects.NotRead`` for hyper-parameters that nobody has allowed.

    Elsewhere in a file objects are still refused.
    """
    return set_in_context(_leaves_out, True)


def _read_by_name(
    file: IO[bytes], path: str | os.PathLike[str], map_location: MapLocation, error: Exception
) -> dict[str, Any]:
    """Read a file that torch's own reader refuses, if its classes are plain data or were allowed."""
    file.seek(0)
    try:
        with numpy_allowed():
            contents, names = objects.read(file, map_location, leaves_out=_leaves_out.get())
    except Exception:  # the contents of the file are not known
        names = [str(error).partition("GLOBAL ")[2].split(" ")[0].rstrip(".,") or _first_global(file)]
    if not names:
        return cast("dict[str, Any]", contents)
    if names == [""]:
        raise CheckpointRefused(f"{path} is a pickle, but not a file of torch.save, and was not loaded.")
    raise CheckpointRefused(
        f"{path} was not loaded: reading it would run code (it calls {', '.join(names)}).",
        fix=(
            "If you trust whoever wrote it as you would trust a program, load it with weights_only=False; better, save "
            f"it again with plain data only. {objects.how_to_allow(names)}"
        ),
    )


def _first_global(file: IO[bytes]) -> str:
    """Return the first function or class that a pickle names, without running anything."""
    texts: list[str] = []
    try:
        file.seek(0)
        for operation, argument, _ in pickletools.genops(file):
            if operation.name == "GLOBAL":
                return str(argument).replace(" ", ".")
            if operation.name == "STACK_GLOBAL":
                return ".".join(texts[-2:])
            if isinstance(argument, str):
                texts.append(argument)
    except (ValueError, ArithmeticError, MemoryError, struct.error):
        pass
    return ""


# -- files behind URLs


def _local(path: str | os.PathLike[str]) -> Path:
    return Path(local(path)).expanduser()


def _file_system(url: str, storage_options: Any) -> tuple[Any, str]:
    fsspec = need("fsspec", purpose=f"A checkpoint at {url}")
    system, inner = fsspec.core.url_to_fs(url, **(storage_options or {}))
    return system, inner


def opened_remote(url: str) -> IO[bytes]:
    """Open a file behind a URL for reading.

    Raises:
        FileNotFoundError: it does not exist.

    """
    system, inner = _file_system(url, None)
    return cast("IO[bytes]", system.open(inner, "rb"))


def write_remote(url: str, write: Callable[[IO[bytes]], object], storage_options: StorageOptions = None) -> None:
    """Have ``write`` write a file behind a URL, under another name until it is complete."""
    system, inner = _file_system(url, storage_options)
    if system.isdir(inner):
        raise IsADirectoryError(errno.EISDIR, f"{url} is a folder; a checkpoint needs a name", url)
    folder = inner.rpartition("/")[0]
    if folder:
        system.makedirs(folder, exist_ok=True)
    temporary = f"{inner}.{secrets.token_hex(4)}{TEMPORARY}"
    try:
        with system.open(temporary, "wb") as file:
            write(file)
        system.mv(temporary, inner)
    except BaseException as error:
        with suppress(Exception):
            system.rm(temporary)
        error.add_note(f"{url} could not be written; what was there before is untouched.")
        raise


# -- checksums


# In the comment at the end of the zip archive, which other readers skip.
_MARK = b"hasten sha256 "
_LINE_BYTES = len(_MARK) + 64
_END_BYTES = 22  # the record that ends a zip archive, without its comment
# Records of at least this size are checked by the CRC-32 that torch.save computes anyway; the sha256 covers the rest:
# headers, directory, padding and small records. So saving has little to hash, and every byte is covered.
_LARGE_BYTES = 4096
# In the name of a record that holds the bytes of a tensor, and nothing that is unpickled.
_STORAGE = "/data/"
# The name of the record that torch.save writes last.
_LAST = "/.data/serialization_id"
# With fewer bytes of tensors, starting a thread takes longer than it saves.
_THREAD_BYTES = 1 << 20


def add_checksum(file: IO[bytes]) -> None:
    """Append the sha256 to a file that ``torch.save`` has written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 2)
    file.write(_LINE_BYTES.to_bytes(2, "little"))
    file.write(_MARK + bytes(64))
    file.flush()
    digest, _ = _checksums(file, size)
    file.seek(size + len(_MARK))
    file.write(digest)


# An archive record with its own checksum: its name for messages, start, length and CRC-32.
_Record = tuple[str, int, int, int]


def check_whole(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Raise CheckpointDamaged if a byte of the file has changed, as far as its checksums cover it."""
    _check_records(file, path, _check_all_but_large_records(file, path))


@contextmanager
def _checked_meanwhile(file: IO[bytes], path: str | os.PathLike[str]) -> Iterator[None]:
    """Check the file for the body, which reads it from its beginning: tensors in a thread, all else before.

    Raises:
        CheckpointDamaged: as ``check_whole``; at the end in place of an error of the body.

    """
    records = _check_all_but_large_records(file, path)
    # What is unpickled is checked before; storages are bytes.
    storages = [record for record in records if _STORAGE in record[0]]
    _check_records(file, path, [record for record in records if _STORAGE not in record[0]])
    with ExitStack() as stack:
        is_large = not is_url(path) and sum(record[2] for record in storages) >= _THREAD_BYTES
        other = _second_handle(stack, file, path) if is_large else None
        if other is None:
            _check_records(file, path, storages)
            file.seek(0)
            yield
            return
        thread = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums"))
        checked = thread.submit(_check_records, other, path, storages)
        file.seek(0)
        try:
            yield
        finally:
            checked.result()


def _second_handle(stack: ExitStack, file: IO[bytes], path: str | os.PathLike[str]) -> IO[bytes] | None:
    """Open a file once more, for reads at another place; None if another file has its path by now."""
    try:
        other = stack.enter_context(open(_local(path), "rb"))  # noqa: SIM115  (the stack closes it)
    except OSError:
        return None
    return other if os.path.samestat(os.fstat(file.fileno()), os.fstat(other.fileno())) else None


def _check_records(file: IO[bytes], path: str | os.PathLike[str], records: list[_Record]) -> None:
    try:
        damaged = next((name for name, *place, crc in records if _crc32(file, *place) != crc), None)
    except _NOT_AN_ARCHIVE as error:
        raise _cut_off(path, file.seek(0, os.SEEK_END), error) from None
    if damaged is not None:
        raise differs(path, damaged)


def _cut_off(path: str | os.PathLike[str], size: int, error: Exception) -> CheckpointDamaged:
    what = f"{path} is damaged or cut off at {size} bytes: {first_line(error).rstrip('.')}."
    return CheckpointDamaged(what, fix=INSTEAD_OF_DAMAGED)


def _check_all_but_large_records(file: IO[bytes], path: str | os.PathLike[str]) -> list[_Record]:
    """Check what is in none of the large records; return these."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LINE_BYTES - _END_BYTES))
    end, line = file.read(_END_BYTES), file.read()
    file.seek(0)
    begin = file.read(24)
    has_line = line.startswith(_MARK)
    expects_line = end[:4] == b"PK\x05\x06" and end[-2:] == _LINE_BYTES.to_bytes(2, "little")
    if not has_line and not expects_line and begin[:4] != b"PK\x03\x04":
        _check_pickle(begin, path)
        return []
    large: list[_Record] = []
    try:
        if has_line or expects_line:
            digest, large = _checksums(file, size - _LINE_BYTES)
            whole = has_line and expects_line and digest == line[len(_MARK) :]
            damaged = None if whole else _damaged_outside_records(file)
        elif _ends_elsewhere(file, size):
            damaged = "its end"
        else:
            # A file that hasten has not written has only the checksums of the archive.
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
    except _NOT_AN_ARCHIVE as error:
        raise _cut_off(path, size, error) from None
    if damaged is not None:
        raise differs(path, damaged)
    return large


def _damaged_outside_records(file: IO[bytes]) -> str | None:
    with zipfile.ZipFile(file) as archive:
        # Where another program has added records, as ``zipfile.ZipFile(path, "a")`` does, the directory is new.
        has_more = any(name.endswith(_LAST) for name in archive.namelist()[:-1])
        return archive.testzip() if has_more else "its headers"


def _ends_elsewhere(file: IO[bytes], size: int) -> bool:
    """Return whether the length of the archive's comment is wrong: the file was cut off, or extended."""
    file.seek(max(0, size - _END_BYTES - 0xFFFF))
    tail = file.read()
    place = tail.rfind(b"PK\x05\x06")
    announced = tail[place + _END_BYTES - 2 : place + _END_BYTES]
    return place >= 0 and int.from_bytes(announced, "little") != len(tail) - place - _END_BYTES


_NOT_AN_ARCHIVE = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, RuntimeError, ValueError,
)  # fmt: skip


def _check_pickle(begin: bytes, path: str | os.PathLike[str]) -> None:
    """Accept the formats of older torch versions, which have no checksums."""
    if not begin:
        raise CheckpointDamaged(f"{path} is empty.", fix=INSTEAD_OF_DAMAGED)
    why, fix = "", "Give one that trainer.save_checkpoint or torch.save has written, or download it again."
    if begin[4:9] == b"\0\0\0\0{":
        # The length of a header in JSON, which may begin as a pickle does.
        why = "it has the weights alone, in the format of safetensors"
        fix = f"Write model.load_state_dict(safetensors.torch.load_file({str(path)!r}))."
    elif begin.startswith(b"version https://git-lfs"):
        why, fix = "it is a pointer of Git LFS, in place of the file", "Write git lfs pull in its folder."
    elif begin.lstrip().startswith(b"<"):
        why, fix = "it is a web page", "Download the file itself, not the page that shows it or an error."
    elif begin[:1] != b"\x80":
        why = f"it begins with {begin[:4]!r}, not as files of torch.save do"
    if why:
        raise CheckpointDamaged(f"{path} is not a checkpoint: {why}.", fix=fix)


def _checksums(file: IO[bytes], size: int) -> tuple[bytes, list[_Record]]:
    """Return the sha256 of the file without large records, and (name, start, length, CRC-32) of each of those."""
    with zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=operator.attrgetter("header_offset"))
    digest, place = hashlib.sha256(), 0
    large: list[_Record] = []
    for record in records:
        if record.compress_size < _LARGE_BYTES or record.compress_type != zipfile.ZIP_STORED:
            continue
        file.seek(record.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26xHH", file.read(30))
        start = record.header_offset + 30 + name_bytes + extra_bytes
        file.seek(place)
        digest.update(file.read(max(0, start - place)))
        large.append((f"the record {record.filename!r}", start, record.compress_size, record.CRC))
        place = start + record.compress_size
    file.seek(place)
    digest.update(file.read(max(0, size - place)))
    return digest.hexdigest().encode(), large


def _crc32(file: IO[bytes], start: int, length: int) -> int:
    checksum, buffer = 0, memoryview(bytearray(min(length, 1 << 20)))
    file.seek(start)
    while length:
        count = cast(io.BufferedReader, file).readinto(buffer[: min(length, len(buffer))])
        if not count:
            break
        checksum = zlib.crc32(buffer[:count], checksum)
        length -= count
    return checksum


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- as a plugin


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints. Subclass it and pass it as ``plugins=MyCheckpointIO()``."""

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Write ``checkpoint`` to ``path``; called in the first process only.

        Args:
            checkpoint: names and values.
            path: a path or a URL.
            storage_options: for the file system.

        """

    @abstractmethod
    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``.

        Args:
            path: a path or a URL.
            map_location: the device of the tensors, as for ``torch.load``.
            weights_only: False reads Python objects too, which can run code: only for files you trust.

        """

    @abstractmethod
    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path``."""

    @property
    def writes_folders(self) -> bool:
        """Whether ``save_folder`` works, which strategies with sharded checkpoints need."""
        return False

    def save_folder(self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None) -> None:
        """Write ``checkpoint`` as a folder; called in all processes together, which raise the same errors.

        Args:
            checkpoint: names and values, with the shards of this process.
            path: a path or a URL that all machines share.
            storage_options: for the file system.

        """
        raise make_error(
            TypeError, f"{type(self).__name__} writes files only.", fix="Use TorchCheckpointIO or AsyncCheckpointIO."
        )

    @property
    def copies(self) -> Copies:
        """Copies of the checkpoints in another place."""
        return NO_COPIES

    @property
    def wrapped(self) -> CheckpointIO | None:
        """The one that writes and reads for this one; None if it does so itself."""
        return None

    def after(self, function: Callable[[], object]) -> None:
        """Call ``function`` once everything saved so far is complete: at once, unless it is written later."""
        function()

    def teardown(self) -> None:  # noqa: B027 - most write at once
        """Wait for files that are still being written."""


class TorchCheckpointIO(CheckpointIO):
    """Writes files atomically with ``torch.save``; see ``save``."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Write ``checkpoint``; the previous file stays whole until the new one is."""
        save(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``."""
        return load(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path``."""
        remove(path)

    @property
    def writes_folders(self) -> bool:
        # A subclass that changes how files are written must also define how folders are written.
        kind = type(self)
        changed = kind.save_checkpoint is not TorchCheckpointIO.save_checkpoint
        return not changed or kind.save_folder is not TorchCheckpointIO.save_folder

    def save_folder(self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None) -> None:
        """Write ``checkpoint`` as a folder; the previous one stays whole until the new one is. See ``save_folder``."""
        save_folder(checkpoint, path, storage_options=storage_options)


class DefaultCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints where a program names nothing else.

    Files are written at once, but for large ones of a ModelCheckpoint, which its ``writer`` may still be writing.
    """

    # Made by ``writer_of`` in background.py.
    writer: BackgroundWriter | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Write ``checkpoint``, or copy it for the writer; the previous file stays whole until the new one is."""
        if self.writer is None or self.writer.is_idle:
            save(checkpoint, path, storage_options=storage_options)
        else:
            self.writer.save(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``, after everything is written."""
        if self.writer is not None and not self.writer.is_idle:
            self.writer.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path``, after everything is written."""
        if self.writer is None or self.writer.is_idle:
            remove(path)
        else:
            self.writer.remove(remove, path)

    def after(self, function: Callable[[], object]) -> None:
        """Call ``function`` once everything saved so far is complete, and not if that fails."""
        function() if self.writer is None else self.writer.after(function)

    @property
    def writes_folders(self) -> bool:
        return True

    def teardown(self) -> None:
        """Wait for files that are still being written."""
        if self.writer is not None:
            self.writer.close()
