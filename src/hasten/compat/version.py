"""Which version of the field hasten stands in for."""

from __future__ import annotations

# What packages compare with: `lightning.__version__` and `importlib.metadata.version("lightning")`.
VERSION = "2.6.6"
