"""The levers: what makes training faster in one line, how far each can be trusted, where it can apply at all."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hasten._lib.names import did_you_mean
from hasten.machine.allocator import file_of
from hasten.speed.safety import Safety

# (trainer, module) -> what takes it back, or None; called right before a training begins
Change = Callable[[Any, nn.Module], Callable[[], None] | None]
# what is known of device, model and data -> why the lever cannot pay there; None where it may
Applies = Callable[[Mapping[str, Any]], str | None]


# What tells that a step, or the samples, draw random numbers.
_DRAWS = {"step": "step_draws", "samples": "samples_draw"}


def _anywhere(facts: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True)
class Lever:
    """One line that may make training faster.

    Args:
        name: what tables call it.
        line: what to write, word for word.
        safety: its class, what it may change at most; or the name of one, such as "same maths up to rounding".
        redraws: "step" where it draws other random numbers in a step that draws any (dropout), "samples" where it does
            so for samples that are drawn (augmentation): then its class is at least ``Safety.OTHER_DRAWS``.
        arguments: the Trainer's arguments that switch it on; plain values, as JSON has them.
        change: what it does to Trainer and module instead, or besides: a function at the top of a module, or its
            place as "package.module:function".
        preload: an allocator that the program is started with, "tcmalloc" or "jemalloc"; None for the C library's.
        conflicts: names of levers that cannot be on beside it.
        applies: says why it cannot pay on a device, a model or data; None where it may.
        splits_batches: it computes a batch in parts, of which batch normalization takes the statistics.

    Raises:
        ValueError: ``safety`` or ``redraws`` is none of these, or the lever does nothing.

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
        """Return its class in a program; what is not known of the program is taken for the worse.

        Args:
            facts: what is known of device, model and data.

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
        """Return whether the first batch, without dropout, is computed as without the lever: only its draws are others.

        Args:
            facts: what is known of device, model and data.

        """
        draws = self.redraws == "samples" and facts.get("samples_draw", True)
        return self.safety.keeps_batches and not draws

    @property
    def place(self) -> str | None:
        """Where ``change`` is to be found by another process; None without one."""
        if self.change is None or isinstance(self.change, str):
            return self.change
        name = getattr(self.change, "__qualname__", "<>")
        if "<" in name:
            raise ValueError(
                f"Lever({self.name!r}, change=...): other processes must find the function. Define it at the top of "
                "a module."
            )
        return f"{self.change.__module__}:{name}"


def change_at(place: str) -> Change:
    """Return the function at "package.module:function".

    Raises:
        ValueError: there is none.

    Example::

        >>> change_at("hasten.speed.changes:one_thread").__name__
        'one_thread'

    """
    module_name, _, name = place.partition(":")
    try:
        found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{place!r} is no function that can be imported: {error}.") from error
    return found  # type: ignore[no-any-return]


def _only_on(kind: str, why: str) -> Applies:
    return lambda facts: None if facts.get("device_type") == kind else why


def _installed(name: str) -> Applies:
    def applies(facts: Mapping[str, Any]) -> str | None:
        if facts.get("device_type") != "cpu":
            return _NOT_THE_HOST
        return None if file_of(name) is not None else f"there is no {name} on this machine"

    return applies


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


def _reads_the_first_token(facts: Mapping[str, Any]) -> str | None:
    if not facts.get("reads_first_token"):
        return "nothing says that the model reads the first token of each sequence only"
    return _can_pack(facts)


def _computes_bf16(facts: Mapping[str, Any]) -> str | None:
    peaks = facts.get("peak_flops") or {}
    low, full = peaks.get("bfloat16"), peaks.get("float32")
    if low is None:
        return "this device cannot multiply bf16"
    if full is not None and low < _EMULATED * full:
        # Each step would take many times as long, only to be told so.
        return (
            f"bf16 is emulated here: its products reach {low / 1e9:,.0f} GFLOP/s, float32's {full / 1e9:,.0f}"
        )
    return None


def _computes_bf16_on_the_host(facts: Mapping[str, Any]) -> str | None:
    if facts.get("device_type") != "cpu":
        return 'on this device matmul_precision="high" is the better one'
    return _computes_bf16(facts)


def _repeats_blocks(facts: Mapping[str, Any]) -> str | None:
    return None if facts.get("repeated_blocks") else "the model has no repeated blocks"


def _reads_a_loader(facts: Mapping[str, Any]) -> str | None:
    return None if facts.get("map_style") else "the training data is no DataLoader over a map-style dataset"


def _reads_a_loader_for_cuda(facts: Mapping[str, Any]) -> str | None:
    if facts.get("device_type") != "cuda":
        return "resident=True is the same where the host computes"
    return _reads_a_loader(facts)


def _has_dropout(facts: Mapping[str, Any]) -> str | None:
    if facts.get("device_type") != "cpu":
        return "torch's own masks cost nothing on this device"
    return None if facts.get("dropout") else "the model has no dropout"


def _has_attention_dropout(facts: Mapping[str, Any]) -> str | None:
    return None if facts.get("attention_dropout") else "the model has no attention dropout"


def _has_fp8(facts: Mapping[str, Any]) -> str | None:
    if facts.get("device_type") == "cuda" and (facts.get("capability") or 0.0) >= 8.9:
        return None
    return "fp8 needs a CUDA device of compute capability 8.9 or more"


def _threads_at_least(least: int) -> Applies:
    def applies(facts: Mapping[str, Any]) -> str | None:
        if facts.get("device_type") != "cpu":
            return _NOT_THE_HOST
        threads = facts.get("threads") or 1
        return None if threads >= least else f"torch computes with {threads} thread{'s' * (threads > 1)}"

    return applies


def _threads_differ(facts: Mapping[str, Any]) -> str | None:
    if facts.get("device_type") != "cpu":
        return _NOT_THE_HOST
    threads, cores = facts.get("threads"), facts.get("cores") or 1
    if cores == 1 or threads == cores:
        return f"torch computes with {threads} threads on {cores} core{'s' * (cores > 1)}"
    return None


def _memory_ran_out(facts: Mapping[str, Any]) -> str | None:
    return (
        None if facts.get("memory_ran_out") else "batches fit into memory, and this is for those that do not"
    )


_NOT_THE_HOST = "the host does not compute here"
# Below this share of the speed of float32, bf16 is no type of the device.
_EMULATED = 0.5

LEVERS: tuple[Lever, ...] = (
    Lever(
        "kept memory",
        'L.Trainer(..., allocator="keep")',
        Safety.SAME_BITS,
        {"allocator": "keep"},
        applies=_only_on("cpu", "only training on the CPU asks the operating system for fresh memory"),
    ),
    *(
        Lever(
            name,
            f'LD_PRELOAD={file_name} python ..., L.Trainer(..., allocator="{name}")',
            Safety.SAME_BITS,
            {"allocator": name},
            preload=name,
            applies=_installed(name),
        )
        for name, file_name in {
            "tcmalloc": "libtcmalloc_minimal.so.4",
            "jemalloc": "libjemalloc.so.2",
        }.items()
    ),
    Lever(
        "loader workers",
        'L.Trainer(..., num_workers="auto")',
        # Augmentations that workers draw come from other seeds.
        Safety.SAME_BITS,
        {"num_workers": "auto"},
        redraws="samples",
        conflicts=("resident data",),
        applies=_reads_a_loader,
    ),
    Lever(
        "resident data",
        "L.Trainer(..., resident=True)",
        Safety.SAME_BITS,
        {"resident": True},
        conflicts=("loader workers",),
        applies=_reads_a_loader,
    ),
    Lever(
        "data on the device",
        'L.Trainer(..., resident="device")',
        Safety.SAME_BITS,
        {"resident": "device"},
        conflicts=("loader workers", "batches by length"),
        applies=_reads_a_loader_for_cuda,
    ),
    Lever(
        "fused optimizer",
        "L.Trainer(..., fused_optimizer=True)",
        Safety.ROUNDING,
        {"fused_optimizer": True},
    ),
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
        applies=_threads_differ,
    ),
    Lever(
        "TF32 products",
        'L.Trainer(..., matmul_precision="high")',
        Safety.LOWER_PRECISION,
        {"matmul_precision": "high"},
        applies=_only_on("cuda", "TF32 is a format of CUDA devices"),
    ),
    Lever(
        "bf16 products",
        'L.Trainer(..., matmul_precision="medium")',
        Safety.LOWER_PRECISION,
        {"matmul_precision": "medium"},
        applies=_computes_bf16_on_the_host,
    ),
    Lever(
        "bf16 autocast",
        'L.Trainer(..., precision="bf16-mixed")',
        Safety.LOWER_PRECISION,
        {"precision": "bf16-mixed"},
        applies=_computes_bf16,
    ),
    Lever(
        "packed tokens",
        "L.Trainer(..., packed=True)",
        Safety.ROUNDING,
        {"packed": True},
        applies=_can_pack,
        redraws="step",
    ),
    Lever(
        "packed first token",
        'L.Trainer(..., packed="first_token")',
        Safety.ROUNDING,
        {"packed": "first_token"},
        applies=_reads_the_first_token,
        redraws="step",
    ),
    Lever(
        "batches by length",
        'L.Trainer(..., batching="length")',
        Safety.OTHER_BATCHES,
        {"batching": "length"},
        applies=_has_padding,
    ),
    Lever(
        "fast dropout masks",
        'L.Trainer(..., dropout="fast")',
        Safety.OTHER_DRAWS,
        {"dropout": "fast"},
        applies=_has_dropout,
    ),
    Lever("compile", "L.Trainer(..., compile=True)", Safety.ROUNDING, {"compile": True}, redraws="step"),
    Lever(
        "compile by blocks",
        'L.Trainer(..., compile="regional")',
        Safety.ROUNDING,
        {"compile": "regional"},
        applies=_repeats_blocks,
        redraws="step",
    ),
    Lever(
        "CUDA graphs",
        "L.Trainer(..., compile={'mode': 'reduce-overhead'})",
        Safety.ROUNDING,
        {"compile": {"mode": "reduce-overhead"}},
        applies=_only_on("cuda", "they are of CUDA devices"),
        redraws="step",
    ),
    # Never faster than a batch that fits: the advisor takes it where nothing runs without, and measures against that.
    Lever(
        "micro-batches",
        'L.Trainer(..., micro_batch="auto")',
        Safety.ROUNDING,
        {"micro_batch": "auto"},
        applies=_memory_ran_out,
        redraws="step",
        splits_batches=True,
    ),
    Lever(
        "recomputed activations",
        'L.Trainer(..., memory="auto")',
        Safety.SAME_BITS,
        {"memory": "auto"},
        applies=_memory_ran_out,
    ),
    Lever(
        "no attention dropout",
        "hasten.speed.changes.no_attention_dropout(model)",
        Safety.OTHER_MATHS,
        change="hasten.speed.changes:take_attention_dropout_off",
        applies=_has_attention_dropout,
    ),
    Lever(
        "fp8",
        'L.Trainer(..., precision="fp8")',
        Safety.LOWER_PRECISION,
        {"precision": "fp8"},
        applies=_has_fp8,
    ),
)
# The one without which a batch that does not fit cannot be measured.
FITTING = next(lever for lever in LEVERS if lever.name == "micro-batches")

_registered: list[Lever] = []


def register(lever: Lever) -> None:
    """Have the advisor measure one more lever, also for ``Trainer(speed="auto")``; one of the same name is replaced.

    Args:
        lever: the lever.

    """
    unregister(lever.name)
    _registered.append(lever)


def unregister(name: str) -> None:
    """Forget a lever that was registered; nothing happens if there is none of this name."""
    _registered[:] = [known for known in _registered if known.name != name]


def known_levers() -> list[Lever]:
    """Return all levers: those of hasten and those registered."""
    added = {lever.name for lever in _registered}
    return [*(lever for lever in LEVERS if lever.name not in added), *_registered]


def choose(levers: Iterable[Lever | str] | None) -> list[Lever]:
    """Return the levers meant: objects as they are, names looked up, all where None is given.

    The name of a Trainer's argument stands for all levers that set it.

    Raises:
        TypeError: something is neither a Lever nor a name.
        ValueError: there is no lever of a name, or there are two of one name.

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
        raise ValueError(f"levers: {twice[0]!r} is there twice. Levers need names of their own.")
    return chosen
