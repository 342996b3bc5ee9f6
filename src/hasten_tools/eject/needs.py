"""Decide what the ejected loop has to do, from the facts of the first fit and what the program uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hasten._lib.errors import make_error
from hasten_tools.eject.facts import Facts
from hasten_tools.eject.source import EjectError
from hasten_tools.eject.use import CLASSES, Use

PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {},
    "bf16-mixed": {"autocast": "bfloat16"},
    "16-mixed": {"autocast": "float16", "scaler": True},
    "64-true": {"weights": "float64", "floats": "float64"},
    "bf16-true": {"weights": "bfloat16", "floats": "bfloat16"},
}
SHORT = {
    "32": "32-true", "16": "16-mixed", "64": "64-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "None": "32-true",
    "double": "64-true",
}  # fmt: skip
# Schedulers that step groups which an optimizer gets later.
_FOLLOW = {"ConstantLR", "ExponentialLR", "LinearLR", "MultiStepLR", "ReduceLROnPlateau", "StepLR"}
# Attributes of a Trainer for which the training loader must be known before the first step.
_LENGTHS = {"estimated_stepping_batches", "num_training_batches"}


def precision_of(arguments: dict[str, Any]) -> str:
    """Return the full name of a precision."""
    name = str(arguments.get("precision"))
    name = SHORT.get(name, name)
    if name not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        what = f"precision={name!r} has no short equivalent. What can be ejected: {known}."
        raise make_error(EjectError, what, argument="precision")
    return name


class Needs:
    """What the ejected loop has to do. Each property is one decision.

    ``facts`` are those of the first fit of the program. A ModelCheckpoint that the Trainer adds is added to ``use``.
    """

    def __init__(self, facts: Facts, use: Use) -> None:
        self.facts, self.use = facts, use
        self.arguments, self.hooks = facts.arguments, use.model_hooks
        self.precision = precision_of(facts.arguments)
        self.types: dict[str, Any] = {"autocast": None, "scaler": False, "weights": None, "floats": None}
        self.types |= PRECISIONS[self.precision]
        for refusals in (self._refused_steps(), self._refused_validation(), self._refused_lengths()):
            for holds, why in refusals:
                if holds:
                    raise EjectError(why)
        if self.checkpoints and (use.names_runs or use.of_trainer & {"checkpoint_callback", "checkpoint_callbacks"}):
            # The one that a Trainer has by default.
            use.adds_checkpoint = "ModelCheckpoint" not in use.classes
            use.classes.add("ModelCheckpoint")

    # -- what is refused: each row is a condition and what is wrong if it holds

    def _refused_steps(self) -> Iterator[tuple[bool, str]]:
        scales = self.types["scaler"]
        yield (
            self.manual and scales,
            "precision='16-mixed' with manual optimization: scaling is up to the steps of training_step.",
        )
        if "BackboneFinetuning" in self.use.classes:
            kinds = [*self.facts.scheduler_kinds, *(["SWALR"] if self.swaps else [])]
            for kind in (one for one in kinds if one not in _FOLLOW):
                yield True, f"BackboneFinetuning with {kind}: this scheduler does not know the group that is added."
        if self.ddp:
            for holds, what in self._needs_of_one_process():
                yield holds, f"{what} with several processes has no short equivalent. Eject it for one device."
        for holds, why in (
            (self.ddp, "several processes"),
            (self.closure, "a step that takes a closure"),
            (scales, f"precision={self.precision!r}"),
        ):
            yield (
                self.use.may_skip and holds,
                f"training_step leaves batches out by returning None, with {why}. Return 0 * loss instead.",
            )

    def _needs_of_one_process(self) -> Iterator[tuple[bool, str]]:
        yield self.manual, "manual optimization"
        yield "predict" in self.use.verbs, "Trainer.predict"
        yield self.facts.length is None, "a training loader without a length"
        yield self.facts.generator, "a training loader with its own generator"
        yield self.arguments.get("use_distributed_sampler") is False, "use_distributed_sampler=False"

    def _refused_validation(self) -> Iterator[tuple[bool, str]]:
        every, epochs = self.arguments.get("val_check_interval"), self.arguments.get("check_val_every_n_epoch")
        yield (
            self.val_every and not isinstance(every, (int, float)),
            f"val_check_interval={every!r} counts steps or time. Give batches.",
        )
        yield (
            self.val_epochs and epochs is None,
            "check_val_every_n_epoch=None counts batches over epochs. Give a number of epochs.",
        )

    def _refused_lengths(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.limit is not None and not int(self.limit * (self.facts.length or 1)),
            f"limit_train_batches={self.limit!r} trains on no batch. Leave out the call of fit.",
        )
        if self.length_is_known:
            return
        give = "Pass limit_train_batches=..."
        yield (
            self.accumulates,
            "accumulate_grad_batches over a loader without a length: which batch is the last shows only when it ends. "
            + give,
        )
        yield self.val_every, f"val_check_interval over a loader without a length. {give}"
        yield "is_last_batch" in self.use.of_trainer, f"trainer.is_last_batch over a loader without a length. {give}"

    # -- processes and steps

    @property
    def on_cpu(self) -> bool:
        return str(self.arguments.get("accelerator", "auto")) == "cpu"

    @property
    def ddp(self) -> bool:
        return self.facts.processes > 1 or str(self.arguments.get("strategy", "")).startswith("ddp")

    @property
    def manual(self) -> bool:
        return not self.facts.automatic

    @property
    def closure(self) -> bool:
        return not self.manual and (self.facts.closure or "optimizer_step" in self.hooks)

    @property
    def windows(self) -> bool:
        """Whether the Trainer of the program accumulates gradients, be it with manual optimization."""
        given = self.arguments.get("accumulate_grad_batches", 1)
        return given > 1 or "GradientAccumulationScheduler" in self.use.classes

    @property
    def accumulates(self) -> bool:
        return self.windows and not self.manual

    @property
    def clip(self) -> str | None:
        """How the loop clips gradients: "norm", "value" or not at all."""
        if self.manual or not self.arguments.get("gradient_clip_val"):
            return None
        return self.arguments.get("gradient_clip_algorithm") or "norm"

    @property
    def swaps(self) -> bool:
        return "StochasticWeightAveraging" in self.use.classes

    # -- when it validates and ends

    @property
    def fits(self) -> bool:
        return "fit" in self.use.verbs

    @property
    def validates(self) -> bool:
        return self.fits and self.facts.validates

    @property
    def val_every(self) -> bool:
        return self.validates and "val_check_interval" in self.use.parameters

    @property
    def val_epochs(self) -> bool:
        return self.validates and "check_val_every_n_epoch" in self.use.parameters

    @property
    def max_steps(self) -> bool:
        return "max_steps" in self.use.parameters and self.arguments.get("max_steps", -1) != -1

    @property
    def max_epochs(self) -> bool:
        return not self.max_steps or "max_epochs" in self.use.parameters

    @property
    def stops(self) -> bool:
        return "EarlyStopping" in self.use.classes or "should_stop" in self.use.of_trainer

    @property
    def leaves(self) -> bool:
        """Whether the loop may end within an epoch."""
        may_stop = self.val_every or self.use.user_callbacks or "should_stop" in self.use.of_trainer
        return self.max_steps or (self.stops and may_stop)

    @property
    def epochwise(self) -> list[tuple[str, str, int, str | None]]:
        """The schedulers that step at the end of an epoch, without a monitored value."""
        if self.manual:
            return []
        return [one for one in self.facts.schedulers if one[1] == "epoch" and one[3] is None]

    @property
    def ends_epochs(self) -> bool:
        """Whether what ends an epoch is left out where the loop ends within it."""
        at_end = bool(self.epochwise) or self.swaps or (self.validates and not self.val_every)
        return self.leaves and at_end

    # -- the training batches

    @property
    def limit(self) -> Any:
        return self.arguments.get("limit_train_batches") if "limit_train_batches" in self.use.parameters else None

    @property
    def length_is_known(self) -> bool:
        return self.facts.length is not None or isinstance(self.limit, int)

    @property
    def counts_batches(self) -> bool:
        """Whether the loop needs the number of batches of an epoch."""
        last_batch = self.accumulates or "is_last_batch" in self.use.of_trainer
        ends = self.val_every or (self.ends_epochs and self.length_is_known)
        return last_batch or ends or self.limit is not None

    @property
    def reads_lengths(self) -> bool:
        return bool(self.use.of_trainer & _LENGTHS)

    @property
    def keeps_loader(self) -> bool:
        return (self.facts.generator and self.saves) or self.swaps or self.reads_lengths

    # -- what it logs and saves

    @property
    def logs(self) -> bool:
        return bool(self.use.members & {"log", "log_dict"})

    @property
    def sums(self) -> bool:
        """Whether means over epochs are computed."""
        return self.logs and (self.use.evaluation_logs or self.use.train_epoch_logs)

    @property
    def logs_in_training(self) -> bool:
        return self.use.step_logs or self.use.train_epoch_logs

    @property
    def batch_weights(self) -> bool:
        return self.sums and self.use.unweighed_logs

    @property
    def writes(self) -> bool:
        return self.logs and self.fits and self.arguments.get("logger") is not False and not self.use.keeps_loggers

    @property
    def records(self) -> bool:
        return self.fits and (self.use.keeps_loggers or "history" in self.use.of_trainer)

    @property
    def records_steps(self) -> bool:
        return self.records and (self.logs_in_training or "LearningRateMonitor" in self.use.classes)

    @property
    def reports_steps(self) -> bool:
        return self.writes and self.logs_in_training

    @property
    def counts_rows(self) -> bool:
        """Whether batches are counted for rows: with manual optimization optimizers may step at any time."""
        rows = self.prints or self.writes or self.records or "LearningRateMonitor" in self.use.classes
        return self.manual and self.fits and rows

    @property
    def row_step(self) -> str:
        """What the rows of values count."""
        return "logged_step" if self.counts_rows else "global_step"

    @property
    def prints(self) -> bool:
        return self.arguments.get("enable_progress_bar") is not False and self.fits

    @property
    def checkpoints(self) -> bool:
        return self.arguments.get("enable_checkpointing") is not False and self.fits

    @property
    def saves_last(self) -> bool:
        return self.checkpoints and "ModelCheckpoint" not in self.use.classes

    @property
    def resumes(self) -> bool:
        return self.checkpoints or "ckpt_path" in self.use.verbs.get("fit", ())

    @property
    def saves(self) -> bool:
        return self.resumes or "save_checkpoint" in self.use.of_trainer

    @property
    def keeps_optimizers(self) -> bool:
        """Whether the Trainer keeps its optimizers as an attribute."""
        needs_them = self.manual or self.saves or self.swaps
        asks = self.use.members & {"optimizers", "lr_schedulers"} or "optimizers" in self.use.of_trainer
        return bool(needs_them or asks or self.use.classes & {"BackboneFinetuning", "LearningRateMonitor"})

    # -- callbacks

    @property
    def callback_hooks(self) -> set[str]:
        hooks = self.use.user_hooks.union(*(CLASSES[name] for name in self.use.classes)) - {"check"}
        return hooks | {"on_train_start"} if self.resumes and "EMAWeightAveraging" in self.use.classes else hooks

    @property
    def reads_outputs(self) -> bool:
        return "on_train_batch_end" in self.hooks | self.callback_hooks

    @property
    def checks(self) -> str:
        """When callbacks look at a monitored value: after a "validation", after an "epoch", or ""."""
        if not self.use.classes & {"EarlyStopping", "ModelCheckpoint"}:
            return ""
        monitors = self.use.monitors
        only_validation = self.val_every and not monitors & self.use.logged_in_training
        return "validation" if only_validation else "epoch"

    @property
    def callback_base(self) -> bool:
        """Whether callbacks need a base class, because not all of them have all hooks."""
        sets = [set(CLASSES[name]) for name in self.use.classes]
        return self.use.user_callbacks or (bool(sets) and any(one != set.union(*sets) for one in sets))

    @property
    def callback_state(self) -> bool:
        stateful = self.use.classes - {"GradientAccumulationScheduler", "LearningRateMonitor"}
        callbacks = self.use.classes or self.use.user_callbacks
        return bool(self.saves and callbacks and (stateful or self.use.user_callback_state))
