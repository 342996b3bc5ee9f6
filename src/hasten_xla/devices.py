"""XLA devices, above all TPUs: which there are, whether torch_xla fits, and the hosts of a pod.

torch_xla is imported by the functions that need it, and by nothing before an XLA device is asked for.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.optional import install_line, installed
from hasten.machine.cluster import LightningEnvironment
from hasten.machine.devices import Accelerator, whole_number
from hasten.precision.builtin import is_half
from hasten_xla.generator import GENERATOR
from hasten_xla.generator import runtime_started as runtime_started
from hasten_xla.precision import XLAPrecision

if TYPE_CHECKING:
    from hasten.types import Devices

# torch_xla works with the torch of the same minor version alone; 2.9 is the newest.
_PCI_VENDOR_OF_GOOGLE = "0x1ae0"
# PCI devices of TPU v2 to v7, as torch_xla knows them.
_PCI_DEVICES = {"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"}


def require_torch_xla(purpose: str) -> None:
    """Raise unless torch_xla is installed, in the version that fits torch."""
    if not installed("torch_xla"):
        raise make_error(
            ModuleNotFoundError,
            f"{purpose} needs torch_xla, which is not installed. The newest is 2.9 and needs torch 2.9; this is torch "
            f"{torch.__version__}.",
            fix=f"Run: {install_line('tpu')}",
            name="torch_xla",
            argument="accelerator",
        )
    if "torch_xla" in sys.modules:
        return
    version = importlib.metadata.version("torch_xla")
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise make_error(
            ImportError,
            f"{purpose}: torch_xla {version} needs torch {'.'.join(version.split('.')[:2])}, and this is torch "
            f"{torch.__version__}.",
            fix=f"Run: {install_line('tpu')}",
        )


@cache
def tpu_chips() -> int:
    """Return the number of TPU chips of this machine, from its list of PCI devices; nothing is started."""
    chips = 0
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        vendor = Path(path)
        if vendor.read_text("ascii").strip() == _PCI_VENDOR_OF_GOOGLE:
            chips += vendor.with_name("device").read_text("ascii").strip() in _PCI_DEVICES
    return chips


def runtime_kind() -> str:
    """Return the kind of device that torch_xla's runtime has here: "TPU", "CPU", ..., or "" for none.

    The environment variable PJRT_DEVICE says which; without it, the TPUs of this machine are taken.
    """
    named = os.environ.get("PJRT_DEVICE", "").split("_")[0].upper()
    return named or ("TPU" if tpu_chips() else "")


def finds_tpu() -> bool:
    """Return whether ``accelerator="auto"`` trains on TPUs: torch_xla is installed and there are some."""
    return runtime_kind() == "TPU" and installed("torch_xla")


class XLAAccelerator(Accelerator):
    """TPUs, through torch_xla; with the environment variable ``PJRT_DEVICE=CPU`` the processor, for trying it out.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
        ImportError: it does not fit the installed torch.

    Source: `PyTorch/XLA, PJRT runtime <https://docs.pytorch.org/xla/release/r2.9/runtime.html>`_.

    """

    strategies = ("single_xla", "xla", "xla_fsdp")

    def __init__(self) -> None:
        require_torch_xla("accelerator='tpu'")

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the current one of this process."""
        if device.type != "xla":
            raise RuntimeError(f"XLAAccelerator got the device {device}.")
        import torch_xla

        torch_xla.device(device.index or 0)
        GENERATOR.follow()

    def teardown(self) -> None:
        """Do nothing: the runtime keeps its devices until the process ends."""

    @staticmethod
    def parse_devices(devices: Devices) -> int | list[int]:
        """Return the number of devices, or the index of one in a list.

        A TPU host trains on one of its chips or on all of them: torch_xla's processes share all chips.

        """
        kind, present = runtime_kind(), XLAAccelerator.auto_device_count()
        number = whole_number(devices)
        if number is None:
            parts: Any = devices.split(",") if isinstance(devices, str) else devices
            if not isinstance(parts, (list, tuple)):
                what = f"devices={devices!r}, accelerator='tpu':"
                fix = f"use a number, [index] or 'auto', not {type(devices).__name__}."
                raise make_error(TypeError, what, fix=fix, argument="devices")
            indices = [whole_number(part) for part in parts]
            if len(indices) != 1 or indices[0] is None or not 0 <= indices[0] < max(present, 1):
                what = f"devices={devices!r}, accelerator='tpu': a list names one device, from [0] to [{present - 1}]."
                raise make_error(ValueError, what, fix=f"Use devices='auto' for all {present}.", argument="devices")
            return [indices[0]]
        number = present if number == -1 else number
        if number < 1 or (kind == "TPU" and number not in (1, present)):
            raise make_error(
                ValueError,
                f"devices={devices!r}, accelerator='tpu': this machine has {present} TPU chips, and a program uses "
                "one or all of them.",
                fix=f"Use devices=1, [index] or {present}.",
                argument="devices",
            )
        return number

    @staticmethod
    def get_parallel_devices(devices: Devices) -> list[torch.device]:
        """Return the devices; their indices are those on this machine."""
        parsed = XLAAccelerator.parse_devices(devices)
        return [torch.device("xla", index) for index in (range(parsed) if isinstance(parsed, int) else parsed)]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of TPU chips; with PJRT_DEVICE=CPU, CPU_NUM_DEVICES or 1; without either 0."""
        if (kind := runtime_kind()) == "TPU":
            return tpu_chips() or 1
        return int(os.environ.get("CPU_NUM_DEVICES", "1")) if kind else 0

    @staticmethod
    def is_available() -> bool:
        """Return whether torch_xla is installed and has a device to run on."""
        return bool(runtime_kind()) and installed("torch_xla")

    @staticmethod
    def name() -> str:
        return "tpu"

    @classmethod
    def device_type(cls) -> str:
        """Return "xla", as torch calls them."""
        return "xla"

    @classmethod
    def check_available(cls, purpose: str) -> None:
        """Raise unless torch_xla is installed, fits torch and has a device to run on.

        Args:
            purpose: what asks for one, for the message.

        Raises:
            ModuleNotFoundError: torch_xla is not installed.
            ImportError: it does not fit the installed torch.
            MisconfigurationException: there is no device.

        """
        require_torch_xla(purpose)
        if not cls.is_available():
            raise MisconfigurationException(
                f"{purpose}: this machine has no TPU.",
                fix=(
                    "Use accelerator='auto'; to try a program out on the processor, set the environment variable "
                    "PJRT_DEVICE=CPU."
                ),
            )

    @staticmethod
    def comes_first() -> bool:
        """Return whether there are TPUs, and torch_xla for them."""
        return finds_tpu()

    def default_cluster(self) -> XLAEnvironment:
        """Return the hosts of a TPU pod."""
        return XLAEnvironment()

    def precision_of(self, name: str) -> XLAPrecision | None:
        """Return the precision of 16 bits; for others the strategy's is used.

        Raises:
            MisconfigurationException: it needs a gradient scaler.

        """
        if name == "16-mixed":
            what = "precision='16-mixed', accelerator='tpu': TPUs compute in bfloat16, which needs no gradient scaler."
            fix = "Use precision='bf16-mixed' or 'bf16-true'."
            raise MisconfigurationException(what, fix=fix, argument="precision")
        return XLAPrecision(name) if is_half(name) else None

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the memory in use and in all, in bytes, if the runtime reports it."""
        from torch_xla.core import xla_model

        try:
            return {f"xla_{name}": value for name, value in xla_model.get_memory_info(device).items()}
        except RuntimeError:
            # The CPU does not report it.
            return {}


class XLAEnvironment(LightningEnvironment):
    """The hosts of a TPU pod, on each of which the script is started once; hasten starts a process for each chip.

    Address and number of a host come from MASTER_ADDR and NODE_RANK, or from the TPU's own metadata.

    Example::

        >>> XLAEnvironment().node_rank()
        0

    """

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or the first host of the pod."""
        if "MASTER_ADDR" in os.environ or not self._asks_pod:
            return super().main_address
        from torch_xla._internal import tpu

        first = str(tpu.get_worker_ips()[0])
        return "127.0.0.1" if first == "localhost" else first

    @property
    def main_port(self) -> int:
        """MASTER_PORT, or on a pod the same port on all hosts."""
        if self._asks_pod and "MASTER_PORT" not in os.environ and pod_hosts() > 1:
            return 12910
        return super().main_port

    @staticmethod
    def detect() -> bool:
        """Return whether this machine has a TPU that torch_xla can use."""
        return finds_tpu()

    def node_rank(self) -> int:
        if "NODE_RANK" in os.environ or "GROUP_RANK" in os.environ or not self._asks_pod or pod_hosts() == 1:
            return super().node_rank()
        from torch_xla._internal import tpu

        return int(tpu.worker_id())

    @property
    def _asks_pod(self) -> bool:
        return finds_tpu() and tpu_chips() > 0


@cache
def pod_hosts() -> int:
    """Return the number of hosts of the TPU pod that this machine belongs to, as its metadata says."""
    from torch_xla._internal import tpu

    return len(tpu.get_worker_ips())
