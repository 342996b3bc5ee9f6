"""Parse devices from a string or number; tensors that have no device yet."""

from __future__ import annotations

import os
from collections.abc import MutableSequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.errors import make_error
from hasten.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator
from hasten.machine.devices import best_accelerator
from hasten.resolve import precision_name
from hasten.seed import collect_rng_state
from hasten_lightning.utilities import rank_zero_warn
from hasten_lightning.utilities.exceptions import MisconfigurationException
from hasten_lightning.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from hasten import Trainer
    from hasten.types import PrecisionName

_GPUs = int | str | list[int] | tuple[int, ...] | None
_TYPES = "Device IDs (GPU/TPU) must be an int, a string, a sequence of ints, but you passed"


def collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
    """Return the states of all random generators of this process."""
    return collect_rng_state(cuda=include_cuda)


def parse_gpu_ids(gpus: _GPUs, include_cuda: bool = False, include_mps: bool = False) -> list[int] | None:
    """Return the indices of GPUs that a number (-1 for all), a list or a text such as ``"0,1"`` means; None for none.

    Raises:
        TypeError: ``gpus`` is of another type.
        MisconfigurationException: there are not so many, or an index is given twice.

    Example::

        >>> parse_gpu_ids(0), parse_gpu_ids("0")
        (None, None)

    """
    check_data_type(gpus)
    if gpus is None or gpus == 0 or str(gpus).strip() in ("0", "[]"):
        return None
    wanted = normalize_parse_gpu_string_input(gpus)
    present = all_available_gpus(include_cuda, include_mps)
    indices = None if wanted is None else normalize_parse_gpu_input_to_list(wanted, include_cuda, include_mps)
    if not indices:
        raise MisconfigurationException(f"gpus={gpus!r}: GPUs requested but none are available.", argument="gpus")
    # With torchrun, a process may see only the GPU that it is to use.
    launched = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    if launched and len(indices) > 1 and len(present) == 1:
        return indices
    check_unique(indices)
    return sanitize_gpu_ids(indices, include_cuda, include_mps)


def sanitize_gpu_ids(gpus: list[int], include_cuda: bool = False, include_mps: bool = False) -> list[int]:
    """Return ``gpus``, or raise if this machine does not have all of them.

    Raises:
        ValueError: neither kind of device counts.
        MisconfigurationException: this machine does not have one of them.

    """
    if not include_cuda and not include_mps:
        raise ValueError("At least one gpu type should be specified: include_cuda=True or include_mps=True.")
    present = all_available_gpus(include_cuda, include_mps)
    if not set(gpus) <= set(present):
        raise MisconfigurationException(f"You requested gpu: {gpus}. But your machine only has: {present}.")
    return gpus


def all_available_gpus(include_cuda: bool = False, include_mps: bool = False) -> list[int]:
    """Return the indices of the GPUs of this machine."""
    kinds = (CUDAAccelerator, include_cuda), (MPSAccelerator, include_mps)
    return [index for kind, on in kinds if on and kind.is_available() for index in range(kind.auto_device_count())]


def normalize_parse_gpu_string_input(s: _GPUs) -> int | list[int] | tuple[int, ...] | None:
    """Return the number or the list that a string means; return other values unchanged."""
    if not isinstance(s, str):
        return s
    return [int(part) for part in s.split(",") if part.strip()] if "," in s else int(s)


def normalize_parse_gpu_input_to_list(
    gpus: int | list[int] | tuple[int, ...], include_cuda: bool, include_mps: bool
) -> list[int] | None:
    """Return the indices that a number or a list means; None for 0."""
    if not isinstance(gpus, int):
        return list(gpus)
    if not gpus:
        return None
    return all_available_gpus(include_cuda, include_mps) if gpus == -1 else list(range(gpus))


def determine_root_gpu_device(gpus: list[Any] | None) -> Any:
    """Return the first of a list of devices; None for None."""
    if gpus is None:
        return None
    if not isinstance(gpus, list):
        raise TypeError(f"GPUs should be a list, not {type(gpus).__name__}.")
    assert gpus, "GPUs should be a non-empty list"
    return gpus[0]


def check_unique(device_ids: list[int]) -> None:
    """Raise a ``MisconfigurationException`` if an index is given twice."""
    if len(set(device_ids)) != len(device_ids):
        raise MisconfigurationException(f"Device ID's (GPU) must be unique, but they are {device_ids}.")


def check_data_type(device_ids: object) -> None:
    """Raise a ``TypeError`` unless it is a number, a text, or a list or tuple of numbers."""
    if isinstance(device_ids, MutableSequence | tuple):
        for one in device_ids:
            if type(one) is not int:
                raise TypeError(f"{_TYPES} a sequence of {type(one).__name__}.")
    elif type(device_ids) not in (int, str):
        raise TypeError(f"{_TYPES} {device_ids!r}.")


def select_auto_accelerator() -> str:
    """Return the name of the kind of device that ``accelerator="auto"`` means here."""
    return "tpu" if XLAAccelerator.is_available() else best_accelerator().name()


def convert_precision_to_unified_args(precision: PrecisionName | int | None) -> str | None:
    """Return the name of a precision for one of its spellings; None for None.

    Raises:
        ValueError: there is no such precision.

    Example::

        >>> convert_precision_to_unified_args(16), convert_precision_to_unified_args("bf16")
        ('16-mixed', 'bf16-mixed')

    """
    return None if precision is None else precision_name(precision, "Fabric")


def warn_of_idle_devices(trainer: Trainer) -> None:
    """Warn about a GPU or a TPU of this machine that ``trainer`` does not use."""
    used, best = trainer.accelerator, best_accelerator()
    if not isinstance(best, CPUAccelerator) and not isinstance(used, type(best)):
        fix = "Write Trainer(accelerator='gpu') to use it."
        rank_zero_warn("GPU available but not used.", fix=fix, category=PossibleUserWarning)
    if XLAAccelerator.is_available() and not isinstance(used, XLAAccelerator):
        rank_zero_warn("TPU available but not used.", fix="Write Trainer(accelerator='tpu') to use it.")


def is_slurm_interactive_mode() -> bool:
    """Return whether this is an interactive job of SLURM, whose processes do not belong to a run."""
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


# -- tensors


def convert_fp_tensor(tensor: Tensor, dst_type: torch.dtype | str) -> Tensor:
    """Return a tensor in another type, if it holds floating-point numbers.

    Example::

        >>> convert_fp_tensor(torch.ones(1), torch.half).dtype
        torch.float16
        >>> convert_fp_tensor(torch.ones(1).long(), torch.half).dtype
        torch.int64

    """
    return tensor.to(dst_type) if tensor.is_floating_point() else tensor


def has_meta_device_parameters_or_buffers(obj: nn.Module | Optimizer, recurse: bool = True) -> bool:
    """Return whether a module or an optimizer has tensors without storage."""
    if isinstance(obj, Optimizer):
        tensors: Any = chain.from_iterable(group["params"] for group in obj.param_groups)
    elif isinstance(obj, nn.Module):
        tensors = chain(obj.parameters(recurse), obj.buffers(recurse))
    else:
        raise TypeError(f"Expected `torch.nn.Module` or `torch.optim.Optimizer`, got: {type(obj).__name__}")
    return any(tensor.is_meta for tensor in tensors)


def materialize_meta_tensors(module: nn.Module, device: torch.device | str) -> None:
    """Give tensors on the meta device storage on ``device``, and their initial values.

    Raises:
        TypeError: a submodule has no ``reset_parameters()``.

    Example::

        >>> layer = torch.nn.Linear(2, 2, device="meta")
        >>> materialize_meta_tensors(layer, "cpu")
        >>> layer.weight.device
        device(type='cpu')

    """
    for part in module.modules():
        if not has_meta_device_parameters_or_buffers(part, recurse=False):
            continue
        reset = getattr(part, "reset_parameters", None)
        if not callable(reset):
            name = type(part).__name__
            what = f"{name} has tensors on the meta device, so its `{name}.reset_parameters` method is needed."
            fix = "Write it: it gives them their initial values."
            raise make_error(TypeError, what, fix=fix)
        part.to_empty(device=device, recurse=False)
        reset()
