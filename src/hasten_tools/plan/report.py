"""A plan as numbers, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hasten._lib.errors import make_error
from hasten.machine.host import bytes_text
from hasten.record.pace import seconds_text
from hasten.report.tables import aligned
from hasten.strategies.mesh.sizes import MeshSizes
from hasten_tools.plan.ledger import CATEGORIES, GRADIENTS, OPTIMIZER, WEIGHTS

# The share of a device's memory that a plan may fill. The rest is for the driver, the communication library, and gaps
# between tensors.
USABLE = 0.9
# Between one step and the next, or moved to host memory by cpu_offload.
KEPT = (WEIGHTS, OPTIMIZER, GRADIENTS)


@dataclass(frozen=True)
class Speeds:
    """How fast one device sends and computes.

    The defaults are the NVLink of an H100 (900 GB/s, half of it in each direction), one 400 Gb/s InfiniBand adapter a
    device, and 40 % of the peak of an H100 in bfloat16.

    Args:
        within: to a device of the same machine, in billions of bytes a second.
        between: to a device of another machine.
        tflops: the floating-point operations of a training step, in trillions a second.

    Source: `NVIDIA, H100 <https://www.nvidia.com/en-us/data-center/h100/>`_ and `DGX H100
    <https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html>`_.

    """

    within: float = 450.0
    between: float = 50.0
    tflops: float = 400.0

    def __post_init__(self) -> None:
        if not (0 < self.within < math.inf and 0 < self.between < math.inf):
            what = f"bandwidth {self.within:g},{self.between:g}:"
            raise make_error(ValueError, what, fix="use positive numbers of GB/s.", argument="bandwidth")
        if not 0 < self.tflops < math.inf:
            raise make_error(
                ValueError, f"tflops {self.tflops:g}:", fix="use a positive number of TFLOP/s.", argument="tflops"
            )

    def text(self) -> str:
        """Return what is assumed, as sentences."""
        of = " (NVLink, InfiniBand and 40% of the peak of an H100)" if self == Speeds() else ""
        return (
            f"Seconds: a device sends {self.within:g} GB/s within a machine and {self.between:g} GB/s between "
            f"machines,\nand computes {self.tflops:g} TFLOP/s{of}.\nLatency is not counted, nor that a part of the "
            "exchange is hidden behind computation."
        )


@dataclass(frozen=True)
class Measured:
    """What one process of a run holds and sends, in bytes.

    Args:
        strategy: its name.
        precision: its name.
        tensor_parallel: the number of processes over which layers are split.
        cpu_offload: whether weights, gradients and optimizer states are in host memory.
        parameters: elements of all parameters.
        trainable: elements of those that train.
        local_elements: elements that this process holds.
        weights: its parameters.
        gradients: its gradients after backward.
        optimizer: its part of the optimizers' states.
        buffers: the module's buffers.
        peak: the most memory that tensors held at once in a step.
        peak_parts: by what.
        sent: by kind of collective: calls, payload, and what the process sends in a ring.
        shards: the shape of each parameter in this process; of an estimate, those of the blocks that were planned.
        mesh: the sizes of the axes "replicate", "shard" and "tensor", and of others that are larger than 1; empty for
            strategies without a mesh.
        links: by kind of collective, the parts of what the process sends in a ring: bytes within its machine, and
            bytes between machines. A part is what groups send that are spread over machines alike.
        peaks: the peak of each part of the step, and by what.
        blocks: how many equal blocks the module has, if some of them were left out; else 0.
        kept: how many of them were not left out, or the most of the plans from which all were estimated.
        process: which process of the run it is.
        idle: the part of a step in which it waits for other stages of a pipeline, if all take the same time; None for
            no pipeline, and for schedules that fill this time.
        flops: the floating-point operations of its products, convolutions and attention in a step.
        samples: of the first batch, which is that of each process; 0 if that is not known.
        experts: over how many processes the experts of the module can be divided at most; 1 for a module without any.

    """

    strategy: str
    precision: str
    tensor_parallel: int
    cpu_offload: bool
    parameters: int
    trainable: int
    local_elements: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    peak: int
    peak_parts: dict[str, int]
    sent: dict[str, tuple[int, int, int]]
    shards: dict[str, tuple[int, ...]]
    mesh: dict[str, int] = field(default_factory=dict)
    links: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    peaks: dict[str, tuple[int, dict[str, int]]] = field(default_factory=dict)
    blocks: int = 0
    kept: int = 0
    process: int = 0
    idle: float | None = None
    flops: int = 0
    samples: int = 0
    experts: int = 1

    @property
    def on_device(self) -> int:
        """The most memory on the device."""
        if not self.cpu_offload:
            return self.peak
        return self.peak - sum(self.peak_parts.get(name, 0) for name in KEPT)

    @property
    def on_host(self) -> int:
        """The memory that ``cpu_offload`` takes on the host, for one process."""
        return self.weights + self.gradients + self.optimizer if self.cpu_offload else 0

    def seconds(self, speeds: Speeds) -> float:
        """Return about how long exchanging takes in a step, in seconds, if each collective sends as fast as it can.

        A collective takes as long as the slower of its two links: what goes within machines is sent at the same time.
        """
        return sum(
            max(within / speeds.within, between / speeds.between) / 1e9
            for parts in self.links.values()
            for within, between in parts
        )

    def computing_seconds(self, speeds: Speeds) -> float:
        """Return about how long computing takes in a step, in seconds, with what a pipeline waits."""
        return self.flops / (speeds.tflops * 1e12) / (1 - (self.idle or 0))

    def fits(self, memory: int | None) -> bool | None:
        """Return whether a device of ``memory`` bytes is large enough; None if it is not given."""
        return None if memory is None else self.on_device <= USABLE * memory


@dataclass(frozen=True)
class Change:
    """One change of the program, and what it would make of the plan.

    ``line`` is what to write. Without ``measured`` it cannot be planned, for a ``reason``.
    """

    line: str
    measured: Measured | None = None
    reason: str = ""


@dataclass(frozen=True)
class PlannedMesh(MeshSizes):
    """The sizes of a mesh, and what was found about it.

    Args:
        line: the strategy to write.
        measured: the plan with it; None if there is none.
        seconds: of exchange in a step; None without a plan.
        computing: seconds of computing in a step, and of waiting in a pipeline; None without a plan.
        reason: why there is no plan.

    """

    line: str = ""
    measured: Measured | None = None
    seconds: float | None = None
    computing: float | None = None
    reason: str = ""

    @property
    def seconds_for_all(self) -> float:
        """Seconds for as many batches as there are devices: a step has as many as there are groups that share one."""
        if self.seconds is None or self.computing is None:
            return math.inf
        return (self.seconds + self.computing) * self.processes / self.batches

    def may_fit(self, memory: int | None) -> bool:
        """Return whether it has a plan, which fits if the memory of a device is known."""
        return self.measured is not None and self.measured.fits(memory) is not False


@dataclass(frozen=True)
class FitPlan:
    """The memory and communication that a program needs on many devices.

    Args:
        devices: the number of processes.
        nodes: the number of machines.
        model: the name of the module's class.
        measured: of the first process, which has the largest shards; of a pipeline, of the fullest stage.
        memory: of a device, in bytes; None if it was not given.
        changes: single changes, if the plan does not fit.
        notes: what the plan leaves out of the program.
        meshes: what was found about each mesh, the best one first, if the best one was searched.
        bandwidth: the speeds with which seconds are estimated; None if they are not.
        stages: of a pipeline, the most memory on the first device of each of its processes, by rank, as far as they
            were planned.

    """

    devices: int
    nodes: int
    model: str
    measured: Measured
    memory: int | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    meshes: tuple[PlannedMesh, ...] = ()
    bandwidth: Speeds | None = None
    stages: dict[int, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the memory of a device; None if that was not given."""
        return self.measured.fits(self.memory)

    def to_json(self) -> str:
        """Return everything as JSON."""
        seconds = None if self.bandwidth is None else self.measured.seconds(self.bandwidth)
        content: dict[str, Any] = {**asdict(self), "fits": self.fits, "seconds": seconds}
        return json.dumps(content, indent=1)

    def table(self) -> str:
        """Return the plan as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self._heading()
        yield ""
        yield from aligned(self._facts(), [22, 0])
        yield ""
        yield from self._sent()
        if self.bandwidth is not None:
            yield ""
            if self.meshes:
                yield from self._meshes()
            else:
                seconds = self.measured.seconds(self.bandwidth), self.measured.computing_seconds(self.bandwidth)
                yield "exchanging takes about {} in a step, and computing {}".format(*map(seconds_text, seconds))
            yield self.bandwidth.text()
        if self.changes:
            yield ""
            yield from self._changes()
        if self.notes:
            yield ""
            yield from self.notes

    def _heading(self) -> Iterator[str]:
        """Yield what is planned: model, devices, strategy and mesh."""
        found = self.measured
        machines = "1 machine" if self.nodes == 1 else f"{self.nodes} machines"
        split = f", layers split over {found.tensor_parallel}" if found.tensor_parallel > 1 else ""
        yield f"{self.model} on {self.devices:,} devices of {machines}"
        yield f"strategy {found.strategy!r}{split}, precision {found.precision!r}"
        if found.mesh and (found.strategy == "mesh" or found.mesh["replicate"] > 1):
            yield ", ".join(f"{axis}={count}" for axis, count in found.mesh.items())
        yield f"of {'the first process' if not self.stages else f'process {found.process}'}, in one training step:"

    def _facts(self) -> list[list[str]]:
        """Return the rows about parameters and memory."""
        found = self.measured
        frozen = found.parameters - found.trainable
        trained = f", {frozen:,} of them frozen" if frozen else ""
        share = found.local_elements / max(found.parameters, 1)
        facts = [
            ["parameters", f"{found.parameters:,}{trained}"],
            ["local shard", f"{found.local_elements:,} elements, {share:.2%}"],
            [""],
            ["weights", bytes_text(found.weights)],
            ["gradients", bytes_text(found.gradients)],
            ["optimizer states", bytes_text(found.optimizer)],
        ]
        if found.buffers:
            facts.append(["buffers", bytes_text(found.buffers)])
        rest = {
            name: found.peak_parts[name]
            for name in CATEGORIES
            if name not in (*KEPT, "buffers") and found.peak_parts.get(name)
        }
        facts += [[name, f"{bytes_text(count)} at the peak"] for name, count in rest.items()]
        facts.append(["peak", bytes_text(found.on_device) + self._verdict()])
        if found.cpu_offload:
            per_node = found.on_host * (self.devices // self.nodes)
            facts.append(["on the host", f"{bytes_text(found.on_host)} a process, {bytes_text(per_node)} a machine"])
        if self.stages:
            facts.append(
                ["peak by stage", ", ".join(f"{bytes_text(peak)} (process {r})" for r, peak in self.stages.items())]
            )
            waits = "less than with other schedules" if found.idle is None else f"{found.idle:.1%} of a step"
            facts.append(["idle", f"{waits}, if all stages take the same time"])
        return facts

    def _sent(self) -> Iterator[str]:
        """Yield the table of what the processes send."""
        found = self.measured
        if not found.sent:
            yield "nothing is sent in a step"
            return
        heads = ("calls", "tensors", "by each process (ring)", "within a machine", "between machines")
        rows = [["sent in a step", *heads]]
        for name, (calls, payload, ring) in sorted(found.sent.items()):
            parts = found.links.get(name, ())
            ends = [bytes_text(sum(part[end] for part in parts)) for end in (0, 1)]
            rows.append([name, f"{calls:,}", bytes_text(payload), bytes_text(ring), *ends])
        yield from aligned(rows, [18, 8, 12, 26, 20, 20], right_from=1)

    def _meshes(self) -> Iterator[str]:
        """Yield the lines about meshes, if the best one was searched."""
        rows = [["strategy=", "peak", "exchange", "computing", f"for {self.devices:,} batches", "fits"]]
        unplanned: dict[str, list[str]] = {}
        for mesh in self.meshes:
            if mesh.measured is None or mesh.seconds is None or mesh.computing is None:
                unplanned.setdefault(mesh.reason, []).append(mesh.line)
                continue
            peak, fits = bytes_text(mesh.measured.on_device), mesh.measured.fits(self.memory)
            idle = f" ({mesh.measured.idle:.0%} idle)" if mesh.measured.idle else ""
            costs = seconds_text(mesh.seconds), seconds_text(mesh.computing) + idle, seconds_text(mesh.seconds_for_all)
            rows.append([mesh.line, peak, *costs, {True: "yes", False: "no", None: "?"}[fits]])
        yield from aligned(rows, right_from=1, gap="  ")
        for reason, lines in unplanned.items():
            what = f"{len(lines)} meshes are not planned, such as" if len(lines) > 1 else "1 mesh is not planned,"
            yield f"{what} {lines[0]}: {reason.removesuffix('.')}."
        if estimates := [mesh.measured for mesh in self.meshes if mesh.measured is not None and mesh.measured.blocks]:
            most = max(estimates, key=lambda one: one.blocks)
            count = f"{most.kept} of the {most.blocks} blocks"
            yield f"The best mesh is planned with the whole model, the others with at most {count}."
        yield ""
        yield f"strategy={self.meshes[0].line}" if self.fits is not False else "No mesh fits."

    def _verdict(self) -> str:
        if self.memory is None:
            return ""
        word = "fits into" if self.fits else "does not fit into"
        return f": {word} {USABLE:.0%} of {bytes_text(self.memory)}"

    def _changes(self) -> Iterator[str]:
        fitting = [change for change in self.changes if change.measured and change.measured.fits(self.memory)]
        yield "One change that makes it fit:" if fitting else "None of these changes makes it fit alone:"
        yield from aligned(
            [[f"  {change.line}", _outcome(change)] for change in fitting or self.changes], [46, 0], gap=" "
        )


def _outcome(change: Change) -> str:
    if change.measured is None:
        return f"not planned: {change.reason}"
    host = f", and {bytes_text(change.measured.on_host)} a process on the host" if change.measured.on_host else ""
    return f"peak {bytes_text(change.measured.on_device)}{host}"


def parse_size(text: str) -> int:
    """Return the bytes of a text such as "80GB" or "40 GiB".

    Example::

        >>> parse_size("80GB"), parse_size("1.5 GiB")
        (80000000000, 1610612736)

    """
    letters = text.strip().lower()
    for suffix, factor in _UNITS.items():
        if letters.endswith(suffix):
            try:
                number = float(letters[: -len(suffix)])
            except ValueError:
                break
            if number > 0:
                return int(number * factor)
    raise make_error(ValueError, f"{text!r}:", fix="write a size with its unit, such as 80GB or 40GiB.")


def parse_bandwidth(text: str) -> Speeds:
    """Return the speeds of a text such as "450,50": GB/s within a machine and between machines.

    Example::

        >>> parse_bandwidth("300,25")
        Speeds(within=300.0, between=25.0, tflops=400.0)

    """
    try:
        within, between = map(float, text.split(","))
    except ValueError:
        what = f"bandwidth {text!r}:"
        fix = "write GB/s of a device within a machine and between machines, such as 450,50."
        raise make_error(ValueError, what, fix=fix, argument="bandwidth") from None
    return Speeds(within, between)


_UNITS = {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
