"""The README keeps its word: its examples run, its commands exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run_as_printed(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = run(BLOCKS[number])
    images, labels = names["data"].tensors
    with torch.no_grad():
        right = (names["model"].layer(images).argmax(dim=-1) == labels).float().mean()
    assert right > 0.9


def test_the_first_example_is_about_ten_lines() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 14


def test_the_install_line_brings_what_the_page_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    def packages(names: str) -> set[str]:
        found = {one for name in names.split(",") for one in extras[name]}
        nested = {one for one in found if one.startswith("hasten[")}
        return (found - nested).union(*(packages(one[7:-1]) for one in nested))

    (line,) = re.findall(r"pip install '\.\[([\w,]+)\]'", README)
    brought = {re.split(r"[><=~]", one)[0] for one in packages(line)}
    # The report, its pictures, the data of the ten lines and the demo.
    assert {"plotly", "jinja2", "matplotlib", "scikit-learn", "transformers"} <= brought


def test_two_commands_are_named_and_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_files_named_in_links_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
