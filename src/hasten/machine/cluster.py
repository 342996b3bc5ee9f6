"""Clusters: the launcher, rank and world size of this process, and the address where the processes connect."""

from __future__ import annotations

import os
import re
import socket
import uuid
from abc import ABC, abstractmethod

from hasten._lib.rank_zero import rank_zero_only


class ClusterEnvironment(ABC):
    """The rank and world size of a process, and the address where the processes of a run connect.

    Subclass it for another cluster and pass it as ``plugins=MyCluster()``.
    """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether something else starts the processes, so that hasten must not."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """The host of the first process."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """The port on which the first process listens."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """Return whether this process runs in such a cluster."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes."""

    @abstractmethod
    def set_world_size(self, size: int) -> None:
        """Set the number of processes, if the cluster does not know it."""

    @abstractmethod
    def global_rank(self) -> int:
        """Return which process this is, from 0."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Set which process this is, if the cluster does not know it."""

    @abstractmethod
    def local_rank(self) -> int:
        """Return which process of its machine this is, from 0."""

    @abstractmethod
    def node_rank(self) -> int:
        """Return which machine this is, from 0."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:  # noqa: B027 - most accept all
        """Compare the arguments of the user with what the cluster started.

        Raises:
            ValueError: they differ.

        """

    def teardown(self) -> None:  # noqa: B027 - most hold nothing
        """Release resources of the cluster."""


class _FromVariables(ClusterEnvironment):
    """A cluster that has its ranks in environment variables; of several names the first that is set counts."""

    _local_rank: tuple[str, ...] = ("LOCAL_RANK",)
    _node_rank: tuple[str, ...] = ("NODE_RANK", "GROUP_RANK")

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    def local_rank(self) -> int:
        return _number(*self._local_rank)

    def node_rank(self) -> int:
        return _number(*self._node_rank)


class LightningEnvironment(_FromVariables):
    """One or several machines on which hasten starts the processes itself.

    For several machines, start the script once on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK set. With
    LOCAL_RANK set, each process was started by hand and none is started here.
    """

    def __init__(self) -> None:
        self._main_port = -1
        self._global_rank = 0
        self._world_size = 1

    @property
    def creates_processes_externally(self) -> bool:
        """Whether LOCAL_RANK is set: then each process was started already."""
        return "LOCAL_RANK" in os.environ

    @property
    def main_port(self) -> int:
        """MASTER_PORT, or a free port."""
        if self._main_port == -1:
            self._main_port = _number("MASTER_PORT") or find_free_port()
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """Return True: it is the default if no other cluster is found."""
        return True

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        self._world_size = size

    def global_rank(self) -> int:
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


class _ExternalCluster(_FromVariables):
    """A cluster whose launcher starts all processes and gives each its ranks, which cannot be set."""

    _world_size: str
    _global_rank: str
    _launcher: str

    creates_processes_externally = True

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass

    def world_size(self) -> int:
        return _number(self._world_size, default=1)

    def global_rank(self) -> int:
        return _number(self._global_rank)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"devices={num_devices}, num_nodes={num_nodes}: {self._launcher} started {self.world_size()} "
                "processes. Use devices='auto' and the right num_nodes, or start as many as these."
            )


# Set by `hasten launch`, which starts processes as torchrun does, to its own name.
LAUNCHER_VARIABLE = "HASTEN_LAUNCHER"


class TorchElasticEnvironment(_ExternalCluster):
    """Processes started by ``torchrun`` or ``hasten launch``."""

    _world_size, _global_rank, _node_rank = "WORLD_SIZE", "RANK", ("GROUP_RANK",)

    @property
    def _launcher(self) -> str:  # type: ignore[override]
        return os.environ.get(LAUNCHER_VARIABLE, "torchrun")

    @property
    def main_port(self) -> int:
        """MASTER_PORT."""
        return _number("MASTER_PORT", default=12910)

    @staticmethod
    def detect() -> bool:
        """Return whether torchrun started this process."""
        return "TORCHELASTIC_RUN_ID" in os.environ

    @staticmethod
    def local_world_size() -> int:
        """Return the number of processes on this machine."""
        return _number("LOCAL_WORLD_SIZE", "WORLD_SIZE", default=1)


class SLURMEnvironment(_ExternalCluster):
    """Processes started by ``srun``.

    Args:
        auto_requeue: accepted and ignored: hasten saves on SIGTERM and does not requeue.

    """

    _world_size, _global_rank = "SLURM_NTASKS", "SLURM_PROCID"
    _local_rank, _node_rank = ("SLURM_LOCALID",), ("SLURM_NODEID",)
    _launcher = "SLURM"

    def __init__(self, auto_requeue: bool = True) -> None:
        self.auto_requeue = auto_requeue

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or the first host of SLURM_NODELIST."""
        return os.environ.get("MASTER_ADDR") or first_host(os.environ.get("SLURM_NODELIST", "127.0.0.1"))

    @property
    def main_port(self) -> int:
        """MASTER_PORT, or one derived from the job's number, the same on all machines."""
        digits = re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", ""))[-4:]
        return _number("MASTER_PORT", default=15000 + int(digits or 0))

    @staticmethod
    def detect() -> bool:
        """Return whether srun started this process; an interactive shell in a job does not count."""
        shells = ("bash", "interactive")
        return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in shells


def find_cluster() -> ClusterEnvironment:
    """Return the cluster this process runs in."""
    for kind in (TorchElasticEnvironment, SLURMEnvironment):
        if kind.detect():
            return kind()
    return LightningEnvironment()


def find_free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM list of nodes.

    Example::

        >>> first_host("gpu[07-09,12],cpu1")
        'gpu07'
        >>> first_host("alpha,beta")
        'alpha'

    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0].split(" ")[0]


def _number(*names: str, default: int = 0) -> int:
    """Return the first of these environment variables that is set."""
    for name in names:
        if text := os.environ.get(name):
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"the environment variable {name}={text!r} is not a whole number.") from None
    return default


# -- the name that the processes of one run have in common

# Where the name is kept: processes inherit it from the one that starts them.
JOB_VARIABLE = "HASTEN_JOB"

_OF_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT")
_OF_ITS_PROCESSES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def name_of_job() -> str:
    """Return a name that the processes of one run on this machine have in common, and others do not.

    Letters, digits, "-", "." and "_" only, so that it can be part of a file's name.
    """
    if JOB_VARIABLE not in os.environ:
        parts = [os.environ[name] for name in _OF_A_LAUNCHER if name in os.environ]
        started_by_one = any(name in os.environ for name in _OF_ITS_PROCESSES)
        os.environ[JOB_VARIABLE] = "-".join(parts) if parts and started_by_one else uuid.uuid4().hex
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in os.environ[JOB_VARIABLE])
