"""The workloads by name; a module is imported when its workload runs."""

from __future__ import annotations

import importlib

from benchmarks.workloads.task import Workload

CLASSES = {
    "text": ("text", "Text"),
    "language": ("language", "Language"),
    "resnet": ("images", "ResNet"),
    "vit": ("images", "ViT"),
    "tabular": ("tabular", "Tabular"),
}
NAMES = (*CLASSES, "forecast")


def load(name: str) -> type[Workload]:
    """Return the class of a workload."""
    module, attribute = CLASSES[name]
    found: type[Workload] = getattr(importlib.import_module(f"benchmarks.workloads.{module}"), attribute)
    return found
