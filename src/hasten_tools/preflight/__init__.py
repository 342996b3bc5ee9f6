"""A check of model, data and arguments before a long run: ``Trainer.check`` and ``hasten check``.

It must not import ``hasten.trainer``, ``hasten_tools.speed`` or ``hasten_tools.plan``.
"""

from hasten_tools.preflight.report import CheckFailed, CheckReport, CheckRow

__all__ = ["CheckFailed", "CheckReport", "CheckRow"]
