"""Which data a stage reads: given to the call, or from the datamodule or the module; prepared and limited."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch.utils.data import DataLoader

from hasten._lib.errors import MisconfigurationException
from hasten.data.combined import CombinedLoader, is_collection
from hasten.data.loaders import prepare
from hasten.data.resume.stream import CombinedStream, Stream
from hasten.hooks import overrides
from hasten.module import LightningModule
from hasten.module.datamodule import DataHooks, LightningDataModule

HOOK_OF = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
STEP_OF = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
LIMIT_OF = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


class Source:
    """The loaders of one stage.

    Args:
        stage: "train", "validate", "test" or "predict".
        given: the loaders passed to the call, or None.
        module: the module; its ``*_dataloader`` hooks give loaders when nothing else does.
        datamodule: the datamodule, asked before the module.
        reads_datamodule: False where the datamodule only prepares and moves data that comes from elsewhere.
        limit: batches (int) or share (float) of each loader to use; None for all.
        sampler_kwargs: ``num_replicas`` and ``rank`` where each process reads its own part, else None.
        overfit: read the same batches in the same order each epoch.
        reload_every_n_epochs: ask for the loaders again this often; 0 for never.
        remake: given a loader, the stage and the loader's name, return the one to read instead.

    """

    def __init__(
        self,
        stage: str,
        *,
        given: Any = None,
        module: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        reads_datamodule: bool = True,
        limit: int | float | None = None,
        sampler_kwargs: dict[str, int] | None = None,
        overfit: bool = False,
        reload_every_n_epochs: int = 0,
        remake: Callable[[Any, str, str], Any] | None = None,
    ) -> None:
        self.stage = stage
        self._remake = remake
        self.datamodule = datamodule
        self._given = given
        self._reads_datamodule = reads_datamodule
        self._module = module
        self._limit = self._next_limit = limit
        self._cap = math.inf
        self._agreed_limit = math.inf
        self._sampler_kwargs = sampler_kwargs
        self._overfit = overfit
        self.reload_every_n_epochs = reload_every_n_epochs
        self._streams: list[Stream | CombinedStream] | None = None
        self._loaded_at_epoch = 0
        self._resume_state: list[dict[str, Any]] | None = None

    # -- what there is

    def has_data(self) -> bool:
        """Return whether somebody provides this stage's data."""
        return self._given is not None or self._owner() is not None

    def is_off(self) -> bool:
        """Return whether the stage has nothing to do."""
        if self._limit == 0 or self._module is None or not self.has_data():
            return True
        if self.stage in ("validate", "test") and not overrides(
            self._module, LightningModule, STEP_OF[self.stage]
        ):
            return True
        return all(limit == 0 for limit in self.limits)

    def require(self) -> None:
        """Raise unless somebody provides the data.

        Raises:
            MisconfigurationException: nobody does.

        """
        if self.has_data():
            return
        hook = HOOK_OF[self.stage]
        call = "fit" if self.stage == "train" else self.stage
        argument = "train_dataloaders" if self.stage == "train" else "dataloaders"
        if self.datamodule is not None and self._reads_datamodule:
            raise MisconfigurationException(
                f"Trainer.{call}(): the datamodule {type(self.datamodule).__name__} has no {hook}(). Define it."
            )
        raise MisconfigurationException(
            f"Trainer.{call}(): there is no data. Pass {argument}=..., a datamodule, or define "
            f"{type(self._module).__name__}.{hook}()."
        )

    @property
    def loaders(self) -> list[Any]:
        """The prepared loaders; asked for once. Joined ones are in the structure they were given in."""
        return [
            stream.loader.iterables if isinstance(stream, CombinedStream) else stream.loader
            for stream in self._loaded()
        ]

    @property
    def limits(self) -> list[float]:
        """Batches of each loader to use, as far as their lengths are right; infinite when unknown."""
        return [min(self._limited(stream), self._cap) for stream in self._loaded()]

    @property
    def limit(self) -> float:
        """Batches of the only loader to use, on the process that says the fewest; infinite when unknown."""
        return min(self.limits[0], self._agreed_limit)

    @property
    def given(self) -> Any:
        """What was passed to the call, or None."""
        return self._given

    def streams(self) -> list[Any]:
        """Return every loader by itself, also those that are joined."""
        found: list[Any] = []
        for stream in self._loaded():
            found += stream.loader.flattened if isinstance(stream, CombinedStream) else [stream.loader]
        return found

    @property
    def worker_start_seconds(self) -> float:
        """How long processes that live for one epoch took to start, the last time; 0 without any."""
        return sum(
            stream.worker_start_seconds or 0.0
            for stream in self._streams or []
            if not getattr(stream.loader, "persistent_workers", False)
        )

    def switch_off(self) -> None:
        """Have nothing to do."""
        self._limit = self._next_limit = 0

    def change_limit(self, limit: int | float | None) -> None:
        """Use other numbers of batches, from the next ``take_limit`` on."""
        self._next_limit = limit

    def take_limit(self) -> None:
        """Use the latest limit from now on."""
        self._limit = self._next_limit

    def reload(self) -> None:
        """Ask for the loaders again when they are needed next."""
        self.close()
        self._streams = None

    def remake_with(self, remake: Callable[[Any, str, str], Any]) -> None:
        """Make the loaders with another function, when they are asked for next."""
        self.reload()
        self._remake = remake

    def load(self) -> None:
        """Ask for the loaders now, so that what is wrong with them shows before anything starts."""
        self._loaded()

    @property
    def loaded(self) -> bool:
        """Whether the loaders were asked for."""
        return self._streams is not None

    # -- epochs of training

    def start_epoch(self) -> Iterator[tuple[Any, bool]]:
        """Return the batches of a new epoch with a flag for the last."""
        return self._only().batches(self._cut(self._only()))

    def finish_epoch(self) -> None:
        """Give up what is left of an epoch that was ended before its loader ended, if a resumed run is in one."""
        self._only().finish()

    @property
    def certain_end(self) -> float | None:
        """After how many batches an epoch of training is sure to end; None where only the loader knows."""
        length, cut = self._only().certain_length, self._cut(self._only())
        if length is None:
            return None
        return length if cut is None else min(length, cut)

    def agree_on_limit(self, limit: float) -> None:
        """Plan an epoch for as many batches as all processes say: windows and validation are at the same ones."""
        self._agreed_limit = limit

    def end_at(self, batches: int) -> None:
        """End every epoch after this many batches, also where there are more."""
        self._cap = batches

    def resume_epoch(self, last_batch: bool) -> Iterator[tuple[Any, bool]]:
        """Return the batches that an interrupted epoch still has; its worker processes are where they were."""
        stream = self._only()
        if last_batch:
            stream.finish()
            return iter(())
        stream.open()
        return stream.batches(self._cut(stream))

    def start_at(self, batch: int) -> None:
        """Leave out the first batches of the next epoch, where no exact position is known."""
        self._only().start_at(batch)

    def begin_next(self, epoch: int) -> None:
        """Have living workers begin the next epoch while this one's validation runs, where nobody can tell."""
        stream, every = self._only(), self.reload_every_n_epochs
        if isinstance(stream, Stream) and not (every and epoch - self._loaded_at_epoch >= every):
            stream.begin_next(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers the epoch."""
        for stream in self._loaded():
            stream.set_epoch(epoch)

    def reload_if_due(self, epoch: int) -> None:
        """Ask for the loaders again where ``reload_dataloaders_every_n_epochs`` says so."""
        every = self.reload_every_n_epochs
        if every and self._streams is not None and epoch - self._loaded_at_epoch >= every:
            self.close()
            self._streams = None
            self._loaded_at_epoch = epoch

    def loaded_in(self, epoch: int) -> None:
        """Take it that the loaders are those asked for when ``epoch`` needed new ones; for a resumed run."""
        every = self.reload_every_n_epochs
        self._loaded_at_epoch = epoch - epoch % every if every else 0

    def state_dict(self, consumed: int, *, again: bool = False) -> dict[str, Any]:
        """Return where the training data is, ``consumed`` batches into the epoch; ``again``: before the one in hand."""
        return self._only().state_dict(consumed, again=again)

    def is_in_hand(self, consumed: int) -> bool:
        """Return whether one batch more than ``consumed`` of this epoch was handed out."""
        return self.loaded and self._only().handed == consumed + 1

    def replace_held(self, change: Callable[[Any], Any]) -> None:
        """Have ``state_dict(again=True)`` give ``change`` of the batch that was handed out last."""
        self._only().replace_held(change)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where ``state_dict`` was."""
        self._only().load_state_dict(state)

    # -- evaluation

    def batches(self, loader_idx: int) -> Iterator[tuple[Any, bool]]:
        """Return the batches of one loader with a flag for the last."""
        stream = self._loaded()[loader_idx]
        return iter(()) if self.limits[loader_idx] == 0 else stream.batches(self._cut(stream))

    def keep_indices(self, loader_idx: int) -> None:
        """Remember of which samples each batch of a loader is made."""
        stream = self._loaded()[loader_idx]
        if isinstance(stream, Stream):
            stream.keep_indices()

    def batch_indices(self, loader_idx: int, batch_idx: int) -> list[int]:
        """Return the samples of a batch just read, by their index in the dataset; empty where unknown."""
        stream = self._loaded()[loader_idx]
        return stream.batch_indices(batch_idx) if isinstance(stream, Stream) else []

    def evaluations(self) -> list[dict[str, Any]]:
        """Return where the loaders are, between two evaluations or inside one."""
        return [stream.state_dict(stream.position) for stream in self._loaded()]

    def load_evaluations(self, states: list[dict[str, Any]]) -> None:
        """Go to where ``evaluations`` was taken; an evaluation that was interrupted starts again."""
        for stream, state in zip(self._loaded(), states, strict=False):
            stream.load_state_dict(state)
            stream.finish()

    @contextmanager
    def limited_to(self, steps: int) -> Iterator[None]:
        """Use at most ``steps`` batches of each loader for a while; -1 for all."""
        self._cap = math.inf if steps < 0 else steps
        try:
            yield
        finally:
            self._cap = math.inf

    def close(self) -> None:
        """Shut worker processes down."""
        for stream in self._streams or []:
            stream.close()

    # -- inside

    def _owner(self) -> Any:
        name = HOOK_OF[self.stage]
        read = self.datamodule if self._reads_datamodule else None
        if read is not None and overrides(read, DataHooks, name):
            return read
        if self._module is not None and overrides(self._module, DataHooks, name):
            return self._module
        return None

    def _only(self) -> Stream | CombinedStream:
        return self._loaded()[0]

    def _loaded(self) -> list[Stream | CombinedStream]:
        if self._streams is None:
            given = self._given
            name = HOOK_OF[self.stage]
            if given is None:
                owner = self._owner()
                given = getattr(owner, name)()
                name = f"{type(owner).__name__}.{name}()"
                if given is None:
                    raise MisconfigurationException(
                        f"{name} returned None. Return a DataLoader or an iterable."
                    )
            else:
                name = f"the {self.stage} dataloader"
            found = self._several(given, name)
            self._streams = [
                self._stream(loader, name if len(found) == 1 else f"{name}[{index}]")
                for index, loader in enumerate(found)
            ]
            self._check_limits()
        return self._streams

    def _stream(self, loader: Any, name: str) -> Stream | CombinedStream:
        if not isinstance(loader, CombinedLoader):
            if self._remake is not None:
                loader = self._remake(loader, self.stage, name)
            prepared = prepare(
                loader,
                name=name,
                stage=self.stage,
                overfit=self._overfit,
                allow_empty=self._may_be_empty(),
                **(self._sampler_kwargs or {}),
            )
            trains, module = self.stage == "train", self._module
            # Automatic optimization completes an epoch that ended early afterwards. The user's own steps are theirs to
            # complete, in the batch that `trainer.is_last_batch` says is the last.
            manual = trains and module is not None and not module.automatic_optimization
            marks_last = manual or isinstance(prepared, DataLoader)
            return Stream(prepared, name=HOOK_OF[self.stage], replays=trains, marks_last=marks_last)
        streams = [self._stream(leaf, f"{name}[{index}]") for index, leaf in enumerate(loader.flattened)]
        assert all(isinstance(stream, Stream) for stream in streams)
        combined = copy.copy(loader)
        combined.flattened = [stream.loader for stream in streams]
        return CombinedStream(combined, cast("list[Stream]", streams), name=HOOK_OF[self.stage])

    def _may_be_empty(self) -> bool:
        owners = [owner for owner in (self.datamodule, self._module) if owner is not None]
        return any(owner.allow_zero_length_dataloader_with_multiple_devices for owner in owners)

    def _several(self, given: Any, name: str) -> list[Any]:
        """Return the loaders to read one after the other; training reads one, which may join several."""
        if self.stage == "train":
            return [CombinedLoader(given, "max_size_cycle") if is_collection(given) else given]
        if isinstance(given, CombinedLoader):
            if given.mode == "sequential":
                return given.flattened
            if self.stage == "predict":
                raise MisconfigurationException(
                    f"{name} is a CombinedLoader(mode={given.mode!r}); prediction reads one loader after the other. "
                    'Use mode="sequential".'
                )
            return [given]
        if isinstance(given, Mapping) or is_collection(given):
            return CombinedLoader(given, "sequential").flattened
        return [given]

    def _check_limits(self) -> None:
        for stream in self._streams or []:
            self._limited(stream)
        if (
            self.stage == "train"
            and self._streams
            and self._streams[0].length == 0
            and not self._may_be_empty()
        ):
            raise MisconfigurationException("the train dataloader has no batches.")

    def _cut(self, stream: Stream | CombinedStream) -> int | None:
        """Return after how many batches an epoch is to end; None where the loader ends it, whatever its length says."""
        limit = self._limit
        if limit is None or (isinstance(limit, float) and limit == 1.0):
            return _whole(self._cap)
        asked = limit if isinstance(limit, int) else self._limited(stream)
        return _whole(min(asked, self._cap))

    def _limited(self, stream: Stream | CombinedStream) -> float:
        length = math.inf if stream.length is None else stream.length
        limit = self._limit
        if limit is None or (isinstance(limit, float) and limit == 1.0):
            return length
        if isinstance(limit, int):
            return min(length, limit)
        argument = "overfit_batches" if self._overfit else LIMIT_OF[self.stage]
        if limit == 0.0:
            return 0
        if math.isinf(length):
            raise MisconfigurationException(
                f"Trainer({argument}={limit}): a share needs a loader with a length, and "
                f"{type(stream.loader).__name__} has none. Give a number of batches instead."
            )
        batches = int(length * limit)
        if batches == 0 and length > 0:
            raise MisconfigurationException(
                f"Trainer({argument}={limit}): {limit} of {int(length)} batches is less than one. "
                f"Use at least {argument}={1 / length:.4g}, or a number of batches."
            )
        return batches


def _whole(limit: float) -> int | None:
    return None if math.isinf(limit) else int(limit)
