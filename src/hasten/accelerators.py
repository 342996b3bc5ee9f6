"""Accelerators under their public names; they live in ``hasten.machine.devices``."""

from hasten.machine.devices import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator

__all__ = ["Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator"]
