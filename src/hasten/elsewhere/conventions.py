"""Where programs under Lightning's names get what Lightning does, and ``import hasten`` does something else.

Each decision is a field of ``Conventions``: False is what ``import hasten`` does, True what Lightning does. A run keeps
them in ``run.conventions``, everything else asks ``current()``; the loop over batches reads none. They hold for the
whole process: in a program that ``hasten run`` has started, ``import hasten`` gets Lightning's, too. The page
``docs/differences.md`` has a table that is made from these fields (``table``), and a test compares the two. Its other
tables list what hasten does differently under both names.

A new decision needs a reason that a user of either name would accept; where Lightning's behavior is neither wrong nor
slow, both names have it and no field exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


def _decision(topic: str, *, lightning: str, hasten: str) -> Any:
    return field(default=False, metadata={"topic": topic, "lightning": lightning, "hasten": hasten})


@dataclass(frozen=True)
class Conventions:
    """Named decisions; see the text of each field.

    Example::

        >>> HASTEN.tail_divides_by_full_size, current() is HASTEN
        (False, True)

    """

    # Numbers of a run.
    tail_divides_by_full_size: bool = _decision(
        "`accumulate_grad_batches` at the end of an epoch",
        lightning="divides the last, shorter window by the full number, so the step is too small",
        hasten="divides by the number of batches in the window",
    )
    optimizer_computes_gradients: bool = _decision(
        "optimizers with their own `step` (a subclass or a patched method)",
        lightning="call a closure that computes the gradients",
        hasten="find the gradients already computed, as after `loss.backward()` in your own loop. The closure they "
        "receive recomputes them only if weights or gradients have changed since",
    )
    updates_are_rounded: bool = _decision(
        '`precision="bf16-true"`, `"16-true"`',
        lightning="rounds weights to 16 bits after each step: steps smaller than about 0.4 % of a weight are lost",
        hasten="no update is lost, for four more bytes per weight",
    )
    ends_at_length: bool = _decision(
        "a loader that yields more batches than its length",
        lightning="ignores additional batches",
        hasten="uses every batch and recognizes the last one. To end an epoch earlier, set `limit_train_batches`",
    )
    shuffles_over_processes: bool = _decision(
        "a training loader with `shuffle=False` on several processes, or under `ddp` with one",
        lightning="is shuffled",
        hasten="keeps its order",
    )
    opens_loaders_late: bool = _decision(
        "when dataloader hooks are called, and when loaders draw random numbers",
        lightning="validation before the sanity check, training after it; loaders begin before the epoch's hooks",
        hasten="all before the sanity check, so that errors show at once; loaders begin after the epoch's hooks",
    )
    samplers_learn_epoch: bool = _decision(
        "`set_epoch` of a sampler that a program gives a loader of validation, test or prediction",
        lightning="is called with the epoch",
        hasten="is called in training only",
    )
    clears_gradients: bool = _decision(
        "gradients that are there when `fit` begins; and those of manual optimization when a validation begins",
        lightning="are cleared",
        hasten="are kept: they may be part of a step that is still to come",
    )
    averages_in_single_precision: bool = _decision(
        "numbers that are not tensors in `self.log`",
        lightning="are rounded to 32 bits",
        hasten="keep the 64 bits of a Python number",
    )
    lr_find_in_single_precision: bool = _decision(
        "`Tuner.lr_find`",
        lightning="suggests the rate with the steepest loss over the rate itself, which favors small rates; halves the "
        "first loss; ends after `max_epochs`",
        hasten="suggests the rate with the steepest loss over the steps, and trains all of them",
    )
    datamodule_gives_all_loaders: bool = _decision(
        "a datamodule without `val_dataloader`, and a module with one",
        lightning="no validation",
        hasten="the module's data",
    )
    stage_is_given_by_name: bool = _decision(
        "`stage` of `setup` and `teardown`",
        lightning="is passed by name, so it may stand anywhere among the parameters",
        hasten="is passed by position, as everything that hooks receive",
    )
    # Errors and warnings.
    mistakes_are_warnings: bool = _decision(
        "mistakes that leave a run without effect: an empty loader, `training_step` that always returns None, hooks "
        "with parameters that they are not given, arguments and keys that nothing takes, a file that is missing",
        lightning="a warning, or an error only when the hook is called",
        hasten="an error before training, or at the end of the epoch that trained nothing",
    )
    warns_of_settings: bool = _decision(
        "advice about settings: workers of loaders, modules in eval mode, an interval of logging that is longer than "
        "an epoch, which weights checkpoints of manual optimization have, `srun` and `--ntasks` of SLURM",
        lightning="a warning before each run in which it might apply; an error for `--ntasks` alone",
        hasten="a warning where it is known to apply, which names the cause and the line to write",
    )
    metrics_are_attributes: bool = _decision(
        "`self.log` with a torchmetrics object that is not an attribute of the module",
        lightning="an error",
        hasten="the object is reset, saved and restored all the same",
    )
    tunes_batch_size_alone: bool = _decision(
        "`Tuner.scale_batch_size` with several processes", lightning="an error", hasten="searches on all processes"
    )
    groups_wait_half_an_hour: bool = _decision(
        "`timeout` of strategies by default", lightning="30 minutes", hasten="10 minutes"
    )
    # What is drawn and written.
    bars_have_counters: bool = _decision(
        "refresh of the progress bar",
        lightning="every so many batches, with a counter `n` that programs read; epochs count from 0",
        hasten="by time, at most ten times a second, on a line of its own design; epochs count from 1",
    )
    summary_has_flops: bool = _decision(
        "FLOPs in the model summary without `example_input_array`", lightning="a column of zeros", hasten="no column"
    )
    framework_is_lightning: bool = _decision(
        "the name that an optimizer's `repr` and Comet show",
        lightning="`LightningAdam`, `pytorch-lightning`",
        hasten="`HastenAdam`, `hasten`",
    )
    prefers_tensorboard: bool = _decision(
        "the default logger",
        lightning="TensorBoard if it is installed; its version is the number of the SLURM job",
        hasten="`CSVLogger`, with the next free number",
    )
    loggers_on_every_process: bool = _decision(
        "loggers of other processes than the first",
        lightning="are called, and decorate their methods with `rank_zero_only`",
        hasten="are not called",
    )
    # Files.
    saves_objects: bool = _decision(
        "Python objects in checkpoints, such as instances of the program's classes",
        lightning="are written; `hasten run` warns that only `weights_only=False` reads them back",
        hasten="are refused, or left out with a message, unless you allow their classes with "
        "`torch.serialization.add_safe_globals`",
    )
    hparams_of_makers: bool = _decision(
        "`save_hyperparameters()` in a module that another module makes in its `__init__`",
        lightning="saves the arguments of both",
        hasten="saves the arguments of the module only",
    )
    removes_unpicklable_hparams: bool = _decision(
        "hyperparameters that cannot be pickled",
        lightning="are removed from `hparams` when `fit` begins, with a warning for each",
        hasten="stay in `hparams`, and a checkpoint leaves them out with one message",
    )
    checkpoints_have_loops: bool = _decision(
        "the checkpoint that `on_save_checkpoint` and `on_load_checkpoint` receive",
        lightning='has the state of each loop under `"loops"`',
        hasten='has hasten\'s own entries in addition to `"state_dict"`',
    )
    overwrites_equal_names: bool = _decision(
        "`ModelCheckpoint(save_top_k=-1)` when the file name stays the same",
        lightning="overwrites the file",
        hasten="keeps all of them: `-v1`, `-v2`",
    )
    last_is_a_name: bool = _decision(
        '`ckpt_path="last"`',
        lightning="the file called `last` of this run's folder",
        hasten="the newest checkpoint, also of earlier runs; a damaged one is skipped with a warning",
    )
    csv_starts_over: bool = _decision(
        "`CSVLogger` with a `version` that exists",
        lightning="deletes the file",
        hasten="appends to it; a resumed run replaces the rows after its checkpoint",
    )
    checkpoint_beats_options: bool = _decision(
        "`--ckpt_path` of the command line",
        lightning="the checkpoint's hyperparameters override everything",
        hasten="they override configs, and options on the command line override them",
    )


HASTEN = Conventions()

_current = HASTEN


def current() -> Conventions:
    """Return the decisions in force: Lightning's between ``hasten_lightning.install()`` and ``uninstall()``."""
    return _current


def class_of(thing: object) -> type:
    """Return the class of an object; hasten's own where the program has made it under Lightning's name.

    Lightning's root has subclasses with Lightning's parameters, which are the same classes to all code here.
    """
    kind = type(thing)
    return vars(kind).get("behind") or kind


def use(conventions: Conventions) -> None:
    """Use these decisions for everything that is made from now on."""
    global _current
    _current = conventions


def table() -> Iterator[str]:
    """Yield the lines of the table in ``docs/differences.md``."""
    yield "| | Lightning, and `hasten run` | `import hasten` |"
    yield "|---|---|---|"
    for each in fields(Conventions):
        yield "| {topic} | {lightning} | {hasten} |".format(**each.metadata)
