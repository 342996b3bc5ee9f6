"""What ``plugins=`` takes, under its public names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach
from hasten.checkpoint.background import AsyncCheckpointIO
from hasten.checkpoint.files import CheckpointIO, TorchCheckpointIO
from hasten.checkpoint.uploads import UploadedCheckpointIO
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
    DoublePrecision,
    Float8Precision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from hasten.strategies.parallel import LayerSync, TorchSyncBatchNorm

if TYPE_CHECKING:
    from hasten_deepspeed.precision import DeepSpeedPrecision as DeepSpeedPrecision
    from hasten_xla.checkpoint import XLACheckpointIO as XLACheckpointIO
    from hasten_xla.devices import XLAEnvironment as XLAEnvironment
    from hasten_xla.precision import XLAPrecision as XLAPrecision

__all__ = [
    "AsyncCheckpointIO", "BitsandbytesPrecision", "CheckpointIO", "ClusterEnvironment",
    "DeepSpeedPrecision", "DoublePrecision", "FSDPPrecision", "Float8Precision", "HalfPrecision",
    "KubeflowEnvironment", "LSFEnvironment", "LayerSync", "LightningEnvironment", "MPIEnvironment",
    "MixedPrecision", "Precision", "SLURMEnvironment", "TorchCheckpointIO", "TorchElasticEnvironment",
    "TorchSyncBatchNorm", "TransformerEnginePrecision", "UploadedCheckpointIO", "XLACheckpointIO", "XLAEnvironment",
    "XLAPrecision",
]  # fmt: skip

# Classes of backends are imported when they are used; ``extend.moved`` says where their modules are.
__getattr__, __dir__, _ = attach(
    __name__,
    {
        "hasten.checkpoint.xla": "XLACheckpointIO",
        "hasten.precision.deepspeed": "DeepSpeedPrecision",
        "hasten.precision.xla": "XLAPrecision",
        "hasten.xla.devices": "XLAEnvironment",
    },
    also=__all__,
)
