"""What other libraries do otherwise: names that hasten does not have, and decisions in which Lightning differs."""

from hasten.elsewhere.names import ACCELERATORS, STRATEGIES, Refused

__all__ = ["ACCELERATORS", "STRATEGIES", "Refused"]
