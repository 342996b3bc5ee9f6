"""The documentation site builds without a warning, its links lead somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hasten
from hasten_tools.demo.task import ENGINEERS_LOOP
from tests.docs import measured
from tests.docs.measured import table
from tests.programs import load_script
from tests.rules.test_public_signatures import MODULES

ROOT = Path(__file__).parents[2]


class Warnings(logging.Handler):
    """Keeps the messages of a build."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """The folder of the built site, and what the build warned of."""
    pytest.importorskip("material", reason="needs mkdocs-material: pip install -e '.[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs mkdocstrings: pip install -e '.[docs]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        folder = tmp_path_factory.mktemp("site")
        seen = Warnings()
        logger = logging.getLogger("mkdocs")
        logger.addHandler(seen)
        try:
            config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=False)
            config.extra["api"] = False  # `make docs` renders the docstrings, in fourteen seconds.
            config.plugins.on_startup(command="build", dirty=False)
            build(config)
        finally:
            logger.removeHandler(seen)
        yield folder, seen.messages


@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_without_a_warning(site: tuple[Path, list[str]]) -> None:
    folder, messages = site
    assert messages == []
    pages = {path.relative_to(folder).with_suffix(".md").as_posix() for path in folder.rglob("*.html")}
    sources = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(sources - pages) == []


# What is asked on the first day: a search, and the pages that answer it; the best of those that exist.
QUESTIONS = {
    "log values": ("guides/logging",),
    "checkpoint": ("guides/checkpoints", "checkpoints"),
    "resume": ("resuming",),
    "out of memory": ("speed/out_of_memory",),
    "multi gpu": ("guides/many_devices", "scaling"),
    "mixed precision": ("guides/precision", "cookbook/training"),
    "learning rate": ("guides/learning_rates", "cookbook/training"),
    "validation": ("guides/validation", "cookbook/training"),
    "data loading": ("guides/data", "speed/data_loading"),
    "nan loss": ("bad_loss",),
    "faster": ("speed", "speed/advise"),
    "error messages": ("errors",),
    "where are the logs": ("guides/logging",),
    "continue training": ("resuming",),
    "two gpus": ("guides/many_devices",),
    "own loop": ("cookbook/training",),
    "notebook": ("guides/notebook_to_cluster",),
    "lightning programs": ("compat",),
    "leave": ("eject",),
    "stop early": ("cookbook/training", "guides/callbacks"),
    "bf16": ("guides/precision", "speed/precision"),
    "best model": ("guides/checkpoints",),
    "validate every 500 steps": ("guides/validation",),
    "multiple dataloaders": ("guides/validation", "guides/data"),
    "lr scheduler warmup": ("guides/learning_rates",),
    "gradient clipping": ("cookbook/training",),
    "early stopping": ("cookbook/training",),
    "freeze layers": ("cookbook/models",),
    "wandb": ("cookbook/training",),
    "num_workers": ("speed/data_loading",),
    "seed": ("cookbook/training",),
    "write predictions": ("cookbook/data",),
    "profiler": ("cookbook/training",),
    "config file": ("cli",),
    "slurm": ("launch", "engines"),
    "manual optimization": ("cookbook/models",),
    "torch.compile": ("speed/compile",),
    "fast_dev_run": ("guides/validation",),
    "oom": ("speed/out_of_memory",),
    "ctrl-c": ("guides/checkpoints",),
    "hyperparameter search": ("cookbook/training",),
    "deploy": ("cookbook/models",),
}


def test_questions_of_the_first_day_are_two_clicks_and_one_search_away(site: tuple[Path, list[str]]) -> None:
    folder = site[0]
    one = linked(folder, "index.html")
    two = one | {page for first in one if not first.startswith("files/") for page in linked(folder, first)}
    documents = json.loads((folder / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    fields = [
        [re.findall(r"\w+", document.get(field, "").lower()) for document in documents]
        for field in ("title", "keywords")
    ]
    far, lost = [], []
    for query, pages in QUESTIONS.items():
        answer = next(page for page in pages if (folder / f"{page}.html").exists())
        far += [query] if f"{answer}.html" not in two else []
        found = searched(query, documents, fields)
        lost += [(query, found)] if f"{answer}.html" not in found else []
    assert (far, lost) == ([], [])


def linked(folder: Path, page: str) -> set[str]:
    """Return the pages that a page of the site links to."""
    text = (folder / page).read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r'<a [^>]*href="([^":?]+)"', text)}
    found = (os.path.normpath(os.path.join(os.path.dirname(page), link)) for link in links if link.endswith(".html"))
    return {path for path in found if (folder / path).exists()}


def searched(query: str, documents: list[dict[str, Any]], fields: list[list[list[str]]]) -> list[str]:
    """Return the three pages that a search finds first: titles and keywords count most, as in the site's search."""
    words = [word for word in re.findall(r"\w+", query.lower()) if len(word) > 2]
    pages: dict[str, float] = {}
    for texts in fields:
        for document, score in zip(documents, scores(words, texts), strict=True):
            page = document["location"].partition("#")[0]
            pages[page] = max(pages.get(page, 0.0), document.get("boost", 1) * score)
    return sorted(pages, key=lambda page: -pages[page])[:3]


def scores(words: list[str], texts: list[list[str]]) -> list[float]:
    """Return how well each text answers a search: rare words count more, and a short text is more about its words."""
    holders = {word: sum(any(each.startswith(word) for each in text) for text in texts) for word in words}
    weights = {word: math.log(1 + len(texts) / (1 + holders[word])) for word in words}
    return [
        sum(weights[word] * sum(each.startswith(word) for each in text) for word in words) / (1 + len(text) / 5)
        for text in texts
    ]


def test_old_addresses_lead_on(site: tuple[Path, list[str]]) -> None:
    for before, there in script().MOVED.items():
        here, _, part = before.partition("#")
        page = (site[0] / here).read_text(encoding="utf-8")
        target, _, anchor = there.partition("#")
        assert os.path.relpath(target, os.path.dirname(here) or ".") in page, before
        assert f'id="{anchor}"' in (site[0] / target).read_text(encoding="utf-8") or not anchor, there
        assert f'id="{part}"' not in page or not part, f"{before} has not moved"
    pages = {f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in (ROOT / "docs").rglob("*.md")}
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"docs/[\w/]+\.md", path.read_text("utf-8"))
    }
    assert named - pages == set()


def test_links_of_the_pages_lead_to_files(site: tuple[Path, list[str]]) -> None:
    """MkDocs checks those in Markdown; here are also those in HTML, and pictures."""
    broken = set()
    for page in site[0].rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in re.findall(r"(?:href|src|srcset)=\"([^\"#?:]+)[\"#?]", page.read_text(encoding="utf-8")):
            target = link.partition(" ")[0]
            if not (page.parent / target).exists():
                broken.add((page.relative_to(site[0]).as_posix(), target))
    assert broken == set()


def test_no_page_loads_anything_from_elsewhere(site: tuple[Path, list[str]]) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//[^\"]*|<link[^>]*href=\"https?://[^\"]*"
    )
    found = {
        (path.name, link)
        for path in site[0].rglob("*.html")
        for link in loads.findall(path.read_text(encoding="utf-8"))
    }
    assert found == set()
    for path in site[0].rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:", path.read_text(encoding="utf-8")), path.name


def test_the_reference_has_each_public_name(site: tuple[Path, list[str]]) -> None:
    anchors = {
        found
        for page in (site[0] / "reference").glob("*.html")
        for found in re.findall(r'id="(hasten\w*\.[\w.]+)"', page.read_text(encoding="utf-8"))
    }
    names = {f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__}
    assert sorted(names - anchors) == [], "add the module to REFERENCE in scripts/site.py"


def test_tables_of_the_reference_name_what_a_class_has_and_begin_with_what_every_program_calls() -> None:
    rows, _ = script().summary(hasten.Trainer, "Trainer")
    names = re.findall(r"^\| \[?`(\w+)`", "\n".join(rows), re.MULTILINE)
    assert names[:4] == ["fit", "validate", "test", "predict"]
    assert [name for name in names if name not in dir(hasten.Trainer(accelerator="cpu", logger=False))] == []


def test_the_measured_factors_are_those_of_the_results() -> None:
    assert table() in measured.PAGE.read_text(encoding="utf-8"), "run: python -m tests.docs.measured --write"
    rows = measured.ladder("ladder_docstrings.json")
    engineer = next(row["speed"] for row in rows if row["row"] == ENGINEERS_LOOP)
    speeds = {row["line"]: row["speed"] / engineer for row in rows}
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    bars = r"<code>([^<]+)</code></span><span class=\"bar\" style=\"width:([\d.]+)%\"></span>.*?>([\d.]+)\u00d7"
    shown = re.findall(bars, home)
    assert len(shown) == 5
    step = {row["case"]: row["ratio"] for row in measured.ladder("overhead.json")}["default"]
    assert f"took {step:.2f} times as long" in (ROOT / "docs" / "start" / "pytorch.md").read_text(encoding="utf-8")
    for line, width, speed in shown:
        assert f"{speeds[f'L.Trainer({line})']:.2f}" == speed
        assert float(width) == pytest.approx(100 * float(speed) / max(speeds.values()), abs=0.2)


def test_cells_and_blocks_say_how_they_may_wrap() -> None:
    name = "tests/docs/test_site.py::test_cells_and_blocks"
    html = (
        "<table><thead><tr><th>when</th><th>what</th></tr></thead>"
        f"<tbody><tr><td>2026-11-28</td><td>Run <code>{name}</code></td></tr></tbody></table>"
        '<div class="language-sh highlight"><pre>a  # b</pre></div>'
        '<div class="language-text highlight"><pre>a  b</pre></div>'
        '<div class="language-python highlight"><span class="nf">Old</span></div>'
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/a.md"), url="reference/a.html")
    found = script().on_page_content(
        html, page=page, config=SimpleNamespace(extra={"renamed": {"reference/a.md": [("Old", "New")]}})
    )
    assert '<td data-whole="short">2026-11-28</td>' in found
    assert 'sh highlight" data-wrap' in found
    assert 'text highlight"><pre>' in found
    assert '<span class="nf">New</span>' in found
    shown = script().on_post_page(found, page=page)
    assert (
        "<code>tests/<wbr>docs/<wbr>test_<wbr>site.<wbr>py::<wbr>test_<wbr>cells_<wbr>and_<wbr>blocks</code>" in shown
    )


def test_docstrings_become_markdown() -> None:
    script()  # Adds scripts/ to the path.
    from docstrings import in_markdown

    text = "See docs/speed.md, ``docs/fsdp.md`` and :func:`pack`.\n\nExample::\n\n    >>> 1\n    1\n\nSource: `A\nb <https://c.d>`_."
    assert in_markdown(text) == (
        "See [docs/speed.md](../speed.md), [docs/fsdp.md](../fsdp.md) and `pack`.\n\nExamples:\n    >>> 1\n    1\n\n"
        "Source: [A b](https://c.d)."
    )


def script() -> Any:
    """Import ``scripts/site.py``, which is in no package."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install -e '.[docs]'")
    return load_script("site")


def test_links_to_files_of_the_repository_lead_to_their_pages(caplog: pytest.LogCaptureFixture) -> None:
    text = "[a](../src/hasten/loops/fit.py) [b](speed.md#top) [c](../README.md) `[d](../no)` [e](https://x.org/../y)"
    assert script().with_links_of_the_site(text, "docs/plan.md", "plan.md") == (
        "[a](files/src/hasten/loops/fit.py.md) [b](speed.md#top) [c](readme.md) `[d](../no)` [e](https://x.org/../y)"
    )
    deeper = script().with_links_of_the_site(
        "[a](../../tests/models.py) [b](../plan.md)", "docs/start/a.md", "start/a.md"
    )
    assert deeper == "[a](../files/tests/models.py.md) [b](../plan.md)"
    assert caplog.messages == []
    script().with_links_of_the_site("[gone](../src/hasten/gone.py)", "docs/plan.md", "plan.md")
    assert caplog.messages == ["docs/plan.md links to ../src/hasten/gone.py, which does not exist"]
