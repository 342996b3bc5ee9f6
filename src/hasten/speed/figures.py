"""Figures of a variant that was measured: time, samples, memory, the share of the device's peak."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from hasten.speed.race import Variant


def figures(
    variant: Variant, facts: Mapping[str, Any], given: Mapping[str, str], tokens_per_sample: float | None
) -> dict[str, Any]:
    """Return the figures of a ``Row``.

    Args:
        variant: what had its turns.
        facts: device, model and data.
        given: the program's own Trainer arguments, as text.
        tokens_per_sample: useful tokens of a usual sample; None where batches have no mask.

    """
    turns = variant.turns
    rates = [turn.samples / turn.seconds for turn in turns if turn.samples]
    if tokens_per_sample and all(turn.tokens for turn in turns):
        # Samples of the usual length: those of a few batches by length are shorter or longer.
        rates = [(turn.tokens or 0) / tokens_per_sample / turn.seconds for turn in turns]
    samples_per_second = median(rates) if rates else None
    return {
        "step_seconds": median(turn.seconds / turn.steps for turn in turns),
        "samples_per_second": samples_per_second,
        "memory_bytes": max(turn.memory_bytes for turn in turns),
        "faults_per_step": median(turn.faults / turn.steps for turn in turns),
        "mfu": _mfu(variant, facts, given, samples_per_second),
        "useful_tokens": variant.useful_share,
    }


def _mfu(
    variant: Variant, facts: Mapping[str, Any], given: Mapping[str, str], samples_per_second: float | None
) -> float | None:
    """Return useful operations a second as a share of the peak; those of the unchanged step count."""
    flops, batch = facts.get("flops_per_step"), facts.get("samples_counted")
    if not flops or not batch or not samples_per_second:
        return None
    precision, products = (_asked(name, variant, given) for name in ("precision", "matmul_precision"))
    peaks = facts.get("peak_flops") or {}
    if "bf16" in precision or "medium" in products:
        peak = peaks.get("bfloat16")
    elif "highest" not in products and "high" in products:
        # On a GPU; elsewhere there is no such type.
        peak = peaks.get("tf32", peaks.get("float32"))
    else:
        peak = peaks.get("float32")
    if not peak:
        return None
    share = flops / batch * (facts.get("useful_tokens") or 1.0) * samples_per_second / peak
    # Above the peak: others had the device while that was measured, and it says nothing.
    return float(share) if share <= 1.0 else None


def _asked(name: str, variant: Variant, given: Mapping[str, str]) -> str:
    """Return what a variant's levers say for an argument, else what the program does; empty where neither does."""
    by_levers = (lever.arguments[name] for lever in variant.levers if name in lever.arguments)
    return str(next(by_levers, given.get(name, "")))


def one_time_seconds(variant: Variant, unchanged: Variant) -> float | None:
    """Return what a start costs more than the unchanged one's: preparing and warming up, without the steps.

    Args:
        variant: what had its turns.
        unchanged: the unchanged program.

    """
    starts = []
    for each in (variant, unchanged):
        if each.prepared is None:
            return None
        step = median(turn.seconds / turn.steps for turn in each.turns)
        starts.append(each.prepared.seconds - each.prepared.steps * step)
    return max(0.0, starts[0] - starts[1])
