"""The check: run the first batches of fit, validate, test and predict on a separate Trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from hasten import Callback, LightningDataModule, LightningModule
from hasten._lib import torch_private
from hasten._lib.device import is_cuda
from hasten._lib.observers import set_until
from hasten.compile.settings import inner_model
from hasten.extend.origin import is_builtin
from hasten.hooks import overrides
from hasten.loops.bad_loss import first_bad
from hasten.loops.evaluate import evaluate, predict
from hasten.loops.fit import fit
from hasten.loops.run_data import STEP_OF
from hasten.loops.saved_state import SavedObjects
from hasten.machine.cluster import ClusterEnvironment
from hasten.module.signatures import check_takes_loader
from hasten.seed import collect_rng_state, restore_rng_state
from hasten.types import RunningStage
from hasten_tools.preflight import cost, loaders, machine, methods, monitors, training, waits
from hasten_tools.preflight.plan import Length
from hasten_tools.preflight.report import CheckReport, Rows
from hasten_tools.preflight.said import listening, row_of_error
from hasten_tools.preflight.watch import TRAIN_BATCHES, NotFinite, Observations, StepWatch

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run import Run
    from hasten.trainer import Trainer
    from hasten.types import Dataloaders

_NOT_COMPILED = "compiling takes longer than a check: the steps ran as they are written"
# Set by launchers; a check of a run of several processes takes place in one.
_OF_SEVERAL = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "SLURM_NTASKS")


def check(
    trainer: Trainer,
    arguments: Arguments,
    model: LightningModule,
    train_dataloaders: Dataloaders,
    val_dataloaders: Dataloaders,
    datamodule: LightningDataModule | None,
) -> CheckReport:
    """Return what ``Trainer.check`` returns; it has the documentation."""
    begun = time.perf_counter()
    if isinstance(train_dataloaders, LightningDataModule):
        datamodule, train_dataloaders = train_dataloaders, None
    module: Any = inner_model(model)
    rows = Rows()
    given = {"train": train_dataloaders, "validate": val_dataloaders}
    random = collect_rng_state()
    saved = SavedObjects()
    for loader in _loaders_in(given.values()):
        saved.save(loader, values=False)
    try:
        with listening(rows), _as_written(module, rows):
            Check(trainer, arguments, module, given, datamodule, rows).run()
    finally:
        saved.restore()
        restore_rng_state(random)
    seconds = time.perf_counter() - begun
    device = trainer.strategy.root_device
    title = f"Check of {type(module).__name__} on {device}, in {seconds:.1f} s"
    return CheckReport(rows.by_status(), title)


def _as_written(module: Any, rows: Rows) -> AbstractContextManager[object]:
    """Return a context in which parts that the program compiles run uncompiled."""
    # Nothing is compiled where nobody has imported the compiler, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    if any(torch_private.inside_compiled(part) is not None for part in parts):
        rows.skipped("compile", _NOT_COMPILED)
    as_written: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return as_written


def _loaders_in(given: Iterable[Any]) -> Iterator[Any]:
    for one in given:
        if isinstance(one, (list, tuple)):
            yield from _loaders_in(one)
        elif isinstance(one, dict):
            yield from _loaders_in(one.values())
        elif one is not None and not isinstance(one, torch.Tensor):
            yield one


class Check:
    """One check: its inputs and its results."""

    def __init__(
        self,
        trainer: Trainer,
        arguments: Arguments,
        module: LightningModule,
        given: dict[str, Any],
        datamodule: LightningDataModule | None,
        rows: Rows,
    ) -> None:
        self.trainer, self.arguments, self.module, self.given = trainer, arguments, module, given
        self.datamodule, self.rows, self.seen = datamodule, rows, Observations()
        self.callbacks: list[Callback] = list(trainer.callbacks)
        self.logged: set[str] = set()
        self.length: Length | None = None
        self._epoch_ended = False

    def run(self) -> None:
        """Check everything that can be checked."""
        rows, trainer = self.rows, self.trainer
        self._guarded("versions", lambda: machine.check_versions(rows))
        self._guarded("device", lambda: machine.check_devices(trainer, rows))
        self._guarded("processes", lambda: machine.check_processes(trainer, rows))
        begins = methods.check_methods(trainer, self.arguments, self.module, self.datamodule, self.given.values(), rows)
        if not begins or not isinstance(self.module, LightningModule):
            rows.skipped("steps", "fit would stop before its first batch, see the errors")
            return
        if any(map(is_lazy, [*self.module.parameters(), *self.module.buffers()])):
            why = "the model has lazy layers, which could not lose the shapes again that they get from a batch"
            rows.skipped("steps", f"{why}. Run one batch through it first: model(batch)")
            return
        self._guarded("buffers", lambda: waits.check_tensors(self.module, rows))
        own = alone(trainer, rows)
        self._fit(own)
        if "validate" not in self.seen.evaluated:
            self._validate(own)
        for stage in methods.stages_with_data(self.module, self.datamodule, rows, ("test", "predict")):
            self._evaluate(own, stage)
        self._report_batches()
        complete = self._epoch_ended
        self._guarded(
            "monitor",
            lambda: monitors.check_monitors(
                self.callbacks, self.logged, rows, complete=complete, validated="validate" in self.seen.evaluated
            ),
        )

    def _guarded(self, name: str, look: Callable[[], object]) -> None:
        """Call a part of the check; an error of it does not end the others."""
        try:
            look()
        except Exception as error:
            self.rows.skipped(name, f"this part of the check failed: {type(error).__name__}: {error}")

    # -- the stages

    def _fit(self, own: Trainer) -> None:
        probe = StepWatch(self.seen)
        self._stage(own, "fit", lambda run: self._train(run, probe), probe)

    def _train(self, run: Run, probe: StepWatch) -> None:
        """Train on a few batches and validate on one, with what comes before and after."""
        rows, seen = self.rows, self.seen
        if overrides(run.module, LightningModule, "on_before_zero_grad"):
            run.changed = True
        run.state.stage = RunningStage.TRAINING
        run.data.load()
        sources = [source for source in run.data.of("fit") if not source.is_off()]
        saved = SavedObjects()
        saved.save(run.optimizers)
        saved.save([config.scheduler for config in run.schedulers])
        for source in sources:
            saved.save(source.streams(), values=False)
        readable = True
        for source in sources:
            readable &= loaders.check_loaders(run, source, rows)
        self._guarded("validation data", lambda: loaders.check_overlap(run, rows))
        length = self.length = Length.of(run, int(self.trainer.world_size))
        self._guarded("optimizer", lambda: training.check_optimizers(run, length, rows))
        if not readable:
            rows.skipped("training_step", "its data was not read, see there")
            return
        if run.data.train.is_off():
            rows.skipped("training_step", "limit_train_batches=0")
            return
        self._limit(run)
        probe.watch_gradients(run.module)
        probe.has_scaler = run.runtime.scaler is not None
        probe.name_function = lambda batch, index: first_bad(run, None, batch, index, backward=True)
        if is_cuda(run.runtime.device):
            torch.cuda.reset_peak_memory_stats(run.runtime.device)
        try:
            with run.data.validation.limited_to(1):
                fit(run)
            self._epoch_ended = run.progress.epoch_ended
            self._check_end(run, length)
        except NotFinite:
            pass
        finally:
            probe.close()
            self.logged |= set(run.logged.callback_metrics())
            self._guarded("loss", lambda: training.check_step(run, seen, rows))
            self._guarded("train data", lambda: loaders.check_last_batch(run, seen, length, rows))
            self._guarded("resident", lambda: cost.check_resident(self.trainer, run, seen, rows))
            self._guarded("waits", lambda: waits.check_waits(seen.waits, seen.trained, rows))
            self._guarded("labels", lambda: loaders.check_labels(run, seen, rows))
            if seen.trained:
                self._guarded("memory", lambda: cost.check_memory(run, seen, rows))
                self._guarded("time", lambda: cost.say_time(length, seen, rows))
            self._guarded("eval mode", lambda: training.check_repeatable(run, seen, rows))
            self._guarded("checkpoints", lambda: monitors.check_places(self.trainer, run, length, rows))
            self._guarded("logging", lambda: monitors.check_intervals(self.trainer, self.arguments, run, length, rows))
            saved.restore()

    def _check_end(self, run: Run, length: Length) -> None:
        """Warn of data that ended before its length."""
        trained, due = self.seen.trained, min(TRAIN_BATCHES, length.batches)
        if not trained:
            if "train" in self.seen.batches:
                self.rows.skipped("training_step", "on_train_batch_start returned -1, which skips the epoch")
        elif run.progress.last_batch and trained < due and len(run.data.train.streams()) == 1:
            batches = f"{trained} batch{'es' if trained != 1 else ''}"
            what = f"The loader ended after {batches}, and its length says {length.batches:.0f}."
            self.rows.warning("train data", what, "Let __len__ of the dataset return how many samples __iter__ yields.")

    def _limit(self, run: Run) -> None:
        """Make a run train for one short epoch, after which the watch stops it, and validate."""
        given = run.data.train.limit
        run.window.accumulate_grad_batches = min(run.window.accumulate_grad_batches, 2)
        run.change_arguments(
            dataclasses.replace(
                run.arguments,
                min_epochs=None,
                max_steps=-1,
                min_steps=None,
                limit_train_batches=int(min(TRAIN_BATCHES, given)),
                val_check_interval=1.0,
                check_val_every_n_epoch=1,
                # Otherwise the loop would warn of an epoch shorter than its interval.
                log_every_n_steps=1,
            )
        )
        run.data.train.take_limit()

    def _validate(self, own: Trainer) -> None:
        """Validate by itself, where the fit did not come so far."""
        data = self.given["validate"] is not None or any(
            overrides(owner, LightningDataModule, "val_dataloader")
            for owner in (self.datamodule, self.module)
            if owner is not None
        )
        if data and overrides(self.module, LightningModule, "validation_step"):
            self._evaluate(own, "validate")

    def _evaluate(self, own: Trainer, stage: str) -> None:
        probe = StepWatch(self.seen)

        def body(run: Run) -> None:
            source = run.data.of(stage)[0]
            if source.is_off():
                return
            saved = SavedObjects()
            saved.save(source.streams(), values=False)
            try:
                if not loaders.check_loaders(run, source, self.rows):
                    return
                check_takes_loader(
                    run.module, run.hooks, "validation" if stage == "validate" else stage, len(source.load())
                )
                with source.limited_to(1):
                    if stage == "predict":
                        predict(run, return_predictions=False)
                    else:
                        evaluate(run, source)
            finally:
                probe.close()
                self.logged |= set(run.logged.callback_metrics())
                saved.restore()

        self._stage(own, stage, body, probe)

    def _stage(self, own: Trainer, stage: Any, body: Callable[[Run], None], probe: StepWatch) -> None:
        """Call ``body`` with a run that is like a call of the Trainer; its error becomes a row."""
        data = {key: value for key, value in self.given.items() if stage == "fit" or key == stage}
        called = [one for one in self.trainer.callbacks if methods.may_be_called(one)]
        kept = SavedObjects()
        for callback in called:
            kept.save(callback)
        try:
            with self._own_callbacks(kept):
                own.prepared_run(stage, self.module, data, self.datamodule, body, callbacks=[*called, probe])
        except Exception as error:
            self._take_error(stage, error)
        finally:
            probe.close()
            kept.restore()

    @contextmanager
    def _own_callbacks(self, kept: SavedObjects) -> Iterator[None]:
        """Leave out callbacks that ``configure_callbacks`` adds and a check does not call."""
        module, configure = self.module, self.module.configure_callbacks

        def configured() -> list[Callback]:
            found = configure()
            added = [found] if isinstance(found, Callback) else list(found or ())
            known = set(map(id, self.callbacks))
            self.callbacks += [one for one in added if id(one) not in known]
            called = [one for one in added if methods.may_be_called(one)]
            for one in called:
                kept.save(one)
            return called

        with ExitStack() as undo:
            if overrides(module, LightningModule, "configure_callbacks"):
                set_until(undo, vars(module), "configure_callbacks", configured)
            yield

    def _take_error(self, name: str, error: Exception) -> None:
        """Make a row of an error; one of reading data names the sample."""
        seen = self.seen
        stage = "train" if name == "fit" else name
        source = self.given.get(stage)
        if stage not in seen.batches:
            for loader in _loaders_in([source]):
                failed = None
                with contextlib.suppress(Exception):
                    failed = loaders.failing_sample(loader)
                if failed is not None and type(failed[1]) is type(error):
                    self.rows.take(loaders.sample_row(f"{stage} data", *failed))
                    return
        self.rows.take(row_of_error(error, name))

    def _report_batches(self) -> None:
        for stage, texts in self.seen.batches.items():
            for index, text in enumerate(texts):
                which = f" [{index}]" if len(texts) > 1 else ""
                self.rows.ok(f"{stage} batch{which}", text)
            if stage in self.seen.outputs:
                self.rows.ok(STEP_OF[stage], f"returned {self.seen.outputs[stage]}")


def alone(trainer: Trainer, rows: Rows) -> Trainer:
    """Return a Trainer with the same arguments, in this process alone and without what takes long."""
    given = trainer.given_arguments
    changes: dict[str, Any] = {
        "speed": None,
        "profiler": None,
        "detect_anomaly": False,
        "on_bad_loss": "warn",
        "allocator": None,
    }
    if given.get("compile"):
        changes["compile"] = None
        rows.skipped("compile", _NOT_COMPILED)
    for name in ("batch_size", "num_workers"):
        if given.get(name) == "auto":
            changes[name] = None
            rows.skipped(name, f"{name}='auto' is found by fit; the check used that of the loader")
    if given.get("resident"):
        changes["resident"] = False
        rows.skipped("resident", "the check read batches from the loader, not from memory")
    if is_builtin(type(trainer.strategy)) and trainer.strategy.name != "single_device":
        device = trainer.strategy.root_device
        on_one = [device.index] if is_cuda(device) and device.index is not None else 1
        plugins = given.get("plugins")
        kept = plugins if isinstance(plugins, list) else [plugins] if plugins is not None else []
        changes |= {
            "strategy": "auto",
            "devices": on_one,
            "num_nodes": 1,
            "sync_batchnorm": False,
            "uneven": "stop",
            "plugins": [one for one in kept if not isinstance(one, ClusterEnvironment)] or None,
        }
    with _without(_OF_SEVERAL):
        return trainer.with_arguments(**changes)


@contextmanager
def _without(names: Iterable[str]) -> Iterator[None]:
    """Remove variables from the environment for a while."""
    removed = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)
