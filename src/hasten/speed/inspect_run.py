"""What a trial finds out about the device, the model and the data of a program."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from hasten._lib import VERSION
from hasten._lib.errors import MisconfigurationException
from hasten._lib.tree import leaves
from hasten.arguments import SPEED_NAMES
from hasten.data.memory.read import is_random
from hasten.logged_value import batch_size_of
from hasten.machine.host import available_memory_bytes, cpu_name, process_memory_bytes, usable_cores
from hasten.report.peaks import flop_counter, measured_peaks
from hasten.seed import isolate_rng
from hasten.speed.changes import attention_dropouts

if TYPE_CHECKING:
    from hasten.trainer import Trainer
    from hasten.types import Batch

# Memory that the driver takes on a GPU in addition to torch's.
_CONTEXT_BYTES = 600 * 2**20
_PACKED = "Trainer(packed=True)"
# Classifiers of transformers whose head reads the first token; each backward checks that it does.
_READ_THE_FIRST_TOKEN = tuple(
    f"{name}ForSequenceClassification"
    for name in ("Bert", "Camembert", "DistilBert", "Electra", "Ernie", "Roberta", "XLMRoberta")
)


class Observed:
    """What the steps of a trial show: shapes of batches, useful tokens, operations, random draws."""

    def __init__(self) -> None:
        # Whether a step has moved torch's generators.
        self.draws = False
        # Operations of the step that was counted, and samples of its batch.
        self.flops: int | None = None
        self.samples_counted = 0
        self._counts_next = False
        self._shapes: set[tuple[int, ...]] = set()
        self._generators: list[Tensor] = []
        self._useful = self._slots = 0

    def count_next(self) -> None:
        """Count the operations of the next step."""
        self._counts_next = True

    def before_step(self) -> None:
        """Call it before each step."""
        self._generators = _generator_states()
        if self._counts_next:
            self._counter = flop_counter()
            self._counter.__enter__()

    def after_step(self, batch: Batch) -> None:
        """Call it after each step."""
        if self._counts_next:
            self._counter.__exit__(None, None, None)
            self._counts_next, self.flops = False, int(self._counter.get_total_flops())
            self.samples_counted = batch_size_of(batch)[0]
        pairs = zip(self._generators, _generator_states(), strict=False)
        self.draws = self.draws or any(not torch.equal(before, after) for before, after in pairs)
        self._shapes.update(tuple(leaf.shape[1:]) for leaf in leaves(batch) if isinstance(leaf, Tensor))
        mask = mask_of(batch)
        if mask is not None:
            self._useful += int((mask != 0).sum())
            self._slots += mask.numel()

    @property
    def useful_share(self) -> float | None:
        """Share of the tokens that are not padding, 0 to 1; None if no batch has an ``attention_mask``."""
        return self._useful / self._slots if self._slots else None

    @property
    def shapes_vary(self) -> bool:
        """Whether batches have more than one shape for each number of dimensions."""
        return len(self._shapes) > len({len(shape) for shape in self._shapes})


def mask_of(batch: Batch) -> Tensor | None:
    """Return the ``attention_mask`` of a batch, (batch, tokens), or None.

    Example::

        >>> mask_of({"attention_mask": torch.ones(2, 3)}).shape
        torch.Size([2, 3])

    """
    for part in batch if isinstance(batch, (list, tuple)) else [batch]:
        name = "attention_mask"
        found = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
        if isinstance(found, Tensor) and found.dim() == 2:
            return found
    return None


def facts(observed: Observed, trainer: Trainer, module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything known of device, model and data of a running ``fit``, as plain values that JSON can hold."""
    # These import the compiler, and every Trainer imports this module.
    from hasten.compile.regions import alike_blocks

    device: torch.device = trainer.strategy.root_device
    on_cuda = device.type == "cuda"
    major, minor = torch.cuda.get_device_capability(device) if on_cuda else (0, 0)
    data = leaves([trainer.train_dataloader])
    loader = next((leaf for leaf in data if isinstance(leaf, DataLoader)), None)
    children = list(module.modules())
    return {
        "device_type": device.type,
        "device": device_name(device),
        "capability": major + minor / 10 if on_cuda else None,
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "torch": torch.__version__,
        "hasten": VERSION,
        "python": platform.python_version(),
        "model": type(module).__qualname__,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "batch_size": getattr(loader, "batch_size", None),
        "num_workers": getattr(loader, "num_workers", None),
        "map_style": loader is not None and not isinstance(loader.dataset, IterableDataset),
        "useful_tokens": observed.useful_share,
        "shapes_vary": observed.shapes_vary,
        "step_draws": observed.draws,
        "samples_draw": loader is not None and _samples_draw(loader),
        "batch_norm": any(isinstance(child, _BatchNorm) for child in children),
        "coarse": is_coarse(trainer.precision, device, module),
        "dropout": any(isinstance(child, nn.Dropout) and child.p > 0 for child in children),
        "reads_first_token": any(type(child).__name__ in _READ_THE_FIRST_TOKEN for child in children),
        "not_packed": None if given.get("packed") else _why_not_packed(module),
        "repeated_blocks": max((len(blocks) for _, blocks in alike_blocks(module)), default=0),
        "attention_dropout": sorted({type(child).__name__ for child, _ in attention_dropouts(module)}),
        "flops_per_step": observed.flops,
        "samples_counted": observed.samples_counted,
        # Memory that another process could have now.
        "free_bytes": torch.cuda.mem_get_info(device)[0] if on_cuda else available_memory_bytes(),
        "peak_flops": measured_peaks(device),
        "page_bytes": resource.getpagesize(),
        "key": key_of(given, module, device),
    }


def is_coarse(precision: object, device: torch.device, module: nn.Module) -> bool:
    """Return whether a program computes with less than float32, so that rounding is coarser."""
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    convolutions = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return (
        not kinds <= {torch.float32, torch.float64}
        or not str(precision).startswith(("32", "64"))
        or torch.get_float32_matmul_precision() != "highest"
        or (convolutions and any(isinstance(child, nn.modules.conv._ConvNd) for child in module.modules()))
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as "NVIDIA H100 PCIe"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process held: of the device, or of the host if that computes.

    On a GPU this is all memory that torch has reserved, graphs and fragments included, and about what the driver takes.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device)) + _CONTEXT_BYTES
    # Not ru_maxrss first: on Linux a new process begins with that of its parent.
    unit = 1 if sys.platform == "darwin" else 1024
    return process_memory_bytes(peak=True) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def key_of(given: Mapping[str, Any], module: nn.Module, device: torch.device) -> str:
    """Return the name under which a result is kept: program, model, device, versions and relevant arguments."""
    main = sys.modules.get("__main__")
    relevant = (*SPEED_NAMES, "precision", "accumulate_grad_batches", "strategy", "gradient_clip_val")
    known = [
        VERSION,
        torch.__version__,
        device_name(device),
        # Not torch's threads: the processes of one run share the cores, and the result.
        os.cpu_count(),
        os.path.abspath(getattr(main, "__file__", None) or ""),
        f"{type(module).__module__.replace('__mp_main__', '__main__')}.{type(module).__qualname__}",
        [(name, list(value.shape), str(value.dtype)) for name, value in module.named_parameters()],
        [(name, repr(given[name])) for name in relevant if given.get(name) not in (None, False, 1, "auto")],
    ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]


def _samples_draw(loader: DataLoader[Any]) -> bool:
    """Return whether reading or joining samples draws random numbers; True if that cannot be found out."""
    dataset: Any = loader.dataset
    try:
        with isolate_rng(include_cuda=False):
            count = min(len(dataset), loader.batch_size or 1)
            return is_random(dataset, lambda: loader.collate_fn([dataset[index] for index in range(count)]))
    except Exception:
        # Only its workers may be able to read it.
        return True


def _why_not_packed(module: nn.Module) -> str | None:
    """Return why ``packed=True`` cannot be on for a model; None if it can."""
    from hasten.packed.blocks import packed_blocks

    try:
        with packed_blocks(module, asked=_PACKED):
            return None
    except MisconfigurationException as error:
        return str(error).removeprefix(f"{_PACKED}: ").partition(". ")[0]


def _generator_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])
