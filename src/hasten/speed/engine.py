"""Race variants of a program, each in its own process: start them, step them in turns, compare their speed.

The parent's side; ``hasten.speed.trial`` is the child's::

    with Engine() as engine:
        plain = engine.start("package.module:train")
        other = engine.start("package.module:train", "bf16-mixed")
        (found,) = race(plain, [other], steps=5)
        print(found.verdict, found.speed)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol

from hasten.machine.allocator import file_of

# The verdicts of a comparison.
FASTER, SLOWER, NO_GAIN, UNCLEAR, FAILED = "faster", "slower", "no gain", "unclear", "failed"
# A smaller gain counts as none: it is not worth a line.
SMALLEST_GAIN = 0.03
# Risk of a wrong verdict over all looks, and the share of turns that is cut off on each side: one in so many.
_RISK = 0.1
_TRIMMED = 8
# Two turns that agree by chance do not show that turns never differ.
_LEAST_DEVIATION = 0.005
# Numbers of turns after which a race is judged: each look costs certainty, so the later the fewer.
_LOOKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
# Times as slow as the base: one turn is enough, however busy the machine is.
_HOPELESS = 4.0
# A gain that may be as large as this is unclear when the time is over; a smaller one counts as none.
_WORTH_MORE_TURNS = 1.1
_KILL_SECONDS = 5.0
_LINES_OF_A_LOG = 12
_LONGEST_FOLDER = 48
# What every trial needs; the first optimizer of a process imports torch._dynamo, which takes longer than torch.
_PRELOADED = ("torch", "torch._dynamo", "hasten.trainer", "hasten.callbacks", "hasten.speed.trial")


class TrialError(RuntimeError):
    """A trial failed: the program or an argument refused, or something broke. ``log`` is the program's last lines."""

    def __init__(self, text: str, *, refused: bool = False, log: str = "") -> None:
        super().__init__(text)
        self.text, self.refused, self.log = text, refused, log

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out."""
        signs = ("OutOfMemoryError", "out of memory", "can't allocate memory")
        return any(sign in self.text for sign in signs)

    @property
    def with_log(self) -> str:
        """What went wrong, and the last lines."""
        return f"{self.text}\nIts last lines were:\n{self.log}" if self.log else self.text


class LateError(TrialError):
    """The time was over before a trial answered."""


@dataclasses.dataclass
class Turn:
    """Some steps of a trial: totals over its batches, None if they are unknown."""

    # From the order to the end of the last step.
    seconds: float
    step_seconds: list[float]
    # Of each step; None for a step without one.
    losses: list[float | None] = dataclasses.field(default_factory=list)
    samples: int | None = None
    # Useful tokens, and places for tokens, padding included.
    tokens: int | None = None
    slots: int | None = None
    # Pages of memory that the operating system provided, and the peak memory of the process so far.
    faults: int = 0
    memory_bytes: int = 0

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.step_seconds)

    def cost(self, unit: str) -> float:
        """Return the seconds of one of its "tokens", "samples" or "steps"."""
        return self.seconds / int(getattr(self, unit))


class SteppedTrial(Protocol):
    """A variant that trains in turns; a fake of it needs no process."""

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        """Train for so many steps; raise ``LateError`` if they are not done by ``until``."""


# -- processes


class Engine:
    """Starts trials and ends all of them when it is closed, whatever happens.

    Trials are forks of one process that has imported torch, hasten and the preloaded modules, so a start takes
    milliseconds; if forks do not work, each is a fresh process. A trial must answer within ``timeout_seconds``.
    """

    def __init__(self, *, timeout_seconds: float = 900.0) -> None:
        self.timeout_seconds = timeout_seconds
        self._closing = ExitStack()
        self._numbers = itertools.count()

    def __enter__(self) -> Engine:
        # Loader workers put sockets into it, and the path of a socket may have 107 characters.
        parent = "/tmp" if len(tempfile.gettempdir()) > _LONGEST_FOLDER and os.path.isdir("/tmp") else None
        folder = tempfile.TemporaryDirectory(prefix="hasten-advise-", dir=parent, ignore_cleanup_errors=True)
        # If this process is killed, the server or a trial removes it.
        self.scratch = Path(self._closing.enter_context(folder))
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def preload(self, modules: Sequence[str]) -> None:
        """Import these modules for all later trials; those that cannot be imported are left out."""
        self._fork_server.preload(modules)

    def start(
        self, target: str, *arguments: object, allocator: str | None = None, name: str = ""
    ) -> TrialProcess:
        """Start a trial; this returns at once.

        Args:
            target: "package.module:function", called in the new process with a ``hasten.speed.trial.Session``.
            arguments: further arguments of the function; they are pickled.
            allocator: "tcmalloc" or "jemalloc", which the process is then started with.
            name: for messages.

        """
        path = self.scratch / f"trial-{next(self._numbers)}.pickle"
        path.write_bytes(pickle.dumps((target, pickle.dumps(arguments), str(self.scratch))))
        start: _Start
        if allocator is None and self._fork_server.is_ready():
            start = self._fork_server.start
        else:
            start = functools.partial(_start_fresh, trial_environment(self.scratch, allocator))
        trial = TrialProcess(path, start, self.timeout_seconds, name)
        self._closing.callback(trial.close)
        return trial

    @functools.cached_property
    def _fork_server(self) -> _ForkServer:
        server = _ForkServer(trial_environment(self.scratch), self.scratch)
        self._closing.callback(server.close)
        return server


class TrialProcess:
    """A ``SteppedTrial`` in its own process, made by ``Engine.start``."""

    def __init__(self, path: Path, start: _Start, timeout_seconds: float, name: str) -> None:
        self.name = name
        self.history: list[Turn] = []
        self._facts: dict[str, Any] | None = None
        self._timeout, self._log = timeout_seconds, path.with_suffix(".log")
        self._buffer = b""
        read_orders, self._orders = os.pipe()
        self._answers, write_answers = os.pipe()
        try:
            with open(self._log, "wb") as log:
                self._process = start(str(path), read_orders, write_answers, log.fileno())
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(read_orders)
            os.close(write_answers)

    def ready(self, until: float = math.inf) -> dict[str, Any]:
        """Wait until it is ready to train; return the facts passed to ``Session.ready``."""
        if self._facts is None:
            self._facts = self._answer("ready", until, "the program has not called Trainer.fit")["facts"]
        return self._facts

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        """Train for so many steps; raise ``LateError`` if they are not done by ``until``."""
        self.ready(until)
        self._order({"do": "turn", "steps": steps})
        answer = self._answer("turn", until)
        turn = Turn(**{field.name: answer[field.name] for field in dataclasses.fields(Turn)})
        self.history.append(turn)
        return turn

    def ask(self, name: str, **options: object) -> Any:
        """Return what the trial's handler of this name returns."""
        self.ready()
        self._order({"do": "ask", "name": name, "options": options})
        return self._answer("asked", math.inf)["value"]

    def close(self) -> None:
        """End it with all processes that it started, and wait until it is gone."""
        if self._orders < 0:
            return
        if self._process.poll() is None:
            # Its workers are in its group. Before the pipes: a trial whose pipe ends takes the parent for dead.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_SECONDS)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for fd in (self._orders, self._answers):
            os.close(fd)
        self._orders = self._answers = -1

    def _order(self, order: Mapping[str, object]) -> None:
        # If the trial is gone, reading its answer reports that.
        with suppress(BrokenPipeError):
            os.write(self._orders, (json.dumps(order) + "\n").encode())

    def _answer(self, event: str, until: float, late: str = "no answer") -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line(until, late))
        if answer["event"] == event:
            return answer
        if answer["event"] == "error":
            raise self._error(answer["text"], refused=answer["refused"])
        if event == "ready":
            raise self._error("the program ended without calling Trainer.fit")
        raise TrialError("the training ended by itself before enough steps were measured")

    def _line(self, until: float, late: str) -> bytes:
        last = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = min(last, until) - time.monotonic()
                if left <= 0 and until < last:
                    raise LateError("the time was over before it was ready")
                if left <= 0:
                    raise self._error(f"{late} within {self._timeout:.0f} s")
                if selector.select(min(left, 1.0)):
                    part = os.read(self._answers, 1 << 16)
                    if not part:
                        raise self._error(self._how_it_died())
                    self._buffer += part
                elif self._process.poll() is not None and not selector.select(0):
                    # A worker that outlived it may hold the other end.
                    raise self._error(self._how_it_died())
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

    def _error(self, text: str, *, refused: bool = False) -> TrialError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return TrialError(text, refused=refused, log="\n".join(lines[-_LINES_OF_A_LOG:]))


class _ForkServer:
    """The parent's side of the process that trials are forks of; ``hasten.speed.trial.serve`` is the other.

    Each request is one message of the socket, and so is each answer.
    """

    def __init__(self, environment: Mapping[str, str], scratch: Path) -> None:
        self._scratch, self._unread = scratch, 0
        # Only Linux has sockets of whole messages; macOS cannot fork a process that has imported torch.
        self._works = sys.platform == "linux"
        if not self._works:
            return
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "from hasten.speed.trial import serve; serve()"
        with other:
            self._process = _python(
                environment, program, [other.fileno()], [scratch], output=subprocess.DEVNULL
            )
        self.preload(_PRELOADED)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules for all trials to come; this returns before they are imported."""
        if self._works:
            path = self._scratch / f"modules-{time.monotonic_ns()}.json"
            path.write_text(json.dumps(list(modules)), encoding="utf-8")
            self._send({"preload": str(path)})
            self._unread += 1

    def is_ready(self) -> bool:
        """Wait until all modules are imported; return whether trials can be forks."""
        while self._unread:
            self._unread -= 1
            self._works = self._receive().get("works", False)
        return self._works

    def start(self, path: str, read_fd: int, write_fd: int, log: int) -> _ForkedProcess:
        self._send({"path": path}, (read_fd, write_fd, log))
        return _ForkedProcess(self._receive()["pid"], self.exit_code)

    def exit_code(self, pid: int) -> int | None:
        self.is_ready()
        self._send({"wait": pid})
        code: int | None = self._receive().get("code", -signal.SIGKILL)
        return code

    def close(self) -> None:
        """End the server and its forks."""
        if not hasattr(self, "_socket"):
            return
        self._socket.close()
        try:
            self._process.wait(timeout=_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))

    def _receive(self) -> dict[str, Any]:
        data = b""
        with suppress(ConnectionError):
            data = self._socket.recv(1 << 16)
        # Empty if the server has died: an import may have ended it.
        answer: dict[str, Any] = json.loads(data or b"{}")
        return answer


class _ForkedProcess:
    """A child of the server, with the methods of ``subprocess.Popen`` that a trial needs."""

    def __init__(self, pid: int, exit_code: Callable[[int], int | None]) -> None:
        self.pid, self._exit_code = pid, exit_code
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._exit_code(self.pid)
        return self._code

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("trial", timeout)
            time.sleep(0.005)
        return code


_AnyProcess = subprocess.Popen[bytes] | _ForkedProcess
# (path of the pickled call, read end of the orders, write end of the answers, file for what it prints) -> the process
_Start = Callable[[str, int, int, int], _AnyProcess]


def _start_fresh(
    environment: Mapping[str, str], path: str, read_fd: int, write_fd: int, log: int
) -> _AnyProcess:
    program = "from hasten.speed.trial import main; main()"
    return _python(environment, program, [read_fd, write_fd], [path], output=log)


def _python(
    environment: Mapping[str, str],
    program: str,
    fds: Sequence[int],
    arguments: Sequence[object],
    *,
    output: int,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, (*fds, *arguments))],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        # Ctrl-C is for the parent, which then ends its trials.
        start_new_session=True,
        env=environment,
    )


def trial_environment(scratch: Path, allocator: str | None = None) -> dict[str, str]:
    """Return an environment in which a program leaves nothing behind."""
    # A trial is one process, also if this one is one of several.
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ranks},
        "TMPDIR": str(scratch),
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
        # Looking for a GPU must not start CUDA, which no fork survives.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Compiled code of one trial serves the next, not the user's own runs: a cold start is timed, and nothing stays.
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "HASTEN_CACHE": str(scratch / "cache"),
    }
    library = file_of(allocator) if allocator is not None else None
    if library is not None:
        environment["LD_PRELOAD"] = " ".join(filter(None, (library, environment.get("LD_PRELOAD"))))
    return environment


# -- comparing


class SpeedInterval(NamedTuple):
    """The logarithm of a speed-up: the estimate, and the ends of its interval."""

    middle: float
    low: float
    high: float

    def verdict(self, worth: float) -> str:
        """Return "faster", "slower", "no gain" or nothing yet; ``worth`` is the smallest logarithm that counts."""
        if self.low > 0 and self.middle >= worth:
            return FASTER
        if self.high < 0 and self.middle <= -worth:
            return SLOWER
        return NO_GAIN if self.high < worth else ""


def interval(log_ratios: Sequence[float], looks: int = 0) -> SpeedInterval:
    """Return the interval of a mean of logarithms that is right over repeated looks at it.

    The mean is trimmed, as turns on a busy machine have outliers (Yuen, "The two-sample trimmed t for unequal
    population variances", Biometrika 1974); the risk of the whole series is ``1 / 10``, of which the look number k
    spends a share of 1 / (k (k + 1)), after ``looks`` before it.

    Example::

        >>> found = interval([1.38, 1.40])
        >>> round(found.middle, 2), found.low > 1.0
        (1.39, True)

    """
    count = len(log_ratios)
    if count < 2:
        return SpeedInterval(sum(log_ratios), -math.inf, math.inf)
    cut = count // _TRIMMED
    kept = sorted(log_ratios)[cut : count - cut]
    pulled_in = [kept[0]] * cut + kept + [kept[-1]] * cut
    deviation = max(stdev(pulled_in), _LEAST_DEVIATION)
    error = deviation / ((1 - 2 * cut / count) * math.sqrt(count))
    half = error * _students_t(_RISK / ((looks + 1) * (looks + 2)), len(kept) - 1)
    middle = fmean(kept)
    return SpeedInterval(middle, middle - half, middle + half)


@functools.cache
def _students_t(risk: float, freedom: int) -> float:
    """Return the value that Student's t exceeds with this risk, both sides together."""
    low, high = 0.0, 1.0
    while _risk_beyond(high, freedom) > risk:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _risk_beyond(middle, freedom) > risk else (low, middle)
    return high


def _risk_beyond(t: float, freedom: int) -> float:
    """Return the risk that Student's t is beyond ``t`` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    inside = math.sin(angle) * total
    return 1.0 - (2 / math.pi * (angle + inside) if odd else inside)


@dataclasses.dataclass
class Comparison:
    """How fast a trial is, measured in turns with another."""

    # The smallest speed-up that counts.
    worth: float = 1.0 + SMALLEST_GAIN
    # Turns of the trial it is compared with, and its own.
    base: list[Turn] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    # "faster", "slower", "no gain", "unclear" (the time was over first) or "failed"; empty before.
    verdict: str = ""
    error: TrialError | None = None

    @property
    def interval(self) -> SpeedInterval:
        """The logarithm of the speed-up, with its interval."""
        return interval(self._log_ratios(), max(0, sum(look <= len(self.turns) for look in _LOOKS) - 1))

    @property
    def speed(self) -> float:
        """How many times as fast as the base."""
        return math.exp(self.interval.middle)

    @property
    def low(self) -> float:
        """The lower end of the interval of ``speed``."""
        return math.exp(self.interval.low)

    @property
    def high(self) -> float:
        """The upper end of the interval of ``speed``."""
        return math.exp(self.interval.high)

    def add(self, base: Turn, turn: Turn) -> None:
        """Add a turn of each, and decide if it is time to look."""
        self.base.append(base)
        self.turns.append(turn)
        if len(self.turns) in _LOOKS:
            self.verdict = self.interval.verdict(math.log(self.worth))
        elif len(self.turns) == 1 and self._log_ratios()[0] < -math.log(_HOPELESS):
            self.verdict = SLOWER

    def end(self) -> None:
        """Decide by the turns so far: the time is over, or enough turns were taken."""
        if not self.verdict:
            self.verdict = NO_GAIN if self.turns and self.high < _WORTH_MORE_TURNS else UNCLEAR

    def _log_ratios(self) -> list[float]:
        return [math.log(a / max(b, 1e-12)) for a, b in zip(*costs(self.base, self.turns), strict=True)]


def costs(base: Sequence[Turn], turns: Sequence[Turn]) -> tuple[list[float], list[float]]:
    """Return the seconds that the same work takes in each of the turns of two trials.

    The work is a useful token if batches have a mask: batches by length are short or long, and a few of them are not a
    fair sample. Otherwise it is a sample, or a step if the size of a batch is not known.
    """
    names = ("tokens", "samples", "steps")
    unit = next(name for name in names if all(getattr(turn, name) for turn in (*base, *turns)))
    return [turn.cost(unit) for turn in base], [turn.cost(unit) for turn in turns]


def race(
    base: SteppedTrial,
    challengers: Sequence[SteppedTrial],
    *,
    steps: int,
    worth: float = 1.0 + SMALLEST_GAIN,
    most: int = 96,
    until: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> list[Comparison]:
    """Let trials take turns (A B C A B C ...), each challenger until it is certain how it compares with the base.

    The interval of a speed-up holds over all looks at it: a factor of four shows in two turns, three percent in
    forty. Two turns are taken also if the time is over, and at most ``most``. A challenger that fails has the error in
    its comparison.

    Raises:
        TrialError: the base failed.

    Example::

        >>> class Fake:
        ...     def __init__(self, seconds):
        ...         self.seconds = seconds
        ...     def turn(self, steps, until=math.inf):
        ...         return Turn(self.seconds * steps, [self.seconds] * steps)
        >>> (found,) = race(Fake(2.0), [Fake(0.5)], steps=1)
        >>> found.verdict, round(found.speed, 3), len(found.turns)
        ('faster', 4.0, 2)

    """
    found = [Comparison(worth) for _ in challengers]
    for number in range(1, most + 1):
        running = [(trial, each) for trial, each in zip(challengers, found, strict=True) if not each.verdict]
        if not running or (number > _LOOKS[0] and clock() > until):
            break
        beside = base.turn(steps)
        # A trial that is ready may be late by the time that its slowness takes to show.
        patience = clock() + 2 * _HOPELESS * beside.seconds
        for trial, comparison in running:
            try:
                comparison.add(beside, trial.turn(steps, max(until, patience)))
            except TrialError as error:
                comparison.verdict, comparison.error = FAILED, error
    for comparison in found:
        comparison.end()
    return found
