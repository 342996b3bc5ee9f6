"""The events of a run: the callbacks of transformers are called, and what they ask for is done."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hasten import LightningModule, Trainer
from hasten._lib.rank_zero import rank_zero_warn
from hasten.callbacks import Callback

if TYPE_CHECKING:
    from hasten_tools.transformers.trainer import TransformersTrainer


class Events(Callback):
    """Keep the state of transformers, call its callbacks, and do what they ask for."""

    def __init__(self, owner: TransformersTrainer) -> None:
        self.owner, self.fits, self.ignored = owner, False, cast("list[str] | None", None)
        self.scheduler_state = cast("dict[str, Any] | None", None)
        # The optimizer steps of an epoch, now and in the run that is resumed; None if they are not known.
        self.epoch_steps = self.earlier_epoch_steps = cast("int | None", None)
        self.forget()

    def forget(self) -> None:
        """Forget an earlier training: the next one may have no step."""
        self.first_step = self.last_logged = 0
        self.logged, self.total = 0.0, torch.zeros(())

    def call(self, event: str, **given: Any) -> None:
        owner = self.owner
        owner.control = getattr(owner.callback_handler, event)(owner.args, owner.state, owner.control, **given)
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        owner = self.owner
        if self.fits and owner.control.should_training_stop and owner.state.global_step < self.planned:
            owner.trainer.should_stop = True
            self.limit_validation(0)

    def limit_validation(self, batches: int | float | None) -> None:
        """Limit the batches of validations; 0 for none, also when the run stops."""
        source = self.owner.trainer.current_run.data.validation
        source.next_limit = batches
        source.take_limit()

    def state_dict(self) -> dict[str, Any]:
        owner = self.owner
        scheduler = owner.lr_scheduler.state_dict() if owner.waits_for_metric() else None
        return {"state": dataclasses.asdict(owner.state), "scheduler": scheduler, "epoch_steps": self.epoch_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.owner.state = type(self.owner.state)(**state_dict["state"])
        self.scheduler_state = state_dict.get("scheduler")
        # That of hasten 0.2 does not have it.
        self.earlier_epoch_steps = state_dict.get("epoch_steps")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from transformers import TrainerCallback

        owner, args, state, handler = self.owner, self.owner.args, self.owner.state, self.owner.callback_handler
        self.fits, self.planned, state.global_step = True, trainer.estimated_stepping_batches, trainer.global_step
        state.max_steps, state.epoch = owner._max_steps(), state.epoch or 0
        state.compute_steps(args, state.max_steps)
        if args.logging_strategy == "steps" and args.logging_steps < 1:
            trainer.log_every_n_steps = state.logging_steps
        each = trainer.num_training_batches
        self.batches = each if math.isfinite(each) else state.max_steps * args.gradient_accumulation_steps
        steps = math.ceil(self.batches / args.gradient_accumulation_steps)
        state.num_train_epochs = math.ceil(state.max_steps / steps) if math.isfinite(each) else sys.maxsize
        self.epoch_steps = steps if math.isfinite(each) else None
        self._warn_of_other_steps()
        state.train_batch_size, trial = args.train_batch_size, cast(Any, owner)._trial
        if trial is not None:
            from transformers.integrations import hp_params

            state.is_hyper_param_search, state.trial_params = True, hp_params(trial)
            state.trial_name = owner.hp_name(trial) if owner.hp_name is not None else None
        state.is_world_process_zero, state.is_local_process_zero = trainer.is_global_zero, trainer.local_rank == 0
        handler.model, handler.optimizer, handler.lr_scheduler = owner.model, owner.optimizer, owner.lr_scheduler
        handler.train_dataloader = trainer.train_dataloader
        self.first_step = self.last_logged = state.global_step
        self.logged, self.total, self.in_epoch = 0.0, torch.zeros(()), False
        input_name = getattr(owner.model, "main_input_name", "input_ids")
        self.flos = owner.floating_point_ops({input_name: torch.zeros(1)}) * trainer.world_size
        self.hooks = [
            getattr(owner.optimizer, f"register_step_{when}_hook")(functools.partial(self._in_step, event))
            for when, event in (("pre", "on_pre_optimizer_step"), ("post", "on_optimizer_step"))
            if any(getattr(type(each), event) is not getattr(TrainerCallback, event) for each in handler.callbacks)
        ]
        if self.scheduler_state is not None:
            owner.lr_scheduler.load_state_dict(self.scheduler_state)
            self.scheduler_state = None
        self.call("on_train_begin")
        if args.eval_on_start:
            owner.evaluate(ignore_keys=self.ignored)
            self.stop_if_asked()
        progress = trainer.current_run.progress
        if progress.mid_epoch and not progress.last_batch:
            self.on_train_epoch_start(trainer, pl_module)

    def _warn_of_other_steps(self) -> None:
        before, now, state = self.earlier_epoch_steps, self.epoch_steps, self.owner.state
        self.earlier_epoch_steps = None
        if before not in (None, now) and self.owner.args.max_steps <= 0:
            rank_zero_warn(
                f"An epoch of the run that is resumed had {before} steps, and has {now} now. The learning rate is "
                f"planned for {state.max_steps} steps, and {state.global_step} are done.",
                fix="Resume with the same data, size of batches and number of processes, or write max_steps=...",
            )

    def _in_step(self, event: str, *_: object) -> None:
        self.call(event)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.in_epoch = True
        self.call("on_epoch_begin")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], batch_idx: int
    ) -> None:
        # The rate of this step: the schedule moves before the end of the batch.
        self.rate = float(self.owner.optimizer.param_groups[0]["lr"]) if self.owner.optimizer else 0.0
        if batch_idx % self.owner.args.gradient_accumulation_steps == 0 and not self.owner.control.should_epoch_stop:
            self.call("on_step_begin")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: dict[str, Any],
        batch_idx: int,
    ) -> None:
        state = self.owner.state
        if trainer.global_step == state.global_step:
            self.call("on_substep_end")
            return
        module = self.owner.module
        losses, module.losses = module.losses, []
        self.total = self.total + sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
        state.global_step, state.epoch = trainer.global_step, trainer.current_epoch + (batch_idx + 1) / self.batches
        state.total_flos, module.inputs = state.total_flos + self.flos * module.inputs, 0
        self.call("on_step_end")
        self._log_evaluate_save()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that is resumed at the end of an epoch has done this before.
        if self.in_epoch:
            self.in_epoch = False
            self.call("on_epoch_end")
            self._log_evaluate_save()

    def _log_evaluate_save(self) -> None:
        """Do what the callbacks ask for, in the order of transformers."""
        owner, state, args = self.owner, self.owner.state, self.owner.args
        if owner.control.should_log and state.global_step > self.last_logged:
            of_all = owner.trainer.strategy.gather_objects(float(self.total))
            loss, steps = sum(of_all) / len(of_all), state.global_step - self.last_logged
            self.last_logged, self.logged, self.total = state.global_step, self.logged + loss, torch.zeros(())
            norm = owner.trainer.current_run.window.gradient_norm
            norms = {} if norm is None else {"grad_norm": float(norm)}
            owner.log({"loss": loss / steps, **norms, "learning_rate": self.rate})
        if owner.control.should_evaluate:
            values = owner.evaluate(ignore_keys=self.ignored)
            self.stop_if_asked()
            cast(Any, owner)._report_to_hp_search(owner._trial, state.global_step, values)
            is_best = owner._determine_best_metric(values, None)
            if owner.waits_for_metric():
                owner.lr_scheduler.step(values[f"eval_{args.metric_for_best_model.removeprefix('eval_')}"])
            if args.save_strategy == "best":
                owner.control.should_save = is_best
        if owner.control.should_save:
            owner._save_checkpoint(owner.model, owner._trial)
            self.call("on_save")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.fits:
            self.fits = False
            for hook in self.hooks:
                hook.remove()
