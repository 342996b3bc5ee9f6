"""Write the training loop that a program needs, from what was read of it: the values that fill the templates."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from hasten.eject.facts import Facts
from hasten.eject.source import EjectError
from hasten.eject.template import fill

# What a Trainer(...) of the program keeps: the values that the ejected loop reads.
VALUES = (
    "max_epochs",
    "max_steps",
    "min_epochs",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "log_every_n_steps",
    "callbacks",
)
# What it has no place for, in words of its cost.
LEFT_OUT = {
    "matmul_precision": "matmul_precision left out: call torch.set_float32_matmul_precision instead",
    "speed": 'speed="auto" left out: nothing is measured, and this program may take several times as long',
    "compile": "compile left out: call model.compile() before fit, and pay for compiling in each process anew",
    "batching": "batching left out: batches come in another order, with more padding (`hasten advise` says how much)",
    "packed": "packed left out: this program computes padding, too; `hasten advise` measures what that costs",
    "num_workers": "num_workers left out: it is that of the DataLoader",
    "resident": "resident left out: samples are read and collated one by one in each epoch",
    "fused_optimizer": "fused_optimizer left out: pass fused=... to the optimizer",
    "batch_size": "batch_size left out: it is that of the DataLoader",
    "micro_batch": "micro_batch left out: a batch has to fit into memory as a whole",
    "memory": "memory left out: wrap blocks in torch.utils.checkpoint to recompute activations",
    "dropout": 'dropout="fast" left out: on a CPU dropout costs more, and draws other numbers',
    "allocator": "allocator left out: memory goes back to the system between steps, which costs page faults",
    "max_time": "max_time left out: stop the program yourself",
    "profiler": "profiler left out: wrap the loop in torch.profiler.profile",
    "uneven": "uneven left out: DistributedSampler repeats samples to make the processes even",
    "benchmark": "benchmark left out: set torch.backends.cudnn.benchmark yourself",
    "detect_anomaly": "detect_anomaly left out: call torch.autograd.set_detect_anomaly(True)",
}
# What changes nothing in the ejected program.
SILENT = frozenset(
    {
        "accelerator",
        "callbacks",
        "default_root_dir",
        "deterministic",
        "devices",
        "enable_autolog_hparams",
        "enable_checkpointing",
        "enable_model_summary",
        "enable_progress_bar",
        "gradient_clip_algorithm",
        "inference_mode",
        "logger",
        "num_nodes",
        "num_sanity_val_steps",
        "precision",
        "strategy",
        "use_distributed_sampler",
    }
)
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
# The hooks of each callback that the templates have.
CLASSES: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("check",),
    "ModelCheckpoint": ("check",),
    "LearningRateMonitor": ("on_train_batch_start",),
    "GradientAccumulationScheduler": ("on_train_epoch_start",),
    "BackboneFinetuning": ("setup", "on_train_epoch_start"),
    "EMAWeightAveraging": (
        "on_train_batch_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_train_end",
    ),
    "StochasticWeightAveraging": ("on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
}


@dataclass
class Use:
    """What the text of the program uses; see ``program.py``, which fills it.

    Args:
        members: of the module, such as "log".
        of_trainer: attributes of the Trainer.
        model_hooks: that its modules define, and those that not all of them do.
        user_hooks: that its own callbacks define.
        classes: hasten's callbacks that it makes.
        verbs: the calls of a Trainer, with the names of their arguments.
        parameters: of ``Trainer(...)`` that it gives.

    """

    members: set[str] = field(default_factory=set)
    of_trainer: set[str] = field(default_factory=set)
    model_hooks: set[str] = field(default_factory=set)
    missing_hooks: set[str] = field(default_factory=set)
    data_hooks: set[str] = field(default_factory=set)
    data_methods: set[str] = field(default_factory=set)
    user_hooks: set[str] = field(default_factory=set)
    user_callbacks: bool = False
    user_callback_state: bool = False
    classes: set[str] = field(default_factory=set)
    verbs: dict[str, set[str]] = field(default_factory=dict)
    without_data: set[str] = field(default_factory=set)
    without_model: set[str] = field(default_factory=set)
    loud: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    log_options: set[str] = field(default_factory=set)
    unweighed_logs: bool = False
    step_logs: bool = False
    train_epoch_logs: bool = False
    evaluation_logs: bool = False
    logged_in_training: set[str] = field(default_factory=set)
    may_skip: bool = False
    output: str = "tensor"
    step_takes: dict[str, int] = field(default_factory=dict)
    seeds: bool = False
    third_party: bool = False
    as_lightning: bool = False
    monitors: set[str] = field(default_factory=set)


def precision_of(arguments: dict[str, Any]) -> str:
    """Return the full name of a precision."""
    name = str(arguments.get("precision"))
    name = SHORT.get(name, name)
    if name not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise EjectError(f"precision={name!r} has no short equivalent. What can be ejected: {known}.")
    return name


def values(facts: Facts, use: Use, stem: str) -> dict[str, Any]:
    """Return the values that the templates need."""
    given, hooks = facts.arguments, use.model_hooks
    precision = precision_of(given)
    kinds: dict[str, Any] = {"autocast": None, "scaler": False, "weights": None, "floats": None}
    kinds |= PRECISIONS[precision]
    on_cpu = str(given.get("accelerator", "auto")) == "cpu"
    manual, takes = not facts.automatic, use.step_takes
    if manual and kinds["scaler"]:
        raise EjectError("precision='16-mixed' with manual optimization: scaling is up to the steps of training_step.")
    ddp = facts.processes > 1 or str(given.get("strategy", "")).startswith("ddp")
    if ddp:
        _check_processes(facts, use, manual)
    closure = not manual and (facts.closure or "optimizer_step" in hooks)
    fits = "fit" in use.verbs
    validates = fits and facts.validates
    accumulates = given.get("accumulate_grad_batches", 1) > 1 or "GradientAccumulationScheduler" in use.classes
    clips = given.get("gradient_clip_val") or None
    clip = (given.get("gradient_clip_algorithm") or "norm") if clips and not manual else None
    max_steps = "max_steps" in use.parameters and given.get("max_steps", -1) != -1
    max_epochs = not max_steps or "max_epochs" in use.parameters
    stops = "EarlyStopping" in use.classes or "should_stop" in use.of_trainer
    val_every = validates and "val_check_interval" in use.parameters
    val_epochs = validates and "check_val_every_n_epoch" in use.parameters
    if val_every and not isinstance(given.get("val_check_interval"), (int, float)):
        raise EjectError(f"val_check_interval={given.get('val_check_interval')!r} counts steps or time. Give batches.")
    if val_epochs and given.get("check_val_every_n_epoch") is None:
        raise EjectError("check_val_every_n_epoch=None counts batches over epochs. Give a number of epochs.")
    logs = bool(use.members & {"log", "log_dict"})
    checkpoints = given.get("enable_checkpointing") is not False and fits
    saves_last = checkpoints and "ModelCheckpoint" not in use.classes
    resumes = checkpoints or "ckpt_path" in use.verbs.get("fit", ())
    saves = checkpoints or "save_checkpoint" in use.of_trainer or resumes
    logger = given.get("logger")
    writes = logs and fits and logger is not False
    prints = given.get("enable_progress_bar") is not False and fits
    leaves = max_steps or (stops and (val_every or use.user_callbacks or "should_stop" in use.of_trainer))
    epochwise = [one for one in facts.schedulers if one[1] == "epoch" and one[3] is None] if not manual else []
    swaps = "StochasticWeightAveraging" in use.classes
    ends_epochs = leaves and bool(epochwise or swaps or (validates and not val_every))
    limit = given.get("limit_train_batches") if "limit_train_batches" in use.parameters else None
    known = facts.length is not None or isinstance(limit, int)
    if not known and accumulates and not manual:
        raise EjectError(
            "accumulate_grad_batches over a loader without a length: which batch is the last shows only when it ends. "
            "Pass limit_train_batches=..."
        )
    if not known and val_every:
        raise EjectError("val_check_interval over a loader without a length. Pass limit_train_batches=...")
    batches, needs_count = "train_dataloaders", accumulates and not manual
    if limit is not None:
        batches, needs_count = "itertools.islice(train_dataloaders, num_batches)", True
    if val_every or (ends_epochs and known):
        needs_count = True
    callback_hooks = use.user_hooks.union(*(CLASSES[name] for name in use.classes)) - {"check"}
    if resumes and "EMAWeightAveraging" in use.classes:
        callback_hooks |= {"on_train_start"}
    checked = use.classes & {"EarlyStopping", "ModelCheckpoint"}
    checks = ""
    if checked:
        checks = "validation" if val_every and use.monitors and not use.monitors & use.logged_in_training else "epoch"
    callbacks = bool(use.classes or use.user_callbacks)
    sets = [set(CLASSES[name]) for name in use.classes]
    base_needed = use.user_callbacks or (bool(sets) and any(one != set.union(*sets) for one in sets))
    stateful = use.classes - {"GradientAccumulationScheduler", "LearningRateMonitor"}
    callback_state = saves and callbacks and (bool(stateful) or use.user_callback_state)
    batch_weights = logs and (use.evaluation_logs or use.train_epoch_logs) and use.unweighed_logs
    counts_steps = manual
    multiple = {"optimizer": facts.optimizers, "scheduler": [one[0] for one in facts.schedulers]}
    keeps = manual or saves or swaps or use.members & {"optimizers", "lr_schedulers"} or "optimizers" in use.of_trainer
    keeps = keeps or use.classes & {"BackboneFinetuning", "LearningRateMonitor"}
    configure = list(facts.configure)
    if manual and len(configure) == 1 and not facts.schedulers:
        only = len(multiple["optimizer"]) == 1 and configure[0].startswith("optimizer =")
        value = "[model.configure_optimizers()]" if only else "model.configure_optimizers()"
        configure = [f"self.optimizers = {value}"]
    elif keeps:
        configure.append(f"self.optimizers = [{', '.join(multiple['optimizer'])}]")
    if (keeps and facts.schedulers) or swaps:
        kept = [one[0] for one in facts.schedulers]
        configure.append(f"self.schedulers = [{', '.join(kept)}]")
    take = {
        "call": [],
        "datamodule": ["train_dataloaders = datamodule.train_dataloader()"],
        "model": ["train_dataloaders = model.train_dataloader()"],
    }[facts.data_from]
    if validates and facts.data_from != "call":
        take = [*take, f"val_dataloaders = {facts.data_from}.val_dataloader()"]
    needs_loader = facts.generator and saves
    needs_loader |= swaps or bool(use.of_trainer & {"estimated_stepping_batches", "num_training_batches"})
    if needs_loader:
        take = [*take, "self.train_dataloaders = train_dataloaders"]
    if "datamodule" in use.of_trainer or use.without_data:
        take = [*take, "self.datamodule = datamodule"] if facts.data_from == "datamodule" else take
    result: dict[str, Any] = dict(kinds)
    result |= {
        "precision": precision,
        "moves": not on_cpu,
        "device": _device(on_cpu, ddp),
        "ddp": ddp,
        "ddp_options": ", find_unused_parameters=True" if "find_unused" in str(given.get("strategy")) else "",
        "sampler_seed": "torch.initial_seed()" if use.seeds else "0",
        "manual": manual,
        "closure": closure,
        "closure_step": _closure_step(hooks),
        "closure_loss": closure and (prints or "on_train_batch_end" in hooks | callback_hooks),
        "may_skip": use.may_skip and not closure,
        "output": use.output,
        "accumulates": accumulates and not manual,
        "clip": clip,
        "finishes": bool(clip)
        or bool((hooks | callback_hooks) & {"on_before_optimizer_step", "configure_gradient_clipping"}),
        "clip_arguments": _clip_arguments(given),
        "all_parameters": facts.all_parameters and "BackboneFinetuning" not in use.classes,
        "step": f"{'wrapped' if ddp else 'model.training_step'}({_taken(takes.get('training_step', 2))})",
        "model_hooks": hooks,
        "callback_hooks": callback_hooks,
        "data_hooks": use.data_hooks if facts.data_from == "datamodule" else set(),
        "members": use.members,
        "module": bool(use.members | use.missing_hooks) or fits,
        "module_hooks": _module_hooks(use),
        "seeds": use.seeds,
        "numpy": use.third_party,
        "batch_weights": batch_weights,
        "passes_batch_size": "batch_size" in use.log_options,
        "weight": _weight(batch_weights, "batch_size" in use.log_options),
        "fits": fits,
        "verbs": set(use.verbs),
        "logs": logs,
        "sums": logs and (use.evaluation_logs or use.train_epoch_logs),
        "wants_outputs": "on_train_batch_end" in hooks | callback_hooks,
        "enables_grad": not facts.grad_enabled,
        "step_flag": logs and (use.evaluation_logs or use.train_epoch_logs) and (use.step_logs or use.train_epoch_logs),
        "step_logs": use.step_logs,
        "train_epoch_logs": use.train_epoch_logs,
        "train_means": logs and (use.train_epoch_logs or bool(hooks & {"on_train_epoch_end"})),
        "log_parameters": _log_parameters(use),
        "log_summary": _log_summary(use),
        "stops": stops,
        "saves": saves,
        "saves_last": saves_last,
        "epochs_done": saves,
        "resumes": resumes,
        "named_checkpoints": resumes,
        "folder": _folder(given, stem) if saves or writes else "",
        "deterministic": bool(given.get("deterministic")),
        "warn_only": ", warn_only=True" if given.get("deterministic") == "warn" else "",
        "grad_mode": "no_grad" if given.get("inference_mode") is False else "inference_mode",
        "schedulers": bool(facts.schedulers) or swaps,
        "callback_state": callback_state,
        "loader_generator": facts.generator,
        "counts_steps": counts_steps,
        "estimates": "estimated_stepping_batches" in use.of_trainer,
        "num_training_batches": "num_training_batches" in use.of_trainer,
        "max_steps": max_steps,
        "num_batches": needs_count,
        "num_batches_self": _count("self.train_dataloaders", limit, facts.length),
        "val_every": val_every,
        "val_epochs": val_epochs,
        "validates": validates,
        "leaves": leaves,
        "ends_epochs": ends_epochs,
        "checks": checks,
        "check_epochs": checks == "epoch" and val_epochs and bool(use.monitors - use.logged_in_training),
        "window": "self.accumulate_grad_batches" if use.as_lightning else "window",
        "loss": "share" if accumulates and not manual else "loss",
        "train_outputs": _train_outputs(manual, use, "share" if accumulates else "loss"),
        "manual_outputs": "outputs = " if manual and "on_train_batch_end" in hooks | callback_hooks else "",
        "reports": fits and (prints or writes),
        "prints": prints,
        "writes": writes,
        "reports_steps": writes and (use.step_logs or use.train_epoch_logs),
        "report_summary": "Print the latest values, and append them to metrics.jsonl."
        if prints and writes
        else ("Print the latest values." if prints else "Append the latest values to metrics.jsonl."),
        "report_loss": '"loss": loss.detach(), ' if prints and not manual and not use.may_skip else "",
        "log_every": "self.log_every_n_steps" if "log_every_n_steps" in use.parameters else "50",
        "step_due": "is_last and " if accumulates and not manual else "",
        "data_from": facts.data_from,
        "data_first": bool(use.of_trainer & {"estimated_stepping_batches", "num_training_batches"}),
        "configure": configure,
        "take_data": take,
        "train_batches": batches,
        "goes_on": _goes_on(max_epochs, max_steps, stops, use),
        "callback_base": base_needed,
        "callback_methods": _callback_methods(
            sorted(callback_hooks), bool(checks), callback_state and use.user_callbacks
        ),
        "user_callbacks": use.user_callbacks,
        "classes": use.classes,
        "base": "(Callback)" if base_needed else "",
        "swaps": swaps,
        "summary": _summary(facts, accumulates and not manual, bool(clip), precision, validates),
    }
    result["num_batches_expression"] = _count("train_dataloaders", limit, facts.length)
    every = given.get("val_check_interval")
    result["val_every_expression"] = (
        "max(1, int(num_batches * self.val_check_interval))"
        if isinstance(every, float)
        else "min(self.val_check_interval, num_batches)"
    )
    result["step_schedulers"] = _step_schedulers(facts, hooks, accumulates) if not manual else []
    result["epoch_schedulers"] = _epoch_schedulers(epochwise, hooks, swaps)
    result["epoch_monitored"] = _monitored(facts, hooks, "epoch") if not manual else []
    result["step_monitored"] = _monitored(facts, hooks, "step") if not manual else []
    result["val_due"] = "(batch_idx + 1) % val_every == 0"
    if val_epochs:
        result["val_due"] += " and (self.current_epoch + 1) % self.check_val_every_n_epoch == 0"
    result["leave"] = _leave(max_steps, stops, use, known and needs_count and ends_epochs)
    _evaluations(result, facts, use)
    _init(result, facts, use, max_epochs, max_steps)
    result["fit_parameters"] = _fit_parameters(facts, use, resumes, validates)
    return result


def generated(filled: dict[str, Any]) -> list[str]:
    """Return the lines of the generated part."""
    filled = {**filled, "callbacks": fill("callbacks.txt", filled)}
    return fill("loop.txt", filled)


# -- parts


def _folder(given: dict[str, Any], stem: str) -> str:
    root = given.get("default_root_dir")
    return '"' + (f"{root}/" if root is not None else "") + f'runs/{stem}"'


def _taken(count: int) -> str:
    """Return the arguments of a step that takes so many."""
    return ", ".join(("batch", "batch_idx")[:count])


def _device(on_cpu: bool, ddp: bool) -> str:
    if on_cpu:
        return '"cpu"'
    gpu = "f\"cuda:{os.environ.get('LOCAL_RANK', 0)}\"" if ddp else '"cuda"'
    return f'{gpu} if torch.cuda.is_available() else "cpu"'


def _check_processes(facts: Facts, use: Use, manual: bool) -> None:
    """Refuse what several processes would need more code for."""
    for holds, what in (
        (manual, "manual optimization"),
        ("predict" in use.verbs, "Trainer.predict"),
        (facts.length is None, "a training loader without a length"),
        (facts.generator, "a training loader with its own generator"),
        (facts.arguments.get("use_distributed_sampler") is False, "use_distributed_sampler=False"),
    ):
        if holds:
            raise EjectError(f"{what} with several processes has no short equivalent. Eject it for one device.")


def _closure_step(hooks: set[str]) -> str:
    if "optimizer_step" in hooks:
        return "model.optimizer_step(self.current_epoch, batch_idx, optimizer, closure)"
    return "optimizer.step(closure)"


def _clip_arguments(given: dict[str, Any]) -> str:
    value = "self.gradient_clip_val" if given.get("gradient_clip_val") else "None"
    return f"{value}, {given.get('gradient_clip_algorithm')!r}".replace("'", '"')


def _weight(weighs: bool, passed: bool) -> str:
    if passed and weighs:
        return "batch_size or self.batch_size"
    return "batch_size" if passed else "self.batch_size"


def _log_parameters(use: Use) -> str:
    names = [name for name in ("on_step", "on_epoch") if use.train_epoch_logs]
    names += ["batch_size"] if "batch_size" in use.log_options else []
    rest = "".join(f", {name}=None" for name in names)
    return f"name, value{rest}"


def _log_summary(use: Use) -> str:
    if not (use.step_logs or use.train_epoch_logs):
        return "what counts is the mean over all samples"
    if not use.evaluation_logs and not use.train_epoch_logs:
        return "the latest counts"
    return "the latest counts in training steps, elsewhere the mean"


def _train_outputs(manual: bool, use: Use, loss: str) -> str:
    if manual:
        return "outputs"
    if use.output != "tensor":
        return f'{{**outputs, "loss": {loss}.detach()}}'
    kept = f'{{"loss": {loss}.detach()}}'
    return f"{kept} if loss is not None else {{}}" if use.may_skip else kept


def _count(loader: str, limit: object, length: float | None) -> str:
    if limit is None:
        return f"len({loader})"
    if isinstance(limit, float):
        return f"int(len({loader}) * self.limit_train_batches)"
    return "self.limit_train_batches" if length is None else f"min(len({loader}), self.limit_train_batches)"


def _call_scheduler(name: str, hooks: set[str], metric: str | None = None) -> str:
    if "lr_scheduler_step" in hooks:
        return f"model.lr_scheduler_step({name}, {metric})"
    return f"{name}.step({metric or ''})"


def _step_schedulers(facts: Facts, hooks: set[str], accumulates: bool) -> list[str]:
    lines: list[str] = []
    for name, interval, frequency, monitor in facts.schedulers:
        if interval == "step" and monitor is None:
            tests = ["is_last"] if accumulates else []
            tests += [f"(batch_idx + 1) % {frequency} == 0"] if frequency > 1 else []
            call = _call_scheduler(name, hooks)
            lines += [f"if {' and '.join(tests)}:", f"    {call}"] if tests else [call]
    return lines


def _epoch_schedulers(configs: list[tuple[str, str, int, str | None]], hooks: set[str], swaps: bool) -> list[str]:
    if swaps:
        return ["for scheduler in self.schedulers:", f"    {_call_scheduler('scheduler', hooks)}"]
    lines: list[str] = []
    for name, _, frequency, _ in configs:
        call = _call_scheduler(name, hooks)
        test = f"if (self.current_epoch + 1) % {frequency} == 0:"
        lines += [test, f"    {call}"] if frequency > 1 else [call]
    return lines


def _monitored(facts: Facts, hooks: set[str], when: str) -> list[str]:
    lines: list[str] = []
    for name, interval, frequency, monitor in facts.schedulers:
        if monitor is not None and interval == when:
            call = _call_scheduler(name, hooks, f'self.callback_metrics["{monitor}"]')
            done = "(batch_idx + 1)" if when == "step" else "(self.current_epoch + 1)"
            lines += [f"if {done} % {frequency} == 0:", f"    {call}"] if frequency > 1 else [call]
    return lines


def _goes_on(max_epochs: bool, max_steps: bool, stops: bool, use: Use) -> str:
    tests = ["self.current_epoch < self.max_epochs"] if max_epochs else []
    tests += ["self.global_step < self.max_steps"] if max_steps else []
    if stops:
        early = "self.current_epoch < self.min_epochs"
        tests.append(f"(not self.should_stop or {early})" if "min_epochs" in use.parameters else "not self.should_stop")
    return " and ".join(tests)


def _leave(max_steps: bool, stops: bool, use: Use, ends: bool) -> str:
    tests = ["self.global_step >= self.max_steps"] if max_steps else []
    if stops:
        late = " and self.current_epoch >= self.min_epochs" if "min_epochs" in use.parameters else ""
        tests.append(f"self.should_stop{late}")
    test = " or ".join(tests)
    if not ends:
        return test
    return f"({test}) and batch_idx + 1 < num_batches" if len(tests) > 1 else f"{test} and batch_idx + 1 < num_batches"


def _module_hooks(use: Use) -> list[str]:
    lines: list[str] = []
    for name in sorted(use.missing_hooks):
        lines += ["", f"def {name}(self, *_):", "    pass"]
    return lines


def _callback_methods(hooks: list[str], checks: bool, state: bool) -> list[str]:
    lines: list[str] = []
    for name in [*hooks, *(["check"] if checks else [])]:
        lines += [*([""] if not lines else []), f"def {name}(self, *_): ..."]
    if state:
        lines += ["", "def state_dict(self):", "    return {}", "", "def load_state_dict(self, state):", "    pass"]
    return lines


def _fit_parameters(facts: Facts, use: Use, resumes: bool, validates: bool) -> str:
    given = use.verbs.get("fit", set())
    if facts.data_from == "datamodule":
        names = ["model", "datamodule"]
    elif facts.data_from == "model":
        names = ["model"]
    else:
        names = ["model", "train_dataloaders"]
        names += ["val_dataloaders=None"] if "val_dataloaders" in given or validates else []
    return ", ".join([*names, *(["ckpt_path=None"] if resumes else [])])


def _init(result: dict[str, Any], facts: Facts, use: Use, max_epochs: bool, max_steps: bool) -> None:
    needed = {
        "max_epochs": max_epochs and result["fits"],
        "max_steps": max_steps,
        "min_epochs": result["stops"],
        "limit_train_batches": True,
        "limit_val_batches": result["validates"],
        "limit_test_batches": "test" in use.verbs,
        "limit_predict_batches": "predict" in use.verbs,
        "val_check_interval": result["val_every"],
        "check_val_every_n_epoch": result["val_epochs"],
        "accumulate_grad_batches": result["accumulates"],
        "gradient_clip_val": result["clip"] or "configure_gradient_clipping" in use.model_hooks,
        "log_every_n_steps": result["reports_steps"],
        "callbacks": bool(use.classes or use.user_callbacks),
    }
    kept = [name for name in VALUES if needed[name] and name in use.parameters]
    parameters = [f"{name}=()" if name == "callbacks" else name for name in kept]
    lines = [f"self.{name} = {name}" for name in kept]
    if "callbacks" in kept:
        place = lines.index("self.callbacks = callbacks")
        lines[place] = "self.callbacks = callbacks"
    elif needed["callbacks"]:
        lines.append("self.callbacks = []")
    if max_epochs and result["fits"] and "max_epochs" not in kept:
        lines.append("self.max_epochs = 1000")
    if result["accumulates"] and "accumulate_grad_batches" not in kept:
        lines.append("self.accumulate_grad_batches = 1")
    plain = {
        "is_global_zero": "True", "global_rank": "0", "local_rank": "0", "world_size": "1", "sanity_checking": "False",
        "fast_dev_run": "False", "max_steps": "-1", "max_epochs": "-1",
    }  # fmt: skip
    if result["ddp"]:
        plain |= {
            "is_global_zero": 'int(os.environ.get("RANK", 0)) == 0',
            "local_rank": 'int(os.environ.get("LOCAL_RANK", 0))',
        }
        plain = {name: value for name, value in plain.items() if name not in ("world_size", "global_rank")}
    for name in sorted(use.of_trainer & plain.keys()):
        if not any(line.startswith(f"self.{name} =") for line in lines):
            lines.append(f"self.{name} = {plain[name]}")
    if any("best_model_path" in result[f"best_{stage}"] for stage in ("validate", "test")):
        lines.append('self.best_model_path = ""')
    result["kept"] = kept
    result["init_parameters"] = ", ".join(parameters)
    result["init_assignments"] = lines
    result["first_lines"] = [] if parameters else lines


def _evaluations(result: dict[str, Any], facts: Facts, use: Use) -> None:
    short = {"validate": "validation", "test": "test", "predict": "predict"}
    loader = {"validate": "val", "test": "test", "predict": "predict"}
    steps = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
    for stage in ("validate", "test", "predict"):
        given = use.verbs.get(stage, set())
        called = stage in use.verbs
        own = called and stage in use.without_data and facts.data_from == "model"
        from_module = called and ("datamodule" in given or (stage in use.without_data and not own))
        parameters = ["model=None" if stage in use.without_model else "model"]
        with_default = parameters[0].endswith("None")
        if "dataloaders" in given or (stage == "validate" and result["validates"]):
            parameters.append("dataloaders=None" if with_default or from_module or own else "dataloaders")
        if from_module:
            parameters.append("datamodule=None")
        if "ckpt_path" in given:
            parameters.append("ckpt_path=None")
        limited = f"limit_{loader[stage]}_batches" in use.parameters
        count = f"self.limit_{loader[stage]}_batches"
        limit = facts.arguments.get(f"limit_{loader[stage]}_batches")
        batches = "dataloaders"
        if limited:
            count = f"int(len(dataloaders) * {count})" if isinstance(limit, float) else count
            batches = f"itertools.islice(dataloaders, {count})"
        takes = use.step_takes.get(steps[stage], 2)
        keeps = f"on_{short[stage]}_batch_end" in use.model_hooks | use.user_hooks
        result |= {
            f"evaluate_{stage}": ", ".join(parameters),
            f"gives_{stage}": stage in use.without_model,
            f"setup_{stage}": from_module,
            f"last_data_{stage}": from_module and stage in use.without_data,
            f"own_{stage}": own,
            f"loader_{stage}": f"{loader[stage]}_dataloader",
            f"best_{stage}": "best_model_path" if "ckpt_path" in given else "",
            f"standalone_{stage}": called,
            f"hook_{stage}": short[stage],
            f"batches_{stage}": batches,
            f"arguments_{stage}": _taken(takes),
            f"outputs_{stage}": "outputs = " if keeps else "",
            f"returns_{stage}": called,
            f"means_{stage}": "means = " if called else "",
            f"says_{stage}": stage in use.loud,
        }
    result["model_or_last"] = "self.model if model is None else model"
    result["predict_step"] = "predict_step" if "predict_step" in use.step_takes else "forward"
    if result["predict_step"] == "forward":
        result["arguments_predict"] = "batch"


def _summary(facts: Facts, accumulates: bool, clips: bool, precision: str, validates: bool) -> str:
    parts = ["forward, backward, a step for each batch of each epoch"]
    if not facts.automatic:
        parts = ["its training_step for each batch of each epoch"]
    elif accumulates:
        parts = ["forward and backward for each batch, a step for each window"]
    if validates:
        parts.append("then validation")
    return ", ".join(parts)


def used_by(text: str) -> set[str]:
    """Return the modules that generated lines use, to be imported."""
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return names & {"atexit", "contextlib", "dist", "itertools", "json", "numpy", "os", "random", "torch", "Path"}
