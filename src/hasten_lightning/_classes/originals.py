"""The classes behind facades, under a private name.

While a command line runs under Lightning's names, jsonargparse knows these classes by it, and offers the facades alone.
"""

from hasten.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
from hasten.callbacks.checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
from hasten.callbacks.lambda_function import LambdaCallback as LambdaCallback
from hasten.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
from hasten.callbacks.spike import SpikeDetection as SpikeDetection
from hasten.loggers.base import Logger as Logger
from hasten.loggers.comet import CometLogger as CometLogger
from hasten.loggers.mlflow import MLFlowLogger as MLFlowLogger
from hasten.loggers.wandb import WandbLogger as WandbLogger
from hasten.machine.cluster import KubeflowEnvironment as KubeflowEnvironment
from hasten.machine.cluster import LSFEnvironment as LSFEnvironment
from hasten.machine.cluster import SLURMEnvironment as SLURMEnvironment
from hasten.machine.cluster import TorchElasticEnvironment as TorchElasticEnvironment
from hasten.precision.builtin import HalfPrecision as HalfPrecision
from hasten.precision.builtin import MixedPrecision as MixedPrecision
from hasten.precision.fsdp import FSDPPrecision as FSDPPrecision
from hasten.strategies.base import Strategy as Strategy
from hasten.strategies.ddp import DDPStrategy as DDPStrategy
from hasten.strategies.fsdp import FSDPStrategy as FSDPStrategy
from hasten.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
from hasten.strategies.parallel import ParallelStrategy as ParallelStrategy
from hasten.strategies.single import SingleDeviceStrategy as SingleDeviceStrategy
from hasten_deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
from hasten_xla.devices import XLAEnvironment as XLAEnvironment
from hasten_xla.precision import XLAPrecision as XLAPrecision
from hasten_xla.strategies import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
from hasten_xla.strategies import XLAFSDPStrategy as XLAFSDPStrategy
from hasten_xla.strategies import XLAStrategy as XLAStrategy
