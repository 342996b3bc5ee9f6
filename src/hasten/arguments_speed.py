"""The arguments that only change how fast a run is: checked here, applied in loops/speedups.py."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hasten._lib.names import did_you_mean
from hasten.batching.rebatch import as_batching
from hasten.batching.sample_fields import MicroBatch
from hasten.compile.settings import CompileSettings, as_compile


@dataclass(frozen=True)
class SpeedArguments:
    """What was asked for after all checks; every default is off.

    Args:
        speed: "auto" to measure the levers that change rounding at most before training, and keep those that win.
        compile: None, or what is compiled and how.
        batching: how batches are made of the user's loader: None or a ``LengthBatching``.
        packed: train attention and feed-forward blocks of a transformer on real tokens only; "first_token" computes
            the last block for the first token of each sequence only.
        num_workers: None to leave the loaders as they are, "auto" or a number.
        resident: hold the data in memory and index whole batches: True, "device" for the device's memory, "auto" where
            it can be; False leaves the loaders as they are.
        matmul_precision: for ``torch.set_float32_matmul_precision``; None leaves it.
        fused_optimizer: True, False, or None to leave the user's optimizers as they are.
        batch_size: samples of a batch, on each process; None for what the loader says, "auto" until it was found.
        micro_batch: samples computed at once: None for all, a number, or "auto".
        shared_fields: of a batch that is split, the fields that belong to all samples; None to look at the data.
        memory: activation checkpointing: "auto" once memory runs out, "selective" or "full" from the start.
        dropout: "fast" for masks from random bytes; None for torch's own.
        allocator: "keep", "tcmalloc", "jemalloc"; None for the allocator as it is.

    """

    speed: str | None = None
    compile: CompileSettings | None = None
    batching: Any = None
    packed: bool | str = False
    num_workers: int | str | None = None
    resident: bool | str = False
    matmul_precision: str | None = None
    fused_optimizer: bool | None = None
    batch_size: int | str | None = None
    micro_batch: int | str | None = None
    shared_fields: frozenset[Any] | None = None
    memory: str | None = None
    dropout: str | None = None
    allocator: str | None = None


def check_speed(
    *,
    speed: Any = None,
    compile: Any = None,
    batching: Any = None,
    packed: Any = False,
    num_workers: Any = None,
    resident: Any = False,
    matmul_precision: Any = None,
    fused_optimizer: Any = None,
    batch_size: Any = None,
    micro_batch: Any = None,
    memory: Any = None,
    dropout: Any = None,
    allocator: Any = None,
    owner: str = "Trainer",
) -> SpeedArguments:
    """Check every argument: type, range, combination.

    Raises:
        TypeError: an argument has a type it cannot have.
        ValueError: an argument is out of range, or two of them contradict each other.

    """
    shared_fields = None
    if isinstance(micro_batch, MicroBatch):
        shared_fields = _shared(owner, micro_batch.shared)
        micro_batch = micro_batch.samples
        if micro_batch is None:
            raise TypeError(f"{owner}(micro_batch=MicroBatch(None)): use a number of samples or 'auto'.")
    if fused_optimizer is not None:
        _boolean(owner, "fused_optimizer", fused_optimizer)
    return SpeedArguments(
        speed=_word(owner, "speed", speed, ("auto",)),
        compile=as_compile(owner, compile),
        batching=as_batching(owner, batching),
        packed=_packed(owner, packed),
        num_workers=_num_workers(owner, num_workers),
        resident=_resident(owner, resident, as_batching(owner, batching)),
        matmul_precision=_matmul_precision(owner, matmul_precision),
        fused_optimizer=fused_optimizer,
        batch_size=_batch_size(owner, batch_size, as_batching(owner, batching), micro_batch, memory),
        micro_batch=_micro_batch(owner, micro_batch, batch_size),
        shared_fields=shared_fields,
        memory=_word(owner, "memory", memory, ("auto", "selective", "full")),
        dropout=_word(owner, "dropout", dropout, ("fast",)),
        allocator=_word(owner, "allocator", allocator, ("keep", "tcmalloc", "jemalloc")),
    )


SPEED_NAMES = tuple(inspect.signature(check_speed).parameters)[:-1]


def _boolean(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}({name}={value!r}): use True or False.")


def _packed(owner: str, value: Any) -> bool | str:
    allowed = "True, False or 'first_token' (for classifiers that read nothing else of the last block)"
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{owner}(packed={value!r}): use {allowed}, not {type(value).__name__}.")
    if value != "first_token":
        raise ValueError(f"{owner}(packed={value!r}): use {allowed}.{did_you_mean(value, ('first_token',))}")
    return value


def _samples(owner: str, name: str, value: Any, *words: str) -> int | None:
    if value is None:
        return None
    allowed = " or ".join(["a number of samples, at least 1", *map(repr, words)])
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}({name}={value!r}): use {allowed}, not {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{owner}({name}={value}): use {allowed}.")
    return value


def _num_workers(owner: str, value: Any) -> int | str | None:
    allowed = "a number of worker processes from 0 on, or 'auto' to have it measured"
    if value is None:
        return None
    if isinstance(value, str):
        if value != "auto":
            raise ValueError(
                f"{owner}(num_workers={value!r}): use {allowed}.{did_you_mean(value, ('auto',))}"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}(num_workers={value!r}): use {allowed}, not {type(value).__name__}.")
    if value < 0:
        raise ValueError(f"{owner}(num_workers={value}): use {allowed}.")
    return value


def _resident(owner: str, value: Any, batching: Any) -> bool | str:
    allowed = "True, False, 'auto' (where the data fits) or 'device' (on the device)"
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{owner}(resident={value!r}): use {allowed}, not {type(value).__name__}.")
    if value not in ("auto", "device"):
        hint = did_you_mean(value, ("auto", "device"))
        raise ValueError(f"{owner}(resident={value!r}): use {allowed}.{hint}")
    if value == "device" and batching is not None:
        raise ValueError(
            f"{owner}(resident='device', batching=...): cutting off padding would make the host wait for the device "
            "at every batch. Use resident=True, which holds the data on the host."
        )
    return value


def _batch_size(owner: str, value: Any, batching: Any, micro_batch: Any, memory: Any) -> int | str | None:
    samples: int | str | None
    if value == "auto":
        samples = "auto"
        for name, other in (("micro_batch", micro_batch), ("memory", memory)):
            if other is not None and (name == "micro_batch" or other == "auto"):
                raise ValueError(
                    f"{owner}(batch_size='auto', {name}={other!r}): with {name} memory is not used up, so there is "
                    f"no largest size. Give batch_size a number, or leave {name} out."
                )
    elif isinstance(value, str):
        raise TypeError(
            f"{owner}(batch_size={value!r}): use a number of samples, at least 1, or 'auto', not str."
            + did_you_mean(value, ("auto",))
        )
    else:
        samples = _samples(owner, "batch_size", value, "auto")
    if samples is not None and getattr(batching, "max_tokens", None) is not None:
        raise ValueError(
            f"{owner}(batch_size={samples!r}, batching=...): with max_tokens={batching.max_tokens} the tokens say how "
            "large a batch is. Leave one of them out."
        )
    return samples


def _micro_batch(owner: str, value: Any, batch_size: Any) -> int | str | None:
    if isinstance(value, str):
        if value != "auto":
            raise ValueError(
                f"{owner}(micro_batch={value!r}): use a number of samples, at least 1, or 'auto'."
                + did_you_mean(value, ("auto",))
            )
        return value
    samples = _samples(owner, "micro_batch", value, "auto")
    if samples is not None and isinstance(batch_size, int) and samples > batch_size:
        raise ValueError(
            f"{owner}(batch_size={batch_size}, micro_batch={samples}): a micro-batch is a part of a batch. Use "
            f"micro_batch={batch_size} or less, or batch_size={samples}."
        )
    return samples


def _shared(owner: str, names: Any) -> frozenset[Any]:
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(
            f"{owner}(micro_batch=MicroBatch(shared={names!r})): use a list of names or positions."
        )
    return frozenset(names)


def _matmul_precision(owner: str, value: Any) -> str | None:
    allowed = ("highest", "high", "medium")
    kinds = {"fp32": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium", "bfloat16": "medium"}
    if isinstance(value, str) and (meant := kinds.get(value.lower())) is not None:
        raise ValueError(f"{owner}(matmul_precision={value!r}): use {meant!r}, which is torch's word for it.")
    return _word(owner, "matmul_precision", value, allowed)


def _word(owner: str, name: str, value: Any, allowed: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    listed = " or ".join(map(repr, allowed))
    if not isinstance(value, str):
        raise TypeError(f"{owner}({name}={value!r}): use {listed}, not {type(value).__name__}.")
    if value not in allowed:
        hint = did_you_mean(value, allowed) if len(allowed) > 1 else ""
        raise ValueError(f"{owner}({name}={value!r}): use {listed}.{hint}")
    return value
