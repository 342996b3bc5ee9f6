"""Pages and sentences are short, lines of code fit, and a reader sees each name that a program uses.

``python -m tests.docs.test_pages`` lists what is too long, and the lines that two programs side by side should mark.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from collections.abc import Iterator

import pytest

from tests.docs.blocks import ROOT, Block, blocks_in, blocks_of, pages

# A page that takes longer to read than ten minutes is two pages.
MOST_WORDS = 2500
MOST_WORDS_OF_A_SENTENCE = 35
# What is shown beside the navigation at 1,280 pixels.
MOST_CHARACTERS_OF_A_LINE = 88
# Where nearly all lines differ, marks say nothing.
MOST_MARKED = 0.75
# What the reader's own program has.
OWN = {"data", "loader", "model", "train_loader", "trainer", "val_loader"}

_CODE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}).*?^(?P=indent)(?P=fence) *$", re.MULTILINE | re.DOTALL)
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_BLOCK_TAG = r"</?(?:p|div|h\d|li|ol|ul|br|picture|source|img|strong|a|table|tr|td)\b[^>]*>"
# What begins a text of its own: an item, a row, a heading, a tab, an admonition.
_OWN_TEXT = re.compile(r"^\s*(?:[-*] |\d+\. |\||#|===|!!!|\?\?\?|>)")


def texts_of(text: str) -> Iterator[str]:
    """Yield the paragraphs, items and cells of a page, without code blocks and comments, and a link as its words."""
    text = re.sub(r"<!--.*?-->", "", _CODE.sub("\n", _FRONT.sub("", text)), flags=re.DOTALL)
    # Code in a line is one word, whatever is in it.
    text = re.sub(r"(`+)(?:(?!\1)[^`]|(?!\1)`)+\1", "CODE", text)
    text = re.sub(r"<[^>]+>", "", re.sub(_BLOCK_TAG, "\n\n", text))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if lines and (not line.strip() or _OWN_TEXT.match(line)):
            joined = " ".join(lines)
            yield from joined.strip("|").split("|") if joined.startswith("|") else [joined]
            lines = []
        if line.strip():
            lines.append(line.strip())


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a page."""
    for part in texts_of(text):
        # "e.g. this" and "3.5" go on; a sentence begins with a capital, a number, code, a mark or the package's name.
        yield from re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[A-Z0-9\"'(*_\[]|hasten|torch)", part.strip(" -*#>"))


def words_in(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def long_sentences(page: str) -> list[str]:
    """Return the sentences of a page that have too many words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [each for each in sentences_of(text) if words_in(each) > MOST_WORDS_OF_A_SENTENCE]


@pytest.mark.parametrize("page", pages())
def test_sentences_are_short(page: str) -> None:
    assert long_sentences(page) == [], f"{page}: write two sentences, or a list"


def test_pages_are_short() -> None:
    """All words count, also in tables and programs. Pages made of docstrings, to look things up in, are not counted."""
    words = {page: len((ROOT / page).read_text(encoding="utf-8").split()) for page in pages()}
    assert {page: found for page, found in words.items() if found > MOST_WORDS} == {}, "make two pages of it"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_size_that_a_page_names_is_that_of_the_tree(page: str) -> None:
    lines = sum(len(path.read_bytes().splitlines()) for path in (ROOT / "src").rglob("*.py"))
    tests = sum(
        len(re.findall(rb"^ *(?:async )?def test_", path.read_bytes(), re.MULTILINE))
        for path in (ROOT / "tests").rglob("test_*.py")
    )
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.search(r"about ([\d,]+) lines of Python \([^)]*\),? (?:and )?([\d,]+) tests", text)
    assert named is not None
    for found, count in zip(named.groups(), (lines, tests), strict=True):
        assert int(found.replace(",", "")) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("page", ["docs/cookbook/index.md", "docs/cookbook/models.md", "examples/README.md"])
def test_programs_are_as_short_as_a_page_says(page: str) -> None:
    says = re.search(r"at most (\d+) lines", (ROOT / page).read_text(encoding="utf-8"))
    assert says is not None
    if page.startswith("docs/"):
        cookbook = [f"docs/cookbook/{path.name}" for path in (ROOT / "docs/cookbook").glob("*.md")]
        lengths = {f"{each.page}:{each.line}": each.text.count("\n") for name in cookbook for each in blocks_of(name)}
    else:
        lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert {where: lines for where, lines in lengths.items() if lines > int(says[1])} == {}


def test_sentences_are_told_apart() -> None:
    text = (
        "---\ntitle: A b\n---\n# Title\n\nOne is, e.g. this\none. `Two. Three.` is [a link](x.md). 4 is last.\n\n"
        "```sh\nnot. This.\n```\n- five\n- six\n\n| seven | eight. Nine |\n<!-- not this -->\n"
    )
    assert [each.strip() for each in sentences_of(text)] == [
        *("Title", "One is, e.g. this one.", "CODE is a link.", "4 is last.", "five", "six", "seven", "eight.", "Nine")
    ]


@pytest.mark.parametrize("page", [page for page in pages() if page != "README.md"])
def test_lines_of_code_fit(page: str) -> None:
    """Output keeps the lines that programs print."""
    wide = [
        f"{page}:{block.line + number}: {line}"
        for block in blocks_of(page)
        if block.language in ("python", "sh")
        for number, line in enumerate(block.text.splitlines())
        if len(line) > MOST_CHARACTERS_OF_A_LINE
    ]
    assert wide == []


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a program defines, and those that it uses."""
    defined, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return defined, used


@pytest.mark.parametrize("page", pages())
def test_each_name_of_a_program_is_on_the_page(page: str) -> None:
    """In the program, in one above it, or named in the text. The lines of ``run first`` are not shown."""
    known, unknown = {*dir(builtins), "__file__", "__name__", *OWN}, []
    text = _CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for block in blocks_of(page):
        if block.language == "python":
            defined, used = names_in(ast.parse(block.text))
            known |= defined
            unknown += [f"{page}:{block.line}: {name}" for name in used - known if f"`{name}`" not in text]
    assert unknown == [], "import or define it where the reader sees it"


def compared(text: str, page: str) -> Iterator[tuple[Block, Block]]:
    """Yield the programs that stand side by side on a page."""
    for part in re.findall(r'<div class="compare" markdown>\n(.*?)\n</div>\n</div>', text, re.DOTALL):
        programs = [block for block in blocks_in(part, page) if block.language == "python"]
        if len(programs) == 2:
            yield programs[0], programs[1]


def changed_lines(before: str, after: str) -> tuple[str, str]:
    """Return the lines that two programs do not share, as ``hl_lines`` of each: "1 4-6"."""
    lines = [text.splitlines() for text in (before, after)]
    bare = [[line.strip() for line in text] for text in lines]
    marked: tuple[list[int], list[int]] = ([], [])
    for kind, *ends in difflib.SequenceMatcher(None, *bare, autojunk=False).get_opcodes():
        if kind != "equal":
            for numbers, text, start, stop in zip(marked, lines, ends[::2], ends[1::2], strict=True):
                numbers += [number + 1 for number in range(start, stop) if text[number].strip()]
    if all(len(numbers) > MOST_MARKED * sum(map(bool, text)) for numbers, text in zip(marked, bare, strict=True)):
        return "", ""
    shown = []
    for numbers in marked:
        runs: list[list[int]] = []
        for number in numbers:
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        shown.append(" ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs))
    return shown[0], shown[1]


def marks(page: str) -> list[tuple[str, str]]:
    """Return the ``hl_lines`` that the programs side by side on a page have, and those that they should have."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for pair in compared(text, page):
        for block, expected in zip(pair, changed_lines(*(each.text for each in pair)), strict=True):
            info = re.search(rf"^```python(.*)\n{re.escape(block.text)}", text, re.MULTILINE)
            given = re.search(r'hl_lines="([^"]*)"', info[1]) if info else None
            found.append((given[1] if given else "", expected))
    return found


def test_changed_lines_are_marked() -> None:
    assert changed_lines("a\nb\n\nc\nd\n", "a\nx\ny\n\nc\n") == ("2 5", "2-3")
    pairs = {page: marks(page) for page in pages()}
    assert sum(map(len, pairs.values())) >= 6
    wrong = {page: [pair for pair in found if pair[0] != pair[1]] for page, found in pairs.items()}
    assert {page: found for page, found in wrong.items() if found} == {}, 'write ```python hl_lines="..."'


if __name__ == "__main__":
    for page in pages():
        content = (ROOT / page).read_text(encoding="utf-8")
        if len(content.split()) > MOST_WORDS:
            print(f"{page}: {len(content.split())} words")
        for sentence in long_sentences(page):
            print(f"{page}: {words_in(sentence)} words: {sentence}")
        for given, expected in marks(page):
            if given != expected:
                print(f'{page}: hl_lines="{expected}" instead of "{given}"')
