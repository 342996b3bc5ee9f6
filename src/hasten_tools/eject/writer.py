"""Write the training loop of a program: the values that fill the templates, from what was read of the program."""

from __future__ import annotations

import ast
import json
from typing import Any

from hasten_tools.eject.facts import Facts
from hasten_tools.eject.needs import Needs
from hasten_tools.eject.objects import LOGGERS
from hasten_tools.eject.template import fill
from hasten_tools.eject.use import VALUES, Use


def values(facts: Facts, use: Use, stem: str) -> dict[str, Any]:
    """Return the values that the templates need: what ``Use`` and ``Needs`` have, by its name there, and texts."""
    needs = Needs(facts, use)
    kept = _kept_arguments(needs)
    result = vars(use) | needs.types
    result |= {name: getattr(needs, name) for name, member in vars(Needs).items() if isinstance(member, property)}
    result |= _used(needs)
    result |= _of_device(needs)
    result |= _of_steps(needs)
    result |= _of_epochs(needs)
    result |= _of_batches(needs)
    result |= {
        "schedulers": bool(needs.facts.schedulers) or needs.swaps,
        "configure": _configure(needs),
        "step_schedulers": _scheduler_steps(needs, "step"),
        "epoch_schedulers": _scheduler_steps(needs, "epoch"),
        "epoch_monitored": _scheduler_steps(needs, "epoch", monitored=True),
        "step_monitored": _scheduler_steps(needs, "step", monitored=True),
    }
    result |= _of_logs(needs)
    result |= _of_reports(needs)
    result |= _of_checkpoints(needs, stem)
    result |= _of_callbacks(needs)
    for stage in ("validate", "test", "predict"):
        result |= _of_evaluation(stage, needs)
    result |= _of_prediction(use)
    result |= _of_init(needs, kept)
    return result


def generated(filled: dict[str, Any]) -> list[str]:
    """Return the lines of the generated part."""
    filled = {**filled, "callbacks": fill("callbacks.txt", filled), "run_logs": fill("loggers.txt", filled)}
    return fill("loop.txt", filled)


# -- the values of one part of the program


def _used(needs: Needs) -> dict[str, Any]:
    """Return what the templates ask of the text of the program."""
    facts, use = needs.facts, needs.use
    return {
        "precision": needs.precision,
        # A class of another file may have both.
        "data_methods": use.data_methods or {"prepare_data", "setup"},
        "data_hooks": use.data_hooks if facts.data_from == "datamodule" else set(),
        "module": bool(use.members | use.missing_hooks) or needs.fits,
        "module_hooks": _module_hooks(use),
        "numpy": use.third_party,
        "verbs": set(use.verbs),
        "metrics": use.logs_metrics,
    }


def _of_device(needs: Needs) -> dict[str, Any]:
    deterministic = needs.arguments.get("deterministic")
    finds_unused = "find_unused" in str(needs.arguments.get("strategy"))
    return {
        "moves": not needs.on_cpu,
        "device": _device(needs.on_cpu, needs.ddp),
        "ddp_options": ", find_unused_parameters=True" if finds_unused else "",
        "sampler_seed": "torch.initial_seed()" if needs.use.seeds else "0",
        "deterministic": bool(deterministic),
        "warn_only": ", warn_only=True" if deterministic == "warn" else "",
        "grad_mode": "no_grad" if needs.arguments.get("inference_mode") is False else "inference_mode",
        "enables_grad": not needs.facts.grad_enabled,
    }


def _of_steps(needs: Needs) -> dict[str, Any]:
    facts, use, hooks = needs.facts, needs.use, needs.hooks | needs.callback_hooks
    function = "wrapped" if needs.ddp else "model.training_step"
    return {
        "closure_step": _closure_step(needs.hooks),
        "closure_loss": needs.closure and (needs.prints or needs.reads_outputs),
        "closure_outputs": "outputs = " if use.output != "tensor" else "",
        "closure_nonlocal": ", outputs" if use.output != "tensor" else "",
        "hooks_of_backward": bool(hooks & {"on_before_backward", "on_after_backward"}),
        "finishes": bool(needs.clip or hooks & {"on_before_optimizer_step", "configure_gradient_clipping"}),
        "clip_arguments": _clip_arguments(needs.arguments),
        "all_parameters": facts.all_parameters and "BackboneFinetuning" not in use.classes,
        "step": f"{function}({_taken(use.step_takes.get('training_step', 2))})",
        "wants_outputs": needs.reads_outputs,
        "counts_steps": needs.manual,
        "row_step": needs.row_step,
        "window": "self.accumulate_grad_batches" if use.as_lightning else "window",
        "loss": "share" if needs.accumulates else "loss",
        "train_outputs": _train_outputs(needs.manual, use, "share" if needs.windows else "loss"),
        "manual_outputs": "outputs = " if needs.manual and needs.reads_outputs else "",
        "step_due": "is_last and " if needs.accumulates else "",
    }


def _of_epochs(needs: Needs) -> dict[str, Any]:
    every = needs.arguments.get("val_check_interval")
    part_of_epoch = "max(1, int(num_batches * self.val_check_interval))"
    epoch_due = " and (self.current_epoch + 1) % self.check_val_every_n_epoch == 0" if needs.val_epochs else ""
    return {
        "while_it_goes_on": _goes_on(needs),
        "leave": _leave(needs),
        "val_every_expression": part_of_epoch
        if isinstance(every, float)
        else "min(self.val_check_interval, num_batches)",
        "val_due": f"(batch_idx + 1) % val_every == 0{epoch_due}",
        "epochs_done": needs.saves,
        "summary": _summary(needs),
    }


def _of_batches(needs: Needs) -> dict[str, Any]:
    facts, use = needs.facts, needs.use
    return {
        "data_from": facts.data_from,
        "data_first": needs.reads_lengths,
        "take_data": _take_data(needs),
        "fit_parameters": _fit_parameters(needs),
        "train_batches": "train_dataloaders"
        if needs.limit is None
        else "itertools.islice(train_dataloaders, num_batches)",
        "num_batches": needs.counts_batches,
        "num_batches_expression": _count("train_dataloaders", needs.limit, facts.length),
        "num_batches_self": _count("self.train_dataloaders", needs.limit, facts.length),
        "loader_generator": facts.generator,
        "estimates": "estimated_stepping_batches" in use.of_trainer,
        "num_training_batches": "num_training_batches" in use.of_trainer,
    }


def _of_logs(needs: Needs) -> dict[str, Any]:
    use = needs.use
    gives_size = "batch_size" in use.log_options
    return {
        "on_step": "on_step and value is not None" if use.logs_metrics else "on_step",
        "step_flag": needs.sums and needs.logs_in_training,
        "train_means": needs.logs and (use.train_epoch_logs or "on_train_epoch_end" in needs.hooks),
        "passes_batch_size": gives_size,
        "weight": _weight(needs.batch_weights, gives_size),
        "log_parameters": _log_parameters(use),
        "log_summary": _log_summary(use),
    }


def _of_reports(needs: Needs) -> dict[str, Any]:
    prints, writes = needs.prints, needs.writes
    has_interval = "log_every_n_steps" in needs.use.parameters
    return {
        "reports": needs.fits and (prints or writes),
        "report_summary": _report_summary(prints, writes),
        "report_loss": '"loss": loss.detach(), ' if prints and not needs.manual and not needs.use.may_skip else "",
        "history": "history" in needs.use.of_trainer,
        "run_folders": bool(needs.use.loggers),
        "log_every": "self.log_every_n_steps" if has_interval else "50",
        "rates_every": "trainer.log_every_n_steps" if has_interval else "50",
        "rate_names": _rate_names(needs.facts.rate_names),
    }


def _of_checkpoints(needs: Needs, stem: str) -> dict[str, Any]:
    use = needs.use
    return {
        "named_checkpoints": needs.resumes,
        "folder": _folder(needs.arguments, stem) if needs.saves or needs.writes else "",
        "saves_hparams": "load_from_checkpoint" in use.members and use.saves_hparams,
    }


def _of_callbacks(needs: Needs) -> dict[str, Any]:
    use = needs.use
    has_state = needs.callback_state and use.user_callbacks
    only_in_validation = bool(use.monitors - use.logged_in_training)
    return {
        "base": "(Callback)" if needs.callback_base else "",
        "callback_methods": _callback_methods(sorted(needs.callback_hooks), bool(needs.checks), has_state),
        "check_epochs": needs.checks == "epoch" and needs.val_epochs and only_in_validation,
    }


# -- texts


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


def _rate_names(names: list[tuple[str, str | None]]) -> str:
    pairs = (f"({json.dumps(name)}, {json.dumps(interval) if interval else None})" for name, interval in names)
    return f"[{', '.join(pairs)}]"


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
    nothing = "{}" if use.as_lightning else "None"
    return f"{kept} if loss is not None else {nothing}" if use.may_skip else kept


def _count(loader: str, limit: object, length: float | None) -> str:
    if limit is None:
        return f"len({loader})"
    if isinstance(limit, float):
        return f"int(len({loader}) * self.limit_train_batches)"
    return "self.limit_train_batches" if length is None else f"min(len({loader}), self.limit_train_batches)"


def _scheduler_steps(needs: Needs, when: str, monitored: bool = False) -> list[str]:
    """Return the lines that step the schedulers that step then."""
    own, lines = "lr_scheduler_step" in needs.hooks, list[str]()
    done = "(batch_idx + 1)" if when == "step" else "(self.current_epoch + 1)"
    for name, interval, frequency, monitor in [] if needs.manual else needs.facts.schedulers:
        if interval == when and (monitor is not None) == monitored:
            # StochasticWeightAveraging replaces this scheduler with its own when it begins.
            tests = ["not self.swa_schedulers"] if needs.swaps else []
            tests += ["is_last"] if when == "step" and needs.windows and not monitored else []
            tests += [f"{done} % {frequency} == 0"] if frequency > 1 else []
            metric = f'self.callback_metrics["{monitor}"]' if monitored else ""
            call = f"model.lr_scheduler_step({name}, {metric or None})" if own else f"{name}.step({metric})"
            lines += [f"if {' and '.join(tests)}:", f"    {call}"] if tests else [call]
    return lines


def _goes_on(needs: Needs) -> list[str]:
    """Return the head of the loop over the epochs, in one line if it fits."""
    tests = ["self.current_epoch < self.max_epochs"] if needs.max_epochs else []
    tests += ["self.global_step < self.max_steps"] if needs.max_steps else []
    if needs.stops:
        has_least = "min_epochs" in needs.use.parameters
        early = "self.current_epoch < self.min_epochs"
        tests.append(f"(not self.should_stop or {early})" if has_least else "not self.should_stop")
    head = f"while {' and '.join(tests)}:"
    if len(head) <= 92:
        return [head]
    return ["while (", f"    {tests[0]}", *(f"    and {test}" for test in tests[1:]), "):"]


def _leave(needs: Needs) -> str:
    tests = ["self.global_step >= self.max_steps"] if needs.max_steps else []
    if needs.stops:
        late = " and self.current_epoch >= self.min_epochs" if "min_epochs" in needs.use.parameters else ""
        tests.append(f"self.should_stop{late}")
    test = " or ".join(tests)
    if not (needs.length_is_known and needs.counts_batches and needs.ends_epochs):
        return test
    return f"({test}) and batch_idx + 1 < num_batches" if len(tests) > 1 else f"{test} and batch_idx + 1 < num_batches"


def _configure(needs: Needs) -> list[str]:
    """Return the lines that make the optimizers and schedulers."""
    facts = needs.facts
    lines = list(facts.configure)
    if needs.manual and facts.returns_optimizers:
        only = lines[0].startswith("optimizer =")
        value = "[model.configure_optimizers()]" if only else "model.configure_optimizers()"
        lines = [f"self.optimizers = {value}"]
    elif needs.keeps_optimizers:
        lines.append(f"self.optimizers = [{', '.join(facts.optimizers)}]")
    if (needs.keeps_optimizers and facts.schedulers) or needs.swaps:
        lines.append(f"self.schedulers = [{', '.join(one[0] for one in facts.schedulers)}]")
    return lines


def _take_data(needs: Needs) -> list[str]:
    """Return the lines that ask the datamodule or the model for its loaders."""
    owner, use = needs.facts.data_from, needs.use
    lines: list[str] = []
    if owner != "call":
        lines.append(f"train_dataloaders = {owner}.train_dataloader()")
        if needs.validates:
            lines.append(f"val_dataloaders = {owner}.val_dataloader()")
    if needs.keeps_loader:
        lines.append("self.train_dataloaders = train_dataloaders")
    if owner == "datamodule" and ("datamodule" in use.of_trainer or use.without_data):
        lines.append("self.datamodule = datamodule")
    return lines


def _summary(needs: Needs) -> str:
    parts = ["forward, backward, a step for each batch of each epoch"]
    if needs.manual:
        parts = ["its training_step for each batch of each epoch"]
    elif needs.accumulates:
        parts = ["forward and backward for each batch, a step for each window"]
    if needs.validates:
        parts.append("then validation")
    return ", ".join(parts)


def _report_summary(prints: bool, writes: bool) -> str:
    if not prints:
        return "Append the latest values to metrics.jsonl."
    return f"Print the latest values{', and append them to metrics.jsonl' if writes else ''}."


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


def _fit_parameters(needs: Needs) -> str:
    names = ["model"]
    if needs.facts.data_from == "datamodule":
        names.append("datamodule")
    elif needs.facts.data_from == "call":
        takes_validation = "val_dataloaders" in needs.use.verbs.get("fit", set()) or needs.validates
        names += ["train_dataloaders", *(["val_dataloaders=None"] if takes_validation else [])]
    return ", ".join([*names, *(["ckpt_path=None"] if needs.resumes else [])])


# -- the constructor of the Trainer


def _kept_arguments(needs: Needs) -> list[str]:
    """Return the parameters of the ejected Trainer: what the program gives and the loop reads."""
    use = needs.use
    is_read = {
        "max_epochs": needs.max_epochs and needs.fits,
        "max_steps": needs.max_steps,
        "min_epochs": needs.stops,
        "limit_train_batches": True,
        "limit_val_batches": needs.validates,
        "limit_test_batches": "test" in use.verbs,
        "limit_predict_batches": "predict" in use.verbs,
        "val_check_interval": needs.val_every,
        "check_val_every_n_epoch": needs.val_epochs,
        "accumulate_grad_batches": needs.accumulates,
        "gradient_clip_val": needs.clip or "configure_gradient_clipping" in use.model_hooks,
        "log_every_n_steps": needs.reports_steps or needs.records_steps or "LearningRateMonitor" in use.classes,
        "callbacks": _has_callbacks(use),
    }
    kept = [name for name in VALUES if is_read[name] and name in use.parameters]
    return ["logger", *kept] if use.keeps_loggers and "logger" in use.parameters else kept


def _of_init(needs: Needs, kept: list[str]) -> dict[str, Any]:
    parameters = [f"{name}=()" if name == "callbacks" else name for name in kept]
    lines = _assignments(needs, kept)
    return {
        "late_assignments": _late(needs.facts, needs.use),
        "kept": kept,
        "init_parameters": ", ".join(parameters),
        "init_assignments": lines,
        "first_lines": [] if parameters else lines,
    }


def _has_callbacks(use: Use) -> bool:
    return bool(use.classes or use.user_callbacks)


def _assignments(needs: Needs, kept: list[str]) -> list[str]:
    """Return the lines of ``Trainer.__init__``."""
    use = needs.use
    lines = [f"self.{name} = {name}" for name in kept]
    added = "ModelCheckpoint()" if use.adds_checkpoint else ""
    if "callbacks" in kept and added:
        lines[kept.index("callbacks")] = f"self.callbacks = [*callbacks, {added}]"
    elif "callbacks" not in kept and _has_callbacks(use):
        lines.append(f"self.callbacks = [{added}]")
    defaults = _read_defaults(needs, kept)
    unwritten = use.of_trainer - {*kept, *defaults}
    constants = {name: value for name, value in _constants(needs.ddp).items() if name in unwritten}
    lines += [f"self.{name} = {value}" for name, value in (defaults | constants).items()]
    if any("ckpt_path" in use.verbs.get(stage, ()) for stage in ("validate", "test")):
        lines.append('self.best_model_path = ""')
    if use.keeps_loggers:
        _init_loggers(lines, needs.facts, kept)
    return lines


def _read_defaults(needs: Needs, kept: list[str]) -> dict[str, str]:
    """Return the arguments that the loop reads and no Trainer of the program has, and what stands for them."""
    is_read = {
        "max_epochs": ("1000", needs.max_epochs and needs.fits),
        "accumulate_grad_batches": ("1", needs.accumulates),
    }
    return {name: value for name, (value, holds) in is_read.items() if holds and name not in kept}


def _constants(ddp: bool) -> dict[str, str]:
    """Return what attributes of a Trainer are that no loop changes, by name in order."""
    of_processes = {"global_rank": "0", "is_global_zero": "True", "local_rank": "0", "world_size": "1"}
    if ddp:
        # The ejected program assigns the others where it joins the group.
        of_processes = {
            "is_global_zero": 'int(os.environ.get("RANK", 0)) == 0',
            "local_rank": 'int(os.environ.get("LOCAL_RANK", 0))',
        }
    others = {"fast_dev_run": "False", "max_epochs": "-1", "max_steps": "-1", "sanity_checking": "False"}
    return dict(sorted((of_processes | others).items()))


def _init_loggers(lines: list[str], facts: Facts, kept: list[str]) -> None:
    """Make the Trainer create the loggers that it is not given."""
    if "logger" in kept:
        several = isinstance(facts.arguments.get("logger"), (list, tuple))
        lines.remove("self.logger = logger")
        lines.append("self.loggers = list(logger)" if several else "self.loggers = [logger] if logger else []")
    else:
        made = f'{facts.logger}("{facts.root}")' if facts.logger in LOGGERS else ""
        lines.append(f"self.loggers = [{made}]")
    lines.append("self.logger = self.loggers[0] if self.loggers else None")


def _late(facts: Facts, use: Use) -> list[str]:
    """Return assignments of attributes that the program reads, made of those that are there."""
    lines: list[str] = []
    for name, kind in (("checkpoint", "ModelCheckpoint"), ("early_stopping", "EarlyStopping")):
        found = f"[c for c in self.callbacks if isinstance(c, {kind})]" if kind in use.classes else "[]"
        if {f"{name}_callback", f"{name}_callbacks"} & use.of_trainer:
            lines.append(f"self.{name}_callbacks = {found}")
            lines.append(f"self.{name}_callback = next(iter(self.{name}_callbacks), None)")
    late = {
        "default_root_dir": f'self.default_root_dir = os.path.abspath("{facts.root}")',
        "log_dir": "self.log_dir = self.logger.log_dir if self.logger else None",
        "logged_metrics": "self.logged_metrics = self.callback_metrics",
    }
    return lines + [late[name] for name in sorted(late.keys() & use.of_trainer)]


# -- evaluations

# Of each: its name in hooks, its name in loaders and limits, its step.
_STAGES = {
    "validate": ("validation", "val", "validation_step"),
    "test": ("test", "test", "test_step"),
    "predict": ("predict", "predict", "predict_step"),
}


def _of_evaluation(stage: str, needs: Needs) -> dict[str, Any]:
    """Return the values for one of ``validate``, ``test`` and ``predict``; their names end with it."""
    use = needs.use
    hook, loader, step = _STAGES[stage]
    called = stage in use.verbs
    asks_model, asks_datamodule = _owners(stage, needs)
    found = {
        "evaluate": _evaluation_parameters(stage, needs),
        "gives": stage in use.without_model,
        "setup": asks_datamodule,
        "last_data": asks_datamodule and stage in use.without_data,
        "own": asks_model,
        "loader": f"{loader}_dataloader",
        "best": "best_model_path" if "ckpt_path" in use.verbs.get(stage, ()) else "",
        "standalone": called,
        "hook": hook,
        "batches": _evaluated_batches(f"limit_{loader}_batches", needs),
        "arguments": _taken(use.step_takes.get(step, 2)),
        "outputs": "outputs = " if f"on_{hook}_batch_end" in use.model_hooks | use.user_hooks else "",
        "returns": called,
        "means": "means = " if called else "",
        "says": stage in use.loud,
    }
    return {f"{name}_{stage}": value for name, value in found.items()}


def _owners(stage: str, needs: Needs) -> tuple[bool, bool]:
    """Return whether an evaluation asks the model for its loaders, and whether it asks a datamodule."""
    use = needs.use
    if stage not in use.verbs:
        return False, False
    without_data, from_model = stage in use.without_data, needs.facts.data_from == "model"
    return without_data and from_model, "datamodule" in use.verbs[stage] or (without_data and not from_model)


def _evaluation_parameters(stage: str, needs: Needs) -> str:
    given = needs.use.verbs.get(stage, set())
    has_model, (asks_model, asks_datamodule) = stage not in needs.use.without_model, _owners(stage, needs)
    parameters = ["model" if has_model else "model=None"]
    if "dataloaders" in given or (stage == "validate" and needs.validates):
        must_have = has_model and not asks_model and not asks_datamodule
        parameters.append("dataloaders" if must_have else "dataloaders=None")
    parameters += ["datamodule=None"] if asks_datamodule else []
    parameters += ["ckpt_path=None"] if "ckpt_path" in given else []
    return ", ".join(parameters)


def _evaluated_batches(limit: str, needs: Needs) -> str:
    if limit not in needs.use.parameters:
        return "dataloaders"
    count = f"self.{limit}"
    if isinstance(needs.arguments.get(limit), float):
        count = f"int(len(dataloaders) * {count})"
    return f"itertools.islice(dataloaders, {count})"


def _of_prediction(use: Use) -> dict[str, Any]:
    last_model = {"model_or_last": "self.model if model is None else model"}
    if "predict_step" in use.step_takes:
        return last_model | {"predict_step": "predict_step"}
    return last_model | {"predict_step": "forward", "arguments_predict": "batch"}


def used_by(text: str) -> set[str]:
    """Return the modules that generated lines use, to be imported."""
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return names & {
        "atexit", "contextlib", "csv", "dist", "itertools", "json", "numpy", "os", "random", "re", "time", "torch",
        "torchmetrics", "Path",
    }  # fmt: skip
