"""What a program needs on many devices, without using any: ``hasten plan``."""

from hasten.plan.ledger import Ledger
from hasten.plan.planner import PlanError, plan_fit
from hasten.plan.report import Change, FitPlan, Measured

__all__ = ["Change", "FitPlan", "Ledger", "Measured", "PlanError", "plan_fit"]
