"""The stack of a thread as plain data, what the thread is doing, and a report over all ranks."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from hasten.extend import frames
from hasten.extend.origin import SOURCE, is_builtin_file
from hasten.machine.agreement import format_ranks

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PATHS = sysconfig.get_paths()
_PYTHON = tuple({_PATHS[name] + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({_PATHS[name] + os.sep for name in ("purelib", "platlib")})

# By file: functions of hasten and torch in which a process waits for others or works longer than a step.
_BARRIERS = {"machine/collectives.py": ("barrier", "first_one_first"), "distributed_c10d.py": ("barrier",)}
_SAVES_OF_PROGRAM = {"trainer/trainer.py": ("save_checkpoint",), "fabric/fabric.py": ("save",)}
_SAVING = {"runtime.py": ("save",), **_SAVES_OF_PROGRAM}
_PREPARING = {"loops/prepare.py": ("prepare",), "runtime.py": ("load",), "fabric/fabric.py": ("load", "load_raw")}
_MEETING = {"machine/agreement.py": ("exchange", "all_at"), "machine/same_program.py": ("_wait",)}
# Waits for a thread that writes a folder together with those of the other processes.
_JOINING = {"checkpoint/sharded.py": ("_wait", "close")}
_CHECKPOINTS = tuple(os.path.join("hasten", part) for part in ("checkpoint", os.path.join("callbacks", "checkpoint")))
_LEAVING = {"trainer/trainer.py": ("_abort", "_release", "_finish", "_leave")}


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    name: str
    owner: str  # "user", "installed", "hasten", "torch" or "python".

    def within(self, functions: Mapping[str, Sequence[str]]) -> bool:
        """Return whether this is one of these functions of hasten or torch, given by the end of their file's path."""
        if self.owner not in ("hasten", "torch"):
            return False
        last = self.name.rpartition(".")[2]
        return any(self.file.endswith(os.sep + file) and last in names for file, names in functions.items())


def capture(thread: int) -> list[Frame]:
    """Return the stack of a thread of this process, the outermost call first; empty if the thread has ended."""
    running, found = [*frames.outwards(sys._current_frames().get(thread))], []
    for frame in reversed(running):
        file, name = frames.file_of(frame), frames.full_name_of(frame)
        # Made by a library, such as ``dataclasses``; that of ``python -c`` has no caller.
        is_made = (file, name) == ("<string>", "<module>") and frame is not running[-1]
        found.append(Frame(file, frame.f_lineno or 0, name, "python" if is_made else _owner(file)))
    return found


def passes_program(error: BaseException) -> bool:
    """Return whether an error came through a function of the program on its way to the function that caught it."""
    called = islice(traceback.walk_tb(error.__traceback__), 1, None)
    return any(_owner(frames.file_of(frame)) == "user" for frame, _ in called)


def _owner(file: str) -> str:
    if is_builtin_file(file):
        return "hasten"
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith(_INSTALLED):
        return "installed"
    return "python" if file.startswith(_PYTHON) or file.startswith("<frozen") else "user"


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process is doing, read from a stack."""

    doing: str  # For people, such as "in Model.training_step" or "waits in all_reduce".
    hook: str  # The function of the user that hasten called, or "".
    waits: bool  # Waits for other processes.
    # Takes part in something that may take longer than a step: a checkpoint, ``prepare_data``, a barrier.
    is_long: bool
    is_unlimited: bool  # Waits for work of the first process that may take as long as it wants.
    saves: bool  # Works on a checkpoint, also in a thread, and does not wait in a collective.
    in_save_checkpoint: bool  # Is in the Trainer's ``save_checkpoint`` or Fabric's ``save``.
    is_patient: bool  # Runs the user's hook around the steps, or ends the run.
    in_backward: bool  # Computes a backward, or waits in it for others.


def activity_of(frames: Sequence[Frame]) -> Activity:
    """Return what a process is doing, read from its stack."""
    hook, waits = _hook(frames), _waits_in(frames)
    saving = _any(frames, _SAVING) or any(_is_checkpoint(frame) for frame in frames)
    leaving = _any(frames, _LEAVING)
    barrier = _any(frames, _BARRIERS) or _any(frames, _MEETING)
    preparing = _any(frames, _PREPARING)
    # A process in a collective of a checkpoint waits for the processes that write it.
    is_long = saving or leaving or barrier or preparing
    if waits:
        doing = f"waits in {waits}" + (" of a checkpoint" if saving else "")
    elif hook:
        doing = f"in {hook}"
    elif saving:
        doing = "saves a checkpoint"
    elif leaving:
        doing = "ends the run"
    elif preparing:
        doing = "prepares the run"
    else:
        doing = _inside_torch(frames) or _function(frames)
    return Activity(
        doing=doing,
        hook=hook,
        waits=bool(waits),
        is_long=is_long,
        is_unlimited=any(frame.within({"machine/collectives.py": ("first_one_first",)}) for frame in frames),
        saves=saving and (not waits or _any(frames, _JOINING)),
        in_save_checkpoint=_any(frames, _SAVES_OF_PROGRAM),
        is_patient=leaving or hook.rpartition(".")[2].startswith("on_"),
        in_backward=_any(frames, _BACKWARD),
    )


def _function(frames: Sequence[Frame]) -> str:
    """Return the innermost function of a program without hasten's loops."""
    index = marked(frames)
    name = "<module>" if index is None else frames[index].name
    return "in the program" if name == "<module>" else f"in {name.replace('<locals>.', '')}"


def _any(frames: Iterable[Frame], functions: Mapping[str, Sequence[str]]) -> bool:
    return any(frame.within(functions) for frame in frames)


def _is_checkpoint(frame: Frame) -> bool:
    return frame.owner == "hasten" and frame.file.removeprefix(SOURCE).startswith(_CHECKPOINTS)


def _waits_in(frames: Sequence[Frame]) -> str:
    """Return the collective in which a process waits, "" if it does not."""
    for frame in reversed(frames[-6:]):
        if frame.within(_MEETING):
            return "an agreement with the other processes"
        if frame.within(_JOINING):
            return "the background save"
        if frame.owner == "torch" and frame.file.endswith(("distributed_c10d.py", "_functional_collectives.py")):
            return frame.name
        if frame.owner in ("user", "installed"):
            return ""
    return ""


def _inside_torch(frames: Sequence[Frame]) -> str:
    files = [frame.file.removeprefix(_TORCH) for frame in frames if frame.owner == "torch"]
    if any(file.startswith(("_dynamo", "_inductor")) for file in files):
        return "compiles"
    if _any(frames, _BACKWARD):
        return "in backward"
    if any(file.startswith(os.path.join("utils", "data")) for file in files):
        return "waits for a data worker" if _any(frames, _WORKERS) else "reads data"
    return "in the training loop" if any(frame.owner == "hasten" for frame in frames) else ""


_BACKWARD = {"autograd/graph.py": ("_engine_run_backward",), "optim/fast_step.py": ("backward",)}
_WORKERS = {"utils/data/dataloader.py": ("_try_get_data", "_get_data")}


def _hook(frames: Sequence[Frame]) -> str:
    """Return the first function of the user that hasten has called."""
    entered, hook = False, ""
    for frame in frames:
        if frame.name == "<module>":
            # The program itself, which hasten may have started.
            entered, hook = False, ""
        entered = entered or frame.owner == "hasten"
        if entered and not hook and frame.owner == "user":
            hook = frame.name.replace("<locals>.", "")
    return hook


def marked(frames: Sequence[Frame]) -> int | None:
    """Return the index of the innermost call of the user's code, or of an installed package; None without one."""
    for owner in ("user", "installed"):
        found = [index for index, frame in enumerate(frames) if frame.owner == owner]
        if found:
            return found[-1]
    return None


def as_data(frames: Sequence[Frame]) -> list[dict[str, Any]]:
    """Return frames as plain data, for another process."""
    return [asdict(frame) for frame in frames]


def from_data(data: Iterable[Mapping[str, Any]]) -> list[Frame]:
    """Return the frames that were passed to ``as_data``."""
    return [Frame(**frame) for frame in data]


def report(headline: str, ranks: Mapping[int, tuple[str, Sequence[Frame]]]) -> str:
    """Return the report about all processes: a line for each, and their stacks; equal stacks appear once.

    ``ranks`` has for each where it is in the run and what it does, and its stack, empty where it did not answer.
    """
    lines = [headline]
    for rank in sorted(ranks):
        where, frames = ranks[rank]
        index = marked(frames)
        at = "" if index is None else f", {frames[index].file}:{frames[index].line}"
        lines.append(f"  rank {rank}: {where}{at}")
    printed: dict[tuple[Frame, ...], int] = {}
    for rank in sorted(ranks):
        frames = ranks[rank][1]
        if not frames:
            continue
        same = printed.setdefault(tuple(frames), rank)
        if same != rank:
            lines.append(f"Stack of rank {rank}: the same as that of rank {same}.")
            continue
        index = marked(frames)
        lines.append(f"Stack of rank {rank}, the innermost call last, that of the program marked:")
        lines += [
            f"  {'>' if position == index else ' '} {frame.file}:{frame.line} in {frame.name}"
            for position, frame in enumerate(frames)
        ]
    return "\n".join(lines) + "\n"


# -- the last collective of each process


@dataclass(frozen=True, slots=True)
class LastCollective:
    """The last collective that a process has begun in one process group."""

    group: str  # The name of the group.
    number: int  # Counts the collectives of the group, from 1.
    text: str  # What it is, such as "all_reduce of float32 (130)".


def last_collectives(entries: Iterable[Mapping[str, Any]]) -> list[LastCollective]:
    """Return the last collective of each process group, read from torch's flight record.

    Example::

        >>> entry = {"process_group": ["0", "default_pg"], "collective_seq_id": 8, "is_p2p": False,
        ...     "profiling_name": "gloo:all_reduce", "input_sizes": [[130]], "input_dtypes": ["Float"]}
        >>> last_collectives([entry])
        [LastCollective(group='default_pg', number=8, text='all_reduce of Float (130)')]

    """
    found: dict[str, LastCollective] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            name, about = entry["process_group"]
            label = "default_pg" if about == "default_pg" else " ".join(filter(None, (str(name), str(about))))
            found[str(name)] = LastCollective(label, int(entry["collective_seq_id"]), _collective_text(entry))
    return list(found.values())


def _collective_text(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2]
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    shapes = [f"{kind} ({', '.join(map(str, size))})" for kind, size in zip(dtypes, sizes, strict=False)]
    more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    return f"{name} of {shapes[0]}{more}" if shapes else name


def describe_collectives(ranks: Mapping[int, Sequence[LastCollective]]) -> str:
    """Return which collective each process is in, and who never came to it; "" where nothing is known.

    ``ranks`` has for each rank that answered what ``last_collectives`` returned.

    Example::

        >>> one, two = LastCollective("default_pg", 7, "broadcast"), LastCollective("default_pg", 8, "all_reduce")
        >>> print(describe_collectives({0: [two], 1: [one]}), end="")
        Last collectives of the process group default_pg:
          rank 0: in number 8, all_reduce
          rank 1: never reached number 8; its last is number 7, broadcast

    """
    groups: dict[str, dict[int, LastCollective]] = {}
    for rank in sorted(ranks):
        for one in ranks[rank]:
            groups.setdefault(one.group, {})[rank] = one
    lines: list[str] = []
    for group, members in groups.items():
        furthest = max(one.number for one in members.values())
        different = len({one.text for one in members.values() if one.number == furthest}) > 1
        alike: dict[LastCollective, list[int]] = {}
        for rank, one in members.items():
            alike.setdefault(one, []).append(rank)
        absent = [rank for rank in sorted(ranks) if rank not in members] if group == "default_pg" else []
        lines.append(f"Last collectives of the process group {group}:")
        for one, numbers in alike.items():
            is_last = one.number == furthest
            before = "in" if is_last else f"never reached number {furthest}; its last is"
            after = ", another one than that of the other ranks" if is_last and different else ""
            lines.append(f"  {format_ranks(numbers)}: {before} number {one.number}, {one.text}{after}")
        if absent:
            lines.append(f"  {format_ranks(absent)}: never reached number {furthest}; nothing is known of earlier ones")
    return "".join(f"{line}\n" for line in lines)
