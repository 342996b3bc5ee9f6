"""Errors, warnings and notes keep what is wrong, what to write and the argument apart, and show one text."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest

from hasten._lib.errors import (
    CheckpointRefused,
    MisconfigurationException,
    NotPartOfLightning2,
    Parts,
    WrongType,
    add_note,
    make_error,
    notes_of,
    parts_of,
)
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten.checkpoint.contents import WeightsOnly

PARTS = Parts("Trainer(devices=8): this machine has 2.", "Use devices=2.", "devices")
WHOLE = "Trainer(devices=8): this machine has 2. Use devices=2."
OURS = [MisconfigurationException, WrongType, NotPartOfLightning2, CheckpointRefused, WeightsOnly]
OTHERS = [ValueError, TypeError, RuntimeError, FileNotFoundError, ModuleNotFoundError, KeyError, UserWarning]


@pytest.mark.parametrize("kind", OURS)
def test_our_exceptions_take_parts_and_show_one_text(kind: type[BaseException]) -> None:
    error = kind(PARTS.what, fix=PARTS.fix, argument=PARTS.argument)  # type: ignore[call-arg]
    assert str(error) == WHOLE
    assert parts_of(error) == PARTS
    assert parts_of(kind("A text.")) == Parts("A text.")


@pytest.mark.parametrize("kind", [*OURS, *OTHERS])
def test_parts_are_copied_and_pickled_and_raised_from_another(kind: type[BaseException]) -> None:
    error = make_error(kind, PARTS.what, fix=PARTS.fix, argument=PARTS.argument)
    assert error.args == (WHOLE,)
    for other in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert str(other) == str(error)
        assert parts_of(other) == PARTS
    with pytest.raises(kind) as caught:
        raise error from ZeroDivisionError()
    assert parts_of(caught.value) == PARTS


def test_an_error_without_a_fix_is_what_is_wrong_alone() -> None:
    assert str(make_error(ValueError, "It is nan.", argument="lr")) == "It is nan."
    assert parts_of(make_error(ValueError, "It is nan.", argument="lr")) == Parts("It is nan.", "", "lr")


def test_errors_of_others_are_what_is_wrong_alone() -> None:
    error = ValueError("Use anything else.")
    assert parts_of(error) == Parts("Use anything else.")
    vars(error)["what"] = "an attribute of the program"
    assert parts_of(error) == Parts("Use anything else.")


def test_options_are_those_of_the_exception() -> None:
    error = make_error(ModuleNotFoundError, "There is no wandb.", fix="Run: pip install wandb", name="wandb")
    assert (error.name, error.msg) == ("wandb", "There is no wandb. Run: pip install wandb")


def test_a_warning_has_parts() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("It is slow.", PossibleUserWarning, fix="Use more workers.")
    assert caught[0].category is PossibleUserWarning
    assert str(caught[0].message) == "It is slow. Use more workers."
    assert parts_of(caught[0].message) == Parts("It is slow.", "Use more workers.")


def test_notes_have_parts() -> None:
    error = RuntimeError("out of memory")
    add_note(error, "The batch is too large.", fix="Use micro_batch='auto'.")
    error.add_note("seen before")
    add_note(error, "", fix="Leave it out.")
    assert error.__notes__ == ["The batch is too large. Use micro_batch='auto'.", "seen before", "Leave it out."]
    assert notes_of(error) == [
        Parts("The batch is too large.", "Use micro_batch='auto'."),
        Parts("seen before"),
        Parts("", "Leave it out."),
    ]
