"""Checkpoints whose entries, bytes, archives or pickles are not what a run has written."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import shutil
import signal
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import hasten as L
from hasten.checkpoint import files
from hasten.checkpoint.files import CheckpointDamaged, CheckpointRefused
from tests.callbacks.resuming import SaveAt
from tests.fuzz.arguments import shortened, where
from tests.fuzz.running import Found, in_empty_folder, quietly
from tests.fuzz.values import changed_bytes, plain
from tests.models import Classifier, loader, quiet

# A file that was loaded for so long is never loaded.
_PATIENCE_SECONDS = 30.0
PATH = Path("bad.ckpt")


@contextmanager
def _in_time(shown: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Found("a file is read for ever", shown)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# -- entries


class Scheduled(Classifier):
    """A classifier with a state of the optimizer and a scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _trainer(*callbacks: L.Callback) -> L.Trainer:
    stopping = L.callbacks.EarlyStopping("train_loss", patience=9)
    return quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=[stopping, *callbacks])


@functools.cache
def whole() -> dict[str, Any]:
    """Return a checkpoint that was saved in the middle of an epoch and of an accumulation."""
    with quietly(), in_empty_folder():
        _trainer(SaveAt(Path("a.ckpt"), 3)).fit(Scheduled(), loader(20))
        return files.load("a.ckpt")


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry in nested dicts and lists; of long lists that of the first ones."""
    if place:
        yield place
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, (list, tuple)) else ()
    )
    for key, inner in items:
        yield from _places(inner, (*place, key))


class GONE:
    """Stands for an entry that is taken away."""


# A place in nested dicts and lists, and its new value.
Change = tuple[tuple[Any, ...], Any]


@functools.cache
def _all_places() -> list[tuple[Any, ...]]:
    return list(_places(whole()))


@st.composite
def entries(draw: st.DrawFn) -> list[Change]:
    """Return one or two places in a checkpoint, and what is there instead."""
    return draw(_changes(_all_places()))


def _changes(places: list[tuple[Any, ...]]) -> st.SearchStrategy[list[Change]]:
    value = st.one_of(plain, plain, plain, st.just(GONE))
    return st.lists(st.tuples(st.sampled_from(places), value), min_size=1, max_size=2)


def changed(contents: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of nested contents with another value at a place, or without it."""
    if not place:
        return value
    first, *rest = place
    if not isinstance(contents, (dict, list, tuple)):  # an earlier change has taken this place
        return contents
    new = dict(contents) if isinstance(contents, dict) else list(contents)
    if first not in (new if isinstance(new, dict) else range(len(new))):
        return contents
    if not rest and value is GONE:
        del new[first]
    else:
        new[first] = changed(new[first], tuple(rest), value)
    return new if not isinstance(contents, tuple) else tuple(new)


def check_entries(changes: list[Change]) -> None:
    """Raise ``Found`` unless a run continues from a checkpoint, or the error names its file."""
    contents, shown = whole(), []
    for place, value in changes:
        contents = changed(contents, place, copy.deepcopy(value))
        shown.append(f"{'.'.join(map(str, place))} = {'(none)' if value is GONE else shortened(value)}")
    text = "; ".join(shown)
    files.save(contents, PATH)
    with _in_time(text):
        try:
            _trainer().fit(Scheduled(), loader(20), ckpt_path=PATH)
        except Found:
            raise
        except Exception as error:
            # An optimizer or a scheduler of torch may raise errors of any type when it goes on with another state.
            _require_named(error, text, (Exception,), "entries")


def _require_named(error: Exception, shown: str, kinds: tuple[type[Exception], ...], what: str) -> None:
    """Raise ``Found`` unless an error is of one of the kinds and names the file."""
    told = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if not isinstance(error, kinds) or PATH.name not in told:
        raise Found(f"{what}: {where(error)}", f"{shown}\n  {type(error).__name__}: {told}") from error


# -- bytes


@functools.cache
def _written(kind: str) -> bytes:
    """Return a file: "hasten" wrote it, "torch" or an "older" torch."""
    contents = {"state_dict": {"w": torch.arange(1500.0), "b": torch.ones(2)}, "epoch": 3, "name": "a"}
    if kind == "hasten":
        with in_empty_folder():
            files.save(contents, PATH)
            return PATH.read_bytes()
    buffer = io.BytesIO()
    torch.save(contents, buffer, _use_new_zipfile_serialization=kind == "torch")
    return buffer.getvalue()


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return who wrote a file, and its bytes with a change: a cut, flipped bits, or others."""
    kind = draw(st.sampled_from(("hasten", "hasten", "hasten", "torch", "older")))
    data = _written(kind)
    how = draw(st.sampled_from(("cut", "flip", "other")))
    if how == "cut":
        return kind, data[: draw(st.integers(0, len(data) - 1))]
    if how == "other":
        return kind, draw(changed_bytes(st.just(data)))
    changed = bytearray(data)
    for place in draw(st.lists(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=2, unique=True)):
        changed[place // 8] ^= 1 << place % 8
    return kind, bytes(changed)


def check_damaged(case: tuple[str, bytes]) -> None:
    """Raise ``Found`` unless a damaged file is refused by name; those of hasten always are."""
    kind, data = case
    same = next((at for at, (a, b) in enumerate(zip(data, _written(kind), strict=False)) if a != b), len(data))
    shown = f"{kind}, {len(data)} of {len(_written(kind))} bytes, the first other one at {same}"
    check_file(data, shown, must_fail=kind == "hasten" and data != _written(kind))


def check_file(data: bytes, shown: str, *, must_fail: bool = False) -> None:
    """Raise ``Found`` unless a file is read, or refused by name, and nothing in it runs."""
    PATH.write_bytes(data)
    del CALLS[:]
    reads: list[Any] = [files.load, lambda path: L.Fabric(accelerator="cpu", devices=1).load(path)]
    reads += [Classifier.load_from_checkpoint] if not must_fail else [files.verify]
    for read in reads:
        with _in_time(shown):
            try:
                read(PATH)
            except (CheckpointDamaged, CheckpointRefused) as error:
                _require_named(error, shown, (RuntimeError,), "file")
            except Found:
                raise
            except Exception as error:
                # What is in a file that can be read may be wrong.
                _require_named(error, shown, (ValueError, RuntimeError), "file")
                if must_fail:
                    raise Found(f"file: {where(error)}", f"{shown}\n  {error!r}") from error
            else:
                if must_fail:
                    raise Found("file: a damaged file is read", shown)
        if CALLS or Path("ran").exists() or "this" in sys.modules:
            raise Found("file: code was run", f"{shown}\n  {CALLS}")


# -- archives and pickles

CALLS: list[Any] = []


def canary(*args: object) -> str:
    """Must never be called by a file."""
    CALLS.append(args)
    return "called"


class Canary:
    """Must never be made or changed by a file."""

    def __init__(self, *args: object) -> None:
        CALLS.append(args)

    def __setstate__(self, state: object) -> None:
        CALLS.append(state)

    def __reduce__(self) -> Any:
        return (canary, ())


_GLOBALS = (
    *("os system", "posix system", "builtins exec", "builtins eval", "builtins getattr", "builtins __import__"),
    *(f"{__name__} canary", f"{__name__} Canary", f"{__name__} CALLS.append", "this s", "subprocess Popen", "os mkdir"),
    *("importlib import_module", "operator attrgetter", "functools partial", "torch.serialization load", "torch load"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch._tensor _rebuild_from_type_v2"),
    *(
        "torch.nn.parameter Parameter",
        "torch FloatStorage",
        "torch device",
        "torch Size",
        "torch float32",
        "torch Tensor",
    ),
    *("collections OrderedDict", "collections Counter", "builtins set", "builtins complex", "_codecs encode"),
    *("numpy dtype", "numpy ndarray", "numpy._core.multiarray scalar", "numpy._core.multiarray _reconstruct"),
    *("argparse Namespace", "pathlib PosixPath", "datetime timedelta", "hasten._lib.tree AttributeDict"),
    *("pytorch_lightning.callbacks.early_stopping EarlyStopping", "no.such thing", "__main__ x", "torch.nn Linear"),
)


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _global(name: str) -> bytes:
    module, _, inner = name.partition(" ")
    return b"c" + module.encode() + b"\n" + inner.encode() + b"\n"


_TEXTS = ("a", "state_dict", "storage", "cpu", "0", "touch ran", "f4", "os", "", "\ud800", "mkdir ran", "ran")
_constants = st.sampled_from(
    (
        *(b"N", b"\x88", b"K\x03", b"J\xff\xff\xff\xff", b"G" + struct.pack(">d", 0.5), b"]", b"}", b")", b"\x8f"),
        *map(_text, _TEXTS),
    )
)
_functions = st.one_of(
    st.sampled_from(_GLOBALS).map(_global),
    st.sampled_from(_GLOBALS).map(lambda name: b"".join(map(_text, name.split(" "))) + b"\x93"),
)


def _tuple(items: list[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


# What a pickle may do; each leaves one value on the stack.
_programs: st.SearchStrategy[bytes] = st.recursive(
    st.one_of(_constants, _functions),
    lambda inner: st.one_of(
        st.tuples(_functions, st.lists(inner, max_size=5)).map(lambda it: it[0] + _tuple(it[1]) + b"R"),
        st.tuples(_functions, st.lists(inner, max_size=2)).map(lambda it: it[0] + _tuple(it[1]) + b"\x81"),
        st.tuples(inner, inner).map(lambda it: b"".join(it) + b"b"),
        st.tuples(inner, inner).map(lambda it: b"".join(it) + b"a"),
        st.tuples(inner, inner, inner).map(lambda it: b"".join(it) + b"s"),
        st.lists(inner, max_size=4).map(lambda it: b"}(" + b"".join(it) + b"u"),
        st.lists(inner, max_size=3).map(lambda it: b"](" + b"".join(it) + b"e"),
        st.lists(inner, max_size=5).map(_tuple),
        st.lists(inner, min_size=1, max_size=5).map(lambda it: _tuple([_text("storage"), *it]) + b"Q"),
        inner.map(lambda it: it + b"Q"),
        st.tuples(st.sampled_from(_GLOBALS), st.lists(inner, max_size=2)).map(
            lambda it: b"(" + b"".join(it[1]) + b"i" + it[0].replace(" ", "\n").encode() + b"\n"
        ),
        st.tuples(_functions, st.lists(inner, max_size=2)).map(lambda it: b"(" + it[0] + b"".join(it[1]) + b"o"),
        inner.map(lambda it: it + b"q\x01h\x01\x86"),
    ),
    max_leaves=8,
)


@st.composite
def hostile(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return what was done to a file, and its bytes: a pickle that calls functions, or an archive that lies."""
    body = draw(_programs)
    if draw(st.booleans()):
        body = b"}" + _text(draw(st.sampled_from(("state_dict", "hyper_parameters", "callbacks")))) + body + b"s"
    program = b"\x80" + draw(st.sampled_from((b"\x02", b"\x02", b"\x04", b"\xff"))) + body + b"."
    if draw(st.integers(0, 3)) == 0:
        program = draw(changed_bytes(st.just(program)))
    how = draw(
        st.sampled_from(("pickle", "archive", "archive", "sealed", "twice", "names", "squeezed", "lies", "nested"))
    )
    return f"{how}: {program!r}", _archive(how, program)


def _archive(how: str, program: bytes) -> bytes:
    if how == "pickle":
        return program
    with zipfile.ZipFile(io.BytesIO(_written("torch"))) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in records if name.endswith("data.pkl"))
    records[pickled] = program
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if how == "squeezed" else zipfile.ZIP_STORED) as archive:
        if how == "twice":
            archive.writestr(pickled, pickle.dumps({"state_dict": {}}, 2))
        if how == "nested":
            pickled = f"inner/{pickled}"
        for name, data in records.items():
            archive.writestr(f"../../{name}" if how == "names" else name, data)
            if how == "names":
                archive.writestr(f"/ran/{name}", data)
    data = buffer.getvalue()
    if how == "lies":
        # The headers before the records name others than the directory at the end.
        at = data.find(b"data.pkl")
        data = data[:at] + b"atad.pkl" + data[at + 8 :]
    if how == "sealed":
        file = io.BytesIO(data)
        files.add_checksum(file)
        data = file.getvalue()
    return data


def check_hostile(case: tuple[str, bytes]) -> None:
    """Raise ``Found`` if something in a file runs, or it is not refused by name."""
    check_file(case[1], case[0])
    if any(isinstance(value, str) and value == "called" for value in vars(torch.nn.Parameter).values()):
        raise Found("file: a class was changed", case[0])


# -- folders


@functools.cache
def _stored() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what the first file of a sharded checkpoint holds, and the bytes of the others by name."""
    with in_empty_folder():
        files.save_folder({"state_dict": {"w": torch.arange(6.0), "b": torch.ones(2, 2)}, "epoch": 3}, "a.ckpt")
        stored = torch.load("a.ckpt/meta.pt", weights_only=True)
        others = {
            str(path.relative_to("a.ckpt")): path.read_bytes() for path in Path("a.ckpt").rglob("*") if path.is_file()
        }
    return stored, {name: data for name, data in others.items() if name != "meta.pt"}


@functools.cache
def _stored_places() -> list[tuple[Any, ...]]:
    stored, _ = _stored()
    layout = json.loads(stored["tensors"])
    return [*_places(stored), *(("tensors", *place) for place in _places(layout))]


@st.composite
def folders(draw: st.DrawFn) -> list[Change]:
    """Return one or two places in the first file of a folder, and what is there instead."""
    return draw(_changes(_stored_places()))


def check_folder(changes: list[Change]) -> None:
    """Raise ``Found`` unless a folder is read, or refused by name."""
    stored, others = _stored()
    layout, shown, layout_changed = json.loads(stored["tensors"]), [], False
    for place, value in changes:
        if place[0] == "tensors" and len(place) > 1:
            layout, layout_changed = changed(layout, place[1:], _for_json(value)), True
        else:
            stored = changed(stored, place, value)
        shown.append(f"{'.'.join(map(str, place))} = {'(none)' if value is GONE else shortened(value)}")
    if layout_changed and isinstance(stored, dict) and "tensors" in stored:
        stored = {**stored, "tensors": json.dumps(layout)}
    shutil.rmtree(PATH, ignore_errors=True)
    for name, data in others.items():
        (PATH / name).parent.mkdir(parents=True, exist_ok=True)
        (PATH / name).write_bytes(data)
    torch.save(stored, PATH / "meta.pt")
    text = "; ".join(shown)
    try:
        with _in_time(text):
            try:
                read = files.load(PATH)
                if isinstance(read, dict) and hasattr(read, "whole"):
                    read.whole()
                files.verify(PATH)
            except Found:
                raise
            except Exception as error:
                _require_named(error, text, (ValueError, RuntimeError), "folder")
    finally:
        shutil.rmtree(PATH, ignore_errors=True)


def _for_json(value: Any) -> Any:
    if value is GONE:
        return value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return "x"
