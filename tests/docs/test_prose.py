"""The pages are short, and so are their sentences.

``python -m tests.docs.test_prose`` lists what is too long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.docs.blocks import ROOT, pages

# A page that takes longer to read than ten minutes is two pages.
MOST_WORDS = 2500
MOST_WORDS_OF_A_SENTENCE = 35

_CODE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}).*?^(?P=indent)(?P=fence) *$", re.MULTILINE | re.DOTALL)
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_BLOCK_TAG = r"</?(?:p|div|h\d|li|ol|ul|br|picture|source|img|strong|a|table|tr|td)\b[^>]*>"
# What begins a text of its own: an item, a row, a heading, a tab, an admonition.
_OWN = re.compile(r"^\s*(?:[-*] |\d+\. |\||#|===|!!!|\?\?\?|>)")


def texts_of(text: str) -> Iterator[str]:
    """Yield the paragraphs, items and cells of a page, without code blocks and comments, and a link as its words."""
    text = re.sub(r"<!--.*?-->", "", _CODE.sub("\n", _FRONT.sub("", text)), flags=re.DOTALL)
    # Code in a line is one word, whatever is in it.
    text = re.sub(r"(`+)(?:(?!\1)[^`]|(?!\1)`)+\1", "CODE", text)
    text = re.sub(r"<[^>]+>", "", re.sub(_BLOCK_TAG, "\n\n", text))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("    ") and not lines and not _OWN.match(line):
            continue  # Indented code.
        if lines and (not line.strip() or _OWN.match(line)):
            yield from _cells(" ".join(lines))
            lines = []
        if line.strip():
            lines.append(line.strip())


def _cells(text: str) -> list[str]:
    return text.strip("|").split("|") if text.startswith("|") else [text]


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


def test_sentences_are_told_apart() -> None:
    text = (
        "---\ntitle: A b\n---\n# Title\n\nOne is, e.g. this\none. `Two. Three.` is [a link](x.md). 4 is last.\n\n"
        "```sh\nnot. This.\n```\n- five\n- six\n\n| seven | eight. Nine |\n<!-- not this -->\n"
    )
    assert list(sentences_of(text)) == [
        *("Title", "One is, e.g. this one.", "CODE is a link.", "4 is last.", "five", "six", "seven", "eight.", "Nine")
    ]


if __name__ == "__main__":
    for page in pages():
        found = (ROOT / page).read_text(encoding="utf-8")
        if len(found.split()) > MOST_WORDS:
            print(f"{page}: {len(found.split())} words")
        for sentence in long_sentences(page):
            print(f"{page}: {words_in(sentence)} words: {sentence}")
