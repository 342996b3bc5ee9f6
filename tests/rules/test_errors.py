"""An error or warning of hasten that says what to do says it in a part of its own, ``fix=``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.rules.trees import nodes

SRC = Path(__file__).resolve().parents[2] / "src"
# Messages of two sentences without a fix: the second one is a fact. This number may only fall.
AT_MOST = 42
TESTS = Path(__file__).resolve().parents[1]
# Lines of tests that match the wording of a message, instead of the parts of it that tests/refusals.py asserts. This
# number may only fall.
MATCHES_AT_MOST = 177
_RAISED = re.compile(r"(?:[A-Z]\w*(?:Error|Exception|Refused|Damaged)|WrongType|WeightsOnly)$")
_CALLS = {"make_error", "rank_zero_warn", "warn_once"}
_SECOND_SENTENCE = re.compile(r"[.!?;] (?=[A-Z{`'])")


def text_of(node: ast.expr) -> str:
    """Return a text of the source, with ``{}`` for what is filled in; "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return (text_of(node.left) or "{}") + (text_of(node.right) or "{}")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def without_fix(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each message of two sentences that is made without ``fix=``."""
    for node in nodes(source):
        if not isinstance(node, ast.Call) or any(option.arg == "fix" for option in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _CALLS or _RAISED.match(name):
            texts = [text for argument in node.args if (text := text_of(argument))]
            if texts and _SECOND_SENTENCE.search(texts[-1]):
                yield node.lineno, texts[-1]


def test_messages_of_two_sentences_have_a_fix() -> None:
    found = [
        f"{path.relative_to(SRC)}:{line}: {text}"
        for path in sorted(SRC.rglob("*.py"))
        for line, text in without_fix(path.read_text(encoding="utf-8"))
    ]
    message = "give what is to be written as fix=:"
    assert len(found) <= AT_MOST, "\n".join([message, *found])
    if len(found) < AT_MOST:
        print(f"[tests/rules/test_errors.py] AT_MOST can be lowered to {len(found)}")


def test_the_rule_sees_what_it_should() -> None:
    wrong = 'raise ValueError(f"{name} is off. Use True.")\nwarn_once("key", "It is slow. Use more.")\n'
    right = 'raise make_error(ValueError, f"{name} is off.", fix="Use True.")\nraise ValueError("It is off.")\n'
    assert [line for line, _ in without_fix(wrong)] == [1, 2]
    assert list(without_fix(right)) == []


def test_tests_assert_the_parts_of_a_message_and_not_its_wording() -> None:
    word = "match" + "="
    counted = {path: path.read_text(encoding="utf-8").count(word) for path in sorted(TESTS.rglob("*.py"))}
    found = sum(counted.values()) - counted[TESTS / "refusals.py"]
    assert found <= MATCHES_AT_MOST, f"{found} times {word}; use refused() and warned() of tests/refusals.py"
    if found < MATCHES_AT_MOST:
        print(f"[tests/rules/test_errors.py] MATCHES_AT_MOST can be lowered to {found}")
