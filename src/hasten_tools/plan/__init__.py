"""Estimate what a program needs on many devices, without using any: ``hasten plan``.

It must not import ``hasten_tools.speed``, ``hasten_tools.preflight`` or ``hasten_tools.report``.
"""

from hasten_tools.plan.ledger import Ledger
from hasten_tools.plan.planner import PlanError, plan_fit
from hasten_tools.plan.report import Change, FitPlan, Measured

__all__ = ["Change", "FitPlan", "Ledger", "Measured", "PlanError", "plan_fit"]
