"""Results of ``Trainer(speed=...)`` for a Trainer, which the record of its run repeats."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

# By Trainer, an ``Advice``; what measures puts it here.
verdicts: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
