"""A thread in every process that detects a run without progress, reports where each rank is, and ends the run.

The processes of a run wait for each other. If one does not come, the others wait in a call that neither Ctrl-C nor an
exception can interrupt. This thread reads counters that are kept anyway: batches done, and the collectives that each
process group has begun. It reports them to the store every few seconds, over a connection of its own. The first process
compares them.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from hasten._lib import torch_private
from hasten._lib.observers import set_during
from hasten.machine import agreement, collectives, host, launch, signals, stacks
from hasten.machine.agreement import announce_leaving, format_ranks

# How long a requested stop may wait for a step to complete; less if a rank waits for another, so that the run ends
# within 12 seconds, and as long if the other has ended.
GRACE_SECONDS, STALLED_SECONDS = 15.0, 7.0
# The same after a second Ctrl-C.
SECOND_PRESS_SECONDS = 2.0
# When a rank that is late is reported for the first time.
WARN_SECONDS = 120.0
# A checkpoint, prepare_data or a barrier may take so many times the timeout of a step.
LONG_FACTOR = 3
# How often this process checks itself, and how often it reports to the others.
LOOK_SECONDS, BEAT_SECONDS = 1.0, 2.0
# A process that has not reported for this long counts as stopped.
SILENT_SECONDS = 15.0
# How long to wait for the stacks of the others.
STACK_SECONDS = 4.0
_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a loop has come: a text such as "fit, epoch 0, batch 3, step 3", and a count that each batch changes."""

    text: str = ""
    count: int = 0


@dataclass(slots=True)
class Beat:
    """The report of a process."""

    number: int = 0  # Counts the reports.
    count: int = 0  # Changes with each batch.
    groups: dict[str, int] = field(default_factory=dict)  # How many collectives each process group has begun.
    idle_seconds: float = 0.0  # Time since either of them changed.
    usual_seconds: float = 0.0  # How long a batch takes, 0 before it is known.
    stop: int = 0  # The signal that asked the process to stop, 0 without one.
    stop_seconds: float = 0.0  # For how long it has asked.
    presses: int = 0  # How often the signal came.
    waits: bool = False  # See ``stacks.Activity``; so are the next six.
    is_long: bool = False
    is_unlimited: bool = False
    saves: bool = False
    in_save_checkpoint: bool = False
    is_patient: bool = False
    in_backward: bool = False
    left: bool = False  # The process has left the run.
    host: str = ""  # The name of its machine.
    pid: int = 0  # Its process ID on that machine.


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a run without progress.

    All processes end with the exit code; None to report only. ``late`` are the ranks that the others wait for.
    """

    headline: str
    code: int | None
    late: list[int]


def judge(
    beats: dict[int, Beat],
    timeout_seconds: float,
    *,
    warned: bool,
    ended: Sequence[int] = (),
    left: Mapping[int, Beat] = MappingProxyType({}),
) -> Verdict | None:
    """Decide what to do, from the last reports of all processes that have not left; None for nothing.

    The timeout is that of a step. ``warned`` says whether this standstill was reported before; the processes of the
    ranks ``ended`` are known to have ended in the middle of the run; ``left`` has the last reports of those that left.
    """
    idle = min(beat.idle_seconds for rank, beat in beats.items() if rank not in ended)
    late = behind(beats)
    stalled = bool(late) or any(beat.waits for beat in beats.values())
    asking = [beat for beat in beats.values() if beat.stop]
    code = max((128 + beat.stop for beat in asking), default=1)
    if asking:
        first = max(asking, key=lambda beat: beat.stop_seconds)
        waited = min(idle, first.stop_seconds)
        if waited >= _grace_seconds(beats, timeout_seconds, stalled=stalled):
            name = "Ctrl-C" if first.stop == signal.SIGINT else signal.Signals(first.stop).name
            return Verdict(f"{name} arrived, and {_standstill(beats, late, waited)}.", 128 + first.stop, late)
    if idle >= (STALLED_SECONDS if ended else GRACE_SECONDS) and (never := _never_ends(beats, late, ended, left)):
        return Verdict(never, code, late)
    if not stalled or any(beat.is_unlimited for beat in beats.values()):
        return None
    return _judge_standstill(beats, timeout_seconds, late, idle, code, warned=warned)


def _judge_standstill(
    beats: dict[int, Beat], timeout_seconds: float, late: list[int], idle: float, code: int, *, warned: bool
) -> Verdict | None:
    """Decide what to do about a standstill of ``idle`` seconds; ``code``: the exit code that ends the run."""
    is_long = any(beat.is_long for beat in beats.values())
    limit = timeout_seconds * (LONG_FACTOR if is_long else 1)
    if idle >= limit:
        what = "checkpoints, prepare_data and barriers" if is_long else "a step"
        advice = _saved_on_some(beats)
        advice = advice or f"If it needs longer, raise timeout= of the strategy: {limit:.0f} s is the limit for {what}."
        return Verdict(f"{_standstill(beats, late, idle, capital=True)}. {advice}", code, late)
    if not warned and idle >= (limit / 2 if is_long else WARN_SECONDS):
        ends = f"The run ends if this lasts for {limit:.0f} s."
        return Verdict(f"{_standstill(beats, late, idle, capital=True)}. {ends}", None, late)
    return None


def _never_ends(beats: dict[int, Beat], late: list[int], ended: Sequence[int], left: Mapping[int, Beat]) -> str:
    """Return why a standstill cannot end by itself, "" if it may."""
    if ended and any(beat.waits or beat.in_backward for rank, beat in beats.items() if rank not in ended):
        text = f"{format_ranks(list(ended))} {'has' if len(ended) == 1 else 'have'} ended in the middle of the run."
        return text[0].upper() + text[1:]
    if text := _waits_for_the_left(beats, left):
        return text
    # A rank that is behind may still be in a collective of a checkpoint that the others have completed.
    completes = any(beats[rank].in_save_checkpoint or beats[rank].saves for rank in late)
    return "" if completes or not all(beat.waits for beat in beats.values()) else _saved_on_some(beats)


def _waits_for_the_left(beats: Mapping[int, Beat], left: Mapping[int, Beat]) -> str:
    """Return which ranks have left without a collective that others are in, "" for none."""
    waiting = [rank for rank, beat in beats.items() if beat.waits or beat.in_backward]
    gone = [
        rank
        for rank, last in left.items()
        if any(beats[other].groups.get(name, 0) > begun for name, begun in last.groups.items() for other in waiting)
    ]
    if not gone:
        return ""
    verb, be = "has" if len(gone) == 1 else "have", "is" if len(waiting) == 1 else "are"
    text = f"{format_ranks(gone)} {verb} ended the program without a collective that {format_ranks(waiting)} {be} in."
    return f"{text[0].upper()}{text[1:]} Make as many steps, and the same calls such as all_reduce, on all processes."


def _saved_on_some(beats: dict[int, Beat]) -> str:
    saving = [rank for rank, beat in beats.items() if beat.in_save_checkpoint]
    others = [rank for rank in beats if rank not in saving]
    if not saving or not others:
        return ""
    return (
        f"Trainer.save_checkpoint() or Fabric.save() is called on {format_ranks(saving)} and not on "
        f"{format_ranks(others)}. Call it on all processes."
    )


def behind(beats: dict[int, Beat]) -> list[int]:
    """Return the ranks for which the others wait, according to counters and stacks."""
    furthest: dict[str, int] = {}
    for beat in beats.values():
        for name, number in beat.groups.items():
            furthest[name] = max(furthest.get(name, 0), number)
    late = [r for r, beat in beats.items() if any(n < furthest[name] for name, n in beat.groups.items())]
    if not late and any(beat.waits for beat in beats.values()):
        late = [rank for rank, beat in beats.items() if not beat.waits]
    return late if len(late) < len(beats) else []


def _grace_seconds(beats: dict[int, Beat], timeout_seconds: float, *, stalled: bool) -> float:
    """Return how long a stop may wait for the current step."""
    if max(beat.presses for beat in beats.values()) > 1:
        return SECOND_PRESS_SECONDS
    if any(beat.saves for beat in beats.values()):
        return LONG_FACTOR * timeout_seconds
    if not stalled and any(beat.is_patient for beat in beats.values()):
        # All processes do work that takes long.
        return timeout_seconds
    return max(STALLED_SECONDS if stalled else GRACE_SECONDS, 3 * max(beat.usual_seconds for beat in beats.values()))


def _standstill(beats: dict[int, Beat], late: list[int], seconds: float, *, capital: bool = False) -> str:
    if late:
        others = [rank for rank in beats if rank not in late]
        text = f"{format_ranks(late)} did not arrive for {seconds:.0f} s, and {format_ranks(others)} wait"
        text += "s" if len(others) == 1 else ""
    elif len(beats) == 1:
        text = f"{format_ranks(list(beats))} has waited for {seconds:.0f} s"
    elif any(beat.waits for beat in beats.values()):
        text = f"all ranks have waited for each other for {seconds:.0f} s"
    else:
        text = f"no step was completed for {seconds:.0f} s"
    return text[0].upper() + text[1:] if capital else text


class Watchdog:
    """The thread that watches one process; it has its own connection to the store to which the processes report.

    Within a step, the others may wait for a process as long as the timeout. ``run`` is the number of this process group
    in the program, the same on all processes.
    """

    def __init__(self, *, rank: int, world_size: int, timeout: timedelta, store: Any, run: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout_seconds = timeout.total_seconds()
        # Without hasten's loops nothing is known of it.
        self.position: Callable[[], Position] = Position
        self.thread_watched = threading.get_ident()
        self.folder: Callable[[], str] = os.getcwd
        self._store = torch_private.part_of_store(f"hasten-watchdog/{run}", store.clone())
        self._store.set_timeout(_STORE_TIMEOUT)
        self._stopped = threading.Event()
        self._beat = Beat(host=socket.gethostname(), pid=os.getpid())
        self._counted: Any = None
        self._moved = self._stepped = time.monotonic()
        self._pauses: deque[float] = deque(maxlen=8)
        self._signals = _Signals()
        # The reports of the others, and when they came.
        self._known: dict[int, tuple[Beat, float]] = {}
        self._started = time.monotonic()
        self._next_beat = 0.0
        self._warned = False
        self._last_order = ""
        self._orders = 0
        # Many processes ask the store less often.
        self._patience = max(1.0, world_size / 256)
        self._exchanged = self._looked = time.monotonic()
        self._address = agreement.address_of_store()
        # The others then know the process, should it end at once.
        self._write()
        self._thread = threading.Thread(target=self._watch, name="hasten-watchdog", daemon=True)
        self._thread.start()
        self._second = threading.Thread(target=self._watch_alone, name="hasten-watchdog-alone", daemon=True)
        self._second.start()

    def stop(self) -> None:
        """End the thread: this process leaves the run."""
        self._stopped.set()
        for thread in (self._thread, self._second):
            if threading.current_thread() is not thread:
                thread.join(2.0)
        self._signals.close()
        if not self._thread.is_alive():
            with suppress(RuntimeError):
                self._beat.left = True
                self._beat.groups = collectives_begun()
                self._write()

    # -- the thread

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS * self._patience):
            self._look()
            try:
                self._exchange()
            except RuntimeError:
                # The store is gone, with the process that serves it.
                return
            self._exchanged = time.monotonic()

    def _watch_alone(self) -> None:
        """Watch this process where the store has gone, or does not answer: a call may then wait for ever."""
        while not self._stopped.wait(SILENT_SECONDS / 3):
            silent = time.monotonic() - self._exchanged
            server_has_ended = not self._thread.is_alive() and agreement.store_has_ended(self._address)
            if silent < 2 * SILENT_SECONDS * self._patience and not server_has_ended:
                continue
            self._look()
            own = Beat(**asdict(self._beat))
            # This process cannot be compared with others: a backward that does not end waits for them.
            own.waits = own.waits or own.in_backward
            if (verdict := self._judge({self.rank: own}, [0] if server_has_ended else [], {})) is not None:
                self._report_alone(verdict, silent)

    def _look(self) -> None:
        """Record what has changed in this process."""
        now, beat = time.monotonic(), self._beat
        if now - self._looked > SILENT_SECONDS:
            # The process was suspended, and continues now.
            self._moved = self._stepped = now
        self._looked = now
        groups = collectives_begun()
        counted = (self.position(), groups)
        if counted != self._counted:
            self._counted, self._moved, self._warned = counted, now, False
        if counted[0].count != beat.count:
            if beat.count:
                # The time before the first batch says nothing about a step.
                self._pauses.append(now - self._stepped)
            self._stepped = now
        frames = stacks.capture(self.thread_watched)
        activity = stacks.activity_of(frames)
        beat.count, beat.groups = counted[0].count, groups
        beat.idle_seconds = now - self._moved
        beat.usual_seconds = sorted(self._pauses)[len(self._pauses) // 2] if self._pauses else 0.0
        beat.waits, beat.is_long, beat.is_unlimited = activity.waits, activity.is_long, activity.is_unlimited
        beat.saves, beat.is_patient = activity.saves, activity.is_patient
        beat.in_save_checkpoint = activity.in_save_checkpoint
        beat.in_backward = activity.in_backward
        number, since, beat.presses = self._signals.read(frames, moved=self._moved)
        beat.stop, beat.stop_seconds = number, now - since if number else 0.0

    def _write(self) -> None:
        self._beat.number += 1
        self._store.set(f"beat/{self.rank}", json.dumps(asdict(self._beat)))

    def _exchange(self) -> None:
        """Report to the others, follow their orders, and decide if this is the first living process."""
        now = time.monotonic()
        due = now >= self._next_beat
        if due:
            self._next_beat = now + BEAT_SECONDS * self._patience
            self._write()
        self._pass_on_signal()
        if self._store.check(["order"]):
            order = self._store.get("order").decode()
            if order != self._last_order:
                self._last_order = order
                self._follow(json.loads(order))
                return
        if due and not any(self._lives(rank, now) for rank in range(self.rank)):
            beats = self._everybody(now)
            left = {rank: beat for rank, (beat, _) in self._known.items() if beat.left}
            verdict = self._judge(beats, [rank for rank in beats if self._has_ended(rank, now)], left)
            if verdict is not None:
                self._give_order(verdict)

    def _pass_on_signal(self) -> None:
        """Tell all processes about a signal that arrived at one: an evaluation has no step that all of them make."""
        requests = signals.StopRequests.active
        if requests is None or requests.heard is not None or not requests.number:
            return
        key = f"signal/{requests.number}"
        # The main thread may be in a call, and not know yet.
        number = self._beat.stop if self._beat.stop in requests.handled else requests.signal
        if number:
            self._store.set(key, str(int(number)))
            requests.heard = int(number)
        elif self._store.check([key]):
            requests.heard = int(self._store.get(key))

    def _judge(self, beats: dict[int, Beat], ended: Sequence[int], left: Mapping[int, Beat]) -> Verdict | None:
        verdict = judge(beats, self.timeout_seconds, warned=self._warned, ended=ended, left=left)
        if verdict is not None and verdict.code is None:
            self._warned = True
        return verdict

    def _lives(self, rank: int, now: float) -> bool:
        """Return whether a process has reported lately and has not left."""
        beat, came = self._read(rank, now)
        if beat is None or beat.left or self._has_ended(rank, now):
            return False
        return now - came < SILENT_SECONDS * self._patience

    def _read(self, rank: int, now: float) -> tuple[Beat | None, float]:
        """Return the last report of a process, and when it came."""
        if rank == self.rank:
            return self._beat, now
        before = self._known.get(rank)
        if self._store.check([f"beat/{rank}"]):
            beat = Beat(**json.loads(self._store.get(f"beat/{rank}")))
            if before is None or beat.number != before[0].number:
                self._known[rank] = (beat, now)
            return self._known[rank]
        return None, self._started

    def _has_ended(self, rank: int, now: float) -> bool:
        """Return whether a process of this machine that is silent is known not to run any more."""
        beat, came = self._known.get(rank, (None, now))
        if beat is None or beat.host != self._beat.host or now - came < 2 * BEAT_SECONDS:
            return False
        return host.process_has_ended(beat.pid)

    def _everybody(self, now: float) -> dict[int, Beat]:
        """Return the reports of processes that have not left; a silent one counts as idle since its last report."""
        beats: dict[int, Beat] = {}
        for rank in range(self.world_size):
            beat, came = self._read(rank, now)
            if beat is None:
                beat = Beat(idle_seconds=now - self._started)
            elif beat.left:
                continue
            elif rank != self.rank:
                beat = Beat(**asdict(beat))
                beat.idle_seconds += now - came
                if beat.stop:
                    beat.stop_seconds += now - came
            beats[rank] = beat
        return beats

    # -- reports

    def _give_order(self, verdict: Verdict) -> None:
        self._orders += 1
        order = {"name": f"{self.rank}-{self._orders}", "by": self.rank, **asdict(verdict)}
        self._last_order = json.dumps(order)
        self._store.set("order", self._last_order)
        self._follow(order)

    def _follow(self, order: dict[str, Any]) -> None:
        """Send the stack of this process to the process that prints all stacks; then end, if the order says so."""
        name, code = order["name"], order["code"]
        where, frames = self._where(order["late"])
        calls = [asdict(one) for one in _last_collectives()]
        if code is not None:
            write_flight_record(self.rank, self.folder())
        with suppress(RuntimeError):
            self._store.set(f"stack/{name}/{self.rank}", json.dumps([where, stacks.as_data(frames), calls]))
            if order["by"] == self.rank:
                silent = self._print(order)
                self._store.set(f"printed/{name}", "1")
                if code is not None:
                    self._kill(silent)
            elif code is not None:
                deadline = time.monotonic() + 2 * STACK_SECONDS
                while not self._store.check([f"printed/{name}"]) and time.monotonic() < deadline:
                    time.sleep(0.05)
        if code is not None:
            launch.end_now(code, order["headline"])

    def _where(self, late: list[int]) -> tuple[str, list[stacks.Frame]]:
        """Return a readable description of what this process does, and its stack."""
        frames = stacks.capture(self.thread_watched)
        text = self.position().text
        doing = stacks.activity_of(frames).doing
        if late and self.rank not in late and doing.startswith(("waits in ", "in ")):
            doing = f"waits for {format_ranks(late)} {doing.removeprefix('waits ')}"
        return f"{text}: {doing}" if text else doing, frames

    def _print(self, order: dict[str, Any]) -> list[int]:
        """Print the stacks of all processes; return the ranks of those that do not answer."""
        keys = {rank: f"stack/{order['name']}/{rank}" for rank in range(self.world_size)}
        now = time.monotonic()
        left = {rank for rank in keys if (beat := self._read(rank, now)[0]) is not None and beat.left}
        awaited = [key for rank, key in keys.items() if rank not in left and not self._has_ended(rank, now)]
        deadline = now + STACK_SECONDS
        while not self._store.check(awaited) and time.monotonic() < deadline:
            time.sleep(0.05)
        places: dict[int, tuple[str, list[stacks.Frame]]] = {}
        calls: dict[int, list[stacks.LastCollective]] = {}
        for rank, key in keys.items():
            if rank in left:
                places[rank] = ("has left the run", [])
            elif self._store.check([key]):
                where, frames, own = json.loads(self._store.get(key))
                places[rank] = (where, stacks.from_data(frames))
                calls[rank] = [stacks.LastCollective(**one) for one in own]
            else:
                places[rank] = (self._silence(rank, now), [])
        write(stacks.report(f"hasten: {order['headline']}", places) + stacks.describe_collectives(calls))
        return [rank for rank in keys if rank not in left and not places[rank][1]]

    def _kill(self, silent: list[int]) -> None:
        """Kill processes of this machine that cannot end themselves."""
        for rank in silent:
            beat, _ = self._read(rank, time.monotonic())
            if beat is not None and beat.host == self._beat.host and beat.pid != self._beat.pid:
                with suppress(OSError):
                    os.kill(beat.pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # The same on Windows.

    def _silence(self, rank: int, now: float) -> str:
        beat, came = self._read(rank, now)
        if beat is None:
            return "has not answered since the processes came together"
        if self._has_ended(rank, time.monotonic()):
            return f"has ended (process {beat.pid} on {beat.host})"
        return (
            f"has not answered for {now - came:.0f} s (process {beat.pid} on {beat.host}): it was stopped, or a call "
            "holds the interpreter's lock"
        )

    def _report_alone(self, verdict: Verdict, silent_seconds: float) -> None:
        lost = f"rank {self.rank} has not reached the first process for {silent_seconds:.0f} s"
        headline = f"{verdict.headline} Besides, {lost}."
        write(stacks.report(f"hasten: {headline}", {self.rank: self._where([])}))
        if verdict.code is not None:
            launch.end_now(verdict.code, headline)


def write(text: str) -> None:
    """Write to stderr; not by print, whose lock the training thread may hold."""
    data = text.encode()
    while data:
        data = data[os.write(2, data) :]


def collectives_begun() -> dict[str, int]:
    """Return how many collectives each process group has begun, by its name."""
    counted: dict[str, int] = {}
    for name, count in torch_private.collectives_begun():
        # Backends without a counter raise.
        with suppress(RuntimeError):
            counted[name] = count()
    return counted


def _last_collectives() -> list[stacks.LastCollective]:
    """Return the last collective of each process group, from torch's flight record; empty where there is none."""
    found: list[stacks.LastCollective] = []

    def work() -> None:
        # A record that cannot be read must not keep the report of the stacks from being written.
        with suppress(Exception):
            found.extend(stacks.last_collectives(torch_private.flight_record()))

    thread = threading.Thread(target=work, name="hasten-last-collectives", daemon=True)
    thread.start()
    thread.join(STACK_SECONDS / 2)
    return list(found)


def write_flight_record(rank: int, folder: str) -> None:
    """Write NCCL's record of the last collectives, one file for each rank, as torch's ``torchfrtrace`` reads them."""
    if not collectives.joined() or "nccl" not in dist.get_backend():
        return

    def work() -> None:
        # TORCH_FR_BUFFER_SIZE=0 leaves it empty.
        record = torch_private.record_on("cuda")()
        path = os.path.join(folder, f"nccl_trace_rank_{rank}")
        os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(record)
        if rank == 0:
            write(f"hasten: the record of NCCL's last collectives is in {path}.\n")

    # In a thread: it must not keep the run from ending.
    thread = threading.Thread(target=work, name="hasten-flight-record", daemon=True)
    thread.start()
    thread.join(STACK_SECONDS)


# -- signals


class _Signals:
    """Signals to stop that arrived here, also while the main thread is in a call that cannot see them.

    Python's handlers run in the main thread, between two of its instructions. The number of a signal is written to a
    pipe at once.
    """

    def __init__(self) -> None:
        self._reads = self._writes = -1
        # When the signal came, how often, and the stack it found.
        self._noted: dict[int, tuple[float, int]] = {}
        self._found: list[stacks.Frame] = []
        self._requests: object = None
        if threading.current_thread() is not threading.main_thread() or os.name != "posix":
            return
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before != -1:
            # An event loop uses it.
            signal.set_wakeup_fd(before)
            os.close(reads)
            os.close(writes)
            return
        self._reads, self._writes = reads, writes
        _forget_in_forks()

    def close(self) -> None:
        """Stop listening."""
        if self._reads == -1:
            return
        with suppress(ValueError):  # not in the main thread
            if (now := signal.set_wakeup_fd(-1)) not in (-1, self._writes):
                signal.set_wakeup_fd(now)
            os.close(self._writes)
        os.close(self._reads)
        self._reads = -1

    def read(self, frames: list[stacks.Frame], *, moved: float) -> tuple[int, float, int]:
        """Return the signal that asks this process to stop (0 for none), since when, and how often it came."""
        requests, now = signals.StopRequests.active, time.monotonic()
        if requests is not self._requests:
            # A new run: earlier signals have been handled.
            self._requests, self._noted = requests, {}
        for number in self._bytes():
            # A program's own handlers decide themselves what happens.
            ours = requests is not None and number in requests.handled
            if ours or signal.getsignal(number) is signal.default_int_handler:
                since, presses = self._noted.get(number, (now, 0))
                again = number == signal.SIGINT and now - since > signals.SAME_PRESS_SECONDS
                self._noted[number] = (since, presses + (not presses or again))
                self._found = frames
        if requests is None:
            if self._noted and (frames != self._found or moved > min(since for since, _ in self._noted.values())):
                # The main thread has handled the signal.
                self._noted = {}
        elif requests.signal is not None and requests.signal not in self._noted:
            self._noted[requests.signal] = (now, 1)
        for number, (since, presses) in self._noted.items():
            return number, since, presses
        return 0, 0.0, 0

    def _bytes(self) -> list[int]:
        if self._reads == -1:
            return []
        try:
            return list(os.read(self._reads, 4096))
        except BlockingIOError:
            return []


_in_forks = False


def _forget_in_forks() -> None:
    """Keep forked processes, such as data workers, from writing to the pipe of this one."""
    global _in_forks
    if _in_forks:
        return
    _in_forks = True

    def forget() -> None:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)


# -- one for each process

_current: Watchdog | None = None
_runs = 0


def start(*, rank: int, world_size: int, timeout: timedelta) -> None:
    """Watch the process group that this process has joined, until it leaves it."""
    global _current, _runs
    # Counted also if nothing is watched, so that processes agree on the number.
    _runs += 1
    # Work that a rank does alone at the end may take as long as a barrier, in which the others would wait for it.
    launch.allow_at_end(LONG_FACTOR * timeout.total_seconds())
    if _current is not None:
        # Another run in the same processes.
        _current.timeout_seconds = timeout.total_seconds()
        return
    if world_size == 1:
        return
    store = torch_private.default_store()
    try:
        _current = Watchdog(rank=rank, world_size=world_size, timeout=timeout, store=store, run=_runs)
    except (NotImplementedError, RuntimeError):
        # A store in memory, such as the store of a group for tests, has no second connection.
        return
    collectives.before_leaving(announce_leaving)
    collectives.before_leaving(stop)
    # A thread that is inside the store when the interpreter ends would abort the process.
    atexit.unregister(stop)
    atexit.register(stop)


def stop() -> None:
    """End the thread, if there is one."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


@contextmanager
def observing(position: Callable[[], Position], folder: Callable[[], str]) -> Iterator[None]:
    """Let reports say how far a loop has come, while the context is open.

    ``position`` is called about once a second, in another thread; ``folder`` returns where files about a run that fails
    go.
    """
    watchdog = _current
    if watchdog is None:
        yield
        return
    with set_during(watchdog, position=position, thread_watched=threading.get_ident(), folder=folder):
        yield
