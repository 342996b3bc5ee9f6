"""What the advisor says besides its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.speed.advice import Row

# So much fresh memory a step is worth a word.
_MUCH_BYTES = 16 * 2**20
# A machine that differs from itself by more hides what levers gain.
_BUSY = 0.1
# A lever that leaves out this much padding says so.
_FEWER_PADDED = 0.1


def notes(
    facts: Mapping[str, Any], unchanged: Row, rows: Mapping[str, Row], *, noise: float, has_losses: bool
) -> list[str]:
    """Return sentences on what was found.

    Args:
        facts: device, model and data.
        unchanged: figures of the unchanged program.
        rows: every lever by itself.
        noise: by how much the unchanged program differs from itself.
        has_losses: whether its losses could be compared.

    """
    found = [
        *_on_operations(facts, unchanged),
        *_on_padding(facts, unchanged, rows),
        *_on_memory(facts, unchanged),
    ]
    dropped, priced = facts.get("attention_dropout"), rows.get("no attention dropout")
    if dropped and priced is not None and priced.speed is not None:
        found.append(
            f"Attention dropout in {', '.join(dropped)} forces an attention that keeps every probability. Without it a "
            f"step is {priced.speed:.2f} times as fast; this changes what is trained."
        )
    if noise > _BUSY:
        found.append(
            f"This machine was busy: the unchanged program differed from itself by {noise:.0%}, and gains below that "
            "count as none."
        )
    if not has_losses:
        found.append("training_step gave no loss in some steps: losses were not compared.")
    found.append("Measured on one device, without validation, checkpoints and loggers.")
    return found


def _on_operations(facts: Mapping[str, Any], unchanged: Row) -> list[str]:
    if unchanged.mfu is None:
        return []
    peaks = ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in facts["peak_flops"].items() if value)
    return [
        f"Useful operations (MFU): {unchanged.mfu:.1%} of the peak of this device, measured with a matrix product "
        f"(GFLOP/s: {peaks})."
    ]


def _on_padding(facts: Mapping[str, Any], unchanged: Row, rows: Mapping[str, Row]) -> list[str]:
    # Of all that was measured, as for the levers; the first look saw a few batches only.
    share = facts.get("useful_tokens") if unchanged.useful_tokens is None else unchanged.useful_tokens
    if share is None:
        return []
    text = f"Useful tokens: {share:.0%}; the rest is padding."
    trimmed = [
        f"{row.useful_tokens:.0%} with {row.name}"
        for row in rows.values()
        if row.useful_tokens is not None and row.useful_tokens > share + _FEWER_PADDED
    ]
    return [text + (f" It is {', '.join(trimmed)}." if trimmed else "")]


def _on_memory(facts: Mapping[str, Any], unchanged: Row) -> list[str]:
    faults = unchanged.faults_per_step or 0.0
    fresh = faults * facts.get("page_bytes", 4096)
    if fresh <= _MUCH_BYTES or facts.get("device_type") != "cpu":
        return []
    return [
        f"The operating system makes {fresh / 2**20:,.0f} MiB of fresh, zeroed memory in each step ({faults:,.0f} page "
        'faults): allocator="keep" is against that.'
    ]
