"""Functions for reading and writing checkpoints that packages import from Lightning."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Never, TypeVar

import torch

from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten.checkpoint.background import AsyncCheckpointIO
from hasten.checkpoint.files import CheckpointIO, TorchCheckpointIO
from hasten.module.hparams import construct
from hasten_lightning.names import VERSION

if TYPE_CHECKING:
    from hasten.types import MapLocation, PathLike

T = TypeVar("T")

# Entries of DeepSpeed's file that it reads itself.
_OF_DEEPSPEED = {
    "module", "optimizer", "lr_scheduler", "csr_tensor_module_names", "skipped_steps", "global_steps", "dp_world_size",
    "mp_world_size",
}  # fmt: skip


class NotYetLoadedTensor:
    """Lightning's placeholder for a tensor that it has not read yet.

    Nothing is an instance: ``lazy_load`` returns tensors, whose values the system reads from the file when they are
    first used.
    """

    def __new__(cls, *_: object, **__: object) -> Never:
        raise TypeError(f"{cls.__name__}: there are no such objects. lazy_load() returns tensors of a mapped file.")


def lazy_load(filename: PathLike) -> Any:
    """Return what ``torch.save`` wrote in its zip format, without reading the values of tensors before they are used.

    Raises:
        FileNotFoundError: the file does not exist.
        UnpicklingError: it holds Python objects.

    Example::

        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.ones(2)}, f"{folder}/a.pt")
        ...     lazy_load(f"{folder}/a.pt")["weight"].sum()
        tensor(2.)

    Source: `PyTorch, torch.load <https://docs.pytorch.org/docs/stable/generated/torch.load.html>`_, ``mmap=True``.

    """
    path = Path(filename)
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist, or is not a file.")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def load_from_checkpoint(
    cls: type[T],
    checkpoint_path: PathLike | IO[bytes],
    map_location: MapLocation = None,
    hparams_file: PathLike | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: object,
) -> T:
    """Do what ``cls.load_from_checkpoint`` does, for classes that override it; see there for the arguments."""
    return construct(cls, checkpoint_path, map_location, hparams_file, weights_only, kwargs, strict)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathLike, output_file: PathLike, tag: str | None = None
) -> dict[str, Any]:
    """Write one file with whole float32 weights of a checkpoint folder that DeepSpeed wrote, and return its contents.

    The folder has one named ``tag`` for each save, by default the one that the file ``latest`` names.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: ``tag`` is None and the folder has no file ``latest``.
        FileNotFoundError: the folder ``tag`` does not exist.

    """
    folder = Path(checkpoint_dir)
    latest = folder / "latest"
    if tag is None and not latest.is_file():
        raise make_error(ValueError, f"{folder} has no file 'latest' that names the save to read:", fix="pass tag=....")
    place = folder / (latest.read_text("utf-8").strip() if tag is None else tag)
    if not place.is_dir():
        raise FileNotFoundError(f"{place} is not a folder.")
    zero = need("deepspeed.utils.zero_to_fp32", purpose="a checkpoint of DeepSpeed")
    weights = zero.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
    # The first optimizer file says which stage it was, and with it where the other entries are.
    first = torch.load(zero.get_optim_files(str(place))[0], map_location="cpu", weights_only=False)
    stage = first["optimizer_state_dict"]["zero_stage"]
    model = torch.load(zero.get_model_state_file(str(place), stage), map_location="cpu", weights_only=False)
    contents = {key: value for key, value in model.items() if key not in _OF_DEEPSPEED}
    contents["state_dict"] = {name.removeprefix("_forward_module."): value for name, value in weights.items()}
    torch.save(contents, output_file)
    return contents


class WrappingCheckpointIO(CheckpointIO):
    """A ``CheckpointIO`` that does something around another one, ``TorchCheckpointIO`` by default; subclass it."""

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        super().__init__()
        self._checkpoint_io = checkpoint_io

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The one that writes and reads."""
        if self._checkpoint_io is None:
            self._checkpoint_io = TorchCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        # One that was given to the constructor stays; what is set goes to the innermost.
        if isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = checkpoint_io
        elif self._checkpoint_io is None:
            self._checkpoint_io = checkpoint_io

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, *args: Any, **kwargs: Any) -> None:
        """Let the wrapped object write, with the arguments that are given."""
        self.checkpoint_io.save_checkpoint(checkpoint, path, *args, **kwargs)

    def load_checkpoint(self, path: PathLike, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Let the wrapped object read, with the arguments that are given."""
        return self.checkpoint_io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Let the wrapped object remove a file."""
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Let the wrapped object finish."""
        self.checkpoint_io.teardown()


# It wraps one too, without being a subclass.
WrappingCheckpointIO.register(AsyncCheckpointIO)


def migrate_checkpoint(
    checkpoint: dict[str, Any], target_version: str | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the contents of a checkpoint and the changes made to it: none, because all versions can be read.

    Args:
        checkpoint: what was read from the file; it gets the version that it is read as.
        target_version: not needed.

    Example::

        >>> checkpoint, changes = migrate_checkpoint({"pytorch-lightning_version": "2.0.1"})
        >>> checkpoint["legacy_pytorch-lightning_version"], changes
        ('2.0.1', {})

    """
    written = checkpoint.get("pytorch-lightning_version")
    if written != VERSION:
        if written is not None:
            checkpoint.setdefault("legacy_pytorch-lightning_version", written)
        checkpoint["pytorch-lightning_version"] = VERSION
    return checkpoint, {}


class LegacyPatch(nullcontext[None]):
    """A context for reading old checkpoints, which changes nothing: the older names lead to hasten everywhere."""


def pl_migrate_checkpoint(checkpoint: dict[str, Any], checkpoint_path: PathLike | None = None) -> dict[str, Any]:
    """Return the contents of a checkpoint; see ``migrate_checkpoint``."""
    return migrate_checkpoint(checkpoint)[0]
