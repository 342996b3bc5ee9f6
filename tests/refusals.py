"""What tests say of a refusal: its class, the argument, and what is to be written; not how it is worded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest

from hasten._lib.errors import parts_of

Kinds: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]


@contextmanager
def refused(kind: Kinds, argument: str = "", *, fix: str = "") -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of hasten in the block, and yield what pytest knows of it.

    Args:
        kind: its class, or one of several.
        argument: the argument that it names; "" if it is about none.
        fix: a part of what it tells to write: the code, not the sentence around it.

    """
    with pytest.raises(kind) as caught:
        yield caught
    parts = parts_of(caught.value)
    assert parts.argument == argument, f"the error is about {parts.argument!r}: {caught.value}"
    assert fix in parts.fix, f"it tells to write {parts.fix!r}: {caught.value}"
