"""Write ``docs/strategy_names.md``: every name of a strategy or an accelerator, and what it does.

    PYTHONPATH=src python scripts/strategy_names.py

The tables are made from ``hasten/resolve.py`` and ``hasten/elsewhere/names.py``. A test compares the page with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hasten import elsewhere, resolve

PAGE = Path(__file__).parents[1] / "docs" / "strategy_names.md"

_BEGINNING = """\
---
hide: [toc]
---

# Names of strategies and accelerators

This page lists every name for a way to train on many devices that Lightning (1.x, 2.x and its plugins), Fabric,
Accelerate and torch have used. It says what `strategy=` and `accelerator=` of hasten's `Trainer` and `Fabric` do with
it. A refused name is an error before anything starts; its message is the reason and the line of this page.

Which one to use, in this order ([Scaling](scaling.md) says more):

1. Start with `strategy="ddp"`.
2. If the optimizer's states do not fit: [`"ddp_sharded"`](ddp_sharded.md).
3. If weights and gradients do not fit either: [`"fsdp"`](fsdp.md).
4. If a single layer is too large or too slow for a device: [`ModelParallelStrategy`](model_parallel.md).

[`hasten plan`](plan.md) says what each of them takes, without using a device. `scripts/strategy_names.py`
makes this page from the code.
"""


_OF_DDP = """\
Names with `ddp` can end in `_find_unused_parameters_true` or `_find_unused_parameters_false`, an argument of DDP. The
classes are in `hasten.strategies`, and take more arguments than the names say."""


def page() -> str:
    """Return the whole page."""
    strategies, accelerators = resolve.accepted_strategies(), resolve.accepted_accelerators()
    lines = [_BEGINNING, "## Strategies", "", *_accepted("strategy", strategies), "", _OF_DDP, ""]
    lines += ["## Strategies that are refused", "", *_refused(elsewhere.STRATEGIES), ""]
    lines += ["## Accelerators", "", *_accepted("accelerator", accelerators), ""]
    lines += ["## Accelerators that are refused", "", *_refused(elsewhere.ACCELERATORS), ""]
    return "\n".join(lines)


def _accepted(argument: str, names: Mapping[str, str]) -> list[str]:
    shown = {name: made for name, made in names.items() if "_find_unused" not in name}
    return _table((f"`{argument}=`", "is"), ((f'`"{name}"`', _code(made)) for name, made in shown.items()))


def _refused(names: Mapping[str, elsewhere.Refused]) -> list[str]:
    rows = (
        (f'`"{name}"`', refused.source, refused.reason, f"`{refused.write}`" if refused.write else "an object of it")
        for name, refused in sorted(names.items())
    )
    return _table(("name", "of", "why not", "write"), rows)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _code(text: str) -> str:
    """Return a text with the calls in it as code."""
    return re.sub(r"\w+\(.*?\)", lambda call: f"`{call[0]}`", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
