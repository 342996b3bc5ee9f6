"""Templates of programs: Python source with directives in comments; only the parts that are needed remain.

A template reads like the program it becomes. Directives stand alone on a line:

- ``#? condition`` ... ``#: condition`` ... ``#:`` ... ``#.``: if, else if, else, end. Conditions are
  expressions of Python.
- ``#snippet name PARAMETERS`` ... ``#end``: lines with a name; ``#@ name arguments`` inserts them with the indentation
  of the directive, ``#@+2 name arguments`` with two levels more.
- ``<<name>>`` inserts a value; alone on a line, a list of lines with the same indentation, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

_VALUE = re.compile(r"<<(\w+)(?: (\w+))?>>")


def fill(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a template of this package that are needed."""
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return Template(text.splitlines(), values).lines()


class Template:
    """Lines with directives, and the values that fill them.

    Example::

        >>> Template(["#? greets", "print('<<name>>')", "#:", "pass", "#."], {"greets": True, "name": "you"}).lines()
        ["print('you')"]

    """

    def __init__(self, lines: Sequence[str], values: Mapping[str, Any]) -> None:
        self._values = values
        self._snippets: dict[str, tuple[list[str], list[str]]] = {}
        self._body: list[str] = []
        into = self._body
        for line in lines:
            if line.startswith("#snippet "):
                _, name, *parameters = line.split()
                into = []
                self._snippets[name] = parameters, into
            elif line == "#end":
                into = self._body
            else:
                into.append(line)

    def lines(self) -> list[str]:
        """Return the lines that remain, filled."""
        return list(self._filled(self._body, ""))

    def _filled(self, lines: Sequence[str], indent: str) -> Iterator[str]:
        # Of each open condition: whether its present branch remains, and whether a branch did so far.
        branches: list[list[bool]] = []
        for line in lines:
            word, _, rest = line.strip().partition(" ")
            if word == "#?":
                kept = all(now for now, _ in branches) and self._holds(rest)
                branches.append([kept, kept])
            elif word == "#:":
                before = all(now for now, _ in branches[:-1])
                done = branches[-1][1]
                kept = before and not done and (not rest or self._holds(rest))
                branches[-1] = [kept, done or kept]
            elif word == "#.":
                branches.pop()
            elif not all(now for now, _ in branches):
                continue
            elif word.startswith("#@"):
                own = line[: len(line) - len(line.lstrip())] + "    " * int(word[2:] or 0)
                yield from self._inserted(rest, indent + own)
            else:
                yield from self._with_values(line, indent)
        assert not branches, "a condition of the template is open at its end"

    def _holds(self, condition: str) -> bool:
        return bool(eval(condition, {}, self._values))

    def _inserted(self, call: str, indent: str) -> Iterator[str]:
        name, *arguments = "".join(self._with_values(call, "")).split()
        parameters, lines = self._snippets[name]
        given = dict(zip(parameters, [*arguments, *[""] * len(parameters)], strict=False))
        for parameter, argument in given.items():
            spaced = argument.replace(",", ", ")
            lines = [
                line.replace(f"<<comma {parameter}>>", f", {spaced}" if spaced else "").replace(parameter, spaced)
                for line in lines
            ]
        yield from self._filled(lines, indent)

    def _with_values(self, line: str, indent: str) -> Iterator[str]:
        alone = re.fullmatch(r"( *)<<(\w+)>>", line)
        value = self._values[alone[2]] if alone else None
        if alone and not isinstance(value, str):
            yield from ((indent + alone[1] + one) if one else "" for one in value or ())
            return
        line = _VALUE.sub(lambda found: str(self._values[found[1]]), line)
        yield (indent + line) if line else ""
