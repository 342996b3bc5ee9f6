"""Fabric: the engine for those who keep their own loop."""

from hasten.fabric.fabric import Fabric
from hasten.fabric.wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped"]
