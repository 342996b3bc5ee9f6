"""Packages load their public names when they are first used."""

from __future__ import annotations

import sys
import types

import pytest

from hasten._lib.lazy import attach


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("some_package")
    module.__getattr__, module.__dir__, module.__all__ = attach(  # type: ignore[method-assign,attr-defined]
        "some_package",
        {"json": ("dumps", "read=loads"), "math": ("pi",)},
        also=("VERSION",),
        hidden=("pi",),
        submodules=("parts",),
    )
    monkeypatch.setitem(sys.modules, "some_package", module)
    monkeypatch.setitem(sys.modules, "some_package.parts", types.ModuleType("some_package.parts"))
    return module


def test_names_are_imported_once_from_their_modules(package: types.ModuleType) -> None:
    import json

    assert "read" not in vars(package)
    assert package.read is json.loads
    assert vars(package)["read"] is json.loads
    assert package.pi > 3
    assert package.parts is sys.modules["some_package.parts"]


def test_what_is_listed_is_public(package: types.ModuleType) -> None:
    assert package.__all__ == ["VERSION", "dumps", "read"]
    assert dir(package) == ["VERSION", "dumps", "parts", "read"]


def test_an_unknown_name_is_an_attribute_error_that_offers_the_nearest(package: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"module 'some_package' has no attribute 'dumsp'. Did you mean 'dumps'\?"):
        package.dumsp
