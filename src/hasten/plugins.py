"""What ``plugins=`` takes, under its public names."""

from __future__ import annotations

from abc import ABC
from typing import Any

from hasten._lib.errors import absent
from hasten.checkpoint.background import AsyncCheckpointIO
from hasten.checkpoint.files import CheckpointIO, TorchCheckpointIO
from hasten.checkpoint.xla import XLACheckpointIO
from hasten.machine.cluster import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from hasten.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    DoublePrecision,
    Float8Precision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from hasten.xla.devices import XLAEnvironment

__all__ = [
    "AsyncCheckpointIO", "BitsandbytesPrecision", "CheckpointIO", "ClusterEnvironment",
    "DeepSpeedPrecision", "DoublePrecision", "FSDPPrecision", "Float8Precision", "HalfPrecision",
    "KubeflowEnvironment", "LSFEnvironment", "LayerSync", "LightningEnvironment", "MPIEnvironment",
    "MixedPrecision", "Precision", "SLURMEnvironment", "TorchCheckpointIO", "TorchElasticEnvironment",
    "TorchSyncBatchNorm", "TransformerEnginePrecision", "XLACheckpointIO", "XLAEnvironment",
    "XLAPrecision",
]  # fmt: skip

_NUMBERS = "Write precision='bf16-mixed'."
_TORCHRUN = "Start the program with torchrun, which hasten recognizes, or subclass ClusterEnvironment."


def _absent(name: str, base: type, instead: str) -> Any:
    return absent(name, base, home="hasten.plugins", instead=instead)


LayerSync = _absent("LayerSync", ABC, "Use Trainer(sync_batchnorm=True).")
TorchSyncBatchNorm = _absent("TorchSyncBatchNorm", LayerSync, "Use Trainer(sync_batchnorm=True).")
