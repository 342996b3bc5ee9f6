"""What tests say of a refusal or a warning: its class, the argument, what is to be written, and facts; no wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest

from hasten._lib.errors import message_of, parts_of

Kinds: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]
WarningKinds: TypeAlias = type[Warning] | tuple[type[Warning], ...]
Facts: TypeAlias = str | tuple[str, ...]


@contextmanager
def refused(
    kind: Kinds, argument: str = "", *, fix: str = "", says: Facts = ()
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of hasten in the block, and yield what pytest knows of it.

    Args:
        kind: its class, or one of several.
        argument: the argument that it names; "" if it is about none.
        fix: a part of what it tells to write: the code, not the sentence around it.
        says: facts that its message or its notes name, such as a file, a value or a method; not the words around them.

    """
    with pytest.raises(kind) as caught:
        yield caught
    parts = parts_of(caught.value)
    text = "\n".join([message_of(parts.what, parts.fix), *getattr(caught.value, "__notes__", ())])
    assert parts.argument == argument, f"the error is about {parts.argument!r}: {text}"
    assert fix in parts.fix, f"it tells to write {parts.fix!r}: {text}"
    for fact in _listed(says):
        assert fact in text, f"it does not say {fact!r}: {text}"


@contextmanager
def warned(kind: WarningKinds, *, fix: str = "", says: Facts = ()) -> Iterator[pytest.WarningsRecorder]:
    """Expect a warning in the block, and yield the warnings of it; those of other texts are left to the caller.

    Args:
        kind: its class, or one of several.
        fix: a part of what it tells to write: the code, not the sentence around it.
        says: facts that it names; not the words around them.

    """
    facts = [fact for fact in (*_listed(says), fix) if fact]
    with pytest.warns(kind, match="(?s)" + "".join(f"(?=.*{re.escape(fact)})" for fact in facts)) as caught:
        yield caught
    if fix:
        told = [parts_of(each.message).fix if isinstance(each.message, Warning) else "" for each in caught]
        assert any(fix in each for each in told), f"they tell to write {told}"


def _listed(says: Facts) -> tuple[str, ...]:
    return (says,) if isinstance(says, str) else says
