"""What is promised is importable, lazily, documented and typed."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect

import pytest

import hasten
from tests.programs import run_python

ROOMS = ("callbacks", "loggers", "strategies")


@pytest.mark.parametrize("name", hasten.__all__)
def test_each_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(hasten, name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        assert (value.__doc__ or "").strip(), f"hasten.{name} has no docstring"
    assert name in dir(hasten)
    undocumented = [
        attribute
        for attribute, member in (vars(value).items() if inspect.isclass(value) else ())
        if not attribute.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
        and not inspect.getdoc(getattr(value, attribute, None))
        and not inspect.getdoc(member)
    ]
    assert undocumented == []


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_lists_its_names_and_has_them(room: str) -> None:
    module = importlib.import_module(f"hasten.{room}")
    assert module.__all__
    for name in module.__all__:
        assert (getattr(module, name).__doc__ or "").strip(), f"hasten.{room}.{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error_that_offers_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        hasten.Trianer


def test_the_package_says_that_it_is_typed() -> None:
    assert importlib.resources.files("hasten").joinpath("py.typed").is_file()


def test_names_are_imported_when_they_are_used() -> None:
    program = (
        "import sys, hasten\n"
        "assert 'hasten.trainer' not in sys.modules\n"
        "hasten.Trainer\n"
        "assert 'hasten.trainer' in sys.modules\n"
        "from hasten import *\n"
        "Fabric, LightningModule\n"
    )
    assert run_python("-c", program).returncode == 0
