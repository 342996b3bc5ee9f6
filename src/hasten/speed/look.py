"""What a trial finds out about the device, the model and the data, besides the time of its steps."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from hasten._lib.batch_size import batch_size_of
from hasten._lib.errors import MisconfigurationException
from hasten._lib.version import VERSION
from hasten.arguments import SPEED_NAMES
from hasten.data.memory.read import is_random
from hasten.precision.matmul import matmul_precision as float32_products
from hasten.seed import isolate_rng
from hasten.speed.changes import attention_dropouts, usable_cores

# Large enough that a matrix product reaches the peak of its device, small enough that nobody waits.
_SMALLEST_MATRIX = 128
# Smaller ones say more of how busy the machine is than of the device.
_LARGE_ENOUGH_MATRIX = 512
_LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192, "mps": 4096}
_LONG_ENOUGH_SECONDS = 0.02
# What the driver takes on a GPU beside torch's memory.
_CONTEXT_BYTES = 600 * 2**20


class Examined:
    """Watches the batches of a trial: their shapes, their useful tokens, the operations of one step."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()
        # Whether a step has moved torch's generators.
        self.draws = False
        self._generators: list[Tensor] = []
        self.useful = self.tokens = 0
        self.flops: int | None = None
        self.samples_counted = 0
        self.count_next = self.counted = False
        self._counter: Any = None

    def before(self, batch: Any) -> None:
        """A step begins."""
        self._generators = _generator_states()
        if self.count_next:
            self._counter = flop_counter()
            self._counter.__enter__()

    def after(self, batch: Any) -> None:
        """A step has ended."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.flops = int(self._counter.get_total_flops())
            self._counter, self.count_next, self.counted = None, False, True
            self.samples_counted = batch_size_of(batch)[0]
        states = _generator_states()
        self.draws = self.draws or any(
            not torch.equal(one, other) for one, other in zip(self._generators, states, strict=False)
        )
        self.shapes.update(tuple(tensor.shape[1:]) for tensor in _tensors(batch))
        mask = mask_of(batch)
        if mask is not None:
            self.useful += int((mask != 0).sum())
            self.tokens += mask.numel()

    @property
    def useful_share(self) -> float | None:
        """Share of the tokens that are not padding, 0 to 1; None where no batch has an ``attention_mask``."""
        return self.useful / self.tokens if self.tokens else None


def mask_of(batch: Any) -> Tensor | None:
    """Return the ``attention_mask`` of a batch, (batch, tokens), or None.

    Example::

        >>> mask_of({"attention_mask": torch.ones(2, 3)}).shape
        torch.Size([2, 3])

    """
    for part in batch if isinstance(batch, (list, tuple)) else [batch]:
        found = (
            part.get("attention_mask") if isinstance(part, Mapping) else getattr(part, "attention_mask", None)
        )
        if isinstance(found, Tensor) and found.dim() == 2:
            return found
    return None


def facts(examined: Examined, trainer: Any, module: nn.Module) -> dict[str, Any]:
    """Return everything known of device, model and data, as JSON has it."""
    run = trainer._run
    device: torch.device = run.runtime.device
    loader = (
        run.train.given if isinstance(run.train.given, DataLoader) else _first_loader(run.train.streams())
    )
    dataset = getattr(loader, "dataset", None)
    dropped = attention_dropouts(module)
    return {
        "device_type": device.type,
        "device": device_name(device),
        "capability": capability(device),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "torch": torch.__version__,
        "hasten": VERSION,
        "python": platform.python_version(),
        "model": type(module).__qualname__,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimizers],
        "batch_size": getattr(loader, "batch_size", None),
        "num_workers": getattr(loader, "num_workers", None),
        "map_style": loader is not None and not isinstance(dataset, IterableDataset),
        "useful_tokens": examined.useful_share,
        "shapes_vary": len(examined.shapes) > len(_shapes_of_one_batch(examined)),
        "step_draws": examined.draws,
        "samples_draw": loader is not None and samples_draw(loader),
        "batch_norm": any(isinstance(child, _BatchNorm) for child in module.modules()),
        "coarse": is_coarse(run.runtime, module),
        "dropout": any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.modules()),
        "reads_first_token": reads_first_token(module),
        "not_packed": None if run.arguments.speed.packed else why_not_packed(module),
        "repeated_blocks": blocks_of(module),
        "attention_dropout": sorted({type(child).__name__ for child, _ in dropped}),
        "flops_per_step": examined.flops,
        "samples_counted": examined.samples_counted,
        "free_bytes": free_memory_bytes(device),
        "peak_flops": measured_peaks(device),
        "page_bytes": resource.getpagesize(),
        "key": key_of(trainer.__dict__.get("_given", {}), module, device),
    }


def is_coarse(runtime: Any, module: nn.Module) -> bool:
    """Return whether a program computes with less than float32, so that rounding is coarser."""
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    products = torch.get_float32_matmul_precision() != "highest"
    convolutions = runtime.device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return (
        not kinds <= {torch.float32, torch.float64}
        or not str(getattr(runtime.precision, "precision", runtime.precision)).startswith(("32", "64"))
        or products
        or (convolutions and any(isinstance(child, nn.modules.conv._ConvNd) for child in module.modules()))
    )


def samples_draw(loader: DataLoader[Any]) -> bool:
    """Return whether random numbers are drawn for samples, or where they are joined; also where nobody can say."""
    dataset: Any = loader.dataset
    try:
        with isolate_rng(include_cuda=False):
            count = min(len(dataset), loader.batch_size or 1)
            return is_random(dataset, lambda: loader.collate_fn([dataset[index] for index in range(count)]))
    except Exception:
        # Only its workers may be able to read it.
        return True


def why_not_packed(module: nn.Module) -> str | None:
    """Return why ``packed=True`` cannot be on for a model; None where it can."""
    from hasten.packed.blocks import (
        packed_blocks,
    )  # Takes long to import, and every Trainer imports this module.

    try:
        with packed_blocks(module, asked=_ASKED):
            return None
    except MisconfigurationException as error:
        return str(error).removeprefix(f"{_ASKED}: ").partition(". ")[0]


def reads_first_token(module: nn.Module) -> bool:
    """Return whether it is known of a model that its head reads the first token of each sequence and no other."""
    return any(type(child).__name__ in _READ_THE_FIRST_TOKEN for child in module.modules())


def blocks_of(module: nn.Module) -> int:
    """Return how many alike blocks a model repeats; 0 where it has none."""
    # Imports the compiler.
    from hasten.compile.regions import repeated_blocks

    return max((len(blocks) for _, blocks in repeated_blocks(module)), default=0)


def capability(device: torch.device) -> float | None:
    """Return the compute capability of a CUDA device, such as 8.9; None for others."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


_ASKED = "Trainer(packed=True)"
# Classifiers of transformers; whether it is so is checked in each backward.
_READ_THE_FIRST_TOKEN = tuple(
    f"{name}ForSequenceClassification"
    for name in ("Bert", "Camembert", "DistilBert", "Electra", "Ernie", "Roberta", "XLMRoberta")
)
_PEAKS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_name(device: torch.device) -> str:
    """Return what a device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def flop_counter() -> Any:
    """Return what counts operations, those of attention on the CPU as well, which torch's own leaves out.

    Example::

        >>> q = torch.ones(1, 1, 4, 8, requires_grad=True)
        >>> with flop_counter() as counter:
        ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        >>> counter.get_total_flops() == 3 * 2 * (2 * 4 * 4 * 8)
        True

    """
    # Not above: who imports hasten seldom counts operations.
    from torch.utils.flop_counter import FlopCounterMode

    formulas: dict[Any, Any] = {}
    for name, formula in (("", _attention_flops), ("_backward", _attention_backward_flops)):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}", None)
        if packet is not None:
            formulas[packet] = formula
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _attention_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(q, k, v))


def _attention_backward_flops(gradient: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    # Two products for each of forward's; that scores are computed again is no use of the device.
    return 2 * _attention_flops(q, k, v)


def measured_peaks(device: torch.device) -> dict[str, float | None]:
    """Return the operations a second of a large matrix product, by the type of its numbers.

    On a GPU also in ``"tf32"``: float32 under ``matmul_precision="high"``.
    """
    peaks = {name: peak_flops(device, dtype) for name, dtype in _PEAKS.items()}
    if device.type == "cuda":
        peaks["tf32"] = peak_flops(device, torch.float32, matmul_precision="high")
    return peaks


def peak_flops(
    device: torch.device, dtype: torch.dtype, *, matmul_precision: str = "highest"
) -> float | None:
    """Return the operations a second that a large matrix product reaches here; None where it cannot be done.

    Args:
        device: the device.
        dtype: type of the numbers.
        matmul_precision: for float32, as in ``torch.set_float32_matmul_precision``.

    """
    size, best = _SMALLEST_MATRIX, 0.0
    try:
        with torch.no_grad(), float32_products(matmul_precision):
            while True:
                a = torch.randn(size, size, device=device).to(dtype)
                fastest = min(_seconds_of_product(a) for _ in range(6))
                best = max(best, 2.0 * size**3 / fastest)
                # Where a type is only emulated, one large product would take seconds.
                if size >= _LARGEST_MATRIX.get(device.type, 2048) or (
                    fastest > _LONG_ENOUGH_SECONDS and size >= _LARGE_ENOUGH_MATRIX
                ):
                    return best
                size *= 2
    except (RuntimeError, NotImplementedError):
        return None


def _seconds_of_product(a: Tensor) -> float:
    _wait(a.device)
    began = time.perf_counter()
    torch.mm(a, a)
    _wait(a.device)
    return time.perf_counter() - began


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process held: of the device, or of the host where that computes.

    On a GPU all that torch has reserved, graphs and what lies in pieces among it, and about what the driver takes.
    On the host not ``ru_maxrss``: on Linux a new process begins with that of the one that started it.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device)) + _CONTEXT_BYTES
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory_bytes(device: torch.device) -> int | None:
    """Return the memory that another process could have now; None where nobody says so."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def key_of(given: Mapping[str, Any], module: nn.Module, device: torch.device) -> str:
    """Return what a verdict is remembered by: program, model, device, versions and the arguments that matter.

    Args:
        given: the Trainer's arguments.
        module: the model; the names, shapes and types of its parameters count.
        device: where it trains.

    """
    main = sys.modules.get("__main__")
    matters = (*SPEED_NAMES, "precision", "accumulate_grad_batches", "strategy", "gradient_clip_val")
    known = [
        VERSION,
        torch.__version__,
        device_name(device),
        # Not torch's threads: the processes of one run share the cores, and the verdict.
        os.cpu_count(),
        os.path.abspath(getattr(main, "__file__", None) or ""),
        f"{type(module).__module__.replace('__mp_main__', '__main__')}.{type(module).__qualname__}",
        [(name, list(value.shape), str(value.dtype)) for name, value in module.named_parameters()],
        [(name, repr(given[name])) for name in matters if given.get(name) not in (None, False, 1, "auto")],
    ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _tensors(part)


def _shapes_of_one_batch(examined: Examined) -> set[int]:
    """Return the numbers of dimensions seen: one shape for each is what fixed shapes look like."""
    return {len(shape) for shape in examined.shapes}


def _first_loader(streams: Any) -> DataLoader[Any] | None:
    return next((stream for stream in streams or () if isinstance(stream, DataLoader)), None)


def _generator_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
