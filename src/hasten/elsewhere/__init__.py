"""Names of strategies and accelerators that other libraries have and hasten does not."""

from hasten.elsewhere.names import ACCELERATORS, STRATEGIES, Refused

__all__ = ["ACCELERATORS", "STRATEGIES", "Refused"]
