"""Makes Markdown of the docstrings, for the reference: examples are code, sources and mentions of pages are links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Examples?::\n\s*\n", re.MULTILINE)
_LINK = re.compile(r"`([^`<>]+?)\s+<(https?://[^>\s]+)>`_{1,2}")
_PAGE = re.compile(r"(?<![\w/(\[])`{0,2}docs/([\w/]+)\.md`{0,2}")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|ref|doc):`~?([^`<]+)`")


def in_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    Args:
        text: with Google's sections and reStructuredText's links.

    Example::

        >>> in_markdown("Source: `a title <https://pytorch.org>`_, docs/speed.md")
        'Source: [a title](https://pytorch.org), [docs/speed.md](../speed.md)'

    """
    text = _EXAMPLE.sub("Examples:\n", text)
    text = _LINK.sub(lambda link: f"[{' '.join(link[1].split())}]({link[2]})", text)
    text = _ROLE.sub(r"`\1`", text)
    return _PAGE.sub(r"[docs/\1.md](../\1.md)", text)


class MarkdownDocstrings(griffe.Extension):
    """Changes each docstring when its object is found."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object; leave private bases and parameters out."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Class):
            obj.bases = [base for base in obj.bases if not str(base).rpartition(".")[2].startswith("_")]
        if isinstance(obj, griffe.Function):
            for name in [each.name for each in obj.parameters if each.name.startswith("_")]:
                del obj.parameters[name]
