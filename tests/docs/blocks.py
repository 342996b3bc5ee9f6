"""The code blocks of the documentation, and how they are run. ``python -m tests.docs.blocks`` counts them.

The blocks of a page run in order, with the names of the blocks before them, in one empty folder. A comment above a
block changes that:

- ``<!-- not run: reason -->``: it cannot run here (8 GPUs, SLURM, a file that the page does not make). It is compiled.
- ``<!-- run first: code -->``: lines that run before the block and are not shown.
- ``<!-- raises ValueError: part of the message -->``: the block ends with this error.
- ``<!-- run -->`` above a ``sh`` block: its ``python`` and ``hasten`` commands run. Otherwise the options of its
  ``hasten`` commands are checked.

``title="train.py"`` after the language writes a block to that file. The block is not run by itself if a ``sh`` block
runs the file.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Pages whose Python blocks other tests run.
ELSEWHERE = {
    "README.md": "tests/commands/test_readme.py",
    "docs/cli.md": "tests/cli/test_programs.py",
}
LANGUAGES = {"python", "sh", "yaml", "toml", "json", "html", "text", "console"}

_BLOCK = re.compile(
    r"(?P<comment>(?:^ *<!--(?:(?!-->).)*-->\s*?\n(?: *\n)?)*)"
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: path in the repository.
        line: the number of its first line of code.
        language: the first word after the fence.
        title: the file it is, if it says so.
        text: its code, without the indent of the fence.
        not_run: the reason why it is only compiled; empty if it runs.
        first: code to run before it.
        raises: the name of the error it ends with, and part of its message.
        run: a ``sh`` block whose commands run.

    """

    page: str
    line: int
    language: str
    title: str
    text: str
    not_run: str
    first: str
    raises: tuple[str, str] | None
    run: bool


def pages() -> list[str]:
    """Return the pages of the documentation and the README, as paths in the repository."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return blocks_in((ROOT / page).read_text(encoding="utf-8"), page)


def blocks_in(text: str, page: str) -> list[Block]:
    """Return the fenced blocks of a text, see the top of this file."""
    blocks = []
    for found in _BLOCK.finditer(text):
        comment = found["comment"]
        words = found["info"].split()
        title = re.search(r'title="([^"]+)"', found["info"])
        not_run = re.search(r"<!-- not run: (.*?) -->", comment, re.DOTALL)
        first = re.search(r"<!-- run first:(.*?)-->", comment, re.DOTALL)
        raises = re.search(r"<!-- raises (\w+)(?:: (.*?))? -->", comment, re.DOTALL)
        blocks.append(
            Block(
                page=page,
                line=text.count("\n", 0, found.start("text")) + 1,
                language=words[0] if words else "",
                title=title[1] if title else "",
                text=textwrap.dedent(found["text"]),
                not_run=not_run[1] if not_run else "",
                first=textwrap.dedent(first[1].lstrip(" ")) if first else "",
                raises=(raises[1], raises[2] or "") if raises else None,
                run="<!-- run -->" in comment,
            )
        )
    return blocks


def commands_of(block: Block) -> list[str]:
    """Return the commands of a ``sh`` block, or those after the prompts of a ``console`` block, without comments."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    if block.language == "console":
        lines = [line for line in lines if line.startswith("$ ")]
    bare = (re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ") for line in lines)
    return [line for line in bare if line]


def table() -> str:
    """Return the number of blocks of each page: run, checked, compiled only, and output."""
    rows = [f"{'page':<40}{'run':>6}{'checked':>9}{'not run':>9}{'output':>8}"]
    total = [0, 0, 0, 0]
    for page in pages():
        blocks = blocks_of(page)
        code = [block for block in blocks if block.language in ("python", "sh")]
        left = [block for block in code if block.not_run]
        runs = [block for block in code if not block.not_run and (block.language == "python" or block.run)]
        numbers = [len(runs), len(code) - len(left) - len(runs), len(left), len(blocks) - len(code)]
        total = [one + other for one, other in zip(total, numbers, strict=True)]
        if blocks:
            rows.append(f"{page:<40}{numbers[0]:>6}{numbers[1]:>9}{numbers[2]:>9}{numbers[3]:>8}")
    rows.append(f"{f'{len(pages())} pages':<40}{total[0]:>6}{total[1]:>9}{total[2]:>9}{total[3]:>8}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
