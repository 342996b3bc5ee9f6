"""Race variants of a program, each in its own process: start them, step them in turns, compare their speed.

The parent's side; ``hasten_tools.speed.trial`` is the child's::

    with TrialStarter() as starter:
        plain = starter.start("package.module:train")
        other = starter.start("package.module:train", "bf16-mixed")
        (found,) = race(plain, [other], steps=5)
        print(found.verdict, found.speed)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol

from hasten.machine.allocator import file_of

# The verdicts of a comparison.
FASTER, SLOWER, NO_GAIN, UNCLEAR, FAILED = "faster", "slower", "no gain", "unclear", "failed"
# A smaller gain counts as none: it is not worth a line.
WORTH_A_LINE = 1.03
# Risk of a wrong verdict over all looks, and the share of turns that is cut off on each side: one in so many.
_RISK = 0.1
_TRIMMED = 8
# Where turns side by side differ by more than this, a factor is not known well enough to be named or kept.
NOISY = 0.3
# On such a machine, pairs of turns that must agree before a lower end is named.
AGREEING = 4
# An interval whose ends are further apart than this, one divided by the other, says too little to be shown.
_WIDEST = 3.0
# Two turns that agree by chance do not show that turns never differ.
_LEAST_DEVIATION = 0.005
# Numbers of turns after which a race is judged: each look costs certainty, so the later the fewer.
_LOOKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
# Times as slow as the base: one turn is enough, however busy the machine is.
_HOPELESS = 4.0
# If each turn of one side takes so many times as long as each of the other, chance is not the reason.
_APART = 2.0
# A gain that may be as large as this is unclear when the time is over; a smaller one counts as none.
_WORTH_MORE_TURNS = 1.1
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.2
_LINES_OF_A_LOG = 12
_LONGEST_FOLDER = 48
# What every trial needs; the first optimizer of a process imports torch._dynamo, which takes longer than torch.
_PRELOADED = ("torch", "torch._dynamo", "hasten.trainer", "hasten.callbacks", "hasten_tools.speed.trial")


class TrialError(RuntimeError):
    """Raised if a trial failed: the program or an argument was refused, or something broke.

    ``log`` has the last lines of the program's output.
    """

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
    """Raised if time ran out before a trial answered."""


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
    # Seconds in which it could have run, but other programs had the cores; 0 where the system does not say.
    waited: float = 0.0

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


class TrialStarter:
    """Starts trials and ends all of them when it is closed, whatever happens.

    Trials are forks of one process that has imported torch, hasten and the preloaded modules, so a start takes
    milliseconds; if forks do not work, each is a fresh process. A trial must answer within ``timeout_seconds``, and by
    ``deadline`` (of ``time.monotonic``): after that everything that waits for it raises ``LateError``.
    """

    def __init__(self, *, timeout_seconds: float = 900.0, deadline: float = math.inf) -> None:
        self.timeout_seconds, self.deadline = timeout_seconds, deadline
        self._closing = ExitStack()
        self._numbers = itertools.count()

    def __enter__(self) -> TrialStarter:
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("speed-ups are measured in processes that use Unix sockets, which this system does not have.")
        # Sockets are in it, ours and the sockets of loader workers, and the path of a socket may have 107 characters.
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

    def start(self, target: str, *arguments: object, allocator: str | None = None, name: str = "") -> TrialProcess:
        """Start a trial; this returns at once.

        ``target`` is "package.module:function", called in the new process with a ``hasten_tools.speed.trial.Session``
        and the arguments, which are pickled. ``allocator`` is "tcmalloc" or "jemalloc", which the process is then
        started with.
        """
        path = self.scratch / f"trial-{next(self._numbers)}"
        path.write_bytes(pickle.dumps((target, pickle.dumps(arguments))))
        start: Callable[[Path], _Process]
        if allocator is None and self._fork_server.is_ready(self.deadline):
            start = self._fork_server.start
        else:
            start = functools.partial(_start_fresh, trial_environment(self.scratch, allocator))
        trial = TrialProcess(path, start, self.timeout_seconds, name, deadline=self.deadline)
        self._closing.callback(trial.close)
        return trial

    @functools.cached_property
    def _fork_server(self) -> _ForkServer:
        server = _ForkServer(trial_environment(self.scratch), self.scratch)
        self._closing.callback(server.close)
        return server


class TrialProcess:
    """A ``SteppedTrial`` in its own process, made by ``TrialStarter.start``."""

    def __init__(
        self, path: Path, start: Callable[[Path], _Process], timeout_seconds: float, name: str, *, deadline: float
    ) -> None:
        self.name, self._deadline = name, deadline
        self.history: list[Turn] = []
        self._log, self._timeout = Path(f"{path}.log"), timeout_seconds
        self._log.touch()
        self._facts: dict[str, Any] | None = None
        # The trial connects to the socket.
        self._socket = socket.socket(socket.AF_UNIX)
        self._connection: Connection | None = None
        try:
            self._socket.bind(f"{path}.socket")
            self._socket.listen(1)
            self._process = start(path)
        except BaseException:
            self._socket.close()
            raise

    def ready(self, until: float = math.inf) -> dict[str, Any]:
        """Wait until it is ready to train; return the facts passed to ``Session.ready``."""
        if self._facts is None:
            self._facts = self._answer("ready", until, "the program has not called Trainer.fit")
        return self._facts

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        """Train for so many steps; raise ``LateError`` if they are not done by ``until``."""
        self.ready(until)
        self._order("turn", steps)
        turn: Turn = self._answer("turn", until)
        self.history.append(turn)
        return turn

    def ask(self, name: str, **options: object) -> Any:
        """Return what the trial's handler of this name returns."""
        self.ready()
        self._order("ask", name, options)
        return self._answer("asked")

    def close(self) -> None:
        """End it with all processes that it started, and wait until it is gone."""
        if self._socket.fileno() < 0:
            return
        if self._process.exit_code(0) is None:
            # Its workers are in its group. Before the connection: a trial that loses it takes the parent for dead.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.exit_code(_KILL_SECONDS)
        self._socket.close()
        if self._connection is not None:
            self._connection.close()

    def _order(self, *order: object) -> None:
        # If the trial is gone, reading its answer reports that.
        with suppress(ConnectionError):
            assert self._connection is not None
            self._connection.send(order)

    def _answer(self, event: str, until: float = math.inf, late: str = "no answer") -> Any:
        last, until = time.monotonic() + self._timeout, min(until, self._deadline)
        if self._connection is None:
            self._await(self._socket, last, until, late)
            self._connection = Connection(self._socket.accept()[0].detach())
        self._await(self._connection, last, until, late)
        try:
            found, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._error(self._how_it_died()) from None
        if found == event:
            return value
        if found == "error":
            raise self._error(value["text"], refused=value["refused"])
        if event == "ready":
            raise self._error("the program ended without calling Trainer.fit")
        raise TrialError("the training ended by itself before enough steps were measured")

    def _await(self, source: socket.socket | Connection, last: float, until: float, late: str) -> None:
        while (left := min(last, until) - time.monotonic()) > 0:
            if wait([source], min(left, 1.0)):
                return
            # A worker that outlives the trial may hold its end of the connection.
            if self._process.exit_code(0) is not None and not wait([source], 0):
                raise self._error(self._how_it_died())
        if until < last:
            raise LateError("time ran out before it was ready")
        raise self._error(f"{late} within {self._timeout:.0f} s")

    def _how_it_died(self) -> str:
        code = self._process.exit_code(_KILL_SECONDS)
        if code is None:
            return "the process closed its end"
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"the process died of {signal.Signals(-code).name}{hint}"
        return f"the process ended with code {code}"

    def _error(self, text: str, *, refused: bool = False) -> TrialError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return TrialError(text, refused=refused, log="\n".join(lines[-_LINES_OF_A_LOG:]))


class _Process(NamedTuple):
    pid: int
    # Waits so many seconds for its end; returns the exit code, None if it still runs.
    exit_code: Callable[[float], int | None]


def _start_fresh(environment: Mapping[str, str], path: Path) -> _Process:
    with open(f"{path}.log", "wb") as log:
        process = _python("main", [path], environment, output=log.fileno())

    def exit_code(seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None

    return _Process(process.pid, exit_code)


def _python(
    function: str, arguments: Sequence[object], environment: Mapping[str, str], *, output: int, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process that calls a function of ``hasten_tools.speed.trial``."""
    program = f"from hasten_tools.speed.trial import {function}; {function}()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # Ctrl-C is for the parent, which then ends its trials.
        start_new_session=True,
        env=environment,
        **options,
    )


class _ForkServer:
    """The parent's side of the process that trials are forks of; ``hasten_tools.speed.trial.serve`` is the other."""

    def __init__(self, environment: Mapping[str, str], scratch: Path) -> None:
        # macOS cannot fork a process that has imported torch.
        self._works, self._unread = sys.platform == "linux", 0
        self._connection, other = Pipe()
        with other:
            if self._works:
                fd = other.fileno()
                self._process = _python("serve", [fd, scratch], environment, output=subprocess.DEVNULL, pass_fds=[fd])
        self.preload(_PRELOADED)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules for all trials to come; this returns before they are imported."""
        if self._works:
            self._send("preload", *modules)
            self._unread += 1

    def is_ready(self, until: float = math.inf) -> bool:
        """Wait until all modules are imported; return whether trials can be forks. ``LateError`` after ``until``."""
        while self._unread:
            while not self._has_answer():
                if time.monotonic() > until:
                    raise LateError("time ran out before its imports were done")
            self._unread -= 1
            self._works = self._receive(False)
        return self._works

    def start(self, path: Path) -> _Process:
        """Start a trial."""
        self._send("start", str(path))
        pid = self._receive(None)
        if pid is None:
            raise TrialError("the process that starts the trials has died")
        return _Process(pid, functools.partial(self._exit_code, pid))

    def _has_answer(self) -> bool:
        try:
            return self._connection.poll(_POLL_SECONDS)
        except (EOFError, ConnectionError):
            # Reading reports that it is gone.
            return True

    def close(self) -> None:
        """End the server and its forks."""
        self._connection.close()
        if sys.platform == "linux":
            if self._unread:
                # It imports, and would notice only after that; it has no forks.
                self._process.kill()
            try:
                self._process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _exit_code(self, pid: int, seconds: float) -> int | None:
        self.is_ready()
        self._send("wait", pid, seconds)
        code: int | None = self._receive(-signal.SIGKILL)
        return code

    def _send(self, *request: object) -> None:
        with suppress(ConnectionError):
            self._connection.send(request)

    def _receive(self, if_dead: Any) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            # An import may have ended it.
            return if_dead


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
    """The logarithm of a gain in speed: the estimate, and the ends of its interval."""

    middle: float
    low: float
    high: float


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


def speed_text(speed: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return how fast something is, as every report and progress line shows it; empty if too little is known.

    It is None if it was not measured. ``low`` and ``high`` are the ends of its interval; both None, or ``high``
    infinite, if there is none.

    Example::

        >>> speed_text(1.8, 1.6, 2.0)
        '1.8x (1.6x to 2.0x)'
        >>> speed_text(174.0, 72.0, 420.0), speed_text(0.5, 0.1, 0.7)
        ('at least 72x', 'at most 0.70x')
        >>> speed_text(0.7, 0.02, 27.0)
        ''

    """
    if speed is None or not (math.isfinite(speed) and speed > 0):
        return ""
    if low is None or high is None:
        return times(speed)
    if low > 0 and high <= _WIDEST * low:
        return times(speed) if times(low) == times(high) else f"{times(speed)} ({times(low)} to {times(high)})"
    if low > 1.0:
        return f"at least {times(low, down=True)}"
    return f"at most {times(high)}" if high < 1.0 else ""


def times(speed: float, *, down: bool = False) -> str:
    """Return a factor with as many digits as can be meant; ``down`` never rounds it up.

    Example::

        >>> [times(each) for each in (0.876, 1.04, 2.345, 23.45, 234.5)]
        ['0.88x', '1.04x', '2.3x', '23x', '234x']

    """
    # Small gains differ in the second digit behind the point.
    digits = 2 if speed < 1.095 else 1 if speed < 9.95 else 0
    if down:
        speed = math.floor(speed * 10**digits) / 10**digits
    return f"{speed:,.{digits}f}x"


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

    # Fewer pairs of turns are not judged, unless the time is over; where turns differ much, so many as must agree if
    # the result is to be named.
    fewest: int = 2
    wary: bool = False
    # Turns of the trial it is compared with, and its own.
    base: list[Turn] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    # "faster", "slower", "no gain", "unclear" (the time was over first) or "failed"; empty before.
    verdict: str = ""
    error: TrialError | None = None
    # How many times as fast as the base, and the ends of the interval of that.
    speed: float = 1.0
    low: float = 0.0
    high: float = math.inf
    # How many times as fast every pair of turns was at least; None if too few pairs agree.
    least: float | None = None

    def add(self, base: Turn, turn: Turn) -> None:
        """Add a turn of each, and decide if it is time to look."""
        self.base.append(base)
        self.turns.append(turn)
        count = len(self.turns)
        before, after = costs(self.base, self.turns)
        ratios = [math.log(a / max(b, 1e-12)) for a, b in zip(before, after, strict=True)]
        looks = max(0, sum(look <= count for look in _LOOKS) - 1)
        self.speed, self.low, self.high = map(math.exp, interval(ratios, looks))
        # Few turns on a busy machine have a wide interval, also where the two sides are far apart.
        least, most = min(before) / max(max(after), 1e-12), max(before) / max(min(after), 1e-12)
        if count > 1 and (least > _APART or most < 1 / _APART):
            self.low, self.high = max(self.low, least), min(self.high, most)
        if self.wary and count > 1 and max(stdev(ratios), self.waited_share) > NOISY:
            self.fewest = max(self.fewest, AGREEING)
        if count >= AGREEING:
            slowest, fastest = math.exp(min(ratios)), math.exp(max(ratios))
            agree = min(self.low, slowest) >= WORTH_A_LINE and fastest <= _WIDEST * slowest
            self.least = min(self.low, slowest) if agree else None
        if count in _LOOKS and count >= self.fewest:
            self.look()
        elif count == 1 and self.speed < 1 / _HOPELESS:
            self.verdict = SLOWER

    @property
    def waited_share(self) -> float:
        """The share of the turns in which other programs had the cores."""
        turns = [*self.base, *self.turns]
        return sum(turn.waited for turn in turns) / max(1e-12, sum(turn.seconds for turn in turns))

    def look(self) -> None:
        """Decide by the turns so far; the verdict stays empty if they are too few."""
        if self.low > 1 and self.speed >= WORTH_A_LINE:
            self.verdict = FASTER
        elif self.high < 1 and self.speed <= 1 / WORTH_A_LINE:
            self.verdict = SLOWER
        else:
            self.verdict = NO_GAIN if self.high < WORTH_A_LINE else ""

    def end(self) -> None:
        """Decide by the turns so far: the time is over, or enough turns were taken."""
        if not self.verdict and len(self.turns) == 1:
            # A machine may be twice as fast in the one turn as in the other.
            self.low, self.high = self.speed / _APART, self.speed * _APART
            self.verdict = FASTER if self.low > 1.0 else SLOWER if self.high < 1.0 else UNCLEAR
        if not self.verdict and 1 < len(self.turns) < self.fewest:
            self.look()
        if not self.verdict:
            self.verdict = NO_GAIN if self.turns and self.high < _WORTH_MORE_TURNS else UNCLEAR


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
    fewest: int = 2,
    wary: bool = False,
    most: int = 96,
    until: float = math.inf,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> list[Comparison]:
    """Let trials take turns (A B C A B C ...), each challenger until it is certain how it compares with the base.

    The interval of a gain holds over all looks at it: a factor of four shows in two turns, three percent in
    forty. After ``until`` only the second turn is taken, and none that would end after ``deadline``; there are at least
    ``fewest`` if there is time (if ``wary``, more where turns differ much), and at most ``most``. A challenger that
    fails has the error in its comparison.

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
    found, seconds = [Comparison(fewest, wary) for _ in challengers], 0.0
    for number in range(1, most + 1):
        running = [(trial, each) for trial, each in zip(challengers, found, strict=True) if not each.verdict]
        if not running or (number > _LOOKS[0] and clock() > until):
            break
        if number > 1 and clock() + seconds > deadline:
            break
        began = clock()
        beside = base.turn(steps)
        # A trial that is ready may be late by the time that its slowness takes to show.
        patience = clock() + 2 * _HOPELESS * beside.seconds
        for trial, comparison in running:
            try:
                comparison.add(beside, trial.turn(steps, min(max(until, patience), deadline)))
            except TrialError as error:
                comparison.verdict, comparison.error = FAILED, error
        seconds = clock() - began
    for comparison in found:
        comparison.end()
    return found
