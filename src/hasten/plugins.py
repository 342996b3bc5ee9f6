"""What ``plugins=`` takes, under its public names."""

from __future__ import annotations

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
from hasten.strategies.parallel import LayerSync, TorchSyncBatchNorm
from hasten.xla.devices import XLAEnvironment

__all__ = [
    "AsyncCheckpointIO", "BitsandbytesPrecision", "CheckpointIO", "ClusterEnvironment",
    "DeepSpeedPrecision", "DoublePrecision", "FSDPPrecision", "Float8Precision", "HalfPrecision",
    "KubeflowEnvironment", "LSFEnvironment", "LayerSync", "LightningEnvironment", "MPIEnvironment",
    "MixedPrecision", "Precision", "SLURMEnvironment", "TorchCheckpointIO", "TorchElasticEnvironment",
    "TorchSyncBatchNorm", "TransformerEnginePrecision", "XLACheckpointIO", "XLAEnvironment",
    "XLAPrecision",
]  # fmt: skip
