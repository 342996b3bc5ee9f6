"""``torch.compile`` in the right place: one graph a phase, nothing to see from outside, kept for the next run."""

from __future__ import annotations

from hasten.compile.settings import CompileSettings, as_compile, check_possible

__all__ = ["CompileSettings", "as_compile", "check_possible"]
