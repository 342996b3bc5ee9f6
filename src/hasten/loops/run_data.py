"""The data of a stage: its loaders, the transfer of batches to the device, and time spent waiting for them."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from hasten._lib.errors import MisconfigurationException, WrongType
from hasten._lib.names import defined_by_program
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn, warn_once
from hasten.checkpoint.files import is_plain, objects_allowed
from hasten.data import advice
from hasten.data.combined import CombinedLoader, is_collection
from hasten.data.loader_parts import samplers_of
from hasten.data.loaders import SideStream, in_lightnings_order, prepare, with_seeded_workers
from hasten.data.memory.resident import is_resident
from hasten.data.resume.stream import CombinedStream, Stream, nothing_read, reads_once
from hasten.elsewhere import conventions
from hasten.extend.origin import is_builtin
from hasten.hooks import overrides, redefines
from hasten.module import LightningModule
from hasten.module.datamodule import DataHooks, LightningDataModule

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.types import Dataloaders

# By stage: the hook that gives the loaders, the step, and the argument that limits the batches.
_SHORT = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}
HOOK_OF = {stage: f"{short}_dataloader" for stage, short in _SHORT.items()}
STEP_OF = {stage: f"{stage}_step" for stage in _SHORT} | {"train": "training_step", "validate": "validation_step"}
LIMIT_OF = {stage: f"limit_{short}_batches" for stage, short in _SHORT.items()}


class StageData:
    """The loaders of one stage.

    Args:
        stage: "train", "validate", "test" or "predict".
        given: loaders passed to the call, or None.
        module: the module; its ``*_dataloader`` hooks give loaders when nothing else does.
        datamodule: the datamodule of the call; its loaders and hooks come before the module's.
        limit: number (int) or share (float) of batches of each loader to use; None for all.
        sampler_kwargs: ``num_replicas`` and ``rank`` where each process reads its own part, else None.
        overfit: read the same batches in the same order each epoch.
        reload_every_n_epochs: get new loaders this often; 0 for never.
        remake: called with a loader, the stage and the loader's name; returns the loader to read instead.
        process: called with each loader when it has its samplers, if the program's strategy changes loaders.
        several_processes: other processes may have batches where this one has none.
        processes: number of processes of the run on this machine.

    """

    def __init__(
        self,
        stage: str,
        *,
        given: Dataloaders = None,
        module: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        limit: int | float | None = None,
        sampler_kwargs: dict[str, int] | None = None,
        overfit: bool = False,
        reload_every_n_epochs: int = 0,
        remake: Callable[[Any, str, str], Any] | None = None,
        process: Callable[[Any], Any] | None = None,
        several_processes: bool = False,
        processes: int = 1,
    ) -> None:
        self.stage, self.given, self.datamodule = stage, given, datamodule
        self._remake, self._process = remake, process
        self._several_processes, self._processes = several_processes, processes
        self._module = module
        # The number or share of batches, now and from the next ``take_limit`` on.
        self._limit = self.next_limit = limit
        # Every epoch ends after this many batches, even if there are more.
        self.most_batches = math.inf
        # The limit by which all processes plan accumulation and validation: the smallest number of batches on any
        # process.
        self.agreed_limit = math.inf
        self._sampler_kwargs = sampler_kwargs or {}
        self._overfit = overfit
        self.reload_every_n_epochs = reload_every_n_epochs
        self._streams: list[Stream | CombinedStream] | None = None
        # The object that returned the loaders of an evaluation.
        self._collection: CombinedLoader | None = None
        # None before the first epoch that reads them.
        self._loaded_at_epoch: float | None = None
        # Read loaders when and as far as Lightning does, which matters if they draw random numbers or have a wrong
        # length.
        self._conventions = conventions.current()
        draws = stage == "train" and self._conventions.shuffles_over_processes
        self._in_lightnings_order = sampler_kwargs if draws else None

    # -- which data there is

    def has_data(self) -> bool:
        """Return whether the call, the datamodule or the module provides this stage's data."""
        return self.given_or_owner() is not None

    def given_or_owner(self) -> Any:
        """Return the loaders passed to the call, or the datamodule or module whose hook gives them, or None."""
        return self._owner() if self.given is None else self.given

    def is_off(self, *, loads: bool = True) -> bool:
        """Return whether the stage has nothing to do; ``loads=False`` does not ask for the loaders to find out."""
        if self._limit == 0 or self._module is None or not self.has_data():
            return True
        evaluates = self.stage in ("validate", "test")
        if evaluates and not overrides(self._module, LightningModule, STEP_OF[self.stage]):
            return True
        # A process without batches takes part in the reductions of the others.
        if not loads and not self.loaded:
            return False
        if self._several_processes:
            return False
        streams = self._streams or self.load()
        return self.most_batches == 0 or not any(map(self._limited, streams))

    @property
    def is_switched_off(self) -> bool:
        """Whether the limit is 0 batches."""
        return self._limit == 0

    def require(self) -> None:
        """Raise unless the data is provided."""
        if self.has_data():
            return
        hook = HOOK_OF[self.stage]
        call = "fit" if self.stage == "train" else self.stage
        argument = "train_dataloaders" if self.stage == "train" else "dataloaders"
        if self.datamodule is not None:
            raise WrongType(
                f"Trainer.{call}(): the datamodule {type(self.datamodule).__name__} has no {hook}().", fix="Define it."
            )
        raise WrongType(
            f"Trainer.{call}(): there is no data.",
            fix=f"Pass {argument}=..., a datamodule, or define {type(self._module).__name__}.{hook}().",
        )

    @property
    def loaders(self) -> list[Any]:
        """The prepared loaders. Joined loaders keep the structure in which they were passed."""
        return [
            stream.loader.iterables if isinstance(stream, CombinedStream) else stream.loader for stream in self.load()
        ]

    @property
    def in_structure(self) -> Any:
        """The prepared loader, or a list of several; under Lightning's names in the structure that was passed."""
        loaders = self.loaders
        if self._collection is None:
            return loaders[0] if len(loaders) == 1 else loaders
        shown = copy.copy(self._collection)
        shown.flattened = loaders
        return shown.iterables

    @property
    def limits(self) -> list[float]:
        """Number of batches of each loader to use, if their lengths are right; infinite when unknown."""
        streams = self._streams or self.load()
        return [min(limit, self.most_batches) for limit in map(self._limited, streams)]

    @property
    def limit(self) -> float:
        """Number of batches of the epoch on all processes; infinite when unknown."""
        streams = self._streams or self.load()
        return min(self._limited(streams[0]), self.most_batches, self.agreed_limit)

    def all_limits(self) -> list[float]:
        """Return the number of batches of every single loader, also of joined loaders, and in a sanity check."""
        found: list[float] = []
        for stream in self.load():
            leaves = stream.streams if isinstance(stream, CombinedStream) and self.stage != "train" else [stream]
            found += [self._limited(leaf) for leaf in leaves]
        return found

    def tell_samplers(self, epoch: int) -> None:
        """Call ``set_epoch`` of the samplers that a program brought for an evaluation, as Lightning does."""
        for loader in self.streams():
            for sampler in {id(one): one for one in samplers_of(loader)}.values():
                if callable(getattr(sampler, "set_epoch", None)) and not is_builtin(type(sampler)):
                    sampler.set_epoch(epoch)

    def streams(self) -> list[Any]:
        """Return every single loader, also joined loaders."""
        found: list[Any] = []
        for stream in self.load():
            found += stream.loader.flattened if isinstance(stream, CombinedStream) else [stream.loader]
        return found

    def take_limit(self) -> None:
        """Use ``next_limit`` from now on."""
        self._limit = self.next_limit

    @contextmanager
    def limited_to(self, steps: int) -> Iterator[None]:
        """Use at most ``steps`` batches of each loader inside the block; -1 for all."""
        self.most_batches = math.inf if steps < 0 else steps
        try:
            yield
        finally:
            self.most_batches = math.inf

    # -- making, loading and closing the loaders

    @property
    def loaded(self) -> bool:
        """Whether the loaders are there."""
        return self._streams is not None

    def load(self) -> list[Stream | CombinedStream]:
        """Return the streams; the first time, ask for the loaders, and raise if something is wrong with them."""
        if self._streams is None:
            given, name = self.given, f"the {self.stage} dataloader"
            if given is None:
                owner, hook = self._owner(), HOOK_OF[self.stage]
                given, name = getattr(owner, hook)(), f"{type(owner).__name__}.{hook}()"
                if given is None:
                    fix = "Return a DataLoader or an iterable."
                    if self.stage == "validate":
                        fix += " To run without validation, write Trainer(limit_val_batches=0)."
                    raise WrongType(f"{name} returned None.", fix=fix)
            found = self._several(given, name)
            self._streams = [
                self._stream(loader, name if len(found) == 1 else f"{name}[{index}]")
                for index, loader in enumerate(found)
            ]
            for stream in self._streams:
                self._limited(stream)  # Raises if the limit does not fit the loader.
            empty = self.stage == "train" and self._streams[0].length == 0
            if empty and not (self._conventions.mistakes_are_warnings or self._allows_empty()):
                what, fix = "the train dataloader has no batches", ""
                if self._processes > 1:
                    what += " on this process: its samples are divided over all"
                    fix = "Use a smaller batch_size, drop_last=False, or fewer processes."
                raise MisconfigurationException(f"{what}.", fix=fix)
        return self._streams

    def reload(self) -> None:
        """Ask for the loaders again when they are needed next."""
        self.close()
        self._streams = None

    def reload_if_due(self, epoch: int) -> None:
        """Ask for the loaders again if ``reload_dataloaders_every_n_epochs`` says so."""
        if self._loaded_at_epoch is None:
            self._loaded_at_epoch = epoch
        elif self._streams is not None and self._reloads_at(epoch):
            self.reload()
            self._loaded_at_epoch = epoch
            if self.stage == "train":
                self.begin_in_vain()

    def reload_next(self) -> None:
        """Make the next ``reload_if_due`` ask for the loaders again, if reloading is on."""
        self._loaded_at_epoch = -math.inf

    def loaded_in(self, epoch: int) -> None:
        """Schedule the next reload relative to the epoch in which the saved run loaded last."""
        every = self.reload_every_n_epochs
        self._loaded_at_epoch = epoch - epoch % every if every else 0

    def remake_with(self, remake: Callable[[Any, str, str], Any]) -> None:
        """Make the loaders with another function when they are needed next."""
        self.reload()
        self._remake = remake

    def close(self) -> None:
        """Shut worker processes down."""
        for stream in self._streams or []:
            stream.close()

    def _reloads_at(self, epoch: int) -> bool:
        every = self.reload_every_n_epochs
        return bool(every) and self._loaded_at_epoch is not None and epoch - self._loaded_at_epoch >= every

    # -- reading

    @property
    def stream(self) -> Stream | CombinedStream:
        """The only stream, of training."""
        return self.load()[0]

    def refuse_empty(self, name: str, *, is_last: bool) -> None:
        """Raise for training data that had no batch to give, and will have none; warn if later epochs may have some."""
        if self._allows_empty():
            return
        loader = self.stream.loader
        what, fix = nothing_read(loader, name)
        if is_last or reads_once(loader):
            raise MisconfigurationException(what, fix=fix, argument="train_dataloaders")
        rank_zero_warn(what, fix=fix)

    def begin(self) -> None:
        """Begin the epoch before its first hooks if Lightning does, so that it draws its random numbers before them."""
        if self._conventions.opens_loaders_late and self.load() and self.limits[0] != 0:
            self.load()[0].begin()

    def begin_in_vain(self) -> None:
        """Draw the random numbers that Lightning draws after the first epoch, where it begins the loaders twice."""
        if self._conventions.opens_loaders_late:
            self.begin()
            self.close()

    def start_epoch(self, *, resumes: bool = False) -> Generator[tuple[Any, bool], None, None]:
        """Return the batches of a new epoch with a flag for the last, or of the rest of the one of a loaded state."""
        if resumes:
            self.stream.open()
        elif isinstance(self.stream, CombinedStream):
            self.begin()
        batches: Generator[tuple[Any, bool], None, None] = self.stream.batches(self._cut(self.stream))
        return batches

    def finish(self) -> None:
        """Give up the rest of the epoch that a loaded state is in."""
        self.stream.finish()

    @property
    def certain_end(self) -> float | None:
        """Number of batches after which an epoch of training is certain to end; None if only the loader knows."""
        length, cut = self.stream.certain_length, self._cut(self.stream)
        return length if length is None or cut is None else min(length, cut)

    def begin_next(self, epoch: int) -> None:
        """Let persistent workers start the next epoch during validation, if nothing can observe that."""
        if isinstance(self.stream, Stream) and not self._reloads_at(epoch):
            self.stream.begin_next(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers."""
        for stream in self.load():
            stream.set_epoch(epoch)

    def is_in_hand(self, consumed: int) -> bool:
        """Return whether one batch more than ``consumed`` was yielded in this epoch."""
        return self.loaded and self.stream.consumed == consumed + 1

    def batches(self, loader_idx: int) -> Iterator[tuple[Any, bool]]:
        """Return the batches of one loader of an evaluation with a flag for the last."""
        stream = self.load()[loader_idx]
        return iter(()) if self.limits[loader_idx] == 0 else stream.batches(self._cut(stream))

    def state_dict(self, consumed: int | None = None, *, again: bool = False) -> list[dict[str, Any]]:
        """Return the position of each loader; nothing where none is loaded.

        ``consumed`` batches of this epoch are done, in training; with ``again``, the last one that was yielded has to
        come again.
        """
        streams = self._streams or ()
        if again and not objects_allowed():
            for stream in streams:
                stream.drop_held_unless(is_plain)
        return [stream.state_dict(stream.position if consumed is None else consumed, again=again) for stream in streams]

    def load_state_dict(self, states: Iterable[dict[str, Any]], *, moved: bool = False) -> list[int]:
        """Continue where ``state_dict`` was taken; return how many batches of its epoch each loader has behind it.

        An interrupted evaluation starts again. If another number of processes shared the data (``moved``), the states
        are the first process's.
        """
        for stream, state in zip(self.load(), states, strict=False):
            stream.load_state_dict(state, moved=moved)
            if self.stage != "train":
                stream.finish()
        return [stream.position for stream in self.load()]

    # -- internal functions

    def _owner(self) -> Any:
        """Return the datamodule or module whose hook gives the loaders, or None."""
        is_only_owner = self.datamodule is not None and self._conventions.datamodule_gives_all_loaders
        owners = (self.datamodule, None if is_only_owner else self._module)
        name = HOOK_OF[self.stage]
        return next((owner for owner in owners if owner is not None and overrides(owner, DataHooks, name)), None)

    def _stream(self, loader: Any, name: str) -> Stream | CombinedStream:
        if not isinstance(loader, CombinedLoader):
            if self._remake is not None:
                loader = self._remake(loader, self.stage, name)
            if self._conventions.warns_of_settings:
                advice.warn_about(
                    loader,
                    name=HOOK_OF[self.stage],
                    trains=self.stage == "train" or self._overfit,
                    processes=self._processes,
                    reloads=bool(self.reload_every_n_epochs),
                )
            prepared = prepare(
                loader,
                name=name,
                stage=self.stage,
                overfit=self._overfit,
                shuffle=self._conventions.shuffles_over_processes,
                allow_empty=self._allows_empty(),
                **self._sampler_kwargs,
            )
            if not isinstance(loader, DataLoader):
                self._open_once_more(loader)
            if self._in_lightnings_order:
                prepared = in_lightnings_order(prepared, **self._in_lightnings_order, shuffle=not self._overfit)
            if self._process is not None:
                prepared = self._process(prepared)
            if os.environ.get("PL_SEED_WORKERS") == "1":
                # As Lightning does, and with the same random numbers.
                rank = self._sampler_kwargs.get("rank", 0)
                prepared = with_seeded_workers(prepared, rank, instead_of=loader)
            trains, module = self.stage == "train", self._module
            # Automatic optimization completes an epoch that ended early afterwards. With manual optimization the user
            # completes steps, in the batch for which `trainer.is_last_batch` is True.
            manual = trains and module is not None and not module.automatic_optimization
            marks_last = manual or isinstance(prepared, DataLoader)
            return Stream(
                prepared,
                name=HOOK_OF[self.stage],
                replays=trains,
                marks_last=marks_last,
                ends_at_length=self._conventions.ends_at_length,
            )
        streams = [self._stream(leaf, f"{name}[{index}]") for index, leaf in enumerate(loader.flattened)]
        combined = copy.copy(loader)
        combined.flattened = [stream.loader for stream in streams]
        return CombinedStream(combined, cast("list[Stream]", streams), name=HOOK_OF[self.stage])

    def _open_once_more(self, loader: Any) -> None:
        """Draw the random numbers that Lightning draws when it gets a loader that is no ``DataLoader``."""
        if self._conventions.opens_loaders_late:
            iter(loader)

    def _allows_empty(self) -> bool:
        owners = [owner for owner in (self.datamodule, self._module) if owner is not None]
        return any(owner.allow_zero_length_dataloader_with_multiple_devices for owner in owners)

    def _several(self, given: Any, name: str) -> list[Any]:
        """Return the loaders to read one after the other; training reads one, which may join several."""
        self._collection = None
        if self.stage == "train":
            if isinstance(given, CombinedLoader) and given.mode == "sequential":
                raise MisconfigurationException(
                    f'{name} is a CombinedLoader(mode="sequential"), and training reads one loader.',
                    fix='Use "min_size", "max_size" or "max_size_cycle".',
                )
            return [CombinedLoader(given, "max_size_cycle") if is_collection(given) else given]
        if isinstance(given, CombinedLoader):
            if given.mode == "sequential":
                self._collection = given
                return given.flattened
            if self.stage == "predict":
                raise MisconfigurationException(
                    f"{name} is a CombinedLoader(mode={given.mode!r}); prediction reads one loader after the other.",
                    fix='Use mode="sequential".',
                )
        elif isinstance(given, Mapping) or is_collection(given):
            self._collection = CombinedLoader(given, "sequential")
            return self._collection.flattened
        return [given]

    def _cut(self, stream: Stream | CombinedStream) -> int | None:
        """Return the number of batches after which an epoch must end; None if only the loader ends it."""
        limit: float = math.inf
        if self._limit is not None and not _is_all(self._limit):
            limit = self._limit if isinstance(self._limit, int) else self._limited(stream)
        limit = min(limit, self.most_batches)
        return None if math.isinf(limit) else int(limit)

    def _limited(self, stream: Stream | CombinedStream) -> float:
        batches = stream.length
        length = math.inf if batches is None else batches
        limit = self._limit
        if limit is None or _is_all(limit):
            return length
        if isinstance(limit, int) or limit == 0.0:
            return min(length, limit)
        argument = "overfit_batches" if self._overfit else LIMIT_OF[self.stage]
        if math.isinf(length):
            raise MisconfigurationException(
                f"When using an `IterableDataset`, `Trainer({argument})` must be `1.0` or an int, not {limit}: a share "
                f"needs a loader with a length, and {type(stream.loader).__name__} has none.",
                fix="Give a number of batches instead.",
                argument=argument,
            )
        batches = int(length * limit)
        if batches == 0 and length > 0:
            name = HOOK_OF[self.stage]
            what = f"You requested to check {limit} of the `{name}` but {limit} * {int(length)} < 1: no batch."
            fix = f"Use at least {argument}={1 / length:.4g}, or a number of batches."
            raise MisconfigurationException(what, fix=fix, argument=argument)
        return batches


def _is_all(limit: int | float) -> bool:
    return isinstance(limit, float) and limit == 1.0


def make_transfer(run: Run, source: StageData, loader_idx: int = 0) -> Callable[[Any], Any] | None:
    """Return the function that moves a batch, or None if batches need not be moved."""
    device, owners = run.runtime.device, (source.datamodule, run.module)
    present = [owner for owner in owners if owner is not None]

    def hook(name: str) -> Callable[..., Any] | None:
        # A wrapper around a default hook is called too, unless another object has its own hook.
        found = [owner for owner in present if redefines(owner, DataHooks, name)]
        found += [run.module] if overrides(run.module, DataHooks, name) else []
        return getattr(found[0], name) if found else None

    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    changed = True in [overrides(owner, DataHooks, name) for owner in present for name in names]
    before, move, after = map(hook, names) if changed else (None, None, None)
    to_device = run.runtime.to_device if device.type != "cuda" else SideStream(device)
    strategy = run.runtime.strategy
    if defined_by_program(strategy, "batch_to_device"):
        to_device = functools.partial(strategy.batch_to_device, device=device, dataloader_idx=loader_idx)
    elif before is None and move is None and after is None:
        return None if device.type == "cpu" else run.observers.watch("batch_to_device", to_device)

    def transfer(batch: Any) -> Any:
        # The hooks are not part of the step before.
        context = run.logged.context
        run.logged.leave()
        given = batch
        if before is not None:
            batch = before(batch, loader_idx)
        batch = to_device(batch) if move is None else move(batch, device, loader_idx)
        batch = batch if after is None else after(batch, loader_idx)
        run.logged.context = context
        if batch is None and given is not None:
            own = " or ".join(name for name, found in zip(names, (before, move, after), strict=True) if found)
            who = own or "batch_to_device of the strategy"
            warn_once("no batch", f"{who} returned None instead of the batch.", fix="End it with `return batch`.")
        return batch

    return run.observers.watch("batch_to_device", transfer)


# -- steps that fetch their batches themselves


class DataloaderIterator:
    """The ``dataloader_iter`` of a step: yields (batch, batch_idx, dataloader_idx), and knows whether it is done.

    Batches are not moved: the step moves them to the device itself. ``batches`` has (batch, whether it is the last, its
    index, the index of its loader).
    """

    def __init__(self, run: Run, batches: Iterator[tuple[Any, bool, int, int]], *, is_empty: bool = False) -> None:
        step = f"{type(run.module).__name__}.{STEP_OF[run.evaluation.stage or 'train']}"
        what = f"Found `dataloader_iter` argument in the `{step}`"
        fix = "Fetch one batch in each step: else hooks get a wrong batch_idx."
        warn_once(what, f"{what}, which fetches its batches itself.", PossibleUserWarning, fix=fix)
        self._run, self._batches = run, batches
        self.done, self.fetched = is_empty, 0
        self.batch: Any = None
        self.batch_idx = self.dataloader_idx = 0

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        try:
            fetched = self._run.observers.pace.fetch(self._batches.__next__)
            self.batch, self.done, self.batch_idx, self.dataloader_idx = fetched
        except StopIteration:
            self.done = True
            raise
        self.fetched += 1
        logged = self._run.logged
        logged.batch, logged.batch_size = self.batch, 0
        return self.batch, self.batch_idx, self.dataloader_idx

    def steps(self) -> Iterator[tuple[DataloaderIterator, bool]]:
        """Yield itself for each step, until all batches are fetched."""
        while not self.done:
            yield self, False


class FetchedHooks:
    """The hooks of a run whose ``training_step`` fetches its batches: they get its latest batch."""

    def __init__(self, run: Run, fetched: DataloaderIterator) -> None:
        self._hooks, self._progress, self._fetched = run.hooks, run.progress, fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> Any:
        return self._hooks.on_train_batch_start(self._fetched.batch, self._fetched.batch_idx)

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        # For a checkpoint, batches that were fetched count as done.
        self._progress.batch = self._fetched.fetched
        self._hooks.on_train_batch_end(outputs, self._fetched.batch, self._fetched.batch_idx)

    def on_train_batch_end_last(self, outputs: object, batch: object, batch_idx: int) -> None:
        self._hooks.on_train_batch_end_last(outputs, self._fetched.batch, self._fetched.batch_idx)


# -- whether training waits for its data

# Shorter runs get no warning: they do not wait long, and their first steps are a warm-up.
_SECONDS = 5.0
_WARM_UP = 3
# With fewer steps, a validation among them would count as a step.
_STEPS = 10
# Every loader costs at least this much.
_SHARE = 1 / 3


class StallMonitor:
    """Measures a run's first batches: how long training waited for each, and computed on it."""

    def __init__(self) -> None:
        self._done = False
        self._number = self._idle = 0
        self._waited: list[float] = []
        self._computed: list[float] = []
        self._end = 0.0

    def watched(self, run: Run, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the same batches, measured only until enough is known."""
        if self._done or run.runtime.steps is not None:
            # The host runs ahead of a device that records operations, so its own times say nothing.
            return batches
        iterator = iter(batches)
        return itertools.chain(self._timed(run, iterator), iterator)

    def _timed(self, run: Run, batches: Iterator[Any]) -> Iterator[Any]:
        clock, device = perf_counter, run.runtime.device
        on_cuda = device.type == "cuda"
        while not self._done:
            began = clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            came = clock()
            self._number += 1
            counts = self._number > _WARM_UP
            if counts:
                if not self._waited:
                    self._end = came + _SECONDS
                self._waited.append(came - began)
                # The host runs ahead of a GPU: the GPU has waited for the batch only if it has nothing left to do.
                self._idle += torch.cuda.current_stream(device).query() if on_cuda else True
            yield batch
            if counts:
                now = clock()
                self._computed.append(now - came)
                if now > self._end and len(self._computed) >= _STEPS:
                    self._done = True
                    self._judge(run)

    def _judge(self, run: Run) -> None:
        steps = len(self._waited)
        # The mean, because batches of workers come in bursts; but without validation and checkpoints.
        waited, computed = sum(self._waited) / steps, statistics.median(self._computed)
        share = waited / (waited + computed)
        if share >= _SHARE and self._idle >= steps / 2:
            rank_zero_warn(
                f"Training waits for its data: {100 * share:.0f} % of the time of the first {steps} steps "
                f"({1000 * waited:.3g} of {1000 * (waited + computed):.3g} ms a step).",
                fix=_advice(run),
            )


def _advice(run: Run) -> str:
    loader, speed = run.data.train.loaders[0], run.arguments.speed
    reads_samples = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if reads_samples and not is_resident(loader):
        if not speed.resident and _is_in_memory(loader.dataset):
            return "Trainer(resident=True) reads its samples, which are in memory, without a Python call for each."
        if speed.num_workers is None:
            return "Trainer(num_workers='auto') finds how many worker processes help."
        if not speed.resident:
            return "Trainer(resident='auto') holds data in memory that fits there and is the same in each epoch."
    return "Make its samples cheaper, or read them ahead in other processes."


def _is_in_memory(dataset: object) -> bool:
    """Return whether the samples of a dataset are parts of tensors, or elements of a list."""
    if isinstance(dataset, Subset):
        return _is_in_memory(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(_is_in_memory, dataset.datasets))
    return isinstance(dataset, (TensorDataset, list, tuple))
