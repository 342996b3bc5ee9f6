"""Precision plugins of the Trainer under Lightning's names, with Lightning's parameters and methods."""

from __future__ import annotations

from typing import Any

from hasten._lib.errors import MisconfigurationException
from hasten.precision import base, builtin, fsdp, transformer_engine
from hasten_deepspeed import precision as deepspeed
from hasten_lightning._classes.fabric_plugins import with_sharded_scaler
from hasten_lightning.facades import Facade, exactly, forward
from hasten_lightning.machine.precision import ShardedMethods, TrainerPrecisionMethods, UnconvertedIfMixed
from hasten_xla import precision as xla


class Precision(TrainerPrecisionMethods, base.Precision, metaclass=Facade):
    pass


class DoublePrecision(TrainerPrecisionMethods, builtin.DoublePrecision, metaclass=Facade):
    pass


class HalfPrecision(TrainerPrecisionMethods, builtin.HalfPrecision, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        forward(HalfPrecision, self, given)
        self.keep_small_updates = False


class MixedPrecision(TrainerPrecisionMethods, builtin.MixedPrecision, metaclass=Facade):
    pass


class FSDPPrecision(ShardedMethods, TrainerPrecisionMethods, fsdp.FSDPPrecision, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        forward(FSDPPrecision, self, with_sharded_scaler(given))

    def clip_grad_by_norm(self, *_: object, **__: object) -> None:
        """Refuse: the norm of all shards is known to the strategy."""
        raise MisconfigurationException(
            "FSDPPrecision cannot clip by the norm of all shards.",
            fix="Call trainer.strategy.clip_gradients_norm(...).",
        )


class DeepSpeedPrecision(UnconvertedIfMixed, TrainerPrecisionMethods, deepspeed.DeepSpeedPrecision, metaclass=Facade):
    def clip_gradients(self, *_: object, **__: object) -> None:
        """Do nothing: DeepSpeed's engine clips."""


class XLAPrecision(TrainerPrecisionMethods, xla.XLAPrecision, metaclass=Facade):
    needs = "torch_xla"


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
