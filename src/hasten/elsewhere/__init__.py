"""Names of other libraries, with their replacements, and the decisions in which hasten differs from Lightning.

It has tables only, and must not import ``hasten.strategies``, ``hasten.machine`` or ``hasten_lightning``.
"""

from hasten.elsewhere.names import ACCELERATORS, STRATEGIES, Refused

__all__ = ["ACCELERATORS", "STRATEGIES", "Refused"]
