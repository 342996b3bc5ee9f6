"""Write the plain PyTorch program that does what a program does with hasten."""

from hasten.eject.facts import Facts, gather
from hasten.eject.program import check, ejected
from hasten.eject.source import EjectError

__all__ = ["EjectError", "Facts", "check", "ejected", "gather"]
