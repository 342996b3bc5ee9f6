"""Which packages are installed.

Every module of Lightning has the flags here (``_RICH_AVAILABLE``, ...): its modules import them from each other. Those
of type ``RequirementCache`` look when they are used, and say as text what is missing.
"""

from __future__ import annotations

import platform
import sys

from lightning_utilities.core.imports import RequirementCache, module_available, package_available

from hasten._lib.optional import installed

_IS_WINDOWS = platform.system() == "Windows"
_IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)
_NUMPY_AVAILABLE = installed("numpy")
_OMEGACONF_AVAILABLE = installed("omegaconf")
_BITSANDBYTES_AVAILABLE = RequirementCache("bitsandbytes")
_CLICK_AVAILABLE = RequirementCache("click")
_COMET_AVAILABLE = RequirementCache("comet-ml>=3.44.4", "comet_ml")
_DEEPSPEED_AVAILABLE = RequirementCache("deepspeed")
_DEEPSPEED_GREATER_EQUAL_0_16 = RequirementCache("deepspeed>=0.16.0")
_HYDRA_AVAILABLE = RequirementCache("hydra-core")
_JSONARGPARSE_SIGNATURES_AVAILABLE = RequirementCache("jsonargparse[signatures]>=4.27.7")
_LIGHTNING_SDK_AVAILABLE = RequirementCache("lightning_sdk")
_LITLOGGER_AVAILABLE = RequirementCache("litlogger>=0.1.0")
_MATPLOTLIB_AVAILABLE = RequirementCache("matplotlib")
_MLFLOW_AVAILABLE = RequirementCache("mlflow>=1.0.0", "mlflow")
_MPI4PY_AVAILABLE = RequirementCache("mpi4py")
_ONNX_AVAILABLE = RequirementCache("onnx")
_ONNXSCRIPT_AVAILABLE = RequirementCache("onnxscript")
_PSUTIL_AVAILABLE = RequirementCache("psutil")
_REQUESTS_AVAILABLE = RequirementCache("requests")
_RICH_AVAILABLE = RequirementCache("rich>=10.2.2")
_SKLEARN_AVAILABLE = RequirementCache("scikit-learn")
_TENSORBOARD_AVAILABLE = RequirementCache("tensorboard")
_TENSORBOARDX_AVAILABLE = RequirementCache("tensorboardX")
_TORCH_TRT_AVAILABLE = RequirementCache("torch_tensorrt")
_TORCHVISION_AVAILABLE = RequirementCache("torchvision")
_TRANSFORMER_ENGINE_AVAILABLE = RequirementCache("transformer_engine>=0.11.0")
_WANDB_AVAILABLE = RequirementCache("wandb>=0.12.10")
_XLA_AVAILABLE = RequirementCache("torch_xla>=1.13", "torch_xla")
_XLA_GREATER_EQUAL_2_1 = RequirementCache("torch_xla>=2.1")
_XLA_GREATER_EQUAL_2_5 = RequirementCache("torch_xla>=2.5")
# Since version 2.9, MLflow can write in the background.
_MLFLOW_SYNCHRONOUS_AVAILABLE = _MLFLOW_AVAILABLE
# hasten requires newer versions than these.
_PYTHON_GREATER_EQUAL_3_10_0 = _PYTHON_GREATER_EQUAL_3_11_0 = True
_TORCHMETRICS_GREATER_EQUAL_0_8_0 = _TORCHMETRICS_GREATER_EQUAL_0_9_1 = _TORCHMETRICS_GREATER_EQUAL_0_11 = True
_TORCHMETRICS_GREATER_EQUAL_1_0_0 = True
_TORCH_GREATER_EQUAL_2_2 = _TORCH_GREATER_EQUAL_2_3 = _TORCH_GREATER_EQUAL_2_4 = _TORCH_GREATER_EQUAL_2_4_1 = True
_TORCH_GREATER_EQUAL_2_5 = _TORCH_GREATER_EQUAL_2_6 = _TORCH_GREATER_EQUAL_2_8 = True
_TORCH_EQUAL_2_4_0 = _TORCH_LESS_EQUAL_2_6 = _TORCH_EQUAL_2_8 = False
_TORCH_EQUAL_2_9 = RequirementCache("torch>=2.9.0,<2.10.0")

__all__ = ["RequirementCache", "module_available", "package_available"]
