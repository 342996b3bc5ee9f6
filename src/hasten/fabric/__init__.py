"""Fabric: devices, precision and processes for programs that keep their own training loop.

It must not import ``hasten.loops``, ``hasten.trainer``, ``hasten.hooks`` or ``hasten.callbacks``.
"""

from hasten.fabric.fabric import Fabric
from hasten.fabric.wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped"]
