"""Compare the memory of a step with the available memory, and estimate the time of an epoch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hasten._lib.device import is_cuda, is_host
from hasten._lib.tree import leaves, parameters_of
from hasten.machine.host import available_memory_bytes, bytes_text
from hasten.record.pace import seconds_text
from hasten_tools.preflight.loaders import sample_count
from hasten_tools.preflight.report import Rows

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.trainer import Trainer
    from hasten_tools.preflight.plan import Length
    from hasten_tools.preflight.watch import Observations

# Of the memory of a device; above it, other batches or fragments may not fit.
_NEARLY_FULL = 0.92


def check_memory(run: Run, seen: Observations, rows: Rows) -> None:
    """Compare the memory of the checked steps with what is available."""
    device = run.runtime.device
    if is_cuda(device):
        peak, total = torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)[1]
        others = total - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
        text = f"{bytes_text(peak)} of {bytes_text(total)} at the peak of {seen.trained} steps"
        if others > 2**30:
            text += f", besides {bytes_text(others)} of other processes"
        if peak + others > _NEARLY_FULL * total:
            rows.warning("memory", f"{text}: a larger batch or fragments may not fit.", 'Trainer(micro_batch="auto")')
        else:
            rows.ok("memory", text)
        return
    if not is_host(device):
        rows.skipped("memory", f"{device.type} does not say how much a step takes")
        return
    parts = step_bytes(run, seen)
    need, free = sum(parts.values()), available_memory_bytes()
    shown = ", ".join(f"{name} {bytes_text(count)}" for name, count in parts.items() if count)
    if free is None:
        rows.skipped("memory", f"a step needs about {bytes_text(need)} ({shown}); the system does not say what is free")
    # The weights are in memory by now, and the rest may be.
    elif need - parts["weights"] > free:
        what = f"A step needs about {bytes_text(need)} ({shown}), and {bytes_text(free)} are free."
        rows.error("memory", what, 'Trainer(micro_batch="auto"), or a smaller batch_size')
    else:
        rows.ok("memory", f"a step needs about {bytes_text(need)} ({shown}); {bytes_text(free)} are free")


def check_resident(trainer: Trainer, run: Run, seen: Observations, rows: Rows) -> None:
    """Compare the size of the training data with the memory that ``resident`` would hold it in."""
    asked = trainer.given_arguments.get("resident")
    samples, size = sum(map(sample_count, run.data.train.streams())), seen.sizes.get("train", 0)
    if not asked or not samples or not size or seen.first_batch is None:
        return
    of_batch = sum(leaf.nbytes for leaf in leaves(seen.first_batch[0]) if isinstance(leaf, torch.Tensor))
    need, on_device = of_batch / size * samples, asked == "device" and is_cuda(run.runtime.device)
    free = torch.cuda.mem_get_info(run.runtime.device)[0] if on_device else available_memory_bytes()
    text = f"{samples} samples of {bytes_text(of_batch / size)} are {bytes_text(need)}"
    if free is not None and need > free:
        rows.error("resident", f"{text}, and {bytes_text(free)} are free.", "Leave resident out, or num_workers='auto'")
    elif free is not None:
        rows.ok("resident", f"{text}; {bytes_text(free)} are free")


def step_bytes(run: Run, seen: Observations) -> dict[str, int]:
    """Return the memory of a step, in bytes: weights, gradients, states of the optimizers, and what backward needs."""
    weights = {id(tensor): tensor for tensor in (*run.module.parameters(), *run.module.buffers())}
    trained = [p for p in parameters_of(*run.optimizers) if p.requires_grad]
    states = [
        leaf
        for optimizer in run.optimizers
        for state in optimizer.state.values()
        for leaf in leaves(state)
        if isinstance(leaf, torch.Tensor)
    ]
    return {
        "weights": sum(tensor.nbytes for tensor in weights.values()),
        "gradients": sum(p.nbytes for p in trained),
        "optimizer": sum(state.nbytes for state in states),
        "activations": seen.kept_bytes or 0,
    }


def say_time(length: Length, seen: Observations, rows: Rows) -> None:
    """Say about how long an epoch will take, from the last batch that was trained."""
    if seen.trained < 2:
        return
    seconds = seen.seconds[-1]
    if math.isinf(length.batches):
        rows.ok("time", f"{seconds_text(seconds)} a batch; the length of an epoch is not known")
        return
    batches = math.ceil(length.batches / length.processes)
    epoch = seconds * batches
    text = f"about {seconds_text(epoch)} for an epoch of {batches} batches, without validation and waiting"
    if math.isfinite(length.epochs) and length.epochs > 1:
        text += f"; {seconds_text(epoch * length.epochs)} for {length.epochs:.0f} epochs"
    rows.ok("time", text)
