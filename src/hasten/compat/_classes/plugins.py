"""Precision plugins under Lightning's names, with Lightning's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hasten.compat.facades import Facade, exactly, forward
from hasten.precision import builtin, fsdp, xla

if TYPE_CHECKING:
    import torch


class HalfPrecision(builtin.HalfPrecision, metaclass=Facade):
    @exactly
    def __init__(self, precision: Literal["bf16-true", "16-true"] = "16-true") -> None:
        forward(builtin.HalfPrecision, locals())


class MixedPrecision(builtin.MixedPrecision, metaclass=Facade):
    @exactly
    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        forward(builtin.MixedPrecision, locals())


class FSDPPrecision(fsdp.FSDPPrecision, metaclass=Facade):
    @exactly
    def __init__(
        self, precision: Literal["16-mixed", "bf16-mixed"], scaler: torch.amp.GradScaler | None = None
    ) -> None:
        forward(fsdp.FSDPPrecision, locals())


class XLAPrecision(xla.XLAPrecision, metaclass=Facade):
    @exactly
    def __init__(self, precision: Literal["32-true", "bf16-true", "16-true"]) -> None:
        forward(xla.XLAPrecision, locals())
