"""Versions written into files."""

from __future__ import annotations

VERSION = "0.1.0"

# The layout of checkpoint keys follows this version of the field's format.
FIELD_FORMAT = "2.6.0"
