"""What ``mkdocs.yml`` adds to the pages of ``docs/``: pages for the files of the repository that they link to.

A link such as ``../src/hasten/loops/fit.py`` works where the repository is read. On the site it leads to a page with
the text of that file, which is made here. Of the Markdown files outside ``docs/``, those in ``PAGES`` are pages of the
site.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")

# Markdown files outside docs/ and their pages.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
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
    return PAGES.get(path) or f"files/{path or 'index'}.md"


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
    """Return the text of a changelog whose titles do not link to pages of the host of the repository."""
    titles = re.findall(r"^\[([^\]\n]+)\]: \.\./\.\./.*\n?", text, flags=re.MULTILINE)
    text = re.sub(r"^\[[^\]\n]+\]: \.\./\.\./.*\n?", "", text, flags=re.MULTILINE)
    for title in titles:
        text = text.replace(f"[{title}]", title)
    return text


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


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside ``docs/`` that a page links to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {path: (ROOT / path).read_text(encoding="utf-8") for path in PAGES if path != "README.md"}
    wanted = set(PAGES) - {"README.md"}
    for source, text in texts.items():
        for link in links_of(text):
            path = place(source, link[2])
            if path is not None and not path.startswith("docs/") and (ROOT / path).exists():
                wanted.add(path)
    for path in sorted(wanted - {"README.md"}):
        page = page_of(path)
        if path in PAGES:
            content = without_links_of_the_host(with_links_of_the_site(texts[path], path, page))
        else:
            content = text_of(path)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page in ``docs/`` lead to pages of the site."""
    if page.file.generated_by:
        return markdown
    return with_links_of_the_site(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
