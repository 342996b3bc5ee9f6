"""What the user writes: LightningModule, its hooks and hyper-parameters, and the datamodule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.module.module import LightningModule as LightningModule

__all__ = ["LightningModule"]


def __getattr__(name: str) -> Any:
    if name == "LightningModule":
        from hasten.module.module import LightningModule

        return LightningModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
