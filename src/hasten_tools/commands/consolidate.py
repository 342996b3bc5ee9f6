"""``hasten consolidate``: make one file of a sharded checkpoint, which is a folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hasten._lib.errors import make_error
from hasten.commands.parser import Parser

# What only training needs; see RunState.collect in loops/resume.py.
_OF_TRAINING = (
    "optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "hasten", "current_model_state",
    "averaging_state",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Write the file; return the exit code."""
    options = make_parser().parse(arguments)
    try:
        _allow(options.allow)
        print(consolidate(options.folder, options.output, weights_only=options.weights_only))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"hasten consolidate: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten consolidate",
        description="Make one file of a sharded checkpoint, which is a folder. This takes memory for all its tensors.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the checkpoint, or its URL")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="what to write: a .safetensors file holds the weights alone, any other is a checkpoint "
        "(default: NAME-consolidated.ckpt beside FOLDER)",
    )
    parser.add_argument("--weights-only", action="store_true", help="leave out what only training needs")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="a class whose objects the checkpoint holds, for instance package.module.Class: it is imported, and "
        "reading may run its code. May be given several times",
    )
    return parser


def _allow(names: Sequence[str]) -> None:
    """Import classes and allow files to hold their objects, in this process."""
    if not names:
        return
    import torch

    sys.path.insert(0, os.getcwd())
    allowed: list[Any] = []
    for name in names:
        module, _, kind = name.rpartition(".")
        found = getattr(importlib.import_module(module), kind, None) if module else None
        if found is None:
            raise make_error(
                ValueError, f"--allow {name}: this class was not found.", fix="Write package.module.Class."
            )
        # By the name in the file, which may differ from the name of the class.
        allowed.append((found, name))
    torch.serialization.add_safe_globals(allowed)


def consolidate(folder: str, output: Path | None = None, *, weights_only: bool = False) -> Path:
    """Write one file of a sharded checkpoint.

    Args:
        folder: the checkpoint, or its URL.
        output: the file, which must not exist; by default ``NAME-consolidated.ckpt`` next to ``folder``.
        weights_only: leave out what only training needs.

    Returns:
        The path of the file.

    Raises:
        ValueError: ``folder`` is another thing, ``output`` exists, or the weights are not known.
        CheckpointDamaged: ``folder`` is not whole.

    """
    from hasten._lib.files import is_url
    from hasten.checkpoint import files
    from hasten.checkpoint.stored import StoredCheckpoint, whole

    if is_url(folder):
        if output is None:
            raise make_error(ValueError, f"{folder}:", fix="name the file to write with -o.")
        target = output
    else:
        path = _checked(folder)
        folder, target = str(path), output or path.with_name(f"{path.stem}-consolidated.ckpt")
    if target.exists():
        raise make_error(ValueError, f"{target} exists.", fix="Remove it, or name another file with -o.")
    # The weights alone need no hyper-parameters.
    with files.hyper_parameters_left_out() if target.suffix == ".safetensors" else nullcontext():
        checkpoint = files.load(folder)
    if not isinstance(checkpoint, StoredCheckpoint):
        raise ValueError(f"{folder} is one file already. A sharded checkpoint is a folder.")
    if target.suffix == ".safetensors":
        _write_safetensors(_weights(checkpoint, folder), target)
        return target
    if weights_only:
        if "state_dict" not in checkpoint:
            raise _unknown_weights(checkpoint, folder)
        checkpoint = {key: value for key, value in checkpoint.items() if key not in _OF_TRAINING}
    files.save_unchecked(whole(dict(checkpoint)), target)
    return target


def _checked(folder: str) -> Path:
    """Return the path of a folder that is a sharded checkpoint."""
    from hasten.checkpoint import files
    from hasten.checkpoint.stored import is_checkpoint_folder

    path = Path(os.path.abspath(folder))
    if not files.present(path):
        raise ValueError(f"{path}: {files.not_found(path)}")
    if not path.is_dir():
        raise ValueError(f"{path} is one file already. A sharded checkpoint is a folder.")
    if not is_checkpoint_folder(path):
        inside = [str(each) for each in sorted(path.iterdir()) if is_checkpoint_folder(each)]
        hint = f" Did you mean {inside[-1]!r}?" if inside else ""
        raise make_error(ValueError, f"{path} is not a sharded checkpoint.", fix=hint)
    return path


def _weights(checkpoint: Any, folder: str) -> dict[str, Any]:
    from hasten.checkpoint.stored import StoredTensors, whole

    found = [value for value in checkpoint.values() if isinstance(value, StoredTensors)]
    if "state_dict" not in checkpoint and len(found) != 1:
        raise _unknown_weights(checkpoint, folder)
    weights: dict[str, Any] = whole(checkpoint.get("state_dict", found[0] if found else None))
    return weights


def _unknown_weights(checkpoint: Any, folder: str) -> ValueError:
    names = ", ".join(map(repr, checkpoint))
    return make_error(
        ValueError, f"{folder} has no 'state_dict' (it has {names}):", fix="write all of it into a .ckpt file."
    )


def _write_safetensors(weights: dict[str, Any], target: Path) -> None:
    from torch import Tensor

    from hasten._lib.files import put_in_place, replacing_folder
    from hasten._lib.optional import need

    safetensors = need("safetensors.torch", purpose="hasten consolidate -o FILE.safetensors")
    left_out = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if left_out:
        print(f"hasten consolidate: left out, because they are not tensors: {', '.join(left_out)}", file=sys.stderr)
    tensors = {name: value.contiguous() for name, value in weights.items() if isinstance(value, Tensor)}
    with replacing_folder(target) as temporary:
        written = temporary / target.name
        safetensors.save_file(tensors, written, metadata={"format": "pt"})
        with open(written, "rb+") as file:
            os.fsync(file.fileno())
        put_in_place(written, target)
