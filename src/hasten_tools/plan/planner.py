"""Plan a fit, and the same fit with single changes, each in a copy of this process."""

from __future__ import annotations

import math
import os
import pickle
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error, parts_of
from hasten.machine.cluster import ClusterEnvironment
from hasten.machine.host import usable_cores
from hasten.machine.launch import end_when
from hasten.resolve import PRECISIONS
from hasten_tools.plan import blocks, meshes, simulated
from hasten_tools.plan.report import USABLE, Change, FitPlan, Measured, PlannedMesh, Speeds

if TYPE_CHECKING:
    from hasten import LightningDataModule, LightningModule, Trainer
    from hasten.strategies.mesh.sizes import MeshSizes, Size
    from hasten.types import Dataloaders, PrecisionName, StrategyLike
    from hasten_tools.plan.meshes import Mesh
    from hasten_tools.plan.step import Order

# No further change is planned after this time.
BUDGET_SECONDS = 45.0
# Machines usually have this many devices.
PER_NODE = 8


class PlanError(RuntimeError):
    """A program that cannot be planned; the message says what to change."""


def plan_fit(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders = None,
    datamodule: LightningDataModule | None = None,
    *,
    devices: int,
    num_nodes: int | None = None,
    strategy: StrategyLike | None = None,
    tensor_parallel_size: int | None = None,
    precision: PrecisionName | None = None,
    memory_bytes: int | None = None,
    accelerator: str = "gpu",
    budget_seconds: float = BUDGET_SECONDS,
    mesh: Mesh | None = None,
    bandwidth: tuple[float, float] | None = None,
    tflops: float | None = None,
) -> FitPlan:
    """Return what ``trainer.fit(model, ...)`` would need on many devices, without using any.

    Two training steps run in copies of this process, on tensors without data and in a process group that does not
    exist. Nothing of this process changes. Numbers describe the first process, which has the largest shards. Of a
    pipeline three processes are planned, or all if stages are uneven, and numbers describe the fullest.

    Args:
        trainer: with the arguments of the program; ``devices``, ``num_nodes`` and ``accelerator`` do not matter.
        model: the module. Made in ``configure_model`` it takes no memory.
        train_dataloaders: the training data; the first batch is read.
        datamodule: provides the data instead.
        devices: the number of devices in all.
        num_nodes: the number of machines; by default machines of 8 devices.
        strategy: a name or an object; by default the Trainer's.
        tensor_parallel_size: the same as ``mesh=(1, "auto", tensor_parallel_size)``.
        precision: by default the Trainer's.
        memory_bytes: of one device; with it the plan says whether it fits, and which single change would make it fit.
        accelerator: "gpu" to step optimizers as torch does there, which takes more memory; "cpu".
        budget_seconds: for the changes or the meshes; none is begun after this time.
        mesh: plan with a ``MeshStrategy`` of these sizes: a dict with names of axes, as its arguments; or three sizes,
            of replicate, shard and tensor, or four with pipeline. One may be "auto". A pipeline has the schedule of the
            program's own ``MeshStrategy``, or "1F1B". Layers are split by the plan of that strategy, whose other
            arguments stay, too, or else by ``plan="auto"``. "auto" plans several and finds the fastest that fits.
        bandwidth: GB/s that a device sends within a machine and between machines; with it, or with ``tflops``, the plan
            estimates the seconds that a step takes. For ``mesh="auto"`` the default is (450, 50).
        tflops: trillions of floating-point operations a second that a device computes in training, 400 by default.

    Raises:
        PlanError: a step needs the values of tensors, or fails without them; the message has the line.
        ValueError: an argument does not fit.
        RuntimeError: this system cannot copy processes.

    Example::

        >>> import hasten as L, torch
        >>> from hasten.demos.boring_classes import BoringModel
        >>> from hasten_tools.plan import plan_fit
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> plan = plan_fit(trainer, BoringModel(), devices=1024, strategy="ddp")
        >>> plan.measured.parameters, plan.measured.sent["all-reduce"][1]
        (66, 264)

    Source: `PyTorch, FakeTensor <https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html>`_.

    """
    mesh = chosen_mesh(mesh, tensor_parallel_size, strategy)
    speeds = None if bandwidth is None else Speeds(*bandwidth)
    if tflops is not None:
        speeds = replace(speeds or Speeds(), tflops=tflops)
    variants = Variants(trainer, devices, num_nodes, strategy, mesh, precision, accelerator)

    def fit() -> None:
        trainer.fit(model, train_dataloaders, datamodule=datamodule)

    return plan_variants(trainer, type(model).__name__, variants, fit, memory_bytes, budget_seconds, speeds)


def plan_variants(
    trainer: Trainer,
    model: str,
    variants: Variants,
    fit: Callable[[], None],
    memory: int | None,
    budget: float,
    speeds: Speeds | None = None,
) -> FitPlan:
    """Plan a fit, and changes where it does not fit ``memory`` bytes, or meshes; search for ``budget`` seconds."""
    until = time.monotonic() + budget
    if variants.searches_mesh:
        speeds = speeds or Speeds()
        planned = _search(trainer, variants, fit, memory, until, speeds)
        best = planned[0].measured
        if best is None:
            raise PlanError(f"{planned[0].line}: {planned[0].reason}")
        return FitPlan(
            variants.devices, variants.nodes, model, best, memory, (), variants.notes_on(best), tuple(planned), speeds
        )
    every = [_finish(_start(trainer, order, fit)) for order in variants.base()]
    found = _fullest(every)
    stages = {one.process: one.on_device for one in every} if len(every) > 1 else {}
    changes: list[Change] = []
    if found.fits(memory) is False:
        changes = _planned(trainer, list(variants.changes(found)), fit, time.monotonic() + budget)
    notes = variants.notes_on(found)
    return FitPlan(variants.devices, variants.nodes, model, found, memory, tuple(changes), notes, (), speeds, stages)


_LATE = "the time is over (--budget)"


def _planned(trainer: Trainer, asked: list[tuple[str, Order]], fit: Callable[[], None], until: float) -> list[Change]:
    """Plan changes, as many at once as there are cores, and at least one."""
    changes = [
        Change(line, found) if isinstance(found, Measured) else Change(line, reason=found)
        for line, found in _measured(trainer, asked, fit, until)
    ]
    return sorted(changes, key=lambda change: change.reason == _LATE)


def _search(
    trainer: Trainer, variants: Variants, fit: Callable[[], None], memory: int | None, until: float, speeds: Speeds
) -> list[PlannedMesh]:
    """Plan meshes, as many as the time allows, and return all of them, the best one first.

    A module with many equal blocks is planned with a few of them, and then on the best mesh with all.
    """
    search = _MeshSearch(trainer, variants, fit, memory, speeds)
    search.plan_all(until)

    def place(mesh: PlannedMesh) -> tuple[bool, bool, float]:
        memory_needed = math.inf if mesh.measured is None else float(mesh.measured.on_device)
        fits = mesh.may_fit(memory)
        return mesh.measured is None, not fits, mesh.seconds_for_all if fits else memory_needed

    every = list(chain.from_iterable(meshes.candidates(variants.devices, variants.nodes)))
    every += [sizes for sizes in (*search.found, *search.reasons) if sizes not in every]
    while True:
        best = min(every, key=lambda sizes: place(search.planned(sizes)))
        if not search.is_estimate(best):
            return sorted(map(search.planned, every), key=place)
        search.plan_whole(best)


class _MeshSearch:
    """Plans of meshes."""

    def __init__(
        self, trainer: Trainer, variants: Variants, fit: Callable[[], None], memory: int | None, speeds: Speeds
    ) -> None:
        self._trainer, self._variants, self._fit = trainer, variants, fit
        self._memory, self._speeds = memory, speeds
        self.found: dict[MeshSizes, Measured] = {}
        self.reasons: dict[MeshSizes, str] = {}
        # What was found about the meshes in hand, of each process and with few blocks and more.
        self._open: dict[MeshSizes, list[Measured | str]] = {}
        # An estimate may be wrong by a little.
        usable = None if memory is None else 1.02 * USABLE * memory
        devices, nodes = variants.devices, variants.nodes
        self._asked = meshes.to_plan(devices, nodes, usable, self.found, self.reasons, self._cannot_win)
        # Whether a few blocks do not say what all of them need, and the meshes that were tried with a few.
        self._needs_all = False
        self._again: list[MeshSizes] = []

    def plan_all(self, until: float) -> None:
        """Plan one mesh after the other; none is begun after ``until``."""
        while True:
            for (sizes, count), one in _measured(self._trainer, self._orders(), self._fit, until):
                every = self._open.setdefault(sizes, [])
                every.append(one)
                if len(every) == count:
                    self._take(sizes, self._open.pop(sizes))
            if not self._again:
                return

    def _orders(self) -> Iterator[tuple[tuple[MeshSizes, int], Order]]:
        while True:
            sizes = self._again.pop() if self._again else None
            is_again = sizes is not None
            if sizes is None and (sizes := next(self._asked, None)) is None:
                return
            kept = (None,) if is_again or self._needs_all else (blocks.FEW, blocks.MORE)
            orders = [order for count in kept for order in self._variants.on_mesh(sizes, count)]
            for order in orders:
                yield (sizes, len(orders)), order

    def _take(self, sizes: MeshSizes, every: list[Measured | str]) -> None:
        """Take what was found about a mesh: of each process with few blocks, then with more; or with all."""
        measured = [one for one in every if isinstance(one, Measured)]
        is_whole = len(every) == len(self._variants.on_mesh(sizes))
        if len(measured) < len(every):
            reason = next(one for one in every if isinstance(one, str))
            if is_whole or _LATE in every:
                self.reasons[sizes] = reason
            else:
                # The same mesh with all blocks says whether the mesh is the reason.
                self._again.append(sizes)
            return
        half = measured[: len(measured) // 2]
        if is_whole or not all(one.blocks for one in measured):
            # The stages of a pipeline may have few blocks where the module has many.
            self._needs_all |= is_whole or sizes.pipeline == 1
            self.found[sizes] = _fullest(measured if is_whole else half)
        else:
            self.found[sizes] = _fullest(list(map(blocks.extended, half, measured[len(half) :])))

    def planned(self, sizes: MeshSizes) -> PlannedMesh:
        """Return a mesh with what was found about it."""
        one, line = self.found.get(sizes), self._variants.line_of(sizes)
        if one is None:
            return PlannedMesh(**asdict(sizes), line=line, reason=self.reasons.get(sizes, ""))
        seconds, computing = one.seconds(self._speeds), one.computing_seconds(self._speeds)
        return PlannedMesh(**asdict(sizes), line=line, measured=one, seconds=seconds, computing=computing)

    def _cannot_win(self, sizes: MeshSizes) -> str:
        """Return why a pipeline is not worth a plan, "" if it is: it waits longer than the best mesh so far sends."""
        fitting = [one for one in map(self.planned, self.found) if one.may_fit(self._memory)]
        if sizes.pipeline == 1 or not fitting:
            return ""
        best = min(fitting, key=lambda one: one.seconds_for_all)
        assert best.measured is not None
        idle = self._variants.idle_of(sizes, best.measured.samples)
        at_least = replace(best.measured, idle=idle).computing_seconds(self._speeds) * best.processes / best.batches
        return f"{idle:.0%} idle costs more than others exchange" if at_least > best.seconds_for_all else ""

    def is_estimate(self, sizes: MeshSizes) -> bool:
        """Return whether a mesh has a plan from a few blocks, or none although it should have one."""
        one = self.found.get(sizes)
        return bool(one.blocks) if one is not None else not self.found and self.reasons.get(sizes) == _LATE

    def plan_whole(self, sizes: MeshSizes) -> None:
        """Plan a mesh with all blocks."""
        orders = enumerate(self._variants.on_mesh(sizes))
        every = []
        for _, one in _measured(self._trainer, orders, self._fit, math.inf):
            if isinstance(one, str):
                raise PlanError(f"{self._variants.line_of(sizes)}: {one}")
            every.append(one)
        self.found[sizes] = _fullest(every)
        self.reasons.pop(sizes, None)


def _fullest(every: Sequence[Measured]) -> Measured:
    """Return what was found in the process that needs the most memory; the one that computes most sets the pace."""
    return replace(max(every, key=lambda one: one.on_device), flops=max(one.flops for one in every))


_Key = TypeVar("_Key")


def _measured(
    trainer: Trainer, asked: Iterable[tuple[_Key, Order]], fit: Callable[[], None], until: float
) -> Iterator[tuple[_Key, Measured | str]]:
    """Yield what was asked for, and the plan of it or why there is none.

    As many are planned at once as there are cores, and at least one. What to plan next is asked for when there is a
    core for it, after the plans before it.
    """
    running: deque[tuple[_Key, _Copy]] = deque()
    orders, has_one = iter(asked), False

    def finish() -> tuple[_Key, Measured | str]:
        key, copy = running.popleft()
        try:
            return key, _finish(copy)
        except (PlanError, ValueError, TypeError) as error:
            return key, str(error).partition("\n")[0]

    while True:
        if len(running) >= usable_cores():
            has_one = True
            yield finish()
        following = next(orders, None)
        if following is None:
            break
        key, order = following
        if has_one and time.monotonic() > until:
            yield key, _LATE
        else:
            running.append((key, _start(trainer, order, fit)))
    while running:
        yield finish()


def chosen_mesh(
    mesh: Mapping[str, Size] | Sequence[Size] | str | None, tensor_parallel: int | None, strategy: StrategyLike | None
) -> Mesh | None:
    """Return the mesh that a question asks for, after checking that the question does not contradict itself."""
    if isinstance(mesh, str) and mesh != "auto":
        fix = "use 'auto', sizes by name, as {'shard': 8, 'tensor': 2}, or three, (replicate, shard, tensor)."
        raise make_error(ValueError, f"mesh={mesh!r}:", fix=fix, argument="mesh")
    if mesh is None:
        return None if tensor_parallel is None else (1, "auto", tensor_parallel)
    if tensor_parallel is not None:
        what = f"--mesh and --tp {tensor_parallel}: both say over how many processes layers are split."
        raise make_error(ValueError, what, fix="Leave --tp out.", argument="mesh")
    if isinstance(strategy, str) and not strategy.startswith("fsdp"):
        what = f"--mesh and --strategy {strategy}: a mesh is one of MeshStrategy."
        raise make_error(ValueError, what, fix="Leave --strategy out.", argument="mesh")
    return "auto" if isinstance(mesh, str) else mesh


def _check_machines(devices: int, nodes: int, accelerator: str) -> None:
    check.whole("plan_fit", "devices", devices, at_least=1)
    check.whole("plan_fit", "num_nodes", nodes, at_least=1)
    if devices % nodes:
        raise make_error(
            ValueError, f"{devices} devices on {nodes} machines:", fix="use a multiple of the number of machines."
        )
    if accelerator not in ("gpu", "cpu"):
        raise make_error(ValueError, f"accelerator={accelerator!r}:", fix="use 'gpu' or 'cpu'.", argument="accelerator")


class Variants:
    """The variants of a plan: the unchanged program, and the program with one change."""

    def __init__(
        self,
        trainer: Trainer,
        devices: int,
        nodes: int | None,
        strategy: StrategyLike | None,
        mesh: Mesh | None,
        precision: str | int | None,
        accelerator: str,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        if nodes is None:
            nodes = devices // PER_NODE if devices > PER_NODE and devices % PER_NODE == 0 else 1
        _check_machines(devices, nodes, accelerator)
        given = {**trainer.given_arguments, **(given or {})}
        self.devices, self.nodes = devices, nodes
        self._gpu = accelerator == "gpu"
        self._plugins = given.get("plugins") or []
        if not isinstance(self._plugins, (list, tuple)):
            self._plugins = [self._plugins]
        self._plugins = [plugin for plugin in self._plugins if not isinstance(plugin, ClusterEnvironment)]
        # What the program says; --tp, --mesh and changes of the mesh keep its arguments where they can.
        self._own: Any = strategy or given.get("strategy")
        self.searches_mesh = mesh == "auto"
        self._strategy = None if self.searches_mesh else self._own
        if mesh is not None and not isinstance(mesh, str):
            self._strategy = meshes.strategy_of(meshes.sizes_of(mesh, devices, nodes), self._own)
        name = str(self._strategy).lower()
        if name.startswith(("deepspeed", "xla", "single_xla")):
            what = f"strategy={name!r} runs an engine of its own, which cannot be followed without data."
            fix = "Plan with --strategy fsdp2, ddp_sharded or ddp."
            raise make_error(ValueError, what, fix=fix, argument="strategy")
        # Of the process whose changes are planned.
        self._process = 0
        self._precision = precision or given.get("precision")
        self._memory = given.get("memory")
        self._notes = tuple(self._noted(given))
        if self._scales():
            # On the CPU there is no gradient scaler; the sizes are the same.
            self._precision = "bf16-mixed"

    def _scales(self) -> bool:
        return str(self._precision).lower() in PRECISIONS["16-mixed"]

    def _noted(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield what the plan leaves out, or has otherwise."""
        if self._scales():
            yield f"precision={self._precision!r} is planned as 'bf16-mixed', which has the same sizes."
        for name, without in (
            ("sync_batchnorm", "its exchange of statistics is not counted"),
            ("compile", "compiled steps keep other activations, as a rule fewer"),
            ("packed", "the plan computes padding, too"),
        ):
            if given.get(name):
                yield f"{name}={given[name]!r} is left out: {without}."
        options = getattr(self._strategy, "name", self._strategy)
        if "find_unused_parameters_true" in str(options):
            yield "find_unused_parameters=True is left out: it sends one number a parameter more."

    def notes_on(self, found: Measured) -> tuple[str, ...]:
        """Return what a plan leaves out, has otherwise, or assumes."""
        assumed = "Experts are planned with equal shares: each gets as many tokens as the others."
        return (*self._notes, assumed) if "expert" in found.mesh else self._notes

    def _order(self, *, batch_parts: int = 1, kept: int | None = None, **changes: Any) -> Order:
        from hasten_tools.plan.step import Order

        base = {"strategy": self._strategy, "precision": self._precision, "plugins": self._plugins}
        return Order({**base, **changes}, self.devices, self.nodes, batch_parts, self._gpu, kept, self._process)

    def on_mesh(self, sizes: MeshSizes, kept: int | None = None) -> list[Order]:
        """Return the program with a mesh, of a pipeline in the first stage and the last.

        With ``kept`` of its equal blocks, or of those of each stage; None for all.
        """
        order = self._order(strategy=meshes.strategy_of(sizes, self._own), kept=kept)
        places = sorted({0, sizes.pipeline - 1})
        return [replace(order, process=place * self.devices // sizes.pipeline) for place in places]

    def idle_of(self, sizes: MeshSizes, samples: int) -> float:
        """Return the part of a step in which the processes of a pipeline wait, for batches of so many samples."""
        pipeline = meshes.strategy_of(sizes, self._own).pipeline
        if pipeline is None:
            return 0.0
        schedule = pipeline.schedule
        parts = math.ceil(samples / schedule.part_size(samples)) if samples else schedule.micro_batches
        return schedule.idle_share(parts) or 0.0

    def line_of(self, sizes: MeshSizes) -> str:
        """Return the strategy to write for a mesh of these sizes."""
        return meshes.line_of(sizes, self._own)

    def base(self) -> Iterator[Order]:
        """Yield the program unchanged; of a pipeline, for each process that may have the fullest stage."""
        pipeline = getattr(self._strategy, "pipeline", None)
        count = 1 if pipeline is None else pipeline.processes
        # Of stages with equally many blocks the first has the most activations, but for what is around the blocks.
        is_even = pipeline is None or pipeline.arguments["split"] is None
        for place in sorted({0, min(1, count - 1), count - 1}) if is_even else range(count):
            yield replace(self._order(), process=place * self.devices // count)

    def changes(self, found: Measured) -> Iterator[tuple[str, Order]]:
        """Yield single changes that may take less memory: the line to write, and the order."""
        from hasten.strategies.fsdp import FSDPStrategy

        self._process = found.process
        several = self.devices > 1
        replicated = found.strategy.startswith(("ddp", "single"))
        if several and replicated:
            yield "strategy='fsdp2'", self._order(strategy="fsdp2")
        if several and replicated and not found.strategy.startswith("ddp_sharded"):
            yield "strategy='ddp_sharded'", self._order(strategy="ddp_sharded")
        if self._memory not in ("full", "auto"):
            yield "Trainer(memory='full')", self._order(memory="full")
        if self._memory is None:
            yield "Trainer(memory='selective')", self._order(memory="selective")
        yield "half the batch, twice the accumulation", self._order(batch_parts=2)
        if found.precision == "32-true":
            yield "precision='bf16-mixed'", self._order(precision="bf16-mixed")
        if not found.precision.endswith("-true") or found.precision == "32-true":
            yield "precision='bf16-true'", self._order(precision="bf16-true", **self._half())
        if several and not found.cpu_offload:
            yield ("strategy=FSDPStrategy(cpu_offload=True)", self._order(strategy=FSDPStrategy(cpu_offload=True)))
        size = min(PER_NODE, self.devices)
        if several and found.tensor_parallel == 1 and self.devices % size == 0:
            split = meshes.sizes_of((1, "auto", size), self.devices, self.nodes)
            yield f"--tp {size}", self.on_mesh(split)[0]

    def _half(self) -> dict[str, Any]:
        """Return the plugin with which sharded strategies take 16-bit weights."""
        from hasten.precision.builtin import HalfPrecision

        name = self._strategy if isinstance(self._strategy, str) else getattr(self._strategy, "name", "")
        if not str(name).startswith(("fsdp", "model_parallel", "mesh")):
            return {}
        return {"plugins": [*self._plugins, HalfPrecision("bf16-true", keep_small_updates=False)]}


# -- copies of this process


class _Copy(NamedTuple):
    """A copy of this process that measures, and the pipe that it writes to."""

    process: int
    pipe: int


def _start(trainer: Trainer, order: Order, fit: Callable[[], None]) -> _Copy:
    """Start ``measure(...)`` in a copy of this process."""
    if not hasattr(os, "fork"):
        raise PlanError("a plan runs in copies of this process (os.fork), which this system does not have.")
    simulated.load()
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        # Python warns of threads: the copy uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        os.close(reads)
        _copy(trainer, order, fit, writes)
    os.close(writes)
    return _Copy(process, reads)


def _finish(copy: _Copy) -> Measured:
    """Return the measurements of a copy."""
    try:
        with os.fdopen(copy.pipe, "rb") as pipe:
            sent = pipe.read()
    finally:
        _, status = os.waitpid(copy.process, 0)
    if not sent:
        raise PlanError(
            f"the copy of the process that plans ended with code {os.waitstatus_to_exitcode(status)}"
            + (" (often because memory ran out)." if os.WIFSIGNALED(status) else ".")
        )
    # Written by a copy of this process.
    kind, content = pickle.loads(sent)
    if kind == "measured":
        found: Measured = content
        return found
    if isinstance(content, str):
        raise PlanError(content)
    raised = {"value": ValueError, "type": TypeError, "misuse": MisconfigurationException}[kind]
    raise make_error(raised, content.what, fix=content.fix, argument=content.argument)


def _copy(trainer: Trainer, order: Order, fit: Callable[[], None], writes: int) -> Any:
    """Measure, send the result and end: nothing of the program runs in the copy afterwards."""
    code, parent = 1, os.getppid()

    def wait_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)

    # Tensors without data have no address, and torch warns of it.
    warnings.filterwarnings("ignore", module=r"torch\.")
    try:
        end_when(wait_for_parent)
        answer = _answer(trainer, order, fit)
        with os.fdopen(writes, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    except KeyboardInterrupt:
        pass  # The process that waits for this one got it, too.
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _answer(trainer: Trainer, order: Order, fit: Callable[[], None]) -> tuple[str, Any]:
    from hasten_tools.plan.step import Unplannable, measure

    try:
        return "measured", measure(trainer, order, fit)
    except Unplannable as error:
        return "plan", str(error)
    except MisconfigurationException as error:
        return "misuse", parts_of(error)
    except ValueError as error:
        return "value", parts_of(error)
    except TypeError as error:
        return "type", parts_of(error)
    except Exception as error:
        return "plan", f"{type(error).__name__}: {error}"
    except SystemExit as error:
        return "plan", f"the program ended with {error.code!r} before its first step."
