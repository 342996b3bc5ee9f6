"""The compiled side of Fabric: modules in place, and what came of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import nn

from hasten.compile.settings import CompileSettings, check_possible

if TYPE_CHECKING:
    from hasten.compile.model import CompiledModel
    from hasten.compile.report import CompileReport
    from hasten.runtime import Runtime


def compile_for_good(module: nn.Module, settings: CompileSettings, runtime: Runtime) -> CompiledModel:
    """Have ``module`` called compiled until the program ends.

    Raises:
        ValueError: this machine cannot compile; the message names the nearest that works.

    """
    check_possible("Fabric", settings, runtime.device)
    from hasten.compile.model import compiled_model

    model = compiled_model(module, settings, runtime.device, variant=str(runtime.precision.precision))
    model.enable_until_exit(writes=runtime.is_global_zero)
    return model


def joint_report(models: list[CompiledModel]) -> CompileReport | None:
    """Return what compiling several models has come to; None if there are none."""
    if not models:
        return None
    # The first has counted all the time; the others know their own parts.
    reports = [model.report() for model in models]
    left = {name: reason for report in reports for name, reason in report.left.items()}
    names = tuple(name for report in reports for name in report.compiled)
    return dataclasses.replace(reports[0], compiled=names, left=left)
