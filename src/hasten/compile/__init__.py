"""``torch.compile`` in the right place: one graph per stage, parameter names unchanged, cached for the next run.

It compiles functions and modules of torch, and must not import ``hasten.module``, ``hasten.loops`` or
``hasten.trainer``.
"""

from __future__ import annotations

from hasten.compile.settings import CompileSettings, as_compile, check_possible

__all__ = ["CompileSettings", "as_compile", "check_possible"]
