"""Check versions, devices, precision, and the processes that a run starts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from hasten._lib import VERSION, torch_private
from hasten._lib.device import is_cuda, is_host
from hasten.machine.host import cpu_name, usable_cores
from hasten_tools.preflight.report import Rows

if TYPE_CHECKING:
    from hasten.trainer import Trainer

_NEEDED = re.compile(r"^([A-Za-z0-9_.-]+)\s*\(?([^;)]*)\)?\s*(;.*)?$")


def check_versions(rows: Rows) -> None:
    """Compare the installed packages with what hasten needs."""
    wrong = []
    needs: list[str] = []
    # Without it, hasten runs from a folder that was not installed.
    with suppress(importlib.metadata.PackageNotFoundError):
        needs = importlib.metadata.requires("hasten") or []
    for needed in needs:
        found = _NEEDED.match(needed)
        if found is None or "extra" in (found[3] or ""):
            continue
        name, limits = found[1], found[2]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append((f"{name} is not installed", f"pip install '{name}{limits}'"))
            continue
        least = re.search(r">=\s*([\d.]+)", limits)
        if least and numbers(version) < numbers(least[1]):
            wrong.append((f"{name} {version} is older than {least[1]}", f"pip install '{name}>={least[1]}'"))
    for seen, line in wrong:
        rows.error("versions", f"{seen}.", line)
    if not wrong:
        rows.ok("versions", f"hasten {VERSION}, torch {torch.__version__}, Python {platform.python_version()}")


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version.

    Example::

        >>> numbers("2.13.0+cpu")
        (2, 13, 0)

    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_devices(trainer: Trainer, rows: Rows) -> None:
    """Check the devices of a run, and what else the machine has."""
    device = trainer.strategy.root_device
    precision = str(trainer.precision)
    if is_cuda(device):
        properties = torch.cuda.get_device_properties(device)
        named = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        named = f"{cpu_name()}, {usable_cores()} cores" if is_host(device) else device.type
    rows.ok("device", f"{device} ({named}), precision {precision}")
    if is_host(device) and torch.cuda.is_available():
        count = torch.cuda.device_count()
        what = f"The run is on the CPU, and this machine has {count} CUDA device{'s' if count > 1 else ''}."
        rows.warning("device", what, 'Trainer(accelerator="gpu")')
    _check_precision(device, precision, rows)


def _check_precision(device: torch.device, precision: str, rows: Rows) -> None:
    """Warn of a precision that is slow on a device."""
    is_bfloat16 = precision.startswith("bf16")
    if is_bfloat16 and is_host(device) and not torch_private.cpu_multiplies_bfloat16():
        rows.warning(
            "precision",
            f"Trainer(precision={precision!r}): this CPU has no bfloat16 instructions, and takes longer than with 32 "
            "bits.",
            'Trainer(precision="32-true")',
        )
    if precision.startswith("16") and is_host(device):
        rows.warning(
            "precision",
            f"Trainer(precision={precision!r}): on a CPU, products in float16 are slower than with 32 bits.",
            'Trainer(precision="bf16-mixed")'
            if torch_private.cpu_multiplies_bfloat16()
            else 'Trainer(precision="32-true")',
        )
    if is_bfloat16 and is_cuda(device) and not torch.cuda.is_bf16_supported(including_emulation=False):
        what = f"Trainer(precision={precision!r}): this GPU emulates bfloat16."
        rows.warning("precision", what, 'Trainer(precision="16-mixed")')
    fast = is_cuda(device) and torch.cuda.get_device_capability(device) >= (8, 0)
    if fast and precision.startswith("32") and torch.get_float32_matmul_precision() == "highest":
        fix = 'Trainer(precision="bf16-mixed"), or Trainer(matmul_precision="high") to keep 32 bits'
        rows.warning("precision", "Products of 32-bit matrices run without the tensor cores of this GPU.", fix)


# By launcher: the variable with the number of processes, and the one that shows that it started this process.
_LAUNCHERS = (("torchrun", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"), ("srun", "SLURM_NTASKS", "SLURM_PROCID"))


def check_processes(trainer: Trainer, rows: Rows) -> None:
    """Compare the processes that a run has with those that its environment started."""
    world = int(trainer.world_size)
    if world > 1:
        name = trainer.given_arguments.get("strategy")
        shown = name if isinstance(name, str) else type(trainer.strategy).__name__
        rows.skipped(
            "processes",
            f"strategy {shown!r} trains in {world} processes; this check ran in one of them: what they exchange was "
            "not checked",
        )
    for launcher, variable, mark in _LAUNCHERS:
        text = os.environ.get(variable, "")
        started = int(text) if text.isdigit() else 0
        if mark in os.environ and started not in (0, world):
            number = f"{started} process{'es' if started > 1 else ''}"
            per_node = max(1, started // max(1, int(trainer.num_nodes)))
            rows.error(
                "processes",
                f"{launcher} started {number} ({variable}={started}), and Trainer(devices=..., num_nodes=...) asks for "
                f"{world}.",
                f"Trainer(devices={per_node}, num_nodes={max(1, started // per_node)})",
            )
