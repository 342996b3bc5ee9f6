"""What the advisor found: rows and lines to write, as text, JSON and a picture."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hasten._lib.files import cache_folder, remember_json
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_warn
from hasten.speed.engine import Turn
from hasten.speed.levers import Lever
from hasten.speed.safety import Safety

WIDTH = 100
# What a row may say, best first.
WINS, NO_GAIN, SLOWER, NEVER_PAYS = "wins", "no gain", "slower", "pays back too late"
WRONG, REFUSED, FAILED, NOT_HERE, ALREADY_ON = "wrong", "refused", "failed", "not here", "already on"
NEEDED, NO_TIME, UNCLEAR, NOT_TRIED = "needed", "no time", "unclear", "not tried"
_COLOURS = {WINS: "#2f6fb5"}
_NEEDS_CONSENT = "#c98b2b"
_GREY = "#8a8f98"
_MIB = 2**20


@dataclass
class Row:
    """What was found about a lever, or about several at once.

    Args:
        name: of the lever; several are joined by " + ".
        line: what to write.
        safety: its class in this program; of several levers that of the least safe.
        verdict: "wins", "no gain", "slower", "pays back too late", "wrong" (its losses or gradients are further from
            the base's than its class allows), "refused" (it cannot be on here), "failed", "not here", "already on",
            "needed" (nothing runs without it), "no time" (it was over first), "not tried" (it needs consent, which was
            not given) or "unclear" (the time was over before it was certain).
        reason: more about the verdict.
        levers: all that were on: those of the base, and this one.
        base: the line it was added to and compared with; empty for the unchanged program.
        gain: how many times as fast as the base; None where it was not measured.
        speed: how many times as fast as the unchanged program, with the base.
        low: what ``speed`` is at least.
        high: what ``speed`` is at most.
        step_seconds: of a step.
        samples_per_second: None where batches do not tell their size.
        memory_bytes: the most that was held, of the device or of the process where that is the CPU.
        one_time_seconds: what starting cost more than without the lever: compiling, loading.
        break_even_steps: after so many steps that is won back.
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

    @property
    def wins(self) -> bool:
        """Whether it pays."""
        return self.verdict == WINS


@dataclass
class Line:
    """A line to write.

    Args:
        safety: the least safe of its levers.
        line: what to write.
        levers: their names.
        speed: how many times as fast as the unchanged program, measured with all of them.

    """

    safety: Safety
    line: str
    levers: list[str]
    speed: float


@dataclass(repr=False)
class Advice:
    """The outcome of ``hasten advise`` and ``Trainer.advise``.

    Args:
        program: what was measured.
        unchanged: the program as it is.
        rows: every lever, in the order in which they were tried.
        combinations: other lines: without a lever, or with fewer for a safer class.
        lines: what to write, safest first; each is faster than the one before.
        winners: names of the levers of the best line that needs no consent.
        arguments: its Trainer arguments.
        facts: device, model and data.
        parts: seconds of a step by where they go.
        notes: what else is worth knowing, in sentences.
        noise: how much two turns side by side differ by chance; 0.1 for a tenth.
        rounds: turns of each in a comparison at most.
        steps: of a turn of the unchanged program.
        seconds: how long all of it took.
        unchanged_seconds: of these, spent on steps of the unchanged program.

    Example::

        >>> unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0)
        >>> row = Row("compile", "L.Trainer(..., compile=True)", Safety.ROUNDING, "slower", speed=0.8)
        >>> advice = Advice("train.py", unchanged, [row])
        >>> advice.line
        ''
        >>> advice
        <Advice on train.py: nothing pays>
        >>> print(advice.table().splitlines()[-1])
        Nothing pays here: leave the program as it is.

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
    rounds: int = 0
    steps: int = 0
    seconds: float = 0.0
    unchanged_seconds: float = 0.0

    def __repr__(self) -> str:
        """Return one line; ``print(advice)`` shows the whole table."""
        best = self.automatic
        found = "nothing pays" if best is None else f"{best.speed:.2f}x with {best.line}"
        return f"<Advice on {self.program}: {found}>"

    def __str__(self) -> str:
        """Return the table."""
        return self.table()

    @property
    def is_complete(self) -> bool:
        """Whether there was time for all levers."""
        return all(row.verdict != NO_TIME for row in self.rows)

    @property
    def line(self) -> str:
        """The best line that needs no consent; empty if nothing pays."""
        return "" if self.automatic is None else self.automatic.line

    @property
    def automatic(self) -> Line | None:
        """The best line that needs no consent; None if nothing pays."""
        return next((found for found in reversed(self.lines) if found.safety.is_automatic), None)

    def row(self, name: str) -> Row:
        """Return the row of a lever.

        Raises:
            KeyError: there is none of this name.

        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r}: measured were {', '.join(row.name for row in self.rows)}.")

    def to_json(self) -> str:
        """Return all of it as JSON."""
        whole = {**dataclasses.asdict(self), "line": self.line}
        return json.dumps(whole, indent=2, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Advice:
        """Return what ``to_json`` wrote.

        Raises:
            ValueError: the text is not what ``to_json`` writes.

        """
        try:
            found = json.loads(text)
            found.pop("line", None)
            for name in ("rows", "combinations"):
                found[name] = [_classed(Row, row) for row in found[name]]
            return cls(
                **{
                    **found,
                    "unchanged": _classed(Row, found["unchanged"]),
                    "lines": [_classed(Line, line) for line in found["lines"]],
                }
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this is not an advice: {error}") from error

    def table(self) -> str:
        """Return all of it as plain text, at most 100 columns wide."""
        rule = "-" * WIDTH
        rows = self._ordered()
        lines = [
            *self._head(),
            rule,
            _HEADS,
            rule,
            *(_table_line(row) for row in [self.unchanged, *rows]),
            rule,
        ]
        for row in rows:
            if row.reason:
                first = row.reason.splitlines()[0] if row.verdict in (REFUSED, FAILED) else row.reason
                lines += _wrapped(f"{row.name}: {row.verdict}: {first}")
        for note in self.notes:
            lines += _wrapped(note)
        return "\n".join([*lines, rule, *self._what_to_write()])

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw a bar for each lever that was measured, as long as it is fast.

        Args:
            path: of the picture; its ending says the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.

        """
        purpose = "the bar chart of `hasten advise`"
        # Made without pyplot: no window, no global state, whatever backend is set.
        figure_class = need("matplotlib.figure", purpose=purpose).Figure
        canvas_class = need("matplotlib.backends.backend_agg", purpose=purpose).FigureCanvasAgg
        bars = [self.unchanged, *(row for row in self._ordered() if row.speed is not None)]
        figure = figure_class(figsize=(9.0, 1.6 + 0.42 * len(bars)), layout="constrained")
        canvas_class(figure)
        axes = figure.add_subplot()
        places = list(range(len(bars)))
        speeds = [row.speed or 1.0 for row in bars]
        spread = [
            [max(0.0, speed - (row.low or speed)) for row, speed in zip(bars, speeds, strict=True)],
            [max(0.0, (row.high or speed) - speed) for row, speed in zip(bars, speeds, strict=True)],
        ]
        colours = [_colour(row) if row is not self.unchanged else _GREY for row in bars]
        axes.barh(places, speeds, xerr=spread, color=colours, height=0.66, ecolor="#444444", capsize=2)
        axes.set_yticks(places, ["\n".join(textwrap.wrap(row.name, 44)) for row in bars])
        axes.invert_yaxis()
        axes.axvline(1.0, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_xlim(0, max(a + b for a, b in zip(speeds, spread[1], strict=True)) * 1.45)
        for place, row, speed, more in zip(places, bars, speeds, spread[1], strict=True):
            text = "unchanged" if row is self.unchanged else f"{_times(speed)}   {row.verdict}"
            axes.annotate(
                text,
                (speed + more, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axes.set_xlabel(
            "times as fast as the unchanged program, each lever on top of the winners above it (marks: interval)"
        )
        axes.set_title("\n".join(textwrap.wrap(self._title(), 100)), fontsize=9, loc="left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        notes = [
            self._hardware(),
            "orange: needs consent, as it changes more than rounding",
            *(f"write, {line.safety.words}, {_times(line.speed)}: {line.line}" for line in self.lines),
        ]
        figure.supxlabel(
            "\n".join(part for note in notes for part in textwrap.wrap(note, 125)),
            fontsize=7.5,
            color="#555555",
            x=0.01,
            ha="left",
        )
        figure.savefig(path, dpi=144)
        return Path(path)

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

    # -- parts of the table

    def _ordered(self) -> list[Row]:
        """Return rows in the order in which they were measured; then those that were not."""
        rows = [*self.rows, *self.combinations]
        return sorted(rows, key=lambda row: row.speed is None)

    def _title(self) -> str:
        return (
            f"advise {self.program}: each lever in turns with the fastest line so far, until it is certain; "
            f"{self.seconds:.0f} s, of which {self.unchanged_seconds:.0f} s on the unchanged program"
        )

    def _hardware(self) -> str:
        facts = self.facts
        threads = f", {facts['threads']} threads" if facts.get("device_type") == "cpu" else ""
        return (
            f"{facts.get('device', 'unknown device')}{threads}; torch {facts.get('torch', '?')}, "
            f"hasten {facts.get('hasten', '?')}"
        )

    def _head(self) -> list[str]:
        lines = _wrapped(self._title()) + _wrapped(self._hardware())
        total = sum(self.parts.values())
        if total:
            shares = [
                (part, seconds / total) for part, seconds in self.parts.items() if seconds / total >= 0.005
            ]
            shares.sort(key=lambda share: -share[1])
            lines += _wrapped(
                "Where a step goes: " + ", ".join(f"{part} {share:.0%}" for part, share in shares)
            )
        return lines

    def _what_to_write(self) -> list[str]:
        if not self.lines and any(row.verdict in (NO_TIME, UNCLEAR) for row in self.rows):
            return _wrapped(
                "Nothing is known to pay: what is unclear takes more turns or a quieter machine, what had no time a "
                "larger budget."
            )
        if not self.lines:
            return ["Nothing pays here: leave the program as it is."]
        lines = ["Write, safest first:"]
        for found in self.lines:
            lines += [
                f"  {_times(found.speed)} {found.safety.words}:",
                *_wrapped(f"      {found.line}", "          "),
            ]
        return lines


# gain: over the line it was added to; start s: seconds that starting takes longer than that line: compiling, loading.
_HEADS = (
    f"{'':<22}{'verdict':<18}{'gain':>6}{'speed':>7} {'interval':>11}{'ms/step':>10}{'samples/s':>10}{'start s':>8}"
    f"{'MFU':>7}"
)


def _table_line(row: Row) -> str:
    gain = "" if row.gain is None else _times(row.gain)
    speed = "" if row.speed is None else _times(row.speed)
    spread = "" if row.low is None or row.high is None else f"{row.low:.2f}-{row.high:.2f}"
    each = "" if row.step_seconds is None else f"{1000 * row.step_seconds:,.2f}"
    samples = "" if row.samples_per_second is None else f"{row.samples_per_second:,.0f}"
    start = "" if row.one_time_seconds is None else f"{row.one_time_seconds:+.1f}"
    used = "" if row.mfu is None else f"{row.mfu:.1%}"
    name = textwrap.wrap(row.name, 21) or [""]
    head = (
        f"{name[0]:<22}{row.verdict:<18}{gain:>6}{speed:>7} {spread:>11}{each:>10}{samples:>10}{start:>8}{used:>7}"
    ).rstrip()
    return "\n".join([head, *(f"  {part}" for part in name[1:])])


def _wrapped(text: str, indent: str = "    ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False) or [""]


def _times(speed: float) -> str:
    return f"{speed:.{2 if speed < 10 else 1 if speed < 100 else 0}f}x"


def _classed(kind: type[Any], values: dict[str, Any]) -> Any:
    return kind(**{**values, "safety": Safety(values["safety"])})


def _colour(row: Row) -> str:
    if row.wins and not row.safety.is_automatic:
        return _NEEDS_CONSENT
    return _COLOURS.get(row.verdict, _GREY)


def composed(levers: Sequence[Lever]) -> str:
    """Return one line for several levers: their Trainer arguments together, then what is no argument.

    Example::

        >>> from hasten.speed.levers import choose
        >>> composed(choose(["kept memory", "fused optimizer"]))
        'L.Trainer(..., allocator="keep", fused_optimizer=True)'

    """
    ours = [
        lever for lever in levers if lever.line.startswith("L.Trainer(..., ") and lever.line.endswith(")")
    ]
    inside = ", ".join(lever.line.removeprefix("L.Trainer(..., ").removesuffix(")") for lever in ours)
    others = [lever.line for lever in levers if lever not in ours]
    return "; ".join([*([f"L.Trainer(..., {inside})"] if inside else []), *others])


# -- figures and notes

# Fresh memory in a step that is worth a note.
_MUCH_BYTES = 16 * 2**20
# A machine whose turns differ by more hides what levers gain.
_BUSY = 0.1
# A lever that leaves out this much padding is noted.
_FEWER_PADDED = 0.1


def figures(
    turns: Sequence[Turn], facts: Mapping[str, Any], arguments: Mapping[str, str], usual: Sequence[Turn]
) -> dict[str, Any]:
    """Return the figures of a ``Row``: time, samples, memory, share of the peak.

    Args:
        turns: those that were measured.
        facts: device, model and data.
        arguments: Trainer arguments, as text.
        usual: turns of the unchanged program, whose samples have the usual length.

    """
    rates = [turn.samples / turn.seconds for turn in turns if turn.samples]
    tokens, samples = (sum(getattr(turn, name) or 0 for turn in usual) for name in ("tokens", "samples"))
    if tokens and samples and all(turn.tokens for turn in turns):
        # Those of a few batches by length are shorter or longer.
        rates = [(turn.tokens or 0) * samples / tokens / turn.seconds for turn in turns]
    samples_per_second = median(rates) if rates else None
    useful, slots = (sum(getattr(turn, name) or 0 for turn in turns) for name in ("tokens", "slots"))
    return {
        "step_seconds": median(turn.seconds / turn.steps for turn in turns),
        "samples_per_second": samples_per_second,
        "memory_bytes": max(turn.memory_bytes for turn in turns),
        "faults_per_step": median(turn.faults / turn.steps for turn in turns),
        "mfu": _mfu(facts, arguments, samples_per_second),
        "useful_tokens": useful / slots if slots else None,
    }


def _mfu(
    facts: Mapping[str, Any], arguments: Mapping[str, str], samples_per_second: float | None
) -> float | None:
    """Return useful operations a second as a share of the peak; those of the unchanged step count."""
    flops, batch = facts.get("flops_per_step"), facts.get("samples_counted")
    if not flops or not batch or not samples_per_second:
        return None
    precision, products = arguments.get("precision", ""), arguments.get("matmul_precision", "")
    peaks = facts.get("peak_flops") or {}
    name = "float32"
    if "bf16" in precision or "medium" in products:
        name = "bfloat16"
    elif "'high'" in products and "tf32" in peaks:
        name = "tf32"
    peak = peaks.get(name)
    if not peak:
        return None
    share = flops / batch * (facts.get("useful_tokens") or 1.0) * samples_per_second / peak
    # Above the peak: others had the device while that was measured, and it says nothing.
    return float(share) if share <= 1.0 else None


def notes(
    facts: Mapping[str, Any], unchanged: Row, rows: Mapping[str, Row], *, noise: float, has_losses: bool
) -> list[str]:
    """Return sentences on what was found.

    Args:
        facts: device, model and data.
        unchanged: figures of the unchanged program.
        rows: every lever.
        noise: how much two turns side by side differ by chance.
        has_losses: whether its losses could be compared.

    """
    found = []
    if unchanged.mfu is not None:
        known = facts["peak_flops"].items()
        peaks = ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in known if value)
        found.append(
            f"Useful operations (MFU): {unchanged.mfu:.1%} of the peak of this device, measured with a matrix product "
            f"(GFLOP/s: {peaks})."
        )
    useful = facts.get("useful_tokens") if unchanged.useful_tokens is None else unchanged.useful_tokens
    if useful is not None:
        text = f"Useful tokens: {useful:.0%}; the rest is padding."
        trimmed = [
            f"{row.useful_tokens:.0%} with {row.name}"
            for row in rows.values()
            if row.useful_tokens is not None and row.useful_tokens > useful + _FEWER_PADDED
        ]
        found.append(text + (f" It is {', '.join(trimmed)}." if trimmed else ""))
    faults = unchanged.faults_per_step or 0.0
    fresh = faults * facts.get("page_bytes", 4096)
    if fresh > _MUCH_BYTES and facts.get("device_type") == "cpu":
        found.append(
            f"The operating system provides {fresh / 2**20:,.0f} MiB of fresh, zeroed memory in each step "
            f'({faults:,.0f} page faults): allocator="keep" avoids that.'
        )
    dropped, priced = facts.get("attention_dropout"), rows.get("no attention dropout")
    if dropped and priced is not None and priced.gain is not None:
        found.append(
            f"Attention dropout in {', '.join(dropped)} forces an attention that keeps every probability. Without it a "
            f"step is {priced.gain:.2f} times as fast; this changes what is trained."
        )
    if noise > _BUSY:
        found.append(
            f"This machine was busy: turns side by side differed by {noise:.0%}, so comparisons took longer."
        )
    if not has_losses:
        found.append("training_step gave no loss in some steps: losses were not compared.")
    return [*found, "Measured on one device, without validation, checkpoints and loggers."]


# -- verdicts kept for the next run of the same program with the same model on the same device


def remember(key: str | None, advice: Advice) -> Path | None:
    """Keep a verdict; return its file, or None where it cannot be kept.

    Args:
        key: see ``hasten.speed.inspect_run.key_of``.
        advice: the verdict.

    """
    path = cache_folder("advice") / f"{key}.json"
    return path if key and remember_json(path, json.loads(advice.to_json())) else None


def recall(key: str) -> Advice | None:
    """Return the verdict kept under ``key``; None where there is none, or none that can be read."""
    path = cache_folder("advice") / f"{key}.json"
    try:
        return Advice.from_json(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        rank_zero_warn(
            f"{path} cannot be read: the verdict is dropped, and measured again when it is needed."
        )
        with suppress(OSError):
            path.unlink()
        return None
