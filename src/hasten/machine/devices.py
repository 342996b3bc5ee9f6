"""Accelerators: which devices a machine has, and which of them a run uses."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.check import shown
from hasten._lib.errors import MisconfigurationException, WrongType
from hasten._lib.optional import installed, need
from hasten.extend.entry_points import found, load

if TYPE_CHECKING:
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.precision.base import Precision
    from hasten.trainer import Trainer
    from hasten.types import Devices


# On one machine; more is a mistake, whose list of devices would fill the memory.
_MOST_PROCESSES = 1 << 16


def num_cuda_devices() -> int:
    """Return how many CUDA devices this process sees; tests replace it, to try a program for several."""
    return torch.cuda.device_count()


class Accelerator(ABC):
    """One kind of device.

    Subclass it for other hardware: ``Trainer(accelerator=MyAccelerator())``. Attributes and methods after ``name`` are
    for hardware that hasten's own strategies and number formats do not support.
    """

    # Names of the strategies for these devices, if hasten's usual ones do not support them. With strategy="auto" the
    # first one trains on one device, and the second one on several.
    strategies: tuple[str, ...] = ()

    @abstractmethod
    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the current one of this process.

        Args:
            device: one of ``get_parallel_devices``.

        """

    def setup(self, trainer: Trainer) -> None:  # noqa: B027 - subclasses may do without
        """Called by a Trainer before the module is moved to the device; for subclasses.

        Args:
            trainer: the Trainer.

        """

    @abstractmethod
    def teardown(self) -> None:
        """Free cached memory of the device."""

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Devices) -> int | list[int]:
        """Return what ``get_parallel_devices`` takes.

        Args:
            devices: as the user wrote it: a number, a list of indices, ``"0,1"``, -1.

        Raises:
            ValueError: the device does not exist.
            TypeError: it is neither a number nor a list.

        """

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Devices) -> list[torch.device]:
        """Return the devices, one for each process on this machine."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """Return how many devices ``devices="auto"`` takes."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Return whether this machine has a device of this kind."""

    @staticmethod
    @abstractmethod
    def name() -> str:
        """Return the name users write, for instance ``"cuda"``."""

    @classmethod
    def device_type(cls) -> str:
        """Return the ``type`` of its devices, ``name()`` by default."""
        return cls.name()

    @classmethod
    def check_available(cls, purpose: str) -> None:
        """If there is no device of this type and the reason is known, raise an error that says what is missing.

        Args:
            purpose: what needs the device, for instance ``"Trainer(accelerator='tpu')"``.

        """
        return

    @staticmethod
    def comes_first() -> bool:
        """Return whether ``accelerator="auto"`` prefers these devices to GPUs."""
        return False

    def default_cluster(self) -> ClusterEnvironment | None:
        """Return the cluster of a run without a launcher; None for the usual one."""
        return None

    def precision_of(self, name: str) -> Precision | None:
        """Return the precision for ``Trainer(precision=name)`` on these devices; None for the strategy's.

        Raises:
            ValueError: they do not compute in it.

        """
        return None

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return statistics of ``device``: memory in bytes, use in percent."""
        return {}


class CPUAccelerator(Accelerator):
    """The processor: one process, or several that share its cores.

    Example::

        >>> CPUAccelerator().get_parallel_devices(2)
        [device(type='cpu'), device(type='cpu')]

    """

    def setup_device(self, device: torch.device) -> None:
        _check_kind(self, device)

    def teardown(self) -> None:
        """Do nothing."""

    @staticmethod
    def parse_devices(devices: Devices) -> int:
        """Return the number of processes."""
        number = whole_number(devices)
        if number is None or not 1 <= number <= _MOST_PROCESSES:
            raise WrongType(
                f"devices={shown(devices)}, accelerator='cpu':",
                fix=(
                    "write accelerator='cpu', and leave devices out."
                    if isinstance(devices, str) and devices == "cpu"
                    else f"use the number of processes, from 1 to {_MOST_PROCESSES}, or devices='auto' for one. The "
                    "CPU has no indices."
                ),
                argument="devices",
            )
        return number

    @staticmethod
    def get_parallel_devices(devices: Devices) -> list[torch.device]:
        """Return the CPU, once for each process."""
        return [torch.device("cpu")] * CPUAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: torch uses all cores from one process."""
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "cpu"

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the load of the last minute, if the system reports it, and with psutil use in percent."""
        load = {"cpu_load_1min": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}
        return {**load, **(get_cpu_stats() if installed("psutil") else {})}


def get_cpu_stats() -> dict[str, float]:
    """Return the load of this machine's CPU, memory and swap, in percent.

    Raises:
        ModuleNotFoundError: psutil is not installed.

    Example::

        >>> sorted(get_cpu_stats())
        ['cpu_percent', 'cpu_swap_percent', 'cpu_vm_percent']

    """
    psutil = need("psutil", purpose="Monitoring of the CPU")
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


class CUDAAccelerator(Accelerator):
    """NVIDIA (or ROCm) GPUs."""

    def setup_device(self, device: torch.device) -> None:
        _check_kind(self, device)
        torch.cuda.set_device(device)

    def teardown(self) -> None:
        """Return cached memory to the driver, if CUDA was used at all."""
        torch.cuda.empty_cache()

    @staticmethod
    def parse_devices(devices: Devices) -> list[int]:
        """Return the indices of the GPUs."""
        return _parse_indices(devices, num_cuda_devices(), "CUDA")

    @staticmethod
    def get_parallel_devices(devices: Devices) -> list[torch.device]:
        indices = devices if isinstance(devices, list) else CUDAAccelerator.parse_devices(devices)
        return [torch.device("cuda", index) for index in indices]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of GPUs that this process sees."""
        return num_cuda_devices()

    @staticmethod
    def is_available() -> bool:
        return num_cuda_devices() > 0

    @staticmethod
    def name() -> str:
        return "cuda"

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return torch's memory statistics, in bytes."""
        return dict(torch.cuda.memory_stats(device))


class MPSAccelerator(Accelerator):
    """The GPU of an Apple computer."""

    def setup_device(self, device: torch.device) -> None:
        _check_kind(self, device)

    def teardown(self) -> None:
        """Return cached memory to the system."""
        if MPSAccelerator.is_available():
            torch.mps.empty_cache()

    @staticmethod
    def parse_devices(devices: Devices) -> list[int]:
        """Return the index of the one GPU."""
        return _parse_indices(devices, int(MPSAccelerator.is_available()), "MPS")

    @staticmethod
    def get_parallel_devices(devices: Devices) -> list[torch.device]:
        return [torch.device("mps", index) for index in MPSAccelerator.parse_devices(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return torch.backends.mps.is_available()

    @staticmethod
    def name() -> str:
        return "mps"

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the memory in use, in bytes."""
        return {"mps_current_allocated_bytes": torch.mps.current_allocated_memory()}


ACCELERATORS: dict[str, type[Accelerator]] = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}


@cache
def added_accelerators() -> dict[str, type[Accelerator]]:
    """Return the accelerators that packages add by entry points, by the names for ``accelerator=``; found once."""
    added: dict[str, type[Accelerator]] = {}
    for name, entry in found("hasten.accelerators").items():
        kind = load("hasten.accelerators", name, purpose=f"accelerator={name!r}")
        if not (isinstance(kind, type) and issubclass(kind, Accelerator)):
            raise WrongType(f"The entry point {entry.value} of 'hasten.accelerators' is not a subclass of Accelerator.")
        if name not in ACCELERATORS:
            added[name] = kind
    return added


def best_accelerator() -> Accelerator:
    """Return the fastest kind of device that this machine has."""
    for kind in (CUDAAccelerator, MPSAccelerator):
        if kind.is_available():
            return kind()
    return CPUAccelerator()


def _check_kind(accelerator: Accelerator, device: torch.device) -> None:
    if device.type != accelerator.name():
        kind = {"cuda": "GPU"}.get(accelerator.name(), accelerator.name().upper())
        raise MisconfigurationException(f"Device should be {kind}, got {device} instead.")


def whole_number(devices: Any) -> int | None:
    """Return ``devices`` as a number, if it is one: 2, "2" or "-1"."""
    if isinstance(devices, str):
        text = devices.strip()
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 10 else None
    try:
        return None if isinstance(devices, bool) else operator.index(devices)
    except TypeError:
        return None


def number_of(devices: Devices | None) -> int | None:
    """Return how many devices an argument names; None if it leaves that to the machine.

    Example::

        >>> [number_of(devices) for devices in (2, "2", "0,1", [1, 3], "auto", -1, None)]
        [2, 2, 2, 2, None, None, None]

    """
    number = whole_number(devices)
    if number is not None:
        return number if number > 0 else None
    if isinstance(devices, str):
        return len([part for part in devices.split(",") if part.strip()]) if "," in devices else None
    return len(devices) if isinstance(devices, (list, tuple)) else None


def _count_to_use(present: int) -> str:
    return f"Use at least 1 and at most {present}, or devices='auto'." if present else "Use accelerator='cpu'."


def _parse_indices(devices: Any, present: int, kind: str) -> list[int]:
    """Return the device indices for a number, a list or a string such as "0,1"."""
    has = f"this machine has {present} {kind} devices"
    number = whole_number(devices)
    if number is not None:
        number = present if number == -1 else number
        if not 1 <= number <= present:
            advice = _count_to_use(present)
            raise MisconfigurationException(f"devices={devices!r}: {has}.", fix=advice, argument="devices")
        return list(range(number))
    indices = [part.strip() for part in devices.split(",") if part.strip()] if isinstance(devices, str) else devices
    if not isinstance(indices, (list, tuple)):
        what = f"devices={devices!r}:"
        fix = f"use a number, a list of indices, a string such as '0,1', or 'auto', not {type(devices).__name__}."
        raise WrongType(what, fix=fix, argument="devices")
    if isinstance(devices, str) and all(part.isdigit() for part in indices):
        indices = list(map(int, indices))
    if not indices or not all(type(index) is int and 0 <= index < present for index in indices):
        raise MisconfigurationException(
            f"devices={devices!r}:", fix=f"use indices from 0 to {present - 1}, or 'auto'; {has}.", argument="devices"
        )
    if len(set(indices)) != len(indices):
        raise MisconfigurationException(
            f"devices={devices!r} names a device twice.", fix="Use each index once.", argument="devices"
        )
    return list(indices)
