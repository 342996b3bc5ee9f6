"""Precision plugins of Fabric under Lightning's names, with Lightning's parameters and methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.precision import builtin, fsdp
from hasten_deepspeed import precision as deepspeed
from hasten_lightning.facades import Facade, exactly, forward
from hasten_lightning.machine.precision import ShardedMethods, UnconvertedIfMixed
from hasten_xla import precision as xla

if TYPE_CHECKING:
    import torch
    from torch import nn


def with_sharded_scaler(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a precision, with torch's scaler for sharded gradients if one is needed and missing."""
    if given["scaler"] is not None or given["precision"] != "16-mixed":
        return given
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return {**given, "scaler": ShardedGradScaler()}


class HalfPrecision(builtin.HalfPrecision, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        forward(HalfPrecision, self, given)
        self.keep_small_updates = False


class MixedPrecision(builtin.MixedPrecision, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        forward(MixedPrecision, self, given)
        self.convert_inputs(to_16_bits=True)


class FSDPPrecision(ShardedMethods, fsdp.FSDPPrecision, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        forward(FSDPPrecision, self, with_sharded_scaler(given))


class DeepSpeedPrecision(UnconvertedIfMixed, deepspeed.DeepSpeedPrecision, metaclass=Facade):
    def backward(self, tensor: torch.Tensor, model: nn.Module | None = None, *args: object, **kwargs: object) -> None:
        """Compute gradients with ``backward`` of DeepSpeed's engine."""
        engine: Any = model
        engine.backward(tensor, *args, **kwargs)


class XLAPrecision(xla.XLAPrecision, metaclass=Facade):
    needs = "torch_xla"
