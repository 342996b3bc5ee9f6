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
    (check.whole, None, {"allow_none": True}),
    (check.number, 0.5, {"above": 0, "below": 1}),
    (check.number, np.float32(0.5), {}),
    (check.number, math.inf, {"at_least": 0}),
    (check.share, 1, {}),
    (check.boolean, False, {}),
    (check.boolean, None, {"allow_none": True}),
    (check.one_of, "all", {"allowed": (True, False, "all")}),
    (check.path, Path("a"), {}),
    (check.callable_, len, {}),
]


@pytest.mark.parametrize(("guard", "value", "options"), ACCEPTED)
def test_what_is_allowed_is_returned(guard: Callable[..., Any], value: Any, options: dict[str, Any]) -> None:
    assert guard("Owner", "x", value, **options) == value


def test_whole_numbers_of_numpy_become_those_of_python() -> None:
    assert type(check.whole("Owner", "x", np.int32(3))) is int


REFUSED: list[tuple[Callable[..., Any], Any, dict[str, Any], type[Exception], str]] = [
    (check.whole, True, {}, TypeError, "Owner(x=True): use a whole number, not bool."),
    (
        check.whole,
        2.0,
        {"at_least": 1},
        TypeError,
        "Owner(x=2.0): use a whole number of at least 1, for instance x=2.",
    ),
    (check.whole, "2", {}, TypeError, "Owner(x='2'): use a whole number, not str."),
    (check.whole, None, {}, TypeError, "Owner(x=None): use a whole number."),
    (check.whole, -1, {"at_least": 0}, ValueError, "Owner(x=-1): use a whole number of at least 0."),
    (
        check.whole,
        9,
        {"at_least": 1, "at_most": 8},
        ValueError,
        "Owner(x=9): use a whole number from 1 to 8.",
    ),
    (
        check.whole,
        -1,
        {"at_least": 0, "unit": "steps", "allow_none": True},
        ValueError,
        "Owner(x=-1): use a whole number of steps, at least 0, or None.",
    ),
    (check.number, math.nan, {}, ValueError, "Owner(x=nan): use a number."),
    (check.number, 0, {"above": 0}, ValueError, "Owner(x=0): use a number above 0."),
    (
        check.number,
        2,
        {"at_least": 0, "below": 1},
        ValueError,
        "Owner(x=2): use a number of at least 0 and below 1.",
    ),
    (check.share, 1.5, {}, ValueError, "Owner(x=1.5): use a number from 0 to 1."),
    (check.boolean, 1, {}, TypeError, "Owner(x=1): use True or False."),
    (check.boolean, 1, {"allow_none": True}, TypeError, "Owner(x=1): use True, False or None."),
    (check.one_of, 1, {"allowed": (True, "a")}, ValueError, "Owner(x=1): use one of True, 'a'."),
    (
        check.one_of,
        "nrom",
        {"allowed": ("norm", "value")},
        ValueError,
        "Owner(x='nrom'): use one of 'norm', 'value'. Did you mean 'norm'?",
    ),
    (check.path, 3, {}, TypeError, "Owner(x=3): use a path, not int."),
    (check.callable_, 3, {"allow_none": True}, TypeError, "Owner(x=3): use a function, or None, not int."),
    (
        check.whole,
        0,
        {"at_least": 1, "allowed": "a size", "error": MisconfigurationException},
        MisconfigurationException,
        "Owner(x=0): use a size.",
    ),
]


@pytest.mark.parametrize(("guard", "value", "options", "error", "message"), REFUSED)
def test_the_rest_is_refused_by_name(
    guard: Callable[..., Any], value: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        guard("Owner", "x", value, **options)
    assert str(caught.value) == message
