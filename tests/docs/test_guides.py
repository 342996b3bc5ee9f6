"""The guides list what there is."""

from __future__ import annotations

import re

from hasten import callbacks
from tests.docs.blocks import ROOT


def test_the_guide_of_callbacks_has_each_of_them_with_when_to_use_it() -> None:
    page = (ROOT / "docs" / "guides" / "callbacks.md").read_text(encoding="utf-8")
    table = page.partition("<!-- callbacks -->")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", table, re.MULTILINE))
    assert sorted(rows) == sorted(callbacks.__all__)
    assert all(rows.values())
