"""Guards accept what they should, and refuse the rest with one wording."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException

ACCEPTED: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = [
    (check.whole, 3, {"at_least": 1, "at_most": 3}),
    (check.whole, np.int64(3), {}),
    (check.number, 0.5, {"above": 0, "below": 1}),
    (check.number, np.float32(0.5), {}),
    (check.boolean, None, {"allow_none": True}),
    (check.one_of, "all", {"allowed": (True, False, "all")}),
    (check.path, Path("a"), {}),
    (check.callable_, len, {}),
]


@pytest.mark.parametrize(("guard", "value", "options"), ACCEPTED)
def test_what_is_allowed_is_returned(guard: Callable[..., Any], value: Any, options: dict[str, Any]) -> None:
    assert guard("Owner", "x", value, **options) == value
    assert type(check.whole("Owner", "x", np.int32(3))) is int


REFUSED: list[tuple[Callable[..., Any], Any, dict[str, Any], type[Exception], str]] = [
    (check.whole, True, {}, TypeError, "a whole number, not bool"),
    (check.whole, 2.0, {"at_least": 1}, TypeError, "a whole number of at least 1, not float"),
    (check.whole, "2", {}, TypeError, "a whole number, not str"),
    (check.whole, -1, {"at_least": 0, "unit": "steps", "allow_none": True}, ValueError,
     "a whole number of steps, at least 0, or None"),
    (check.number, math.nan, {}, ValueError, "a number"),
    (check.number, 2, {"at_least": 0, "below": 1}, ValueError, "a number of at least 0 and below 1"),
    (check.number, 1.5, {"at_least": 0, "at_most": 1}, ValueError, "a number from 0 to 1"),
    (check.boolean, 1, {"allow_none": True}, TypeError, "True, False or None"),
    (check.one_of, 1, {"allowed": (True, "a")}, ValueError, "one of True, 'a'"),
    (check.one_of, "nrom", {"allowed": ("norm", "value")}, ValueError, "is unknown. Did you mean 'norm'?"),
    (check.path, 3, {}, TypeError, "a path, not int"),
    (check.callable_, 3, {"allow_none": True}, TypeError, "a function, or None, not int"),
    (check.whole, 0, {"allowed": "a size", "at_least": 1, "error": MisconfigurationException},
     MisconfigurationException, "a size"),
]  # fmt: skip


@pytest.mark.parametrize(("guard", "value", "options", "error", "allowed"), REFUSED)
def test_the_rest_is_refused_by_name(
    guard: Callable[..., Any], value: Any, options: dict[str, Any], error: type[Exception], allowed: str
) -> None:
    with pytest.raises(error) as caught:
        guard("Owner", "x", value, **options)
    told = f"{value!r} {allowed}" if allowed.endswith("?") else f"use {allowed}."
    assert str(caught.value) == f"Owner(x={value!r}): {told}"
