"""Precision plugins of Fabric under Lightning's names, with Lightning's parameters and methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hasten.precision import builtin, fsdp
from hasten_deepspeed import precision as deepspeed
from hasten_lightning.facades import Facade, exactly, forward
from hasten_lightning.machine.precision import ShardedMethods, UnconvertedIfMixed
from hasten_xla import precision as xla

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hasten.precision.fsdp import Name


def sharded_scaler(precision: str, scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """Return a scaler, or torch's for sharded gradients where one is needed and none is given."""
    if scaler is not None or precision != "16-mixed":
        return scaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler()


class HalfPrecision(builtin.HalfPrecision, metaclass=Facade):
    @exactly
    def __init__(self, precision: Literal["bf16-true", "16-true"] = "16-true") -> None:
        forward(builtin.HalfPrecision, locals())
        self.keep_small_updates = False


class MixedPrecision(builtin.MixedPrecision, metaclass=Facade):
    @exactly
    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        forward(builtin.MixedPrecision, locals())
        self.convert_inputs_to_16_bits()


class FSDPPrecision(ShardedMethods, fsdp.FSDPPrecision, metaclass=Facade):
    @exactly
    def __init__(self, precision: Name, scaler: torch.amp.GradScaler | None = None) -> None:
        scaler = sharded_scaler(precision, scaler)
        forward(fsdp.FSDPPrecision, locals())


class DeepSpeedPrecision(UnconvertedIfMixed, deepspeed.DeepSpeedPrecision, metaclass=Facade):
    def backward(self, tensor: torch.Tensor, model: nn.Module | None = None, *args: object, **kwargs: object) -> None:
        """Compute gradients with ``backward`` of DeepSpeed's engine."""
        engine: Any = model
        engine.backward(tensor, *args, **kwargs)


class XLAPrecision(xla.XLAPrecision, metaclass=Facade):
    @exactly
    def __init__(self, precision: Literal["32-true", "bf16-true", "16-true"]) -> None:
        forward(xla.XLAPrecision, locals())
