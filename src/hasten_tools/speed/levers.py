"""The speed-ups: one-line changes that may make training faster, the class of each, and where it can apply."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean_value
from hasten.extend.entry_points import found
from hasten.extend.origin import module_of
from hasten.machine.allocator import file_of
from hasten_tools.speed.safety import Safety

if TYPE_CHECKING:
    from hasten.trainer import Trainer

# (trainer, module) -> a function that undoes the change, or None; called right before training begins
Change = Callable[["Trainer", nn.Module], Callable[[], None] | None]
# facts about device, model and data -> why the speed-up cannot help there; None if it may
Facts = Mapping[str, Any]
Applies = Callable[[Facts], str | None]

# The fact that shows whether a step, or the samples, draw random numbers.
_DRAWS = {"step": "step_draws", "samples": "samples_draw"}


@dataclass(frozen=True)
class Lever:
    """One line that may make training faster.

    Args:
        name: shown in tables.
        line: the line to write, word for word.
        safety: its class, or the name of the class, such as "same maths up to rounding".
        arguments: the Trainer arguments that switch it on; plain values that JSON can hold.
        change: a function ``change(trainer, module)`` to call instead, or in addition: one at the top of a module, or
            its place as "package.module:function". It may return a function that undoes the change.
        preload: the allocator that the program is started with, "tcmalloc" or "jemalloc"; None for the C library's.
        conflicts: names of speed-ups that it cannot be combined with.
        applies: called with facts about device, model and data; returns why it cannot help, or None if it may.
        redraws: "step" if it draws other random numbers in a step that draws any (dropout), "samples" if it does so
            for samples that are drawn (augmentation): then its class is at least ``Safety.OTHER_DRAWS``.
        splits_batches: it computes a batch in parts, whose statistics batch normalization then uses.

    Raises:
        ValueError: ``safety`` or ``redraws`` has an unknown value, or the speed-up does nothing.

    Example::

        >>> lever = Lever("fused optimizer", "L.Trainer(..., fused_optimizer=True)", Safety.ROUNDING,
        ...               {"fused_optimizer": True})
        >>> lever.applies({"device": "cpu"}) is None
        True

    """

    name: str
    line: str
    safety: Safety
    arguments: Mapping[str, Any] = field(default_factory=dict)
    change: Change | str | None = None
    preload: str | None = None
    conflicts: tuple[str, ...] = ()
    applies: Applies = lambda facts: None
    redraws: str = ""
    splits_batches: bool = False

    def __post_init__(self) -> None:
        safety = check.one_of("Lever", "safety", str(self.safety), map(str, Safety))
        object.__setattr__(self, "safety", Safety(safety))
        check.one_of("Lever", "redraws", self.redraws, ("step", "samples", ""))
        if not self.arguments and self.change is None:
            what = f"Lever({self.name!r}): it does nothing."
            raise make_error(ValueError, what, fix="Pass Trainer arguments, or a function as change.")

    @property
    def brings_data(self) -> bool:
        """Whether it changes how batches are read."""
        return not {"num_workers", "resident"}.isdisjoint(self.arguments)

    @property
    def depends_on_free_cores(self) -> bool:
        """Whether its gain depends on how many cores other programs leave free."""
        return "num_workers" in self.arguments or self.name in _THREADS

    def safety_in(self, facts: Facts) -> Safety:
        """Return its class in a program; an unknown fact counts as the worse of its values.

        Args:
            facts: about device, model and data.

        Example::

            >>> (compiled,) = (lever for lever in LEVERS if lever.name == "compile")
            >>> [str(compiled.safety_in({"step_draws": draws})) for draws in (False, True)]
            ['same maths up to rounding', 'other random draws']

        """
        if self.splits_batches and facts.get("batch_norm", True):
            return Safety.OTHER_MATHS
        redraws = self.redraws and facts.get(_DRAWS[self.redraws], True)
        return max(self.safety, Safety.OTHER_DRAWS) if redraws else self.safety

    def keeps_first_batch(self, facts: Facts) -> bool:
        """Return whether the first batch is computed as without the speed-up, apart from random draws."""
        redraws_samples = self.redraws == "samples" and facts.get("samples_draw", True)
        return self.safety.keeps_batches and not redraws_samples

    @property
    def place(self) -> str | None:
        """The place of ``change`` for another process, "package.module:function"; None without one."""
        if self.change is None or isinstance(self.change, str):
            return self.change
        name = getattr(self.change, "__qualname__", "<>")
        if "<" in name:
            what = f"Lever({self.name!r}, change=...): other processes must find the function."
            raise make_error(ValueError, what, fix="Define it at the top of a module.", argument="change")
        return f"{module_of(self.change)}:{name}"


# -- where speed-ups apply


def _only_on(kind: str, why: str) -> Applies:
    return lambda facts: None if facts.get("device_type") == kind else why


def _needs(fact: str, why: str) -> Applies:
    return lambda facts: None if facts.get(fact) else why


def _all(*conditions: Applies) -> Applies:
    return lambda facts: next((why for applies in conditions if (why := applies(facts)) is not None), None)


def _has_padding(facts: Facts) -> str | None:
    share = facts.get("useful_tokens")
    if share is None and not facts.get("shapes_vary"):
        return "batches have no attention_mask, and all have one shape"
    return f"{share:.0%} of the tokens are useful already" if share is not None and share > 0.98 else None


def _computes_bf16(facts: Facts) -> str | None:
    peaks = facts.get("peak_flops") or {}
    low, full = peaks.get("bfloat16"), peaks.get("float32")
    if low is None:
        return "this device cannot multiply bf16"
    if full is not None and low < _EMULATED * full:
        # Each step would take many times as long.
        return f"bf16 is emulated here: {low / 1e9:,.0f} GFLOP/s, float32 has {full / 1e9:,.0f}"
    return None


def _has_fp8(facts: Facts) -> str | None:
    has = facts.get("device_type") == "cuda" and (facts.get("capability") or 0.0) >= 8.9
    return None if has else "fp8 needs a CUDA device of compute capability 8.9 or more"


def _threads_at_least(least: int) -> Applies:
    def applies(facts: Facts) -> str | None:
        threads = facts.get("threads") or 1
        return None if threads >= least else f"torch computes with {threads} thread{'s' * (threads > 1)}"

    return _all(_ON_THE_HOST, applies)


def _threads_differ(facts: Facts) -> str | None:
    threads, cores = facts.get("threads"), facts.get("cores") or 1
    same = cores == 1 or threads == cores
    return f"torch computes with {threads} threads on {cores} core{'s' * (cores > 1)}" if same else None


_ON_THE_HOST = _only_on("cpu", "the host does not compute here")
_READS_A_LOADER = _needs("map_style", "the training data is not a DataLoader over a map-style dataset")
_MEMORY_RAN_OUT = _needs("memory_ran_out", "batches fit into memory, and this is for those that do not")
# Below this share of the speed of float32, bf16 is emulated.
_EMULATED = 0.5


# -- the speed-ups


def _argument(name: str, safety: Safety, argument: str, value: Any, **options: Any) -> Lever:
    """Return the speed-up of an argument of the Trainer."""
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    return Lever(name, f"L.Trainer(..., {argument}={shown})", safety, {argument: value}, **options)


def _preloaded(name: str, file_name: str) -> Lever:
    """Return the speed-up of an allocator that a program is started with."""

    def is_installed(facts: Facts) -> str | None:
        return None if file_of(name) is not None else f"{name} is not installed on this machine"

    line = f'LD_PRELOAD={file_name} python ..., L.Trainer(..., allocator="{name}")'
    applies = _all(_ON_THE_HOST, is_installed)
    return Lever(name, line, Safety.SAME_BITS, {"allocator": name}, preload=name, applies=applies)


# Speed-ups that set a number of threads.
_THREADS = ("one thread", "half the threads", "a thread a core")


def _threads(name: str, line: str, function: str, applies: Applies) -> Lever:
    others = tuple(other for other in _THREADS if other != name)
    change = f"hasten_tools.speed.changes:{function}"
    return Lever(name, line, Safety.ROUNDING, change=change, conflicts=others, applies=applies)


_SAME_BITS, _ROUNDING, _LOWER = Safety.SAME_BITS, Safety.ROUNDING, Safety.LOWER_PRECISION
_FRESH_MEMORY = _only_on("cpu", "only training on the CPU asks the operating system for fresh memory")
_TO_THE_DEVICE = _only_on("cuda", "resident=True is the same if the host computes")
_TF32 = _only_on("cuda", "TF32 is a format of CUDA devices")
_NO_TF32 = _only_on("cpu", 'on this device matmul_precision="high" is the better one')
_CAN_PACK: Applies = lambda facts: facts.get("not_packed")  # noqa: E731
_FIRST_TOKEN = _needs("reads_first_token", "the model is not known to read only the first token of a sequence")
_HAS_DROPOUT = _all(
    _only_on("cpu", "torch's own masks cost nothing on this device"), _needs("dropout", "the model has no dropout")
)
_HAS_BLOCKS = _needs("repeated_blocks", "the model has no repeated blocks")
_GRAPHS = _only_on("cuda", "only CUDA devices have them")
_DROPS_ATTENTION = _needs("attention_dropout", "the model has no attention dropout")

LEVERS: tuple[Lever, ...] = (
    _argument("kept memory", _SAME_BITS, "allocator", "keep", applies=_FRESH_MEMORY),
    _preloaded("tcmalloc", "libtcmalloc_minimal.so.4"),
    _preloaded("jemalloc", "libjemalloc.so.2"),
    # Augmentations that workers draw come from other seeds.
    _argument(
        *("loader workers", _SAME_BITS, "num_workers", "auto"),
        redraws="samples",
        conflicts=("resident data",),
        applies=_READS_A_LOADER,
    ),
    _argument(*("resident data", _SAME_BITS, "resident", True), conflicts=("loader workers",), applies=_READS_A_LOADER),
    _argument(
        *("data on the device", _SAME_BITS, "resident", "device"),
        conflicts=("loader workers", "batches by length"),
        applies=_all(_TO_THE_DEVICE, _READS_A_LOADER),
    ),
    _argument("fused optimizer", _ROUNDING, "fused_optimizer", True),
    _threads("one thread", "torch.set_num_threads(1)", "one_thread", _threads_at_least(2)),
    _threads(
        "half the threads",
        "torch.set_num_threads(torch.get_num_threads() // 2)",
        "half_the_threads",
        _threads_at_least(4),
    ),
    _threads(
        "a thread a core",
        "hasten_tools.speed.changes.a_thread_a_core()",
        "a_thread_a_core",
        _all(_ON_THE_HOST, _threads_differ),
    ),
    _argument("TF32 products", _LOWER, "matmul_precision", "high", applies=_TF32),
    _argument("bf16 products", _LOWER, "matmul_precision", "medium", applies=_all(_NO_TF32, _computes_bf16)),
    _argument("bf16 autocast", _LOWER, "precision", "bf16-mixed", applies=_computes_bf16),
    _argument("packed tokens", _ROUNDING, "packed", True, applies=_CAN_PACK, redraws="step"),
    _argument(
        *("packed first token", _ROUNDING, "packed", "first_token"),
        applies=_all(_FIRST_TOKEN, _CAN_PACK),
        redraws="step",
    ),
    _argument("batches by length", Safety.OTHER_BATCHES, "batching", "length", applies=_has_padding),
    _argument("fast dropout masks", Safety.OTHER_DRAWS, "dropout", "fast", applies=_HAS_DROPOUT),
    _argument("compile", _ROUNDING, "compile", True, redraws="step"),
    _argument("compile by blocks", _ROUNDING, "compile", "regional", applies=_HAS_BLOCKS, redraws="step"),
    _argument(*("CUDA graphs", _ROUNDING, "compile", {"mode": "reduce-overhead"}), applies=_GRAPHS, redraws="step"),
    # Never faster than a batch that fits: the advisor uses it in all trials if nothing runs without.
    _argument(
        *("micro-batches", _ROUNDING, "micro_batch", "auto"),
        applies=_MEMORY_RAN_OUT,
        redraws="step",
        splits_batches=True,
    ),
    _argument("recomputed activations", _SAME_BITS, "memory", "auto", applies=_MEMORY_RAN_OUT),
    Lever(
        "no attention dropout",
        "hasten_tools.speed.changes.no_attention_dropout(model)",
        Safety.OTHER_MATHS,
        change="hasten_tools.speed.changes:switch_attention_dropout_off",
        applies=_DROPS_ATTENTION,
    ),
    _argument("fp8", _LOWER, "precision", "fp8", applies=_has_fp8),
)
# Without it a batch that does not fit into memory cannot be measured.
FITTING = next(lever for lever in LEVERS if lever.name == "micro-batches")

# A step is never all products: peaks that were measured on a busy machine must not promise more.
_MOST_FROM_PEAKS = 3.0


def expected_gain(lever: Lever, facts: Facts) -> float:
    """Return about how many times as fast a speed-up makes a program; the advisor tries the best first.

    Those that hasten does not know come first: the user registered or named them. ``facts`` are about device, model and
    data, with "parts": seconds of a step by where they go.

    Example::

        >>> packed, fused = choose(["packed tokens", "fused optimizer"])
        >>> facts = {"useful_tokens": 0.25, "parts": {"forward": 0.3, "optimizer": 0.1}}
        >>> round(expected_gain(packed, facts), 2), round(expected_gain(fused, facts), 2)
        (4.0, 1.23)

    """
    if all(lever is not known for known in LEVERS):
        return math.inf
    useful: float = max(0.02, facts.get("useful_tokens") or 1.0)
    peaks, parts = facts.get("peak_flops") or {}, facts.get("parts") or {}
    step_seconds = sum(parts.values()) or 1.0
    data, optimizer = (min(1.0, parts.get(name, 0.0) / step_seconds) for name in ("data wait", "optimizer"))
    attention_dropout = 1.3 if facts.get("attention_dropout") and facts.get("device_type") == "cpu" else 1.0
    # About a microsecond for a page that the system zeroes and maps.
    fresh_pages = min(0.5, (facts.get("faults_per_step") or 0.0) * 1e-6 / step_seconds)

    def from_peaks(name: str, share: float) -> float:
        ratio = (peaks.get(name) or 1.0) / (peaks.get("float32") or 1.0)
        return min(_MOST_FROM_PEAKS, max(1.0, share * ratio))

    def without(part: float) -> float:
        return 1.0 / (1.0 - part)

    gains: dict[str, float] = {
        "packed first token": 1.15 * attention_dropout / useful,
        "packed tokens": attention_dropout / useful,
        "batches by length": useful**-0.7,
        "bf16 autocast": from_peaks("bfloat16", 0.6),
        "bf16 products": from_peaks("bfloat16", 0.5),
        "TF32 products": from_peaks("tf32", 0.5),
        "kept memory": without(fresh_pages),
        "fused optimizer": without(0.75 * optimizer),
        "resident data": without(0.9 * data),
        "data on the device": without(0.9 * data),
        "loader workers": without(0.8 * data),
        "one thread": 1.3 if step_seconds < 0.01 else 0.7,
        "fast dropout masks": 1.1,
        "CUDA graphs": 1.5 if step_seconds < 0.05 else 1.1,
        "compile": 1.2,
        "compile by blocks": 1.15,
        "no attention dropout": 1.3,
        "fp8": 1.2,
    }
    return gains.get(lever.name, 1.0)


# A program that waits for its data for this share of a step is faster with what ends the wait, first of all.
_WAITS = 0.2


def waits_for_data(facts: Facts) -> bool:
    """Return whether a program spends much of its time waiting for batches.

    Example::

        >>> waits_for_data({"parts": {"forward": 1.0, "data wait": 1.0}})
        True

    """
    parts = facts.get("parts") or {}
    return bool(parts.get("data wait", 0.0) > _WAITS * sum(parts.values()))


# -- finding speed-ups

_registered: dict[str, Lever] = {}


def register(lever: Lever) -> None:
    """Let the advisor and ``Trainer(speed="auto")`` measure a speed-up, in place of another one of its name."""
    unregister(lever.name)
    _registered[lever.name] = lever


def unregister(name: str) -> None:
    """Remove a speed-up that was registered; an unknown name is ignored."""
    _registered.pop(name, None)


def known_levers() -> list[Lever]:
    """Return all levers: hasten's, those that packages add by entry points, and those registered.

    Raises:
        TypeError: an entry point is not a Speed-up.

    """
    # Of several with one name the last counts: one that the program has registered, one of hasten's, one of a package.
    every = {lever.name: lever for lever in (*LEVERS, *_added(), *_registered.values())}
    every |= {lever.name: lever for lever in LEVERS} | _registered
    return list(every.values())


@functools.cache
def _added() -> tuple[Lever, ...]:
    levers = {name: entry.load() for name, entry in found("hasten.levers").items()}
    for name, lever in levers.items():
        check.instance("entry point", f"hasten.levers: {name}", lever, Lever, "a Lever")
    return tuple(levers.values())


def choose(levers: Iterable[Lever | str] | None) -> list[Lever]:
    """Return speed-ups by name or as objects; all if None is given.

    The name of a Trainer argument stands for all speed-ups that set it.

    Raises:
        TypeError: an element is neither a Speed-up nor a name.
        ValueError: a name is unknown, or given twice.

    Example::

        >>> [lever.line for lever in choose(["compile"])]
        ['L.Trainer(..., compile=True)']

    """
    if levers is None:
        return known_levers()
    by_name = {lever.name: lever for lever in known_levers()}
    chosen: list[Lever] = []
    for given in [levers] if isinstance(levers, (str, Lever)) else levers:
        if isinstance(given, Lever):
            chosen.append(given)
        elif not isinstance(given, str):
            raise make_error(
                TypeError, f"levers=[{given!r}]:", fix="use names of speed-ups, or Lever objects.", argument="levers"
            )
        elif given in by_name:
            chosen.append(by_name[given])
        else:
            by_argument = [lever for lever in by_name.values() if given in lever.arguments]
            if not by_argument:
                hint = did_you_mean_value(given, by_name)
                what = f"levers={given!r}: this speed-up does not exist."
                raise make_error(ValueError, what, fix=f"{hint} Use {', '.join(by_name)}.", argument="levers")
            chosen += [lever for lever in by_argument if lever not in chosen]
    names = [lever.name for lever in chosen]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise make_error(
            ValueError, f"levers: {twice[0]!r} is given twice.", fix="Give each its own name.", argument="levers"
        )
    return chosen
