"""A trial from outside: a fresh process with a variant of the program, which trains when it is told to."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hasten.machine.allocator import file_of
from hasten.speed.engine import LateError, Process, TrialError
from hasten.speed.levers import Lever
from hasten.speed.program import Orders

_KILL_SECONDS = 5.0
_LINES_OF_A_LOG = 12
# Loader workers put sockets into it, whose paths may have 107 characters: in a longer one they would hang.
_LONGEST_FOLDER = 70


# (orders as JSON, read end of the orders, write end of the answers, file for what it prints) -> the process
Start = Callable[[str, int, int, Any], Process]


@dataclasses.dataclass
class MeasuredTurn:
    """What a trial answers after a turn; see ``hasten.speed.program``."""

    seconds: float
    step_seconds: list[float]
    losses: list[float | None]
    samples: int | None
    faults: int
    memory_bytes: int
    tokens: int | None
    slots: int | None
    steps_planned: float | None
    parts: dict[str, float]
    # Some numbers of the gradients of each of the first steps.
    gradients: list[list[float]] = dataclasses.field(default_factory=list)
    # Loss and some numbers of the gradient of the first batch, computed without dropout.
    without_draws: list[float] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps it had."""
        return len(self.step_seconds)

    def cost(self, unit: str) -> float:
        """Return the seconds a "tokens", a "samples" or a "steps" takes."""
        return self.seconds / {"tokens": self.tokens, "samples": self.samples, "steps": self.steps}[unit]  # type: ignore[operator]


@dataclasses.dataclass
class Variant:
    """A way to run the program: with these levers, with this seed.

    Args:
        levers: what is on.
        seed: of the training.
        looks: profile it and examine model and data, instead of timing it.
        compares: compute the first batch once without dropout, too.
        checks_samples: find out whether the samples of its batches leave each other alone, once it has had its turns.

    """

    levers: tuple[Lever, ...] = ()
    seed: int = 0
    looks: bool = False
    compares: bool = False
    checks_samples: bool = False
    # How its samples affect one another, where that was looked at and they do.
    not_apart: str | None = None
    prepared: MeasuredTurn | None = None
    turns: list[MeasuredTurn] = dataclasses.field(default_factory=list)
    error: TrialError | None = None
    given_up: bool = False
    given: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The names of the levers."""
        return " + ".join(lever.name for lever in self.levers) or "unchanged"

    @property
    def losses(self) -> list[float]:
        """The loss of each step from the first; empty where steps gave none."""
        every = [loss for turn in [self.prepared, *self.turns] if turn is not None for loss in turn.losses]
        return [] if any(loss is None for loss in every) else [loss for loss in every if loss is not None]

    @property
    def without_draws(self) -> list[float]:
        """Loss and some numbers of the gradient of the first batch, computed without dropout; empty if it was not."""
        return [] if self.prepared is None else self.prepared.without_draws

    @property
    def gradients(self) -> list[list[float]]:
        """Some numbers of the gradients of each of the first steps."""
        return [] if self.prepared is None else self.prepared.gradients

    @property
    def useful_share(self) -> float | None:
        """Share of the tokens computed that are not padding, 0 to 1; None where batches have no mask."""
        tokens, slots = (sum(getattr(turn, name) or 0 for turn in self.turns) for name in ("tokens", "slots"))
        return tokens / slots if slots else None


def costs(one: Variant, other: Variant) -> tuple[list[float], list[float]]:
    """Return what the same work costs two variants in the turns that both had, in seconds.

    Where batches have a mask the work is a useful token: batches by length are short or long, and a few of them are
    no fair sample of the reviews in them. Elsewhere it is a sample, or a step where batches do not tell their size.
    """
    turns = [*one.turns, *other.turns]
    unit = next(
        (name for name in ("tokens", "samples") if all(getattr(turn, name) for turn in turns)), "steps"
    )
    both = min(len(one.turns), len(other.turns))
    first, second = ([turn.cost(unit) for turn in each.turns[:both]] for each in (one, other))
    return first, second


class Contestant:
    """The parent's side of a trial.

    Args:
        variant: what to run.
        start: starts the process.
        scratch: folder for what the program writes and prints.
        warm_up: steps before the clock.
        timeout_seconds: how long an answer may take.
        always: levers that are on besides those of the variant.

    """

    def __init__(
        self,
        variant: Variant,
        start: Start,
        scratch: Path,
        *,
        warm_up: int,
        timeout_seconds: float,
        always: tuple[Lever, ...] = (),
    ) -> None:
        self.variant, self._timeout = variant, timeout_seconds
        # When its answers come too late for the budget, on the monotonic clock.
        self.until = math.inf
        levers = (*always, *variant.levers)
        self._log = tempfile.NamedTemporaryFile(dir=scratch, suffix=".log", delete=False)  # noqa: SIM115
        orders = Orders(
            arguments={name: value for lever in levers for name, value in lever.arguments.items()},
            changes=[place for lever in levers if (place := lever.place) is not None],
            seed=variant.seed,
            warm_up=warm_up,
            looks=variant.looks,
            compares=variant.compares,
            preload=next((lever.preload for lever in levers if lever.preload is not None), None),
            scratch=str(scratch),
        )
        read_orders, self._orders = os.pipe()
        self._answers, write_answers = os.pipe()
        self._buffer = b""
        try:
            self._process = start(
                json.dumps(dataclasses.asdict(orders)), read_orders, write_answers, self._log
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(read_orders)
            os.close(write_answers)

    def at_fit(self) -> None:
        """Wait until the program begins to train."""
        self.variant.given = self._answer("at_fit", "the program has not called Trainer.fit")["given"]

    def prepare(self) -> MeasuredTurn:
        """Let it set up and warm up."""
        return self._turn({"do": "prepare"})

    def turn(self, steps: int) -> MeasuredTurn:
        """Let it train so many steps."""
        return self._turn({"do": "turn", "steps": steps})

    def examine(self) -> dict[str, Any]:
        """Return what it finds out about device, model and data."""
        self._order({"do": "examine"})
        self._answer("turn")
        self._order({"do": "examine"})
        return self._answer("facts")

    def apart(self) -> str | None:
        """Return how the samples of a batch affect one another; None where they do not."""
        self._order({"do": "apart"})
        why: str | None = self._answer("apart")["why"]
        return why

    def close(self) -> None:
        """End it, with all that it started, and wait until it is gone."""
        if self._process.poll() is None:
            # Its own workers are in its group. Before the pipes: a trial whose pipe ends takes the advisor for dead.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_SECONDS)
        self._close_pipes()
        self._log.close()

    def _close_pipes(self) -> None:
        for fd in (self._orders, self._answers):
            with suppress(OSError):
                os.close(fd)
        self._orders = self._answers = -1

    def _turn(self, order: dict[str, Any]) -> MeasuredTurn:
        self._order(order)
        found = self._answer("turn")
        return MeasuredTurn(
            **{
                field.name: found[field.name]
                for field in dataclasses.fields(MeasuredTurn)
                if field.name in found
            }
        )

    def _order(self, order: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            # Where it is gone, the answer says so.
            os.write(self._orders, (json.dumps(order) + "\n").encode())

    def _answer(self, event: str, late: str = "no answer") -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line(late))
        if answer["event"] == event:
            return answer
        if answer["event"] == "error":
            raise TrialError(answer["text"], refused=answer["refused"], log=self._last_lines())
        if answer["event"] == "ended":
            raise TrialError("the training ended by itself before enough steps were measured")
        if answer["event"] == "no_fit":
            raise TrialError("the program ended without calling Trainer.fit", log=self._last_lines())
        raise TrialError(f"a trial answered {answer['event']!r} where {event!r} was expected")

    def _line(self, late: str) -> bytes:
        until = min(time.monotonic() + self._timeout, self.until)
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = until - time.monotonic()
                if left <= 0 and until == self.until:
                    raise LateError("the budget was spent before it was ready")
                if left <= 0:
                    raise TrialError(f"{late} within {self._timeout:.0f} s", log=self._last_lines())
                if selector.select(min(left, 1.0)):
                    part = os.read(self._answers, 1 << 16)
                    if not part:
                        raise TrialError(self._how_it_died(), log=self._last_lines())
                    self._buffer += part
                elif self._process.poll() is not None and not selector.select(0):
                    # A worker that outlived it may hold the other end.
                    raise TrialError(self._how_it_died(), log=self._last_lines())
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _how_it_died(self) -> str:
        try:
            code = self._process.wait(timeout=_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return "the process closed its end"
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"the process died of {signal.Signals(-code).name}{hint}"
        return f"the process ended with code {code}"

    def _last_lines(self) -> str:
        try:
            text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LINES_OF_A_LOG:])


def start_command(command: Sequence[str]) -> Start:
    """Return what starts a trial as a command; the two ends of the pipes are its first arguments.

    Args:
        command: of the trial, to which ``READ WRITE ORDERS`` is inserted at the place of "{trial}".

    """

    def start(orders: str, read_fd: int, write_fd: int, log: Any) -> Process:
        given = [str(read_fd), str(write_fd), orders]
        words = [part for word in command for part in (given if word == "{trial}" else [word])]
        given = json.loads(orders)
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(read_fd, write_fd),
            # Ctrl-C is for the advisor, which then ends its trials.
            start_new_session=True,
            env=environment(given["scratch"], given["preload"]),
        )

    return start


def environment(scratch: str, preload: str | None = None) -> dict[str, str]:
    """Return an environment in which a program leaves nothing behind.

    Args:
        scratch: where it writes what it would write to common places.
        preload: an allocator that it is started with, "tcmalloc" or "jemalloc".

    """
    environment = {**os.environ, "TMPDIR": scratch, "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    # Compiled code of one trial serves the next, not the user's own runs: a cold start is timed, and nothing stays.
    environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(scratch, "inductor")
    environment["HASTEN_CACHE"] = os.path.join(scratch, "cache")
    library = file_of(preload) if preload is not None else None
    if library is not None:
        environment["LD_PRELOAD"] = " ".join(filter(None, (library, environment.get("LD_PRELOAD"))))
    # A trial is one process, whoever started this one.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        environment.pop(name, None)
    return environment


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a folder that is removed at the end, also when this process is asked to terminate."""
    folder = Path(tempfile.mkdtemp(prefix="hasten-advise-"))
    if len(str(folder)) > _LONGEST_FOLDER and os.path.isdir("/tmp"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="hasten-advise-", dir="/tmp"))
    try:
        with _terminated_in_order():
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Make SIGTERM unwind like Ctrl-C does; where the program has a handler of its own, that stays."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
