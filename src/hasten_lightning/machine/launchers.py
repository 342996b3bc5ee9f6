"""Launchers of processes, for programs that subclass them: they run what is given in this process alone.

The strategies of hasten start processes by themselves (``hasten.machine.launch``).
"""

from __future__ import annotations

import multiprocessing
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten.machine.launch import RunScriptAgain
from hasten.machine.spawn import StartCopies

if TYPE_CHECKING:
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.strategies.parallel import ParallelStrategy
    from hasten.trainer.trainer import Trainer

T = TypeVar("T")


def _refuse(what: str) -> NoReturn:
    raise make_error(
        MisconfigurationException,
        f"{what}: in hasten, the strategy starts the processes.",
        fix="Use strategy='ddp', 'ddp_spawn' or 'ddp_notebook', or start the program with torchrun.",
    )


class LauncherBase(ABC):
    """The base of launchers."""

    @property
    @abstractmethod
    def is_interactive_compatible(self) -> bool:
        """Whether it can start processes from a notebook."""

    @abstractmethod
    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Start the processes and call ``function``."""

    def kill(self, signum: int) -> None:
        """Send a signal to the processes."""
        for process in getattr(self, "procs", ()):
            process.send_signal(signum)


class SubprocessScriptLauncher(LauncherBase):
    """The launcher that runs a script again for each process of this machine."""

    is_interactive_compatible = False

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        self.cluster_environment, self.num_processes, self.num_nodes = cluster_environment, num_processes, num_nodes
        self.procs: list[subprocess.Popen[bytes]] = []

    def launch(self, function: Callable[..., T], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> T:
        """Call ``function`` in this process.

        Raises:
            MisconfigurationException: other processes would have to be started.

        """
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        if self.num_processes > 1:
            _refuse(f"{type(self).__name__} with {self.num_processes} processes")

    def _check_can_spawn_children(self) -> None:
        if self.procs:
            raise RuntimeError("The processes have been started already.")
        if (rank := self.cluster_environment.local_rank()) != 0:
            raise RuntimeError(f"This is process {rank} of its machine: the first one starts the others.")


class MultiProcessingLauncher(LauncherBase):
    """The launcher that starts copies of this process.

    Raises:
        ValueError: this system has no such method.

    """

    def __init__(
        self, strategy: ParallelStrategy, start_method: Literal["spawn", "fork", "forkserver"] = "spawn"
    ) -> None:
        check.one_of(type(self).__name__, "start_method", start_method, multiprocessing.get_all_start_methods())
        self._strategy, self._start_method = strategy, start_method
        self.procs: list[Any] = []

    @property
    def is_interactive_compatible(self) -> bool:
        return self._start_method == "fork"

    def launch(self, function: Callable[..., T], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> T:
        """Call ``function`` in this process.

        Raises:
            MisconfigurationException: the strategy has several processes.

        """
        if self._strategy.num_processes > 1:
            _refuse(f"{type(self).__name__} with {self._strategy.num_processes} processes")
        return function(*args, **kwargs)


class XLALauncher(MultiProcessingLauncher):
    """The launcher for TPUs."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        super().__init__(strategy, "fork")

    @property
    def is_interactive_compatible(self) -> bool:
        return True


def launch_process_observer(child_processes: Iterable[object]) -> None:
    """Do nothing if there are no processes to watch.

    Raises:
        MisconfigurationException: there are some.

    """
    if list(child_processes):
        _refuse("_launch_process_observer")


# Programs ask of which kind trainer.strategy.launcher is.
SubprocessScriptLauncher.register(RunScriptAgain)
MultiProcessingLauncher.register(StartCopies)

__all__ = [
    "LauncherBase", "MultiProcessingLauncher", "SubprocessScriptLauncher", "XLALauncher", "launch_process_observer",
]  # fmt: skip
