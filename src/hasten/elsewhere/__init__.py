"""Names of other libraries, with their replacements, and the decisions in which hasten differs from Lightning."""

from hasten.elsewhere.names import ACCELERATORS, STRATEGIES, Refused

__all__ = ["ACCELERATORS", "STRATEGIES", "Refused"]
