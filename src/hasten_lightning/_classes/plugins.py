"""Precision plugins of the Trainer under Lightning's names, with Lightning's parameters and methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hasten.precision import base, builtin, fsdp, transformer_engine
from hasten_deepspeed import precision as deepspeed
from hasten_lightning._classes.fabric_plugins import sharded_scaler
from hasten_lightning.facades import Facade, exactly, forward
from hasten_lightning.machine.precision import ShardedMethods, TrainerPrecisionMethods, UnconvertedIfMixed

if TYPE_CHECKING:
    import torch

    from hasten.precision.fsdp import Name


class Precision(TrainerPrecisionMethods, base.Precision, metaclass=Facade):
    pass


class DoublePrecision(TrainerPrecisionMethods, builtin.DoublePrecision, metaclass=Facade):
    pass


class HalfPrecision(TrainerPrecisionMethods, builtin.HalfPrecision, metaclass=Facade):
    @exactly
    def __init__(self, precision: Literal["bf16-true", "16-true"] = "16-true") -> None:
        forward(builtin.HalfPrecision, locals())
        self.keep_small_updates = False


class MixedPrecision(TrainerPrecisionMethods, builtin.MixedPrecision, metaclass=Facade):
    @exactly
    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        forward(builtin.MixedPrecision, locals())


class FSDPPrecision(ShardedMethods, TrainerPrecisionMethods, fsdp.FSDPPrecision, metaclass=Facade):
    @exactly
    def __init__(self, precision: Name, scaler: torch.amp.GradScaler | None = None) -> None:
        scaler = sharded_scaler(precision, scaler)
        forward(fsdp.FSDPPrecision, locals())


class DeepSpeedPrecision(UnconvertedIfMixed, TrainerPrecisionMethods, deepspeed.DeepSpeedPrecision, metaclass=Facade):
    pass


class TransformerEnginePrecision(
    TrainerPrecisionMethods, transformer_engine.TransformerEnginePrecision, metaclass=Facade
):
    pass


_BY_ORIGINAL: dict[type, Any] = {
    base.Precision: Precision,
    builtin.DoublePrecision: DoublePrecision,
    builtin.HalfPrecision: HalfPrecision,
    builtin.MixedPrecision: MixedPrecision,
    fsdp.FSDPPrecision: FSDPPrecision,
    deepspeed.DeepSpeedPrecision: DeepSpeedPrecision,
    transformer_engine.TransformerEnginePrecision: TransformerEnginePrecision,
}


def precision_as_facade(precision: base.Precision) -> None:
    """Make a precision that was chosen by its name one of these classes, as if the program had made it."""
    facade = _BY_ORIGINAL.get(type(precision))
    if facade is not None:
        precision.__class__ = facade
