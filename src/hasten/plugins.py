"""What ``plugins=`` takes, under its public names."""

from hasten.checkpoint.io import CheckpointIO, TorchCheckpointIO
from hasten.machine.cluster import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from hasten.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = [
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "HalfPrecision",
    "LightningEnvironment",
    "MixedPrecision",
    "Precision",
    "SLURMEnvironment",
    "TorchCheckpointIO",
    "TorchElasticEnvironment",
]
