"""What ``mkdocs.yml`` adds to the pages of ``docs/``: pages for the files of the repository that they link to.

A link such as ``../src/hasten/loops/fit.py`` works where the repository is read. On the site it leads to a page with
the text of that file, which is made here. Of the Markdown files outside ``docs/``, those in ``PAGES`` are pages of the
site.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from docstrings import in_markdown  # noqa: E402

LOG = logging.getLogger("mkdocs.hooks.site")

# Markdown files outside docs/ and their pages.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
# Pages of the reference: title, what it is about, and the names on it, or the modules whose public names it has.
REFERENCE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "trainer": ("Trainer", "Runs a module: training, validation, test and prediction.", ("hasten.Trainer",)),
    "module": ("LightningModule", "The model, its steps and its optimizers.", ("hasten.LightningModule",)),
    "datamodule": ("LightningDataModule", "The data of a run.", ("hasten.LightningDataModule",)),
    "fabric": ("Fabric", "Devices, precision and strategies for your own loop.", ("hasten.Fabric", "hasten.fabric")),
    "callback": ("Callback", "The hooks that a callback can have.", ("hasten.Callback",)),
    "callbacks": ("Callbacks", "The callbacks that come with hasten.", ("hasten.callbacks",)),
    "loggers": ("Loggers", "Where logged values go.", ("hasten.loggers",)),
    "strategies": ("Strategies", "How one model lives on several devices.", ("hasten.strategies",)),
    "plugins": (
        "Plugins and precisions",
        "What `plugins=` takes: precisions, environments, ways to write checkpoints.",
        ("hasten.plugins", "hasten.precision"),
    ),
    "accelerators": ("Accelerators", "Kinds of devices.", ("hasten.accelerators",)),
    "data": ("Data", "Loaders, samplers and packing.", ("hasten.data",)),
    "optim": ("Optimizers", "hasten's optimizers, and what `configure_optimizers` may return.", ("hasten.optim",)),
    "speed": ("Speed", "Functions that speed a model up, and levers.", ("hasten_tools.speed.levers",)),
    "profilers": ("Profilers", "Where the time of a run goes.", ("hasten.profilers",)),
    "tuner": ("Tuner", "The search for a batch size and a learning rate.", ("hasten.tuner",)),
    "report": ("Reports", "Model summaries and plots.", ("hasten.report",)),
    "cli": ("LightningCLI", "Command line programs.", ("hasten.cli",)),
    "compat": ("Lightning's names", "Programs written for Lightning, unchanged.", ("hasten_lightning",)),
    "transformers": ("Hugging Face's Trainer", "Its programs, with `TrainingArguments`.", ("hasten.transformers",)),
    "demos": ("Demos", "Small models and data for tests and examples.", ("hasten.demos",)),
    "functions": ("Functions", "The functions at the top of the package.", ("hasten",)),
    "utilities": (
        "Utilities",
        "Helpers under Lightning's names.",
        (
            "hasten.utilities",
            *(f"hasten.utilities.{name}" for name in (
                "data", "enums", "exceptions", "hooks", "imports", "memory", "parsing", "rank_zero", "types", "warnings"
            )),
        ),
    ),
}  # fmt: skip
# Of modules without __all__, the names of the interface.
NAMES = {"hasten_tools.speed.levers": ["Lever", "register", "unregister", "known_levers"]}
LANGUAGES = {".py": "python", ".ipynb": "json", ".json": "json", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml"}
# Longer files would be most of the index of the search.
MOST_CHARACTERS = 100_000

LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}).*?^(?P=indent)(?P=fence) *$|`[^`\n]+`", re.MULTILINE | re.DOTALL
)


def links_of(text: str) -> list[re.Match[str]]:
    """Return the relative links of a Markdown text, without those in code."""
    blank = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    return list(LINK.finditer(blank))


def place(source: str, target: str) -> str | None:
    """Return the path in the repository that a link from one of its files leads to; None if it leads out of it.

    Args:
        source: the file with the link, as a path in the repository.
        target: the link.

    """
    parts: list[str] = []
    for part in (PurePosixPath(source).parent / target).parts:
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def page_of(path: str) -> str:
    """Return the page, as a path in ``docs/``, that shows a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # MkDocs leaves files and folders out whose names begin with a dot.
    return PAGES.get(path) or f"files/{path.removeprefix('.') or 'index'}.md"


def relative(page: str, source: str) -> str:
    """Return the link from one page to another."""
    here, there = PurePosixPath(source).parent.parts, PurePosixPath(page).parts
    same = 0
    while same < min(len(here), len(there) - 1) and here[same] == there[same]:
        same += 1
    return "/".join([*[".."] * (len(here) - same), *there[same:]])


def with_links_of_the_site(text: str, source: str, page: str) -> str:
    """Return a text whose links to files of the repository lead to their pages.

    Args:
        text: Markdown.
        source: the file it is from, as a path in the repository.
        page: the page it is on, as a path in ``docs/``.

    """
    for link in reversed(links_of(text)):
        path = place(source, link[2])
        if path is None or not (ROOT / path).exists():
            LOG.warning("%s links to %s, which does not exist", source, link[2])
            continue
        text = text[: link.start(2)] + relative(page_of(path), page) + text[link.end(2) :]
    return text


def without_links_of_the_host(text: str) -> str:
    """Return a text from outside ``docs/``, without links to pages of the repository's host, and with its pictures."""
    titles = re.findall(r"^\[([^\]\n]+)\]: \.\./\.\./.*\n?", text, flags=re.MULTILINE)
    text = re.sub(r"^\[[^\]\n]+\]: \.\./\.\./.*\n?", "", text, flags=re.MULTILINE)
    for title in titles:
        text = text.replace(f"[{title}]", title)
    return re.sub(r'(src|srcset)="docs/', r'\1="', text)


def text_of(path: str) -> str:
    """Return a page that shows a file, or lists a folder, of the repository."""
    at = ROOT / path
    if at.is_dir():
        names = sorted(
            f"{entry.name}/" if entry.is_dir() else entry.name
            for entry in at.iterdir()
            if not entry.name.startswith((".", "__pycache__"))
        )
        return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n```text\n" + "\n".join(names) + "\n```\n"
    text = at.read_text(encoding="utf-8")[:MOST_CHARACTERS]
    fence = "`" * max(3, *(len(found) + 1 for found in re.findall(r"`{3,}", text)), 3)
    language = LANGUAGES.get(at.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def public_names() -> dict[str, dict[str, Any]]:
    """Return the public names on each page of the reference, "module.name", with their objects, in the order shown."""
    pages: dict[str, dict[str, Any]] = {}
    for page, (_, _, places) in REFERENCE.items():
        pages[page] = {}
        for place in places:
            module, _, name = place.rpartition(".")
            if name[0].isupper():
                pages[page][place] = getattr(importlib.import_module(module), name)
                continue
            found = importlib.import_module(place)
            pages[page] |= {f"{place}.{name}": getattr(found, name) for name in NAMES.get(place) or found.__all__}
    return pages


def object_path(thing: Any) -> str | None:
    """Return where a class or function of hasten is defined; None for anything else."""
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", "")
    if (inspect.isclass(thing) or inspect.isroutine(thing)) and module.startswith("hasten") and "<" not in name:
        return f"{module}.{name}"
    return None


def first_sentence(thing: Any) -> str:
    """Return the first paragraph of a docstring, for a row of a table."""
    text = inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0] if object_path(thing) else ""
    return in_markdown(" ".join(text.split())).replace("|", r"\|")


def reference(*, whole: bool) -> tuple[dict[str, str], str]:
    """Return the pages of the reference, by their paths in ``docs/``, and the tables of all names that lead to them.

    Args:
        whole: with the text of each docstring; otherwise the names only.

    """
    pages: dict[str, str] = {}
    shown: dict[str, tuple[str, str]] = {}
    rows = ["", "## Classes", "", "| name | |", "|---|---|"]
    for page, names in public_names().items():
        title, about, places = REFERENCE[page]
        text = [f"# {title}", "", about, ""]
        if "." not in places[0] or places[0].rpartition(".")[2][0].islower():
            rows += ["", f"## {title}", "", f"{about} In " + ", ".join(f"`{place}`" for place in places[:1]) + ".", ""]
            rows += ["| name | |", "|---|---|"]
        for name, thing in names.items():
            path, short = object_path(thing), name.rpartition(".")[2]
            if (path or short) in shown:
                other_page, other = shown[path or short]
                text += [f'<span id="{name}"></span>`{name}` is [`{other}`]({other_page}.md#{other}).', ""]
                continue
            shown[path or short] = (page, name)
            rows.append(f"| [`{short}`]({page}.md#{name}) | {first_sentence(thing)} |")
            text += [f'<span id="{name}"></span>', ""]
            if path is None:
                is_object = inspect.isclass(thing) or inspect.isroutine(thing)
                value = f"{thing.__module__}.{thing.__qualname__}" if is_object else repr(thing)
                text += [f"## {short}", "", "```python", re.sub(r" at 0x\w+", "", value), "```", ""]
            elif whole:
                text += [f"::: {path}", "    options:", f"      heading: {short}"]
                text += ["      inherited_members: true", ""] if name in places else [""]
            else:
                text += [f"## {short}", ""]
        pages[f"reference/{page}.md"] = "\n".join(text) + "\n"
    return pages, "\n".join(rows) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside ``docs/`` that a page links to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {path: (ROOT / path).read_text(encoding="utf-8") for path in PAGES}
    wanted = set(PAGES)
    for source, text in texts.items():
        for link in links_of(text):
            path = place(source, link[2])
            if path is not None and not path.startswith("docs/") and (ROOT / path).exists():
                wanted.add(path)
    for path in sorted(wanted):
        page = page_of(path)
        if path in PAGES:
            content = without_links_of_the_host(with_links_of_the_site(texts[path], path, page))
        else:
            content = text_of(path)
        files.append(File.generated(config, page, content=content))
    pages, tables = reference(whole=config.extra["api"])
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    config.extra["reference"] = tables
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let the links of a page in ``docs/`` lead to pages of the site, and complete the index of the reference."""
    if page.file.generated_by:
        return markdown
    markdown = with_links_of_the_site(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
    if page.file.src_uri == "reference/index.md":
        markdown = markdown.rpartition("\n\n")[0] + "\n" + config.extra["reference"]
    return markdown
