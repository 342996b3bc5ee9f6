"""The advisor's result: rows and lines to write, as text, JSON and a chart."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hasten._lib.files import cache_folder, remember_json
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_warn
from hasten.report.tables import aligned
from hasten_tools.speed.levers import Facts, Lever, waits_for_data
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import FAILED, NO_GAIN, NOISY, SLOWER, UNCLEAR, Turn, speed_text, times

# The other verdicts of a row.
WINS, NEVER_PAYS, WRONG, REFUSED = "wins", "pays back too late", "wrong", "refused"
NOT_HERE, ALREADY_ON, NEEDED, NO_TIME, NOT_TRIED = "not here", "already on", "needed", "no time", "not tried"

_WIDTH, _NARROW = 100, 80
# Lines of a summary, and speed-ups that one of them names.
_MOST_LINES = 10
# Colours of bars.
BLUE, ORANGE, GREY = "#2f6fb5", "#c98b2b", "#8a8f98"
CHART = "the bar chart of `hasten advise`"


@dataclass
class Row:
    """What was found about a speed-up, or about several together.

    Args:
        name: name of the speed-up; several are joined by " + ".
        line: the line to write.
        safety: its class in this program; of several speed-ups, the least safe one.
        verdict: "wins", "no gain", "slower", "pays back too late", "wrong" (losses or gradients differ from the base's
            by more than its class allows), "refused" (it cannot be switched on here), "failed", "not here", "already
            on", "needed" (nothing runs without it), "no time", "not tried" (it needs consent, which was not given) or
            "unclear" (the time ended before the comparison was certain).
        reason: more about the verdict.
        levers: all speed-ups that were on: those of the base, and this one.
        base: the line that it was added to and compared with; empty for the unchanged program.
        gain: how many times as fast as the base; None if it was not measured.
        speed: how many times as fast as the unchanged program, together with the base.
        low: lower end of the interval of ``speed``.
        high: upper end of the interval of ``speed``.
        least: what at least four pairs of turns agree on, also where the machine is busy: each was so many times as
            fast as the unchanged program at least; None if there were fewer, or they differ.
        step_seconds: seconds of a step.
        samples_per_second: None if the size of a batch is not known.
        memory_bytes: peak memory of the device, or of the process if that is the CPU.
        one_time_seconds: how much longer the start takes than without the speed-up: compiling, loading.
        break_even_steps: steps after which a longer start is won back.
        loss_deviation: how far the losses are from the base's.
        loss_noise: how far they may be.
        faults_per_step: pages of memory that the operating system provided.
        mfu: useful operations a second as a share of the measured peak of the type computed in.
        useful_tokens: share of the tokens in its batches that are not padding; None without an ``attention_mask``.

    """

    name: str
    line: str
    safety: Safety
    verdict: str
    reason: str = ""
    levers: list[str] = field(default_factory=list)
    base: str = ""
    gain: float | None = None
    speed: float | None = None
    low: float | None = None
    high: float | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    memory_bytes: int | None = None
    one_time_seconds: float | None = None
    break_even_steps: float | None = None
    loss_deviation: float | None = None
    loss_noise: float | None = None
    faults_per_step: float | None = None
    mfu: float | None = None
    useful_tokens: float | None = None
    least: float | None = None

    @property
    def wins(self) -> bool:
        """Whether it is faster."""
        return self.verdict == WINS


@dataclass
class Line:
    """A line to write.

    Args:
        safety: class of the least safe of its speed-ups.
        line: the line to write.
        levers: names of its speed-ups.
        speed: how many times as fast as the unchanged program, measured with all of them.
        low: lower end of the interval of ``speed``; None if it was concluded from other races.
        high: upper end of the interval.
        least: what at least four pairs of turns agree on, as in ``Row``.

    """

    safety: Safety
    line: str
    levers: list[str]
    speed: float
    low: float | None = None
    high: float | None = None
    least: float | None = None


@dataclass(repr=False)
class Advice:
    """The result of ``hasten advise`` and ``Trainer.advise``.

    Args:
        program: what was measured.
        unchanged: the row of the unchanged program.
        rows: every speed-up, in the order in which they were tried.
        combinations: other lines: without a speed-up, or with fewer speed-ups for a safer class.
        lines: the lines to write, safest first; each is faster than the one before.
        winners: names of the speed-ups of the best line that needs no consent.
        arguments: its Trainer arguments.
        facts: device, model and data.
        parts: seconds of a step by where they go.
        notes: further findings, in sentences.
        noise: how much two turns side by side differ by chance; 0.1 for a tenth.
        waited_share: share of the time in which other programs had the cores, 0 to 1; 0 where the system does not say.
        rounds: most turns of each side of a comparison.
        steps: steps of a turn of the unchanged program.
        seconds: how long everything took.
        unchanged_seconds: of these, the seconds spent on steps of the unchanged program.
        needed_seconds: about the budget with which all speed-ups would have been measured; None if they were.
        interrupted: whether Ctrl-C ended it.

    Example::

        >>> unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0)
        >>> row = Row("compile", "L.Trainer(..., compile=True)", Safety.ROUNDING, "slower", speed=0.8)
        >>> advice = Advice("train.py", unchanged, [row])
        >>> advice.line
        ''
        >>> advice
        <Advice on train.py: nothing is faster>
        >>> print(advice.summary().splitlines()[0])
        train.py: nothing is faster here, leave the program unchanged.

    """

    program: str
    unchanged: Row
    rows: list[Row]
    combinations: list[Row] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    winners: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    noise: float = 0.0
    waited_share: float = 0.0
    rounds: int = 0
    steps: int = 0
    seconds: float = 0.0
    unchanged_seconds: float = 0.0
    needed_seconds: float | None = None
    interrupted: bool = False

    def __repr__(self) -> str:
        best = self.automatic
        found = "nothing is faster" if best is None else f"{self.factor(best)} with {best.line}".removeprefix(" with ")
        return f"<Advice on {self.program}: {found}>"

    def __str__(self) -> str:
        return self.summary()

    @property
    def is_complete(self) -> bool:
        """Whether there was time for all speed-ups."""
        return all(row.verdict != NO_TIME for row in self.rows)

    @property
    def is_noisy(self) -> bool:
        """Whether other programs took so much of the machine that factors are neither named nor kept."""
        return max(self.noise, self.waited_share) > NOISY

    @property
    def is_worth_keeping(self) -> bool:
        """Whether the next run of the program may go by it."""
        return self.is_complete and not self.is_noisy

    @property
    def automatic(self) -> Line | None:
        """The best line that needs no consent; None if nothing is faster."""
        return self.best_within(Safety.OTHER_DRAWS)

    def best_within(self, safety: Safety) -> Line | None:
        """Return the best line of which every speed-up is of this class or a safer one; None if nothing is faster."""
        return next((found for found in reversed(self.lines) if found.safety <= safety), None)

    def factor(self, found: Row | Line) -> str:
        """Return how fast a row or a line is, as text; empty if that is not known well enough.

        On a busy machine it is a lower end on which several turns agree.
        """
        if self.is_noisy:
            return f"at least {times(found.least, down=True)}" if found.least else ""
        return speed_text(found.speed, found.low, found.high)

    @property
    def line(self) -> str:
        """The text of the best line that needs no consent; empty if nothing is faster."""
        return "" if self.automatic is None else self.automatic.line

    def row(self, name: str) -> Row:
        """Return the row of a speed-up.

        Raises:
            KeyError: no row has this name.

        """
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise KeyError(f"{name!r}: measured were {', '.join(rows)}.")
        return rows[name]

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({**dataclasses.asdict(self), "line": self.line}, indent=2, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Advice:
        """Return the advice that ``to_json`` wrote.

        Raises:
            ValueError: ``to_json`` does not write such a text.

        """

        def classed(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
            return kind(**{**values, "safety": Safety(values["safety"])})

        try:
            found = json.loads(text)
            found.pop("line", None)
            found["unchanged"] = classed(Row, found["unchanged"])
            for name, kind in (("rows", Row), ("combinations", Row), ("lines", Line)):
                found[name] = [classed(kind, values) for values in found[name]]
            return cls(**found)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this text is not an Advice: {error}") from error

    def summary(self, width: int = _NARROW) -> str:
        """Return the verdict in at most ten lines: the lines to write, each speed-up once, and what was not measured.

        Args:
            width: columns, at least 40.

        """
        width = max(40, width)
        safe, same = self.automatic, self.best_within(Safety.LOWER_PRECISION)
        # The best line without consent, and the fastest that trains the same model.
        chosen = list(dict.fromkeys(map(id, filter(None, (safe, same)))))
        verdict = self._verdict([line for line in self.lines if id(line) in chosen], width)
        # A line to write is never cut; of the speed-ups, what fits is named.
        return "\n".join([*verdict, *self._rest(width)[: max(1, _MOST_LINES - len(verdict))]])

    def _verdict(self, chosen: Sequence[Line], width: int) -> list[str]:
        program = self.program if len(self.program) <= width // 3 else f"...{self.program[3 - width // 3 :]}"
        if not chosen:
            unknown = any(row.verdict in (NO_TIME, UNCLEAR) for row in self.rows)
            if self.is_noisy:
                return _cut(f"{program}: this machine is too busy to measure: run again when it is idle.", width)
            text = (
                "nothing is known to be faster yet."
                if unknown
                else "nothing is faster here, leave the program unchanged."
            )
            return _cut(f"{program}: {text}", width)
        lines = []
        for number, line in enumerate(chosen):
            factor = self.factor(line)
            text = f"{factor} as fast" if factor else "faster, how much is not certain,"
            lines += _cut(f"{'' if number else f'{program}: '}{text} with ({line.safety.words})", width)
            lines += _wrapped(f"    {line.line}", "        ", width=width)
        return lines

    def _rest(self, width: int) -> list[str]:
        noise = f", noise {self.noise:.0%}" if self.noise and not self.is_noisy else ""
        end = _cut(f"{self.seconds:.0f} s on {self._hardware()}{noise}; all figures: --verbose", width)
        busy = busy_text(self.noise, self.waited_share)
        if self.is_noisy and not self.lines:
            text = f"{busy}, so no speed-up is known to be faster or slower."
            return [
                *self._waiting(width),
                *_cut(f'{text[:1].upper()}{text[1:]} Nothing is saved for speed="auto".', width),
                *end,
            ]
        groups: dict[str, list[str]] = {}
        for row in self._measured_first():
            if row in self.combinations or row.verdict in (NOT_HERE, ALREADY_ON, NOT_TRIED):
                continue
            title = _TITLES.get(row.verdict, row.verdict)
            gain = ""
            if row.wins and row.gain is not None and not self.is_noisy:
                gain = f" {times(row.gain)}"
            groups.setdefault(title, []).append(f"{row.name}{gain}")
        lines = []
        order = list(dict.fromkeys([*_TITLES.values(), *groups]))
        for title in sorted(groups, key=order.index):
            more = ""
            if title == _TITLES[NO_TIME] and self.needed_seconds is not None:
                more = f"; raise --budget to {self.needed_seconds:.0f}"
            lines.append(_listed(title, groups[title], more, width))
        if self.is_noisy:
            lines += _cut(
                f"This machine is busy: {busy}. The result is not saved "
                'for speed="auto"; measure again when it is idle.',
                width,
            )
        return [*self._waiting(width), *lines, *end]

    def _waiting(self, width: int) -> list[str]:
        """Say that the time goes into reading data, if it is not known what makes that faster."""
        measured = any(row.speed is not None for row in self.rows if row.name in ("loader workers", "resident data"))
        if self.lines or measured or not waits_for_data({"parts": self.parts}):
            return []
        share = self.parts["data wait"] / sum(self.parts.values())
        text = f'Training waits for its data for {share:.0%} of a step: try num_workers="auto", or resident=True.'
        return _cut(text, width)

    def table(self, width: int = _WIDTH) -> str:
        """Return everything as plain text: the verdict, then each speed-up with its figures and reasons.

        Args:
            width: columns; figures that do not fit beside the others are left out, the last ones first.

        """
        rows, total = self._measured_first(), sum(self.parts.values())
        lines = [*self._verdict(self.lines, width), "", *_wrapped(self._title(), width=width)]
        lines += _wrapped(self._hardware(), width=width)
        shares = sorted(((seconds / total, part) for part, seconds in self.parts.items()), reverse=True)
        if shares:
            shown = ", ".join(f"{part} {share:.0%}" for share, part in shares if share >= 0.005)
            lines += _wrapped(f"Where a step goes: {shown}", width=width)
        lines += self._figures([self.unchanged, *rows], width)
        for row in rows:
            reason = row.reason.partition("\n")[0] if row.verdict in (REFUSED, FAILED) else row.reason
            lines += _wrapped(f"{row.name}: {row.verdict}: {reason}", width=width) if row.reason else []
        for note in self.notes:
            lines += _wrapped(note, width=width)
        return "\n".join(lines)

    def _figures(self, rows: Sequence[Row], width: int) -> list[str]:
        """Return the table of figures; its columns are as wide as what is in them."""
        speeds = "speed (interval)"
        cells = [["", "verdict", speeds, *(head for head, _, _ in _COLUMNS)]]
        for row in rows:
            factor = "" if row is self.unchanged else self.factor(row)
            hidden = "gain" if self.is_noisy else ""
            figures = [
                "" if needed == hidden or getattr(row, needed) is None else text(row) for _, needed, text in _COLUMNS
            ]
            cells.append([row.name, row.verdict, factor, *figures])
        names = min(_LONGEST_NAME, max(len(texts[0]) for texts in cells))
        widths = [names, *(max(map(len, column)) for column in list(zip(*cells, strict=True))[1:])]
        while len(widths) > 3 and sum(widths) + 2 * (len(widths) - 1) > width:
            widths.pop()
        rule = "-" * min(width, sum(widths) + 2 * (len(widths) - 1))
        rows_of_text = [["\n".join(textwrap.wrap(name, names)), *texts] for name, *texts in cells]
        # Words to the left, figures to the right.
        return list(aligned(rows_of_text, widths, right_from=2, gap="  ", rule=rule))

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw a bar for each speed-up that was measured; its length is the speed.

        Args:
            path: of the picture; its ending names the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.

        """
        bars = [Bar("unchanged", 1.0, "unchanged")]
        for row in self._measured_first():
            if row.speed is not None and (not self.is_noisy or row.least is not None):
                color = GREY if not row.wins else BLUE if row.safety.is_automatic else ORANGE
                text = f"{self.factor(row)}   {row.verdict}".strip()
                bars.append(Bar(row.name, row.speed, text, color, row.low, row.high))
        title, hardware = self._title(), self._hardware()
        axis = "times as fast as the unchanged program, each on top of the winners above (with interval)"
        notes = [hardware, "orange: needs consent, as it changes more than rounding"]
        notes += [f"write, {line.safety.words}, {self.factor(line)}: {line.line}" for line in self.lines]
        return draw_speeds(path, bars, title=title, axis=axis, notes=notes, purpose=CHART)

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write ``advice.txt``, ``advice.json`` and ``advice.png`` to a folder, which is created; return them.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            OSError: the folder cannot be written to.

        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        text, data = target / "advice.txt", target / "advice.json"
        text.write_text(self.table() + "\n", encoding="utf-8")
        data.write_text(self.to_json(), encoding="utf-8")
        return [text, data, self.draw(target / "advice.png")]

    def _measured_first(self) -> list[Row]:
        return sorted([*self.rows, *self.combinations], key=lambda row: row.speed is None)

    def _title(self) -> str:
        return (
            f"advise {self.program}: each speed-up in turns with the fastest combination so far, until it is certain; "
            f"{self.seconds:.0f} s, of which {self.unchanged_seconds:.0f} s on the unchanged program"
        )

    def _hardware(self) -> str:
        facts = self.facts
        threads = ""
        if facts.get("device_type") == "cpu":
            threads = f", {facts['threads']} thread{'s' * (facts['threads'] != 1)}"
        versions = f"torch {facts.get('torch', '?')}, hasten {facts.get('hasten', '?')}"
        return f"{facts.get('device', 'unknown device')}{threads}; {versions}"


class Bar(NamedTuple):
    """A bar of a chart of speeds."""

    name: str
    speed: float
    # Beside the bar.
    text: str
    color: str = GREY
    # Ends of the interval of the speed; it is not drawn if they are not known.
    low: float | None = None
    high: float | None = None
    hatch: str | None = None


def draw_speeds(
    path: str | os.PathLike[str], bars: Sequence[Bar], *, title: str, axis: str, notes: Sequence[str], purpose: str
) -> Path:
    """Draw speeds as bars, the first on top, with notes below; ``ModuleNotFoundError`` without matplotlib."""
    # Made without pyplot: no window, no global state, whatever backend is set.
    figure = need("matplotlib.figure", purpose=purpose).Figure(layout="constrained")
    need("matplotlib.backends.backend_agg", purpose=purpose).FigureCanvasAgg(figure)
    figure.set_size_inches(9.0, 1.6 + 0.45 * len(bars))
    axes, longest = figure.add_subplot(), 1.0
    for place, bar in enumerate(bars):
        end = bar.speed
        axes.barh(place, bar.speed, color=bar.color, height=0.67, hatch=bar.hatch, edgecolor="white")
        # One turn has no interval.
        if bar.low is not None and bar.high is not None and math.isfinite(bar.high):
            end = bar.high
            axes.hlines(place, bar.low, end, color="#444444", linewidth=1.5)
        axes.text(end, place, f"  {bar.text}", va="center", fontsize=9, backgroundcolor="white")
        longest = max(longest, end)
    axes.set_yticks(range(len(bars)), ["\n".join(textwrap.wrap(bar.name, 44)) for bar in bars])
    axes.invert_yaxis()
    axes.axvline(1.0, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlim(0, longest * 1.5)
    axes.set_xlabel(axis)
    axes.set_title("\n".join(textwrap.wrap(title, 100)), fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    below = "\n".join(part for note in notes for part in textwrap.wrap(note, 120))
    figure.supxlabel(below, fontsize=7.5, color="#555555", x=0.01, ha="left")
    figure.savefig(path, dpi=144)
    return Path(path)


# Heading, attribute of the row that it needs, and text. gain: over the line it was added to; start s: how many seconds
# longer than that line the start takes. The last ones are left out where there is no room.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("gain", "gain", lambda row: times(row.gain)),
    ("ms/step", "step_seconds", lambda row: f"{1000 * row.step_seconds:,.2f}"),
    ("samples/s", "samples_per_second", lambda row: f"{row.samples_per_second:,.0f}"),
    ("start s", "one_time_seconds", lambda row: f"{row.one_time_seconds:+.1f}"),
    ("MFU", "mfu", lambda row: f"{row.mfu:.1%}"),
)
# Columns of the longest name in a table; longer ones go on below.
_LONGEST_NAME = 30
# What a summary calls speed-ups of a verdict, in the order in which it names them.
_TITLES = {
    WINS: "faster",
    UNCLEAR: "not certain",
    NO_TIME: "not measured",
    NO_GAIN: "no gain",
    SLOWER: "slower",
    NEVER_PAYS: "pays back too late",
    WRONG: "computes something else",
    REFUSED: "refused",
    FAILED: "failed",
}


def _wrapped(text: str, indent: str = "    ", *, width: int = _WIDTH) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _cut(text: str, width: int) -> list[str]:
    """Return a text on two lines at most."""
    lines = textwrap.wrap(text, width, subsequent_indent="    ")
    if len(lines) > 2:
        lines[1:] = [textwrap.shorten(" ".join(line.strip() for line in lines[1:]), width - 4, placeholder=" ...")]
        lines[1] = "    " + lines[1]
    return lines


def _listed(title: str, names: Sequence[str], more: str, width: int) -> str:
    """Return names on one line; those that do not fit are counted."""
    for count in range(len(names), 0, -1):
        left = len(names) - count
        text = f"{title}: {', '.join(names[:count])}{f' and {left} more' if left else ''}{more}"
        if len(text) <= width:
            return text
    return f"{title}: {len(names)} speed-ups{more}"[:width]


def composed(levers: Sequence[Lever]) -> str:
    """Return one line for several speed-ups: their Trainer arguments together, then the other lines.

    Example::

        >>> from hasten_tools.speed.levers import choose
        >>> composed(choose(["kept memory", "fused optimizer"]))
        'L.Trainer(..., allocator="keep", fused_optimizer=True)'

    """
    inside = [argument for lever in levers if (argument := as_argument(lever.line)) != lever.line]
    others = [lever.line for lever in levers if as_argument(lever.line) == lever.line]
    return "; ".join([*([f"L.Trainer(..., {', '.join(inside)})"] if inside else []), *others])


def as_argument(line: str) -> str:
    """Return the argument in a line ``L.Trainer(..., argument)``; another line unchanged."""
    start, end = "L.Trainer(..., ", ")"
    return line[len(start) : -len(end)] if line.startswith(start) and line.endswith(end) else line


# -- figures and notes

# Fresh memory in a step that is worth a note.
_MUCH_BYTES = 16 * 2**20
# Beyond this difference between turns, a busy machine hides what speed-ups gain.
_BUSY = 0.1
# A speed-up that leaves out this much padding is noted.
_LESS_PADDING = 0.1


def figures(turns: Sequence[Turn], facts: Facts, arguments: Mapping[str, str], usual: Sequence[Turn]) -> dict[str, Any]:
    """Return the figures of a ``Row``: time, samples, memory, share of the peak.

    ``arguments`` are Trainer arguments as text; ``usual`` are turns of the unchanged program, whose samples have the
    usual length.
    """

    def total(turns: Sequence[Turn], name: str) -> int:
        return sum(getattr(turn, name) or 0 for turn in turns)

    # A few batches by length have shorter or longer samples than usual.
    usual_tokens, usual_samples = total(usual, "tokens"), total(usual, "samples")
    if usual_tokens and usual_samples and all(turn.tokens for turn in turns):
        rates = [(turn.tokens or 0) * usual_samples / usual_tokens / turn.seconds for turn in turns]
    else:
        rates = [turn.samples / turn.seconds for turn in turns if turn.samples]
    rate, slots = median(rates) if rates else None, total(turns, "slots")
    return {
        "step_seconds": median(turn.cost("steps") for turn in turns),
        "samples_per_second": rate,
        "memory_bytes": max(turn.memory_bytes for turn in turns),
        "faults_per_step": median(turn.faults / turn.steps for turn in turns),
        "mfu": _mfu(facts, arguments, rate),
        "useful_tokens": total(turns, "tokens") / slots if slots else None,
    }


def _mfu(facts: Facts, arguments: Mapping[str, str], samples_per_second: float | None) -> float | None:
    """Return useful operations a second as a share of the peak; operations are counted in the unchanged step."""
    flops, batch = facts.get("flops_per_step"), facts.get("samples_counted")
    if not flops or not batch or not samples_per_second:
        return None
    products, peaks = arguments.get("matmul_precision", ""), facts.get("peak_flops") or {}
    if "bf16" in arguments.get("precision", "") or "medium" in products:
        peak = peaks.get("bfloat16")
    else:
        peak = peaks.get("tf32" if "'high'" in products and "tf32" in peaks else "float32")
    if not peak:
        return None
    share = flops / batch * (facts.get("useful_tokens") or 1.0) * samples_per_second / peak
    # Above the peak: other processes used the device while the peak was measured.
    return float(share) if share <= 1.0 else None


def busy_text(noise: float, waited: float) -> str:
    """Return how a busy machine showed itself.

    Example::

        >>> busy_text(0.4, 0.1), busy_text(0.2, 0.5)
        ('turns side by side differed by 40%', 'other programs had the cores for 50% of the time')

    """
    if noise >= waited:
        return f"turns side by side differed by {noise:.0%}"
    return f"other programs had the cores for {waited:.0%} of the time"


def notes(
    facts: Facts, unchanged: Row, rows: Mapping[str, Row], *, noise: float, waited: float, has_losses: bool
) -> list[str]:
    """Return sentences on what was found; ``noise`` and ``waited`` are those of ``Advice``."""
    found = []
    if unchanged.mfu is not None:
        peaks = ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in facts["peak_flops"].items() if value)
        found.append(
            f"Useful operations (MFU): {unchanged.mfu:.1%} of the peak of this device, measured with a matrix product "
            f"(GFLOP/s: {peaks})."
        )
    useful = facts.get("useful_tokens") if unchanged.useful_tokens is None else unchanged.useful_tokens
    if useful is not None:
        shares = ((row.useful_tokens or 0.0, row.name) for row in rows.values())
        trimmed = [f"{share:.0%} with {name}" for share, name in shares if share > useful + _LESS_PADDING]
        more = f" It is {', '.join(trimmed)}." if trimmed else ""
        found.append(f"Useful tokens: {useful:.0%}; the rest is padding.{more}")
    faults = unchanged.faults_per_step or 0.0
    fresh = faults * facts.get("page_bytes", 4096)
    if fresh > _MUCH_BYTES and facts.get("device_type") == "cpu":
        found.append(
            f"The operating system provides {fresh / 2**20:,.0f} MiB of fresh, zeroed memory in each step "
            f'({faults:,.0f} page faults): allocator="keep" avoids that.'
        )
    dropped, priced = facts.get("attention_dropout"), rows.get("no attention dropout")
    if dropped and priced is not None and priced.gain is not None and max(noise, waited) <= NOISY:
        found.append(
            f"Attention dropout in {', '.join(dropped)} forces an attention that keeps every probability. Without it a "
            f"step is {priced.gain:.2f} times as fast; this changes what is trained."
        )
    if max(noise, waited) > _BUSY:
        found.append(f"This machine was busy: {busy_text(noise, waited)}, so comparisons took longer.")
    if not has_losses:
        found.append("training_step returned no loss in some steps: losses were not compared.")
    return [*found, "Measured on one device, without validation, checkpoints and loggers."]


# -- results kept for the next run of the same program with the same model on the same device


def remember(key: str | None, advice: Advice) -> Path | None:
    """Keep a result under ``hasten_tools.speed.inspect_run.key_of``; return its file, or None if it cannot be kept."""
    path = cache_folder("advice") / f"{key}.json"
    return path if key and remember_json(path, json.loads(advice.to_json())) else None


def recall(key: str) -> Advice | None:
    """Return the result kept under ``key``; None if it does not exist or cannot be read."""
    path = cache_folder("advice") / f"{key}.json"
    try:
        return Advice.from_json(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        rank_zero_warn(f"{path} cannot be read: it is removed, and measured again when it is needed.")
        with suppress(OSError):
            path.unlink()
        return None
