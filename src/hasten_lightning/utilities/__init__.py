"""Helpers under the names that Lightning gives them: data, messages of the first process, gradients, type hints.

Most of them live elsewhere in hasten. They must not import ``hasten.trainer`` or ``hasten.fabric``.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from hasten._lib.errors import MisconfigurationException as MisconfigurationException
from hasten._lib.lazy import attach
from hasten._lib.rank_zero import rank_zero_debug as rank_zero_debug
from hasten._lib.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from hasten._lib.rank_zero import rank_zero_info as rank_zero_info
from hasten._lib.rank_zero import rank_zero_only as rank_zero_only
from hasten._lib.rank_zero import rank_zero_warn as rank_zero_warn
from hasten.data.combined import CombinedLoader as CombinedLoader
from hasten.module.hparams import AttributeDict as AttributeDict
from hasten.module.hparams import HyperparametersMixin as HyperparametersMixin
from hasten.optim import HastenOptimizer as LightningOptimizer  # noqa: F401
from hasten.report.summary import ModelSummary as ModelSummary
from hasten.report.summary import summarize as summarize
from hasten.report.throughput import Throughput as Throughput
from hasten.report.throughput import measure_flops as measure_flops
from hasten.seed import isolate_rng as isolate_rng
from hasten.types import RunningStage as RunningStage
from hasten.types import TrainerFn as TrainerFn
from hasten.types import TrainerState as TrainerState
from hasten.types import TrainerStatus as TrainerStatus
from hasten_lightning.utilities.data import apply_to_collection as apply_to_collection
from hasten_lightning.utilities.data import is_shared_filesystem as is_shared_filesystem
from hasten_lightning.utilities.data import move_data_to_device as move_data_to_device
from hasten_lightning.utilities.data import suggested_max_num_workers as suggested_max_num_workers
from hasten_lightning.utilities.enums import GradClipAlgorithmType as GradClipAlgorithmType
from hasten_lightning.utilities.enums import LightningEnum as LightningEnum
from hasten_lightning.utilities.model_helpers import find_shared_parameters as find_shared_parameters
from hasten_lightning.utilities.model_helpers import grad_norm as grad_norm
from hasten_lightning.utilities.model_helpers import is_overridden as is_overridden
from hasten_lightning.utilities.model_helpers import set_shared_parameters as set_shared_parameters
from hasten_lightning.utilities.parsing import is_picklable as is_picklable
from hasten_lightning.utilities.types import EVAL_DATALOADERS as EVAL_DATALOADERS
from hasten_lightning.utilities.types import STEP_OUTPUT as STEP_OUTPUT
from hasten_lightning.utilities.types import TRAIN_DATALOADERS as TRAIN_DATALOADERS
from hasten_lightning.utilities.types import LRSchedulerConfig as LRSchedulerConfig
from hasten_lightning.utilities.types import OptimizerLRScheduler as OptimizerLRScheduler
from hasten_lightning.utilities.types import OptimizerLRSchedulerConfig as OptimizerLRSchedulerConfig
from hasten_lightning.utilities.warnings import PossibleUserWarning as PossibleUserWarning
from hasten_lightning.utilities.warnings import disable_possible_user_warnings as disable_possible_user_warnings

# The distance from 1 to the next larger number of each type; programs add it to divisors.
FLOAT16_EPSILON, FLOAT32_EPSILON, FLOAT64_EPSILON = 2.0**-10, 2.0**-23, 2.0**-52

# Type checkers know the names above alone.
if not TYPE_CHECKING:
    __all__ = sorted(
        name
        for name, value in vars().items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name not in ("TYPE_CHECKING", "annotations", "ModuleType", "attach")
    )
    # Lightning's imports its modules with itself.
    _MODULES = (
        "data", "enums", "exceptions", "hooks", "imports", "memory", "model_helpers", "parsing", "rank_zero", "saving",
        "types", "warnings",
    )  # fmt: skip
    __getattr__, _, _ = attach(__name__, {}, submodules=_MODULES)
