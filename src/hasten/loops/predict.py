"""Prediction: every batch once, the outputs kept or handed to callbacks."""

from __future__ import annotations

from typing import Any

from hasten._lib.tree import move_to
from hasten.hooks import STEPS, nothing
from hasten.loops.compiled import compiled_step, recorded_steps
from hasten.loops.evaluate import restore_modes, without_gradients
from hasten.loops.run import Run, Stopped
from hasten.loops.states import RunningStage
from hasten.loops.step_errors import add_place, takes
from hasten.loops.transfer import make_transfer


def predict(run: Run, *, return_predictions: bool) -> list[Any] | None:
    """Predict on every batch; return the outputs by batch (a list of lists with several loaders).

    In short::

        eval mode, no gradients
        on_predict_start, on_predict_epoch_start
        for each loader, for each batch:
            on_predict_batch_start, predict_step, on_predict_batch_end
        on_predict_epoch_end, on_predict_end
    """
    run.enter(RunningStage.PREDICTING)
    hooks, module, source = run.hooks, run.module, run.predict
    source.load()
    modes = [(child, child.training) for child in module.modules()]
    module.on_predict_model_eval()
    outputs: list[list[Any]] = []
    run.epoch_batch_indices = []
    try:
        with without_gradients(run):
            hooks.on_predict_start()
            hooks.on_predict_epoch_start()
            several = len(source.loaders) > 1
            for loader_idx in range(len(source.loaders)):
                outputs.append([])
                run.epoch_batch_indices.append([])
                keeps = return_predictions or run.keeps_predictions
                _predict_loader(run, loader_idx, several, outputs[-1] if keeps else None)
            run.kept_predictions = outputs if several else (outputs[0] if outputs else [])
            hooks.on_predict_epoch_end()
            hooks.on_predict_end()
    finally:
        restore_modes(modes)
    run.leave_if_stopped()
    if not return_predictions:
        run.kept_predictions = None
        return None
    return outputs if len(outputs) != 1 else outputs[0]


def _predict_loader(run: Run, loader_idx: int, several: bool, kept: list[Any] | None) -> None:
    hooks, logged, stop = run.hooks, run.logged, run.stop
    context = logged.context_of(STEPS["predict_step"])
    predict_step = compiled_step(run, "predict_step", run.module.predict_step)
    bound = run.runtime.bind(predict_step, module=run.module)
    if several:
        suffix: tuple[int, ...] = (loader_idx,)
        if takes(run.module.predict_step, "dataloader_idx", at=3):
            step = lambda batch, batch_idx: bound(batch, batch_idx, loader_idx)  # noqa: E731
        else:
            step = bound
    else:
        suffix = ()
        step = bound if takes(run.module.predict_step, "batch_idx", at=2) else lambda batch, _: bound(batch)
    transfer = make_transfer(run, run.predict, loader_idx)
    # Those of a whole data set rarely fit on a device.
    on_host = run.runtime.device.type == "cpu"
    # Which samples a batch is made of is asked by those who write predictions, in these two hooks.
    keeps_indices = hooks.on_predict_batch_end is not nothing or hooks.on_predict_epoch_end is not nothing
    if keeps_indices:
        run.predict.keep_indices(loader_idx)
    graphs = recorded_steps(run)
    for batch_idx, (batch, _) in enumerate(run.predict.batches(loader_idx)):
        if keeps_indices:
            run.batch_indices = run.predict.batch_indices(loader_idx, batch_idx)
            if run.keeps_predictions:
                run.epoch_batch_indices[-1].append(run.batch_indices)
        if transfer is not None:
            batch = transfer(batch)
        hooks.on_predict_batch_start(batch, batch_idx, *suffix)
        logged.context = context
        try:
            if graphs is not None:
                graphs.begin()
            output = step(batch, batch_idx)
        except Exception as error:
            add_place(error, "predict_step", run.module, batch, batch_idx)
            raise
        if output is None:
            from hasten._lib.rank_zero import warn_once

            warn_once(
                "predict_step",
                f"predict returned None: {type(run.module).__name__}.predict_step has no return value.",
            )
        hooks.on_predict_batch_end(output, batch, batch_idx, *suffix)
        if kept is not None:
            kept.append(output if on_host else move_to(output, "cpu"))
        if stop.signal is not None and run.runtime.world_size == 1:
            raise Stopped(stop.signal)
