"""What pyproject.toml, the documentation and the code say about packages agrees."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import hasten
from hasten._lib.optional import _PACKAGES, EXTRAS
from tests.programs import load_script
from tests.rules.trees import nodes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCS = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def _plain(name: str) -> str:
    """Return the name of a package as package indexes compare it, without versions and extras."""
    found = re.match(r"[A-Za-z0-9._-]+", name.strip("'"))
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_every_extra_is_documented_with_its_size() -> None:
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| .+ \| (small|medium|large) \|$", DOCS, re.MULTILINE))
    assert set(rows) == set(PROJECT["optional-dependencies"]) - {"test", "docs", "dev"}


def test_every_package_that_is_needed_is_in_an_extra_or_documented() -> None:
    extras = {name: {_plain(each) for each in packages} for name, packages in PROJECT["optional-dependencies"].items()}
    own = {_plain(each) for each in PROJECT["dependencies"]}
    for module, extra in EXTRAS.items():
        assert _plain(_PACKAGES.get(module, module)) in extras[extra], (module, extra)
    for path in (ROOT / "src").rglob("*.py"):
        for node in nodes(path.read_text(encoding="utf-8")):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "need"
            if not called or not isinstance(node.args[0], ast.Constant):
                continue
            module = str(node.args[0].value).partition(".")[0]
            package = _plain(_PACKAGES.get(module, module))
            assert module in EXTRAS or package in own or package in DOCS, f"{path}: no extra has {module}"


def test_the_version_has_one_place() -> None:
    assert "version" not in PROJECT
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(cited["version"]) == hasten.__version__
    assert cited["license"] == PROJECT["license"]


@pytest.mark.parametrize(
    "template", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml")), ids=lambda p: p.stem
)
def test_issue_templates_have_what_the_form_needs(template: Path) -> None:
    form = yaml.safe_load(template.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
    assert any("hasten env" in field["attributes"]["label"] for field in fields)


def test_each_command_of_the_readme_is_run_before_a_release() -> None:
    module = load_script("check_release")
    found = module.commands()
    assert {"make demo", "hasten report lightning_logs"} <= set(found)
    unknown = [each for each in found if not each.startswith(("hasten ", "make demo", "python ", *module.NOT_RUN))]
    assert unknown == [], "say in scripts/check_release.py how these are run"
    assert module.extras() == "demo"
