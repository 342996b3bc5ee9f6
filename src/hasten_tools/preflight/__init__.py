"""A check of model, data and arguments before a long run: ``Trainer.check`` and ``hasten check``."""

from hasten_tools.preflight.report import CheckFailed, CheckReport, CheckRow

__all__ = ["CheckFailed", "CheckReport", "CheckRow"]
