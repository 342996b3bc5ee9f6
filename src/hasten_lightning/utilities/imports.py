"""Which packages are installed."""

from __future__ import annotations

import platform
import sys

from lightning_utilities.core.imports import RequirementCache, module_available, package_available

from hasten._lib.optional import installed

_IS_WINDOWS = platform.system() == "Windows"
_IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)
_COMET_AVAILABLE = installed("comet_ml")
_MLFLOW_AVAILABLE = installed("mlflow")
_NUMPY_AVAILABLE = installed("numpy")
_OMEGACONF_AVAILABLE = installed("omegaconf")
_RICH_AVAILABLE = installed("rich")
_TENSORBOARD_AVAILABLE = installed("tensorboard")
_TENSORBOARDX_AVAILABLE = installed("tensorboardX")
_TORCHVISION_AVAILABLE = installed("torchvision")
_WANDB_AVAILABLE = installed("wandb")
# Since version 2.9, MLflow can write in the background.
_MLFLOW_SYNCHRONOUS_AVAILABLE = _MLFLOW_AVAILABLE
# hasten requires newer versions than these.
_PYTHON_GREATER_EQUAL_3_11_0 = sys.version_info >= (3, 11)
_TORCHMETRICS_GREATER_EQUAL_1_0_0 = True
_TORCH_GREATER_EQUAL_2_2 = _TORCH_GREATER_EQUAL_2_3 = _TORCH_GREATER_EQUAL_2_4 = True
_TORCH_GREATER_EQUAL_2_5 = _TORCH_GREATER_EQUAL_2_6 = _TORCH_GREATER_EQUAL_2_8 = True

__all__ = ["RequirementCache", "module_available", "package_available"]
