"""Cluster environments under Lightning's names."""

from __future__ import annotations

import os
import signal

from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_warn
from hasten.machine import cluster
from hasten_lightning.facades import Facade
from hasten_xla import devices


def _kept(name: str, value: object) -> str:
    """Return a variable, set to ``value`` if it is missing: programs read it, and so do processes that they start."""
    return os.environ.setdefault(name, str(value))


class SLURMEnvironment(cluster.SLURMEnvironment, metaclass=Facade):
    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        super().__init__()
        # As they are: a signal that no program can handle is refused when a fit begins.
        self.auto_requeue = auto_requeue
        self.requeue_signal = self.requeue_signal if requeue_signal is None else requeue_signal

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, which is set to the first host of SLURM_NODELIST if it is missing."""
        return _kept("MASTER_ADDR", super().main_address)

    @property
    def main_port(self) -> int:
        """MASTER_PORT, which is set to one derived from the job's number if it is missing."""
        job = os.environ.get("SLURM_JOB_ID")
        return int(_kept("MASTER_PORT", 12910 if job is None else 15000 + int(job[-4:])))


class TorchElasticEnvironment(cluster.TorchElasticEnvironment, metaclass=Facade):
    @property
    def main_address(self) -> str:
        """MASTER_ADDR, which is set to this machine if it is missing."""
        return _with_default("MASTER_ADDR", "127.0.0.1", "localhost")

    @property
    def main_port(self) -> int:
        """MASTER_PORT, which is set to 12910 if it is missing."""
        return int(_with_default("MASTER_PORT", "12910", "12910"))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.world_size()  # Has to be known here.
        super().validate_settings(num_devices, num_nodes)


def _with_default(name: str, default: str, said: str) -> str:
    if name not in os.environ:
        rank_zero_warn(f"{name} environment variable is not defined.", fix=f"Set as {said}")
    return _kept(name, default)


class LSFEnvironment(cluster.LSFEnvironment, metaclass=Facade):
    def __init__(self) -> None:
        super().__init__()
        self.node_rank()
        os.environ["MASTER_ADDR"] = self._hosts()[0]
        os.environ["MASTER_PORT"] = str(self.main_port)

    validate_settings = cluster.ClusterEnvironment.validate_settings


class KubeflowEnvironment(cluster.KubeflowEnvironment, metaclass=Facade):
    validate_settings = cluster.ClusterEnvironment.validate_settings

    @staticmethod
    def detect() -> bool:
        """Refuse, as Lightning's class does; hasten itself recognizes the operator's variables.

        Raises:
            NotImplementedError: always.

        """
        raise NotImplementedError("The Kubeflow environment can't be detected automatically.")


class XLAEnvironment(devices.XLAEnvironment, metaclass=Facade):
    def __init__(self) -> None:
        need("torch_xla", purpose="XLAEnvironment")
        super().__init__()
