"""Facts that a trial finds out about the device, the model and the data of a program."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hasten._lib import VERSION, torch_private
from hasten._lib.device import is_cuda, is_host
from hasten._lib.errors import MisconfigurationException
from hasten._lib.tree import leaves
from hasten.arguments import SPEED_NAMES
from hasten.data.memory.dataset_parts import preserve
from hasten.data.memory.read import is_random
from hasten.data.memory.resident import users_dataset
from hasten.extend.origin import full_name, source_of
from hasten.hooks import overrides
from hasten.logged_value import batch_size_of
from hasten.machine.host import available_memory_bytes, cpu_name, process_memory_bytes, resource_usage, usable_cores
from hasten.module import LightningModule
from hasten.report.peaks import flop_counter, measured_peaks
from hasten.seed import isolate_rng
from hasten_tools.speed.changes import attention_dropouts, processes_here

if TYPE_CHECKING:
    from hasten import LightningDataModule, Trainer
    from hasten.types import Batch, Dataloaders

# Memory that the driver takes on a GPU in addition to torch's.
_CONTEXT_BYTES = 600 * 2**20
_PACKED = "Trainer(packed=True)"
_NO_PADDING = "batches have no padding, and attention drops nothing"
# Classifiers of transformers whose head reads the first token; each backward checks that it does.
_READ_THE_FIRST_TOKEN = tuple(
    f"{name}ForSequenceClassification"
    for name in ("Bert", "Camembert", "DistilBert", "Electra", "Ernie", "Roberta", "XLMRoberta")
)


class Observed:
    """Observations of the steps of a trial: shapes of batches, useful tokens, operations, random draws."""

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
        # Tokens of the longest row; None if no batch has an attention_mask.
        self.width: int | None = None

    def count_next(self) -> None:
        """Count the operations of the next step."""
        self._counts_next = True

    def before_step(self) -> None:
        """Call it before each step."""
        self._generators = generator_states()
        if self._counts_next:
            self._counter = flop_counter()
            self._counter.__enter__()

    def after_step(self, batch: Batch) -> None:
        """Call it after each step."""
        if self._counts_next:
            self._counter.__exit__(None, None, None)
            self._counts_next, self.flops = False, int(self._counter.get_total_flops())
            self.samples_counted = batch_size_of(batch)[0]
        pairs = zip(self._generators, generator_states(), strict=False)
        self.draws = self.draws or any(not torch.equal(before, after) for before, after in pairs)
        self.see(batch)

    def see(self, batch: Batch) -> None:
        """Note the shapes and useful tokens of a batch."""
        self._shapes.update(tuple(leaf.shape[1:]) for leaf in leaves(batch) if isinstance(leaf, Tensor))
        mask = mask_of(batch)
        if mask is not None:
            self._useful += int((mask != 0).sum())
            self._slots += mask.numel()
            self.width = max(self.width or 0, mask.shape[1])

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


def facts(
    observed: Observed, trainer: Trainer, module: nn.Module, given: Mapping[str, Any], *, quick: bool = False
) -> dict[str, Any]:
    """Return everything known of device, model and data of a running ``fit``, as plain values that JSON can hold.

    With ``quick``, what takes long to find out is left out: the peaks of the device, alike blocks, and whether a model
    can be packed that has neither padding nor dropout in its attention.
    """
    device: torch.device = trainer.strategy.root_device
    on_cuda = is_cuda(device)
    major, minor = torch.cuda.get_device_capability(device) if on_cuda else (0, 0)
    data = leaves([trainer.train_dataloader])
    loader = next((leaf for leaf in data if isinstance(leaf, DataLoader)), None)
    children = list(module.modules())
    dropping = sorted({type(child).__name__ for child, _ in attention_dropouts(module)})
    may_pack = not quick or bool(dropping) or (observed.useful_share or 1.0) < 1.0
    return {
        "device_type": device.type,
        "device": device_name(device),
        "capability": major + minor / 10 if on_cuda else None,
        "threads": torch.get_num_threads(),
        # Of this process: those of one run share the cores.
        "cores": max(1, usable_cores() // processes_here(trainer, given.get("devices"))),
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
        # Tokens of the longest row, padding included.
        "width": observed.width,
        "shapes_vary": observed.shapes_vary,
        "step_draws": observed.draws,
        "held_tensors": loader is not None and isinstance(users_dataset(loader.dataset), TensorDataset),
        "samples_draw": loader is not None and _samples_draw(loader),
        "batch_norm": any(isinstance(child, torch_private.BatchNorm) for child in children),
        "coarse": is_coarse(trainer.precision, device, module),
        "dropout": any(isinstance(child, nn.Dropout) and child.p > 0 for child in children),
        "reads_first_token": any(type(child).__name__ in _READ_THE_FIRST_TOKEN for child in children),
        "not_packed": None if given.get("packed") else _why_not_packed(module) if may_pack else _NO_PADDING,
        "repeated_blocks": 0 if quick else _repeated_blocks(module),
        "attention_dropout": dropping,
        "flops_per_step": observed.flops,
        "samples_counted": observed.samples_counted,
        # Memory that another process could have now.
        "free_bytes": torch.cuda.mem_get_info(device)[0] if on_cuda else available_memory_bytes(),
        "peak_flops": {} if quick else measured_peaks(device),
        "page_bytes": mmap.PAGESIZE,
        "key": key_of(given, module, device, data_shape(loader, trainer.datamodule, module)),
    }


def _repeated_blocks(module: nn.Module) -> int:
    # It imports the compiler, and every Trainer imports this module.
    from hasten.compile.regions import alike_blocks

    return max((len(blocks) for _, blocks in alike_blocks(module)), default=0)


def is_coarse(precision: object, device: torch.device, module: nn.Module) -> bool:
    """Return whether a program computes with less than float32, so that rounding is coarser."""
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    convolutions = is_cuda(device) and torch.backends.cudnn.allow_tf32
    return (
        not kinds <= {torch.float32, torch.float64}
        or not str(precision).startswith(("32", "64"))
        or torch.get_float32_matmul_precision() != "highest"
        or (convolutions and any(isinstance(child, torch_private.Convolution) for child in module.modules()))
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as "NVIDIA H100 PCIe"."""
    if is_cuda(device):
        return torch.cuda.get_device_name(device)
    return cpu_name() if is_host(device) else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process held: of the device, or of the host if that computes.

    On a GPU this is all memory that torch has reserved, graphs and fragments included, and about what the driver takes.
    """
    if is_cuda(device):
        return int(torch.cuda.max_memory_reserved(device)) + _CONTEXT_BYTES
    # Not ru_maxrss first: on Linux a new process begins with its parent's value.
    unit = 1 if sys.platform == "darwin" else 1024
    return process_memory_bytes(peak=True) or resource_usage("ru_maxrss") * unit


def data_shape(loader: Dataloaders, datamodule: LightningDataModule | None, module: nn.Module) -> list[Any]:
    """Return what a result depends on of the training data: kinds, sizes of samples and batches.

    Numbers are rounded to powers of two: a few samples more are the same data. Data of a datamodule, or of the module
    itself, is known by its owner: before the run prepares it there is nothing else to ask.
    """
    if datamodule is not None:
        return [type(datamodule).__qualname__, getattr(datamodule, "batch_size", None)]
    found = next((leaf for leaf in leaves([loader]) if isinstance(leaf, DataLoader)), None)
    if overrides(module, LightningModule, "train_dataloader") or found is None:
        return [type(module).__qualname__, getattr(module, "batch_size", None)]
    dataset: Any = users_dataset(found.dataset)
    shapes, samples = None, None
    with suppress(Exception), isolate_rng(include_cuda=False), preserve(dataset):
        samples = len(dataset).bit_length()
        shapes = [[size.bit_length() for size in leaf.shape] for leaf in leaves(dataset[0]) if isinstance(leaf, Tensor)]
    return [type(dataset).__qualname__, found.batch_size, samples, shapes]


def key_of(given: Mapping[str, Any], module: nn.Module, device: torch.device, data: object = None) -> str:
    """Return the name under which a result is kept: program, model, data, device, versions, relevant arguments."""
    main = sys.modules.get("__main__")
    # One result serves every value of ``speed``: it names the class of each line.
    relevant = (
        *(name for name in SPEED_NAMES if name != "speed"),
        "precision",
        "accumulate_grad_batches",
        "strategy",
        # With others, each process has other threads.
        "devices",
        "gradient_clip_val",
    )
    known = [
        VERSION,
        torch.__version__,
        device_name(device),
        # Not torch's threads: the processes of one run share the cores, and the result.
        os.cpu_count(),
        os.path.abspath(getattr(main, "__file__", None) or ""),
        full_name(type(module)).replace("__mp_main__", "__main__"),
        # Some lines are judged by what these compute; not every optimizer can be fused.
        [source_of(getattr(type(module), name)) for name in ("training_step", "forward", "configure_optimizers")],
        [(name, list(value.shape), str(value.dtype)) for name, value in module.named_parameters()],
        data,
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


def generator_states() -> list[Tensor]:
    """Return the states of torch's generators, of the host and of each CUDA device."""
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])
