"""Write the plain PyTorch program that does what a program does with hasten.

It reads sources and arguments, and must not import ``hasten.loops``, ``hasten.strategies`` or ``hasten_tools.speed``.
"""

from hasten_tools.eject.facts import QUIETLY, Facts, gather
from hasten_tools.eject.program import check, ejected, with_one_branch
from hasten_tools.eject.source import EjectError

__all__ = ["QUIETLY", "EjectError", "Facts", "check", "ejected", "gather", "with_one_branch"]
