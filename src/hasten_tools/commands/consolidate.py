"""``hasten consolidate``: make one file of a sharded checkpoint, which is a folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import make_error
from hasten.commands.parser import Option, Parser

if TYPE_CHECKING:
    from hasten.checkpoint.stored import StoredTensors

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
        print(
            consolidate(
                options.folder,
                options.output,
                weights_only=options.weights_only,
                output_format=options.format,
                prefix=options.prefix,
            )
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"hasten consolidate: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten consolidate",
        description="Make one file of a sharded checkpoint, which is a folder. This takes memory for all its tensors, "
        "or with --format safetensors for one of them.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the checkpoint, or its URL")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="what to write: a .safetensors file holds the weights alone, any other is a checkpoint "
        "(default: NAME-consolidated.ckpt beside FOLDER)",
    )  # fmt: skip
    parser.add_options(_OPTIONS)
    parser.add_argument(
        "--allow", action="append", default=[], metavar="NAME",
        help="a class whose objects the checkpoint holds, for instance package.module.Class: it is imported, and "
        "reading may run its code. May be given several times",
    )  # fmt: skip
    parser.set_defaults(prefix="")
    return parser


_OPTIONS: list[Option] = [
    (
        *("--format", "", ("checkpoint", "safetensors")),
        "safetensors writes the weights; if FILE does not end with .safetensors, as a folder that from_pretrained of "
        "Hugging Face reads, with files of at most 5 GB (default: what the name of FILE says)",
    ),
    (
        *("--prefix", "TEXT", str),
        "with safetensors: write the weights whose names begin with it, without it, for instance model.",
    ),
    ("--weights-only", "", None, "leave out what only training needs"),
]


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


def consolidate(
    folder: str,
    output: Path | None = None,
    *,
    weights_only: bool = False,
    output_format: str | None = None,
    prefix: str = "",
) -> Path:
    """Write one file of a sharded checkpoint.

    ``folder`` may be a URL. ``output`` must not exist; by default it is ``NAME-consolidated.ckpt`` next to ``folder``.
    ``output_format`` "safetensors" writes the weights alone, into a folder if ``output`` does not end with
    ``.safetensors``; None chooses by the name of ``output``. With it, ``prefix`` writes only weights whose names begin
    with it, without it. Return the path.

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
        ending = "" if output_format == "safetensors" else ".ckpt"
        folder, target = str(path), output or path.with_name(f"{path.stem}-consolidated{ending}")
    is_safetensors = output_format == "safetensors" or (output_format is None and target.suffix == ".safetensors")
    _check_target(target, "" if is_safetensors else prefix)
    # The weights alone need no hyper-parameters.
    with files.hyper_parameters_left_out() if is_safetensors else nullcontext():
        checkpoint = files.load(folder)
    if not isinstance(checkpoint, StoredCheckpoint):
        raise ValueError(f"{folder} is one file already. A sharded checkpoint is a folder.")
    if is_safetensors:
        _write_safetensors(_weights(checkpoint, folder), target, prefix)
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


def _weights(checkpoint: Any, folder: str) -> StoredTensors:
    from hasten.checkpoint.stored import StoredTensors

    found = [value for value in checkpoint.values() if isinstance(value, StoredTensors)]
    if "state_dict" not in checkpoint and len(found) != 1:
        raise _unknown_weights(checkpoint, folder)
    weights: StoredTensors = checkpoint.get("state_dict", found[0] if found else None)
    return weights


def _unknown_weights(checkpoint: Any, folder: str) -> ValueError:
    names = ", ".join(map(repr, checkpoint))
    return make_error(
        ValueError, f"{folder} has no 'state_dict' (it has {names}):", fix="write all of it into a .ckpt file."
    )


def _check_target(target: Path, left_prefix: str) -> None:
    if left_prefix:
        raise make_error(ValueError, f"--prefix {left_prefix} is for safetensors.", fix="Add --format safetensors.")
    if target.exists():
        raise make_error(ValueError, f"{target} exists.", fix="Remove it, or name another file with -o.")


def _write_safetensors(weights: StoredTensors, target: Path, prefix: str) -> None:
    """Write weights, of which one at a time is in memory."""
    from torch import Tensor

    from hasten._lib.files import put_in_place, replacing_folder, sync_folder
    from hasten.checkpoint.stored import StoredTensor
    from hasten.module import pretrained

    chosen = {name.removeprefix(prefix): value for name, value in weights.stored() if name.startswith(prefix)}
    tensors = {name: value for name, value in chosen.items() if isinstance(value, (StoredTensor, Tensor))}
    if left_out := chosen.keys() - tensors.keys():
        print(f"hasten consolidate: left out, because they are not tensors: {', '.join(left_out)}", file=sys.stderr)
    if not tensors:
        some = ", ".join(list(weights)[:3])
        raise make_error(ValueError, f"--prefix {prefix}: no weight begins with it.", fix=f"There are {some}.")
    described = {name: pretrained.Described(value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    is_file = target.suffix == ".safetensors"
    plan = {target.name: list(described)} if is_file else pretrained.divided(described, pretrained.FILE_BYTES)
    with replacing_folder(target) as temporary:
        for file_name, names in plan.items():
            read = (
                value.full() if isinstance(value, StoredTensor) else value for value in map(tensors.__getitem__, names)
            )
            pretrained.write_file(temporary / file_name, {name: described[name] for name in names}, read)
        if is_file:
            put_in_place(temporary / target.name, target)
        else:
            pretrained.write_index(temporary, plan, described)
            sync_folder(temporary)
            put_in_place(temporary, target)
