"""Values of every type, and texts and bytes that are nearly right."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import math
import types
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

import hasten as L


class Color(enum.Enum):
    """An enum of a program."""

    RED = 1


class Plain:
    """A class of a program."""


def called(*args: object, **kwargs: object) -> float:
    """A function that takes anything."""
    return 1.0


# Texts that arguments may mean something by.
WORDS = (
    *("", " ", "auto", "cpu", "cuda", "gpu", "mps", "tpu", "meta", "cpu:0", "cuda:99", "fsdp", "ddp", "ddp_spawn"),
    *("single_device", "deepspeed", "16-mixed", "bf16-mixed", "64-true", "32", "fp8", "min", "max", "step", "epoch"),
    *("batch", "norm", "value", "warn", "stop", "skip", "error", "simple", "advanced", "pytorch", "exact", "full"),
    *("sharded", "link", "last", "all", "power", "binsearch", "linear", "exponential", "cos", "length", "tokens:4096"),
    *("tokens:-1", "tokens:", "first_token", "device", "train", "validate", "left", "right", "min_size", "sequential"),
    *("2ep", "500st", "90min", "00:12:00:00", "7d", "0s", "1e3", "-1", "0", "1", "2", "nan", "inf", "None", "True"),
    *("no", "yes", "false", "{epoch}", "{epoch:02d}-{val_loss:.2f}", "{", "{}", "{a.b}", "{a[0]}", "../up", "/", "."),
    *(
        "a/b",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 300,
        "\ud800",
        "é",
        "日本",
        "val_loss",
        "weight",
        "file:///tmp/x",
        "l1_unstructured",
    ),
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 50, 100, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 2.0, -0.5, 1.5, 1e-300, 1e308, math.nan, math.inf, -math.inf),
)
OBJECTS: tuple[Any, ...] = (
    *(None, True, False, ..., NotImplemented, 1j, b"", b"ab", bytearray(b"a"), range(3), slice(1), object()),
    *(decimal.Decimal("0.5"), fractions.Fraction(1, 2), datetime.timedelta(seconds=5), datetime.timedelta(-1)),
    *(datetime.timedelta.max, datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1), Path("a"), Path("/"), Color),
    *(Color.RED, Plain, Plain(), int, called, len, print, math, types.SimpleNamespace(a=1), deque([1]), Counter("ab")),
    *(OrderedDict(a=1), torch.tensor(1), torch.tensor(0.5), torch.tensor([1.0, 2.0]), torch.zeros(3, 3)),
    *(torch.tensor(math.nan), torch.zeros(0), torch.device("cpu"), torch.device("meta"), torch.float16),
    *(torch.nn.Linear, torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], 0.1), torch.Generator()),
    *(torch.utils.data.TensorDataset(torch.zeros(2)), torch.utils.data.DataLoader([1, 2])),
    *(numpy.int64(3), numpy.float32(0.5), numpy.bool_(True), numpy.array([1, 2]), numpy.array(2), numpy.str_("min")),
    *(ValueError("x"), ValueError, L.Callback, L.Callback(), L.LightningModule, L.Trainer, "a".upper, iter([1])),
)

scalars = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(NUMBERS),
    st.sampled_from(OBJECTS),
    st.text(max_size=8),
    st.integers(-(10**6), 10**6),
    st.floats(),
)
_hashable = st.one_of(st.sampled_from(WORDS), st.integers(-3, 3), st.none(), st.text(max_size=3), st.just((1, "a")))
# A value of any type, as a program might pass it by mistake.
anything: st.SearchStrategy[Any] = st.one_of(
    scalars,
    scalars,
    st.lists(scalars, max_size=3),
    st.lists(scalars, max_size=2).map(tuple),
    st.frozensets(_hashable, max_size=2),
    st.sets(_hashable, max_size=2),
    st.dictionaries(_hashable, scalars, max_size=2),
    st.lists(st.lists(scalars, max_size=2), max_size=2),
)

# What a checkpoint may hold.
_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([number for number in NUMBERS if abs(number) < 2**63 or isinstance(number, float)]),
    st.integers(-5, 5),
    st.floats(),
    st.sampled_from(["", "a", "min", "1", "日本", "../x", "last.ckpt"]),
    st.text(st.characters(codec="utf-8"), max_size=4),
    st.sampled_from([b"", b"ab", 1j, torch.float32, torch.device("cpu"), torch.Size([2])]),
    st.sampled_from([torch.tensor(1), torch.tensor(-1.0), torch.zeros(0), torch.ones(3), torch.ones(2, 2).half()]),
)
_keys = st.one_of(st.sampled_from(["", "a", "state", "step"]), st.integers(-1, 2), st.none())
plain: st.SearchStrategy[Any] = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(_keys, inner, max_size=3),
    ),
    max_leaves=4,
)


@st.composite
def changed_bytes(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Return bytes with a few changes: flipped bits, parts that are gone, repeated or replaced, and a cut end."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        how = draw(st.sampled_from(("flip", "drop", "repeat", "put", "cut")))
        if how == "flip" and data:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif how == "drop":
            del data[start:end]
        elif how == "repeat":
            data[start:start] = data[start:end] * draw(st.integers(1, 3))
        elif how == "put":
            data[start:end] = draw(st.one_of(st.binary(max_size=4), st.sampled_from(_HOSTILE)))
        elif how == "cut":
            del data[start:]
    return bytes(data)


_HOSTILE = (
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"'", b"\n", b"\r", b"\r\n", b",", b"{", b"}", b"[", b"]", b":", b"- "),
    *(b"NaN", b"-Infinity", b"1e999", b"null", b"true", b"-1", b"9" * 30, b"!!python/object:os.system", b"&a [*a]"),
    *(b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\x0c", b"\\ud800", b"*a", b"<<: 1", b"[" * 600),
)
