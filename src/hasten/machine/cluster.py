"""Clusters: the launcher, rank and world size of this process, and the address where the processes connect."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from typing import Any

import torch.distributed

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.optional import installed, need
from hasten._lib.rank_zero import PossibleUserWarning, log, rank_zero_only, rank_zero_warn
from hasten.elsewhere import conventions
from hasten.machine import collectives


class ClusterEnvironment(ABC):
    """The rank and world size of a process, and the address where the processes of a run connect.

    Subclass it for another cluster and pass it as ``plugins=MyCluster()``.
    """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether a launcher starts the processes, so that hasten must not."""

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
        """Return whether this process runs in this kind of cluster."""

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

    # -- a job that continues in another one

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """Signals at which a run saves its state, calls ``requeue`` and ends; none by default."""
        return ()

    @property
    def requeued_job(self) -> str | None:
        """A name of this job that it keeps when it is queued again; None if it cannot be requeued."""
        return None

    def requeue(self) -> str:
        """Queue this job again, in the first process; return "" or why that failed."""
        return "there is no queue"


class _FromVariables(ClusterEnvironment):
    """A cluster whose ranks are in environment variables; of several names the first that is set counts."""

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
        rank_zero_only.rank = rank

    def teardown(self) -> None:
        """Remove WORLD_SIZE, which only this run's processes had."""
        os.environ.pop("WORLD_SIZE", None)


class _ExternalCluster(_FromVariables):
    """A cluster whose launcher starts all processes and gives each its ranks, which cannot be set."""

    _world_size: str
    _global_rank: str
    _launcher: str

    creates_processes_externally = True

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has set it."""
        _not_set(self, "world size", size)

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set it."""
        _not_set(self, "global rank", rank)

    def world_size(self) -> int:
        return _set_by_launcher(self._world_size)

    def global_rank(self) -> int:
        return _set_by_launcher(self._global_rank)

    def local_rank(self) -> int:
        return _set_by_launcher(self._local_rank[0])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        check_world_size(self._launcher, number_of_processes(self), num_devices, num_nodes)


def check_world_size(launcher: str, world_size: int, num_devices: int, num_nodes: int) -> None:
    """Refuse ``devices`` and ``num_nodes`` that contradict the number of processes that were started."""
    if num_devices * num_nodes != world_size:
        raise make_error(
            ValueError,
            f"devices={num_devices}, num_nodes={num_nodes}: the product ({num_devices} * {num_nodes}) does not match "
            f"the world size ({world_size}): {launcher} started {world_size} processes.",
            fix="Use devices='auto' and the right num_nodes, or start as many as these.",
            argument="devices",
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
        return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()

    @staticmethod
    def local_world_size() -> int:
        """Return the number of processes on this machine."""
        return _number("LOCAL_WORLD_SIZE", "WORLD_SIZE", default=1)


class SLURMEnvironment(_ExternalCluster):
    """Processes started by ``srun``.

    A job that asks for a signal before its time limit (``#SBATCH --signal=USR1@120``, ``#SBATCH --requeue``) continues
    in a new job: at the signal, all processes stop after the same step, the Trainer saves ``hpc_ckpt_JOB.ckpt`` in its
    ``default_root_dir``, and the first process calls ``scontrol requeue JOB``. The requeued job continues from there.

    Args:
        auto_requeue: handle ``requeue_signal`` in this way. Other signals end a job as without SLURM.
        requeue_signal: the signal; SIGUSR1 by default.

    Raises:
        ValueError: it is not a signal that can be handled.

    Example::

        >>> SLURMEnvironment(requeue_signal=signal.SIGUSR2).requeue_signal.name
        'SIGUSR2'

    """

    _world_size, _global_rank = "SLURM_NTASKS", "SLURM_PROCID"
    _local_rank, _node_rank = ("SLURM_LOCALID",), ("SLURM_NODEID",)
    _launcher = "SLURM"

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        check.declared(SLURMEnvironment.__init__, locals())
        self._check_srun()
        self.auto_requeue = check.boolean("SLURMEnvironment", "auto_requeue", auto_requeue)
        # Windows does not have it.
        self.requeue_signal: signal.Signals | None = getattr(signal, "SIGUSR1", None)
        if requeue_signal is not None:
            try:
                self.requeue_signal = signal.Signals(requeue_signal)
            except ValueError:
                self.requeue_signal = None
            if self.requeue_signal is None or self.requeue_signal.name in ("SIGKILL", "SIGSTOP", "SIGINT"):
                raise make_error(
                    ValueError,
                    f"SLURMEnvironment(requeue_signal={check.shown(requeue_signal)}):",
                    fix=(
                        "use a signal that a program can handle, such as signal.SIGUSR1, and name it in #SBATCH "
                        "--signal=USR1@120."
                    ),
                    argument="requeue_signal",
                )

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or the first host of SLURM_NODELIST."""
        return os.environ.get("MASTER_ADDR") or first_host(os.environ.get("SLURM_NODELIST", "127.0.0.1"))

    @property
    def main_port(self) -> int:
        """MASTER_PORT, or one derived from the job's number, the same on all machines."""
        digits = re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", ""))[-4:]
        return _number("MASTER_PORT", default=15000 + int(digits) if digits else 12910)

    @staticmethod
    def detect() -> bool:
        """Return whether srun started this process; an interactive shell in a job does not count."""
        SLURMEnvironment._warn_without_srun()
        return "SLURM_NTASKS" in os.environ and not SLURMEnvironment._is_interactive()

    @staticmethod
    def _is_interactive() -> bool:
        return SLURMEnvironment.job_name() in ("bash", "interactive")

    @staticmethod
    def _warn_without_srun() -> None:
        """Warn where srun exists and did not start this program, as Lightning does."""
        by_srun = "SLURM_NTASKS" in os.environ and not SLURMEnvironment._is_interactive()
        if conventions.current().warns_of_settings and not by_srun and shutil.which("srun") is not None:
            command = shlex.join(["srun", os.path.basename(sys.executable), *sys.argv])[:64]
            what = "This machine has the command srun, and it did not start this program."
            rank_zero_warn(what, fix=f"For a job of SLURM, write: {command} ...", category=PossibleUserWarning)

    @staticmethod
    def _check_srun() -> None:
        SLURMEnvironment._warn_without_srun()
        tasks = _number("SLURM_NTASKS", default=1)
        is_strict = conventions.current().warns_of_settings
        if is_strict and tasks > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
            what = f"SLURM_NTASKS is {tasks} and SLURM_NTASKS_PER_NODE is not set."
            fix = f"In place of --ntasks={tasks} write --ntasks-per-node={tasks}, for each machine."
            raise make_error(RuntimeError, what, fix=fix)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if self._is_interactive():
            return
        for variable, option, argument, value in (
            ("SLURM_NTASKS_PER_NODE", "--ntasks-per-node", "devices", num_devices),
            ("SLURM_NNODES", "--nodes", "num_nodes", num_nodes),
        ):
            if (given := os.environ.get(variable, "")).isdigit() and int(given) != value:
                what = f"{argument}={value}: the job of SLURM was started with {option}={given}, which does not match."
                raise make_error(ValueError, what, fix=f"Use {argument}={given}.", argument=argument)
        # Lightning's constructor has looked at --ntasks.
        if self._world_size in os.environ and not conventions.current().warns_of_settings:
            super().validate_settings(num_devices, num_nodes)

    def node_rank(self) -> int:
        return _set_by_launcher(self._node_rank[0])

    @staticmethod
    def job_name() -> str | None:
        """Return the name of the job."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """Return the number of the job; None in an interactive shell."""
        text = os.environ.get("SLURM_JOB_ID", "")
        return int(text) if text.isdigit() and not SLURMEnvironment._is_interactive() else None

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first host of a list of nodes; see ``first_host``."""
        return first_host(nodes)

    # -- continuing in a requeued job

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """The signal at which the job is requeued."""
        return (self.requeue_signal,) if self.auto_requeue and self.requeue_signal and self.requeued_job else ()

    @property
    def requeued_job(self) -> str | None:
        """The name of this job for ``scontrol``, which it keeps when it is requeued."""
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        if array and task:
            return f"{array}_{task}"
        number = self.job_id()
        return None if number is None else str(number)

    def requeue(self) -> str:
        """Let SLURM queue this job again; return "" or why it did not."""
        assert self.requeued_job is not None
        command = ["scontrol", "requeue", self.requeued_job]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{shlex.join(command)}: {error}"
        said = (done.stderr or done.stdout).strip()
        return "" if done.returncode == 0 else f"{shlex.join(command)} ended with {done.returncode}: {said}"


class KubeflowEnvironment(_ExternalCluster):
    """Processes started by the operator of Kubeflow for PyTorchJobs, one in each pod."""

    _world_size, _global_rank, _node_rank = "WORLD_SIZE", "RANK", ("RANK",)
    _launcher = "Kubeflow"
    _required = ("KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")

    @property
    def main_address(self) -> str:
        """MASTER_ADDR."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """MASTER_PORT."""
        return _set_by_launcher("MASTER_PORT")

    def node_rank(self) -> int:
        return self.global_rank()

    @staticmethod
    def detect() -> bool:
        """Return whether the operator set the variables for several pods; torchrun in a pod sets others."""
        names = KubeflowEnvironment._required
        by_others = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not all(name in os.environ for name in names) or any(name in os.environ for name in by_others):
            return False
        # In one pod, processes for its devices are still to be started.
        return os.environ["WORLD_SIZE"] != "1"

    def local_rank(self) -> int:
        return 0


class LSFEnvironment(_ExternalCluster):
    """Processes started by ``jsrun`` of IBM's LSF.

    Raises:
        ValueError: LSB_DJOB_RANKFILE or LSB_JOBID is not set.

    """

    _world_size, _global_rank = "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"
    _local_rank = ("JSM_NAMESPACE_LOCAL_RANK",)
    _launcher = "jsrun"
    _required = ("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE")

    def __init__(self) -> None:
        for name in ("LSB_DJOB_RANKFILE", "LSB_JOBID"):
            if not os.environ.get(name) and not (name == "LSB_JOBID" and "MASTER_PORT" in os.environ):
                state = "empty" if name in os.environ else "missing"
                what = f"LSFEnvironment(): the environment variable {name} is {state}."
                raise make_error(ValueError, what, fix="Start the program with jsrun inside a job of LSF.")

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or the first host of the file LSB_DJOB_RANKFILE that computes."""
        return os.environ.get("MASTER_ADDR") or self._hosts()[0]

    @property
    def main_port(self) -> int:
        """MASTER_PORT, or one derived from the job's number, the same on all machines."""
        return _number("MASTER_PORT", default=10000 + _number("LSB_JOBID") % 1000)

    @staticmethod
    def detect() -> bool:
        """Return whether jsrun started this process."""
        return all(name in os.environ for name in LSFEnvironment._required)

    def node_rank(self) -> int:
        """Return the index of this machine in LSB_DJOB_RANKFILE."""
        hosts, name = self._hosts(), socket.gethostname()
        if name in hosts:
            return hosts.index(name)
        for place, host in enumerate(hosts):
            # The first part of a numeric address is not a name.
            if not host[0].isdigit() and host.partition(".")[0] == name.partition(".")[0]:
                return place
        raise make_error(
            VariableMissing,
            f"this machine, {name}, is not in LSB_DJOB_RANKFILE={os.environ['LSB_DJOB_RANKFILE']!r}, which has "
            f"{', '.join(hosts)}.",
            fix="Start the program with jsrun inside the job.",
        )

    def _hosts(self) -> list[str]:
        """Return the machines that compute, without the one from which the job is launched."""
        file = os.environ["LSB_DJOB_RANKFILE"]
        with open(file, encoding="utf-8") as lines:
            hosts = [line.strip() for line in lines if line.strip()]
        if len(hosts) < 2:
            raise make_error(
                ValueError,
                f"LSB_DJOB_RANKFILE={file!r}: expected the host that launches, and those that compute, on a line each.",
                argument="LSB_DJOB_RANKFILE",
            )
        return list(dict.fromkeys(hosts[1:]))


class MPIEnvironment(ClusterEnvironment):
    """Processes started by ``mpirun`` or ``mpiexec``; needs ``mpi4py``, through which they find each other.

    Raises:
        ModuleNotFoundError: mpi4py is not installed.

    """

    creates_processes_externally = True

    def __init__(self) -> None:
        # Importing it starts MPI.
        self._world: Any = need("mpi4py.MPI", purpose="MPIEnvironment").COMM_WORLD
        self._hosts: list[tuple[str, int]] | None = None

    @staticmethod
    def detect() -> bool:
        """Return whether mpirun started this process and others, and mpi4py is installed."""
        return _started_by_mpi() and installed("mpi4py")

    def _places(self) -> list[tuple[str, int]]:
        """Return the host of each rank and a free port there; all processes call it together, once."""
        if self._hosts is None:
            self._hosts = self._world.allgather((socket.gethostname(), find_free_port()))
        return self._hosts

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or the host of the first process."""
        return os.environ.get("MASTER_ADDR") or self._places()[0][0]

    @property
    def main_port(self) -> int:
        """MASTER_PORT, or a port that is free on that host."""
        return _number("MASTER_PORT", default=self._places()[0][1])

    def world_size(self) -> int:
        return int(self._world.Get_size())

    def set_world_size(self, size: int) -> None:
        """Do nothing: mpirun has set it."""
        _not_set(self, "world size", size)

    def global_rank(self) -> int:
        return int(self._world.Get_rank())

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: mpirun has set it."""
        _not_set(self, "global rank", rank)

    def local_rank(self) -> int:
        hosts = [host for host, _ in self._places()[: self.global_rank() + 1]]
        return hosts.count(hosts[-1]) - 1

    def node_rank(self) -> int:
        hosts = [host for host, _ in self._places()]
        return list(dict.fromkeys(hosts)).index(hosts[self.global_rank()])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        check_world_size("mpirun", self.world_size(), num_devices, num_nodes)


class ProcessGroupEnvironment(_ExternalCluster):
    """Processes that have joined a group of ``torch.distributed`` before, such as the workers of Ray Train."""

    _launcher = "the program"

    @property
    def main_port(self) -> int:
        """MASTER_PORT."""
        return _number("MASTER_PORT", default=12910)

    @staticmethod
    def detect() -> bool:
        """Return whether the program has joined a process group that hasten did not make."""
        return collectives.joined_before() and collectives.world_size() > 1

    def world_size(self) -> int:
        return collectives.world_size()

    def global_rank(self) -> int:
        return torch.distributed.get_rank()

    def local_world_size(self) -> int:
        """Return the number of processes on this machine: LOCAL_WORLD_SIZE, or all of them."""
        return _number("LOCAL_WORLD_SIZE", default=self.world_size())

    def local_rank(self) -> int:
        return _number("LOCAL_RANK", default=self.global_rank() % self.local_world_size())

    def node_rank(self) -> int:
        return _number("NODE_RANK", "GROUP_RANK", default=self.global_rank() // self.local_world_size())


# Variables with the number of processes, of implementations of MPI (Open MPI; MPICH, Intel, Cray; MVAPICH).
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def _started_by_mpi() -> bool:
    numbers = [os.environ.get(name, "1") for name in _OF_MPI]
    return any(number.isdigit() and int(number) > 1 for number in numbers)


def find_cluster() -> ClusterEnvironment:
    """Return the cluster this process runs in."""
    kinds = (
        TorchElasticEnvironment, SLURMEnvironment, KubeflowEnvironment, LSFEnvironment, MPIEnvironment,
        ProcessGroupEnvironment,
    )  # fmt: skip
    for kind in kinds:
        if kind.detect():
            return kind()
    if _started_by_mpi() and "LOCAL_RANK" not in os.environ:
        log.warning("mpirun started several processes, and each will run by itself. To join them: pip install mpi4py.")
    return LightningEnvironment()


def number_of_processes(cluster: ClusterEnvironment) -> int:
    """Return the number of processes; 1 if a program for a cluster runs alone, for instance on a laptop."""
    try:
        return cluster.world_size()
    except KeyError:
        return 1


def find_free_port() -> int:
    """Return ``STANDALONE_PORT`` of the environment if it is set, else a port that is free now."""
    if port := _number("STANDALONE_PORT"):
        return port
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
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", nodes).split(",")[0].split(" ")[0]


class VariableMissing(KeyError, ValueError):
    """A launcher has not set a variable: in Lightning a ``KeyError``, for LSF a ``ValueError``."""


def _set_by_launcher(name: str) -> int:
    """Return a variable that a launcher sets."""
    if name not in os.environ:
        raise VariableMissing(name)
    return _number(name)


def _not_set(cluster: ClusterEnvironment, what: str, value: int) -> None:
    kind = type(cluster).__name__
    log.debug(f"{kind}: setting {what} is not allowed ({value} was given); the launcher has set it. Ignored.")


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

# The variable with the name: processes inherit it from the one that starts them.
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
