"""The levers: what makes training faster in one line, how far each can be trusted, where it can apply at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hasten._lib.names import did_you_mean
from hasten.machine.allocator import file_of
from hasten.speed.safety import Safety

# (trainer, module) -> what undoes it, or None; called right before a training begins
Change = Callable[[Any, nn.Module], Callable[[], None] | None]
# facts about device, model and data -> why the lever cannot pay there; None where it may
Applies = Callable[[Mapping[str, Any]], str | None]

# The fact that says whether a step, or the samples, draw random numbers.
_DRAWS = {"step": "step_draws", "samples": "samples_draw"}


def _anywhere(facts: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True)
class Lever:
    """One line that may make training faster.

    Args:
        name: shown in tables.
        line: what to write, word for word.
        safety: its class, what it may change at most; or its name, such as "same maths up to rounding".
        redraws: "step" where it draws other random numbers in a step that draws any (dropout), "samples" where it does
            so for samples that are drawn (augmentation): then its class is at least ``Safety.OTHER_DRAWS``.
        arguments: the Trainer's arguments that switch it on; plain values, as JSON has them.
        change: a function ``change(trainer, module)`` that it calls instead, or besides: one at the top of a module,
            or its place as "package.module:function".
        preload: an allocator that the program is started with, "tcmalloc" or "jemalloc"; None for the C library's.
        conflicts: names of levers that cannot be on beside it.
        applies: returns why it cannot pay on a device, a model or data; None where it may.
        splits_batches: it computes a batch in parts, whose statistics batch normalization then uses.

    Raises:
        ValueError: ``safety`` or ``redraws`` has an unknown value, or the lever does nothing.

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
    applies: Applies = _anywhere
    redraws: str = ""
    splits_batches: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "safety", Safety(self.safety))
        except ValueError:
            allowed = ", ".join(repr(str(each)) for each in Safety)
            raise ValueError(f"Lever(safety={self.safety!r}): use one of {allowed}.") from None
        if self.redraws not in ("", "step", "samples"):
            raise ValueError(f"Lever(redraws={self.redraws!r}): use 'step', 'samples' or ''.")
        if not self.arguments and self.change is None:
            raise ValueError(
                f"Lever({self.name!r}): it does nothing. Give Trainer arguments, or a function as change."
            )

    def safety_in(self, facts: Mapping[str, Any]) -> Safety:
        """Return its class in a program; an unknown fact counts as the worse of its values.

        Args:
            facts: about device, model and data.

        Example::

            >>> (compiled,) = (lever for lever in LEVERS if lever.name == "compile")
            >>> [str(compiled.safety_in({"step_draws": draws})) for draws in (False, True)]
            ['same maths up to rounding', 'other random draws']

        """
        found = self.safety
        if self.redraws and facts.get(_DRAWS[self.redraws], True):
            found = max(found, Safety.OTHER_DRAWS)
        if self.splits_batches and facts.get("batch_norm", True):
            found = Safety.OTHER_MATHS
        return found

    def keeps_first_batch(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the lever computes the first batch as the program does, apart from random draws.

        Args:
            facts: about device, model and data.

        """
        draws = self.redraws == "samples" and facts.get("samples_draw", True)
        return self.safety.keeps_batches and not draws

    @property
    def place(self) -> str | None:
        """Where another process finds ``change``; None without one."""
        if self.change is None or isinstance(self.change, str):
            return self.change
        name = getattr(self.change, "__qualname__", "<>")
        if "<" in name:
            raise ValueError(
                f"Lever({self.name!r}, change=...): other processes must find the function. Define it at the top of "
                "a module."
            )
        return f"{self.change.__module__}:{name}"


def _only_on(kind: str, why: str) -> Applies:
    return lambda facts: None if facts.get("device_type") == kind else why


def _needs(fact: str, why: str) -> Applies:
    return lambda facts: None if facts.get(fact) else why


def _all(*conditions: Applies) -> Applies:
    return lambda facts: next((why for applies in conditions if (why := applies(facts)) is not None), None)


def _has_padding(facts: Mapping[str, Any]) -> str | None:
    share = facts.get("useful_tokens")
    if share is None and not facts.get("shapes_vary"):
        return "batches have no attention_mask and all have one shape"
    if share is not None and share > 0.98:
        return f"{share:.0%} of the tokens are useful already"
    return None


def _can_pack(facts: Mapping[str, Any]) -> str | None:
    why: str | None = facts.get("not_packed")
    return why


def _computes_bf16(facts: Mapping[str, Any]) -> str | None:
    peaks = facts.get("peak_flops") or {}
    low, full = peaks.get("bfloat16"), peaks.get("float32")
    if low is None:
        return "this device cannot multiply bf16"
    if full is not None and low < _EMULATED * full:
        # Each step would take many times as long.
        return f"bf16 is emulated here: {low / 1e9:,.0f} GFLOP/s, float32 has {full / 1e9:,.0f}"
    return None


def _has_fp8(facts: Mapping[str, Any]) -> str | None:
    if facts.get("device_type") == "cuda" and (facts.get("capability") or 0.0) >= 8.9:
        return None
    return "fp8 needs a CUDA device of compute capability 8.9 or more"


def _threads_at_least(least: int) -> Applies:
    def applies(facts: Mapping[str, Any]) -> str | None:
        threads = facts.get("threads") or 1
        return None if threads >= least else f"torch computes with {threads} thread{'s' * (threads > 1)}"

    return _all(_ON_THE_HOST, applies)


def _threads_differ(facts: Mapping[str, Any]) -> str | None:
    threads, cores = facts.get("threads"), facts.get("cores") or 1
    if cores == 1 or threads == cores:
        return f"torch computes with {threads} threads on {cores} core{'s' * (cores > 1)}"
    return None


def _preloaded(name: str, file_name: str) -> Lever:
    """Return the lever of an allocator that a program is started with."""

    def is_installed(facts: Mapping[str, Any]) -> str | None:
        return None if file_of(name) is not None else f"there is no {name} on this machine"

    line = f'LD_PRELOAD={file_name} python ..., L.Trainer(..., allocator="{name}")'
    applies = _all(_ON_THE_HOST, is_installed)
    return Lever(name, line, Safety.SAME_BITS, {"allocator": name}, preload=name, applies=applies)


def _argument(name: str, safety: Safety, argument: str, value: Any, **options: Any) -> Lever:
    """Return the lever of an argument of the Trainer."""
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    return Lever(name, f"L.Trainer(..., {argument}={shown})", safety, {argument: value}, **options)


_ON_THE_HOST = _only_on("cpu", "the host does not compute here")
_READS_A_LOADER = _needs("map_style", "the training data is not a DataLoader over a map-style dataset")
_MEMORY_RAN_OUT = _needs("memory_ran_out", "batches fit into memory, and this is for those that do not")
# Below this share of the speed of float32, bf16 is emulated.
_EMULATED = 0.5

LEVERS: tuple[Lever, ...] = (
    _argument(
        "kept memory",
        Safety.SAME_BITS,
        "allocator",
        "keep",
        applies=_only_on("cpu", "only training on the CPU asks the operating system for fresh memory"),
    ),
    _preloaded("tcmalloc", "libtcmalloc_minimal.so.4"),
    _preloaded("jemalloc", "libjemalloc.so.2"),
    # Augmentations that workers draw come from other seeds.
    _argument(
        "loader workers",
        Safety.SAME_BITS,
        "num_workers",
        "auto",
        redraws="samples",
        conflicts=("resident data",),
        applies=_READS_A_LOADER,
    ),
    _argument(
        "resident data",
        Safety.SAME_BITS,
        "resident",
        True,
        conflicts=("loader workers",),
        applies=_READS_A_LOADER,
    ),
    _argument(
        "data on the device",
        Safety.SAME_BITS,
        "resident",
        "device",
        conflicts=("loader workers", "batches by length"),
        applies=_all(_only_on("cuda", "resident=True is the same where the host computes"), _READS_A_LOADER),
    ),
    _argument("fused optimizer", Safety.ROUNDING, "fused_optimizer", True),
    Lever(
        "one thread",
        "torch.set_num_threads(1)",
        Safety.ROUNDING,
        change="hasten.speed.changes:one_thread",
        conflicts=("half the threads", "a thread a core"),
        applies=_threads_at_least(2),
    ),
    Lever(
        "half the threads",
        "torch.set_num_threads(torch.get_num_threads() // 2)",
        Safety.ROUNDING,
        change="hasten.speed.changes:half_the_threads",
        conflicts=("one thread", "a thread a core"),
        applies=_threads_at_least(4),
    ),
    Lever(
        "a thread a core",
        "hasten.speed.changes.a_thread_a_core()",
        Safety.ROUNDING,
        change="hasten.speed.changes:a_thread_a_core",
        conflicts=("one thread", "half the threads"),
        applies=_all(_ON_THE_HOST, _threads_differ),
    ),
    _argument(
        "TF32 products",
        Safety.LOWER_PRECISION,
        "matmul_precision",
        "high",
        applies=_only_on("cuda", "TF32 is a format of CUDA devices"),
    ),
    _argument(
        "bf16 products",
        Safety.LOWER_PRECISION,
        "matmul_precision",
        "medium",
        applies=_all(
            _only_on("cpu", 'on this device matmul_precision="high" is the better one'), _computes_bf16
        ),
    ),
    _argument("bf16 autocast", Safety.LOWER_PRECISION, "precision", "bf16-mixed", applies=_computes_bf16),
    _argument("packed tokens", Safety.ROUNDING, "packed", True, applies=_can_pack, redraws="step"),
    _argument(
        "packed first token",
        Safety.ROUNDING,
        "packed",
        "first_token",
        applies=_all(
            _needs(
                "reads_first_token", "nothing says that the model reads the first token of each sequence only"
            ),
            _can_pack,
        ),
        redraws="step",
    ),
    _argument("batches by length", Safety.OTHER_BATCHES, "batching", "length", applies=_has_padding),
    _argument(
        "fast dropout masks",
        Safety.OTHER_DRAWS,
        "dropout",
        "fast",
        applies=_all(
            _only_on("cpu", "torch's own masks cost nothing on this device"),
            _needs("dropout", "the model has no dropout"),
        ),
    ),
    _argument("compile", Safety.ROUNDING, "compile", True, redraws="step"),
    _argument(
        "compile by blocks",
        Safety.ROUNDING,
        "compile",
        "regional",
        applies=_needs("repeated_blocks", "the model has no repeated blocks"),
        redraws="step",
    ),
    _argument(
        "CUDA graphs",
        Safety.ROUNDING,
        "compile",
        {"mode": "reduce-overhead"},
        applies=_only_on("cuda", "only CUDA devices have them"),
        redraws="step",
    ),
    # Never faster than a batch that fits: the advisor uses it in all trials where nothing runs without.
    _argument(
        "micro-batches",
        Safety.ROUNDING,
        "micro_batch",
        "auto",
        applies=_MEMORY_RAN_OUT,
        redraws="step",
        splits_batches=True,
    ),
    _argument("recomputed activations", Safety.SAME_BITS, "memory", "auto", applies=_MEMORY_RAN_OUT),
    Lever(
        "no attention dropout",
        "hasten.speed.changes.no_attention_dropout(model)",
        Safety.OTHER_MATHS,
        change="hasten.speed.changes:take_attention_dropout_off",
        applies=_needs("attention_dropout", "the model has no attention dropout"),
    ),
    _argument("fp8", Safety.LOWER_PRECISION, "precision", "fp8", applies=_has_fp8),
)
# Without it a batch that does not fit cannot be measured.
FITTING = next(lever for lever in LEVERS if lever.name == "micro-batches")


def expected_gain(lever: Lever, facts: Mapping[str, Any]) -> float:
    """Return about how many times as fast a lever makes a program; the advisor tries the best first.

    Args:
        lever: the lever. Those that hasten does not know come first: somebody registered or named them.
        facts: about device, model and data, with "parts": seconds of a step by where they go.

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
    data, optimizer = (parts.get(name, 0.0) / step_seconds for name in ("data wait", "optimizer"))
    bf16 = (peaks.get("bfloat16") or 1.0) / (peaks.get("float32") or 1.0)
    attention_dropout = 1.3 if facts.get("attention_dropout") and facts.get("device_type") == "cpu" else 1.0
    # About a microsecond for a page that the system zeroes and maps.
    fresh_pages = min(0.5, (facts.get("faults_per_step") or 0.0) * 1e-6 / step_seconds)
    gains: dict[str, float] = {
        "packed first token": 1.15 * attention_dropout / useful,
        "packed tokens": attention_dropout / useful,
        "batches by length": useful**-0.7,
        "bf16 autocast": max(1.0, 0.6 * bf16),
        "bf16 products": max(1.0, 0.5 * bf16),
        "TF32 products": max(1.0, 0.5 * (peaks.get("tf32") or 1.0) / (peaks.get("float32") or 1.0)),
        "kept memory": 1.0 / (1.0 - fresh_pages),
        "fused optimizer": 1.0 / (1.0 - 0.75 * optimizer),
        "resident data": 1.0 / (1.0 - 0.9 * min(data, 1.0)),
        "data on the device": 1.0 / (1.0 - 0.9 * min(data, 1.0)),
        "loader workers": 1.0 / (1.0 - 0.8 * min(data, 1.0)),
        "one thread": 1.3 if step_seconds < 0.01 else 0.7,
        "fast dropout masks": 1.1,
        "CUDA graphs": 1.5 if step_seconds < 0.05 else 1.1,
        "compile": 1.2,
        "compile by blocks": 1.15,
        "no attention dropout": 1.3,
        "fp8": 1.2,
    }
    return gains.get(lever.name, 1.0)


_registered: list[Lever] = []


def register(lever: Lever) -> None:
    """Add a lever to those that the advisor and ``Trainer(speed="auto")`` measure; one of the same name is replaced.

    Args:
        lever: the lever.

    """
    unregister(lever.name)
    _registered.append(lever)


def unregister(name: str) -> None:
    """Remove a lever that was registered; an unknown name is ignored."""
    _registered[:] = [known for known in _registered if known.name != name]


def known_levers() -> list[Lever]:
    """Return all levers: hasten's and those registered."""
    added = {lever.name for lever in _registered}
    return [*(lever for lever in LEVERS if lever.name not in added), *_registered]


def choose(levers: Iterable[Lever | str] | None) -> list[Lever]:
    """Return levers by name or as objects; all where None is given.

    The name of a Trainer's argument stands for all levers that set it.

    Raises:
        TypeError: an element is neither a Lever nor a name.
        ValueError: a name is unknown, or is there twice.

    Example::

        >>> [lever.line for lever in choose(["compile"])]
        ['L.Trainer(..., compile=True)']

    """
    if levers is None:
        return known_levers()
    by_name = {lever.name: lever for lever in known_levers()}
    chosen: list[Lever] = []
    for given in [levers] if isinstance(levers, (str, Lever)) else levers:
        if isinstance(given, str):
            by_argument = [lever for lever in known_levers() if given in lever.arguments]
            if given not in by_name and by_argument:
                chosen += [lever for lever in by_argument if lever not in chosen]
                continue
            if given not in by_name:
                hint = did_you_mean(given, list(by_name))
                raise ValueError(
                    f"levers={given!r}: there is no such lever.{hint} There are: {', '.join(by_name)}."
                )
            chosen.append(by_name[given])
        elif isinstance(given, Lever):
            chosen.append(given)
        else:
            raise TypeError(f"levers=[{given!r}]: give names of levers, or Lever objects.")
    names = [lever.name for lever in chosen]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"levers: {twice[0]!r} is there twice. Give each lever another name.")
    return chosen
