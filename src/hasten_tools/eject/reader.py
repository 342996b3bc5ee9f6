"""Find out what a program uses of hasten; refuse what cannot be ejected, naming the line."""

from __future__ import annotations

import ast
import functools
import re
import sys
from typing import Any, TypeGuard

from torch import nn

from hasten._lib.names import did_you_mean
from hasten.extend.origin import module_of
from hasten.hooks import HOOK_NAMES
from hasten.module import LightningModule
from hasten_tools.eject.facts import Facts
from hasten_tools.eject.objects import LOGGER_ARGUMENTS, LOGGER_QUIET, LOGGERS, ONLY_SHOW, Objects, is_logger
from hasten_tools.eject.source import CALLBACK, DATA, MODEL, TRAINER, ProgramCall, Source, loaded_names
from hasten_tools.eject.use import CLASSES, LEFT_OUT, SILENT, VALUES, Use

VERBS = ("fit", "validate", "test", "predict")
# Members of a LightningModule that the templates have.
MEMBERS = frozenset(
    {
        "automatic_optimization", "clip_gradients", "current_epoch", "device", "freeze", "global_step", "log",
        "log_dict", "logger", "lr_scheduler_step", "lr_schedulers", "manual_backward", "optimizer_step",
        "optimizer_zero_grad", "optimizers", "print", "toggle_optimizer", "toggled", "trainer", "unfreeze",
        "untoggle_optimizer",
    }
)  # fmt: skip
# Hooks of a module that the ejected loop calls.
MODEL_HOOKS = frozenset(
    {
        "backward", "configure_gradient_clipping", "configure_model", "lr_scheduler_step", "on_after_backward",
        "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_fit_end", "on_fit_start",
        "on_load_checkpoint", "on_save_checkpoint",
        "on_train_batch_end", "on_train_batch_start", "on_train_end", "on_train_epoch_end", "on_train_epoch_start",
        "on_train_start", "optimizer_step", "optimizer_zero_grad", "prepare_data", "setup",
    }
    | {f"on_{stage}{part}" for stage in ("validation", "test")
       for part in ("_start", "_end", "_epoch_start", "_epoch_end", "_batch_start", "_batch_end")}
)  # fmt: skip
CALLBACK_HOOKS = MODEL_HOOKS & HOOK_NAMES - {
    "configure_model", "on_load_checkpoint", "on_save_checkpoint", "prepare_data",
}  # fmt: skip
OF_TRAINER = frozenset(
    {
        "accumulate_grad_batches", "callback_metrics", "callbacks", "checkpoint_callback", "checkpoint_callbacks",
        "current_epoch", "datamodule", "default_root_dir", "early_stopping_callback", "estimated_stepping_batches",
        "fast_dev_run", "global_rank", "global_step", "history", "is_global_zero", "is_last_batch", "lightning_module",
        "local_rank", "log_dir", "logged_metrics", "logger", "loggers", "max_epochs", "max_steps", "model",
        "num_training_batches", "optimizers", "sanity_checking", "save_checkpoint", "should_stop", "world_size",
    }
)  # fmt: skip
# Options of self.log that change nothing here.
SHOWN = frozenset(
    {"prog_bar", "logger", "sync_dist", "rank_zero_only", "add_dataloader_idx", "sync_dist_group", "enable_graph"}
)
# Values of arguments with which a callback does what the written one does.
_ONLY = {"every_n_epochs": 1, "check_finite": True, "strict": True}
# Arguments of callbacks that are about what is printed, or have such a value.
QUIET = frozenset({"verbose", "rounding", "log_rank_zero_only", "check_finite", "device", "every_n_epochs",
                    "save_weights_only", "strict"})  # fmt: skip
SIGNATURES = {
    "EarlyStopping": ("monitor", "min_delta", "patience", "mode"),
    "ModelCheckpoint": (
        "dirpath", "filename", "monitor", "save_last", "save_top_k", "mode", "auto_insert_metric_name",
    ),
    "LearningRateMonitor": ("logging_interval",),
    "GradientAccumulationScheduler": ("scheduling",),
    "BackboneFinetuning": ("unfreeze_backbone_at_epoch", "backbone_initial_ratio_lr"),
    "EMAWeightAveraging": ("decay", "update_every_n_steps"),
    "StochasticWeightAveraging": ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy"),
}  # fmt: skip
# Arguments of these that stand in the same place here.
POSITIONAL = {
    "EarlyStopping": 3, "ModelCheckpoint": 3, "GradientAccumulationScheduler": 1, "BackboneFinetuning": 1,
    "StochasticWeightAveraging": 4,
}  # fmt: skip
# Arguments in which the Trainers of a program may differ.
_FREE = frozenset(
    {
        "callbacks", "default_root_dir", "enable_autolog_hparams", "enable_model_summary", "enable_progress_bar",
        "log_every_n_steps", "max_epochs", "num_sanity_val_steps",
    }
)  # fmt: skip
_RUN_FOLDER = re.compile(r"\bversion_\d+[/\\]")
_DDP = frozenset({"ddp", "ddp_find_unused_parameters_true", "ddp_fork", "ddp_notebook", "ddp_spawn"})


class UseReader:
    """Finds out what the program uses of hasten; refuses what cannot be ejected, naming the line."""

    def __init__(self, source: Source, facts: Facts, use: Use, comments: list[str]) -> None:
        self.source, self.facts, self.use, self.comments = source, facts, use, comments
        self.objects = Objects(source)

    def read(self) -> None:
        source, use = self.source, self.use
        models = [node for node in source.classes() if source.kind_of(node) == MODEL]
        if self.facts.trained.__name__ not in {node.name for node in models}:
            trained = self.facts.trained
            source.refuse(
                source.tree.body[0],
                f"{trained.__name__} comes from {module_of(trained)}; eject writes one file. Move the class here",
            )
        for kind in source.classes():
            self._read_class_of_program(kind)
        owned = [{one.name for one in node.body if isinstance(one, ast.FunctionDef)} for node in models]
        use.missing_hooks = {name for name in use.model_hooks if not all(name in names for names in owned)}
        for node in ast.walk(source.tree):
            inside = source.class_of(node)
            if inside is not None and self.objects.kinds.get(inside.name) in ONLY_SHOW:
                continue
            if isinstance(node, ast.Call):
                self._read_call(ProgramCall.of(node))
            elif isinstance(node, ast.Attribute):
                self._read_attribute(node)
        self._read_loggers()
        if "fit" not in use.verbs:
            source.refuse(source.tree.body[0], "it does not call Trainer.fit")
        use.third_party = self._imports_third_party()

    def _read_attribute(self, node: ast.Attribute) -> None:
        use = self.use
        if self._is_trainer(node.value):
            self._read_trainer_attribute(node)
        elif node.attr == "best_k_models":
            use.best_k_models = True
        elif node.attr == "hparams":
            parent = self.source.parent(node)
            of_dict = isinstance(parent, ast.Attribute) and parent.attr in vars(dict)
            use.hparams_are_dict |= of_dict or not isinstance(parent, ast.Attribute)

    def _imports_third_party(self) -> bool:
        known = {*sys.stdlib_module_names, "torch", "hasten", "lightning", "pytorch_lightning", ""}
        imports = (node for node in ast.walk(self.source.tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
        modules = (one.module or "" if isinstance(one, ast.ImportFrom) else one.names[0].name for one in imports)
        return any(module.split(".")[0] not in known for module in modules)

    # -- classes

    def _read_class_of_program(self, node: ast.ClassDef) -> None:
        kind = self.source.kind_of(node)
        if kind in (None, MODEL) and node.bases:
            self.use.own_train |= any(isinstance(one, ast.FunctionDef) and one.name == "train" for one in node.body)
        if kind == MODEL:
            self._read_model(node)
        elif kind == DATA:
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            self.use.data_methods |= methods
            self.use.data_hooks |= methods & {"teardown", *MODEL_HOOKS} - {"setup", "prepare_data"}
        elif kind == CALLBACK:
            self._read_callback(node)
        elif is_logger(kind):
            self.source.refuse(node, f"{node.name} changes hasten's {kind}, which the ejected program does not have")
        elif kind == TRAINER:
            self.source.refuse(node, f"{node.name} is a Trainer: its methods have no place in the ejected loop")

    def _read_model(self, node: ast.ClassDef) -> None:
        use = self.use
        own = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        assigned = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        for function in own.values():
            self._read_method(function)
        if "automatic_optimization" in assigned or not self.facts.automatic:
            use.members.add("automatic_optimization")
        for one in ast.walk(node):
            if not isinstance(one, ast.Attribute):
                continue
            of_self = isinstance(one.value, ast.Name) and one.value.id == "self"
            of_super = isinstance(one.value, ast.Call) and getattr(one.value.func, "id", "") == "super"
            if not (of_self or of_super) or (one.attr in own and of_self):
                continue
            self._read_member(one, assigned if of_self else set())

    def _read_method(self, function: ast.FunctionDef) -> None:
        name, source, use = function.name, self.source, self.use
        first = next(iter((*function.args.posonlyargs, *function.args.args)), None)
        if first is not None and first.arg != "self" and not function.decorator_list:
            source.refuse(function, f"{name} calls its first argument {first.arg!r}. Call it self")
        if name in MODEL_HOOKS:
            use.model_hooks.add(name)
        elif name in HOOK_NAMES - {"training_step", "validation_step", "test_step", "predict_step"}:
            source.refuse(function, f"the hook {name} has no place in the ejected loop")
        if name in ("training_step", "validation_step", "test_step", "predict_step"):
            arguments = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            if "dataloader_iter" in arguments:
                source.refuse(function, f"{name} fetches its batches itself. Take a batch instead")
            use.step_takes[name] = max(use.step_takes.get(name, 0), min(len(arguments) - 1, 2))
        if name == "training_step":
            self._read_returns(function)
        if name == "on_train_batch_start":
            self._refuse_short_epochs(function)

    def _read_member(self, node: ast.Attribute, assigned: set[str]) -> None:
        name, source, use = node.attr, self.source, self.use
        use.saves_hparams |= name == "save_hyperparameters"
        if name in ("save_hyperparameters", "hparams", "__init__") or not hasattr(LightningModule, name):
            return
        if name in MEMBERS:
            use.members.add(name)
            if name == "logger":
                use.of_trainer.add(name)
            if name == "untoggle_optimizer":
                use.members.add("toggle_optimizer")
        elif name in HOOK_NAMES and name.startswith(("on_", "setup")):
            use.missing_hooks.add(name)
        elif name not in assigned and not hasattr(nn.Module, name):
            source.refuse(node, f"{source.segment(node)} is hasten's, and the ejected model does not have it")

    def _refuse_short_epochs(self, function: ast.FunctionDef) -> None:
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and self.source.scope(node) is function and not _gives_none(node.value):
                self.source.refuse(
                    function, "on_train_batch_start ends epochs by returning -1, which the loop does not do"
                )

    def _read_returns(self, function: ast.FunctionDef) -> None:
        kinds = set() if _always_leaves(function.body) else {"none"}
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and self.source.scope(node) is function:
                kinds |= self._kinds_returned(node, function)
        kinds = kinds or {"none"}
        if not self.facts.automatic:
            return
        self.use.may_skip = "none" in kinds
        self.use.output = "any" if {"dict", "tensor"} <= kinds else ("dict" if "dict" in kinds else "tensor")
        if self.use.may_skip and self.use.output != "tensor":
            self.source.refuse(function, "training_step returns a dict or nothing. Return the loss or None")

    def _kinds_returned(self, node: ast.Return, function: ast.FunctionDef) -> set[str]:
        """Return which of "none", "dict" and "tensor" a statement may return from ``training_step``."""
        value = node.value
        if _gives_none(value):
            return {"none"}
        is_dict = isinstance(value, ast.Name) and any(
            _assigns(one, value.id) and isinstance(one.value, ast.Dict) for one in ast.walk(function)
        )
        if isinstance(value, ast.Dict):
            is_dict = True
            if "loss_weight" in {one.value for one in value.keys if isinstance(one, ast.Constant)}:
                self.source.refuse(node, '"loss_weight" weighs the batches of an accumulation; divide in training_step')
        may_be_none = isinstance(value, ast.IfExp) and (_gives_none(value.body) or _gives_none(value.orelse))
        return {"dict" if is_dict else "tensor"} | ({"none"} if may_be_none else set())

    def _read_callback(self, node: ast.ClassDef) -> None:
        use = self.use
        use.user_callbacks = True
        base = next((name for one in node.bases if (name := self.source.hasten_name(one)) is not None), None)
        if base not in (None, CALLBACK):
            self.source.refuse(node, f"{node.name} changes hasten's {base}, which the ejected program does not have")
        for one in node.body:
            if not isinstance(one, ast.FunctionDef):
                continue
            if one.name == "on_train_batch_start":
                self._refuse_short_epochs(one)
            if one.name in CALLBACK_HOOKS:
                use.user_hooks.add(one.name)
            elif one.name in ("state_dict", "load_state_dict"):
                use.user_callback_state = True
            elif one.name in HOOK_NAMES:
                self.source.refuse(one, f"the hook {one.name} of a callback has no place in the ejected loop")

    # -- calls and attributes

    def _read_call(self, call: ProgramCall) -> None:
        source, use, function = self.source, self.use, call.node.func
        name = source.hasten_name(function)
        if name == TRAINER:
            for argument, value in trainer_arguments(source, call, self.facts).items():
                self._read_argument(call, argument, value)
        elif name == "seed_everything":
            use.seeds = True
        elif name in CLASSES:
            self._read_class(call, name)
        elif name in ONLY_SHOW:
            self._note(f"{name} left out: it changes nothing in training")
        elif name is not None and name[:1].isupper() and not is_logger(name) and name not in (MODEL, DATA, CALLBACK):
            source.refuse(call.node, f"{name} is hasten's, and has no short equivalent")
        if isinstance(function, ast.Attribute):
            self._read_method_call(call, function)

    def _read_method_call(self, call: ProgramCall, function: ast.Attribute) -> None:
        if function.attr in VERBS and self._is_trainer(function.value):
            self._read_verb(call, function.attr)
        elif function.attr in ("log", "log_dict") and is_self(function.value):
            self._read_log(call, function.attr)
        elif function.attr == "toggle_model":
            self.use.members.add("toggled")
        elif function.attr == "load_from_checkpoint":
            self.use.members.add("load_from_checkpoint")
            if "hparams_file" in call.named:
                self.source.refuse(call.node, "load_from_checkpoint(hparams_file=...). Pass the arguments by name")
        elif function.attr in ("to_onnx", "to_torchscript"):
            self.source.refuse(call.node, f"{function.attr} is hasten's. Use torch.export or torch.onnx")

    def _read_loggers(self) -> None:
        """Find out which loggers the program needs, beyond a line of each epoch in metrics.jsonl."""
        use, objects = self.use, self.objects
        objects.check_attributes()
        made = list(objects.made_loggers())
        texts = (node.value for node in ast.walk(self.source.tree) if isinstance(node, ast.Constant))
        # A program that opens what hasten writes has to find it.
        use.names_runs = any(isinstance(one, str) and _RUN_FOLDER.search(one) for one in texts)
        if not (use.names_runs or use.of_trainer & {"logger", "loggers", "log_dir"} or objects.logger_is_used()):
            return
        use.keeps_loggers = objects.keeps_loggers = True
        use.loggers = {name for _, name in made} or ({self.facts.logger} & LOGGERS.keys())
        self.comments[:] = [note for note in self.comments if not note.startswith("logger=")]
        self._check_loggers(made)

    def _check_loggers(self, made: list[tuple[ProgramCall, str]]) -> None:
        kind = self.facts.logger if self.facts.logger in LOGGERS else "CSVLogger"
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Attribute) or getattr(node.value, "attr", "") != "logger":
                continue
            if node.attr not in LOGGERS[kind]:
                has = f"the ejected {kind} has {', '.join(LOGGERS[kind])}"
                self.source.refuse(node, f"{self.source.segment(node)}: {has}. Leave it out")
        for call, name in made:
            if wrong := sorted(call.named.keys() - {*LOGGER_ARGUMENTS, *LOGGER_QUIET}):
                self.source.refuse(call.node, f"{name}({wrong[0]}=...) has no short equivalent")

    def _note(self, comment: str) -> None:
        """Add a comment for the top of the plain program, once."""
        if comment not in self.comments:
            self.comments.append(comment)

    def _read_argument(self, call: ProgramCall, name: str, written: ast.expr | str) -> None:
        source, use, given = self.source, self.use, self.facts.arguments
        value = given.get(name)
        literal = written.value if isinstance(written, ast.Constant) else value
        if self._is_of_another_trainer(name, literal, value):
            source.refuse(
                call.node, f"another Trainer has not {name}={literal!r}: one loop serves both. Give it to both"
            )
        if name in VALUES:
            use.parameters.add(name)
        elif name in LEFT_OUT and value not in (None, False):
            self._note(LEFT_OUT[name])
        elif name in given and name not in SILENT and name not in LEFT_OUT:
            source.refuse(call.node, f"Trainer({name}={value!r}) has no short equivalent. Leave it out before ejecting")
        if name == "logger":
            self._read_logger_argument(literal, value)
        # One device, or several that DDP joins.
        if name == "strategy" and value not in (None, "auto", "single_device", *_DDP):
            source.refuse(call.node, f"Trainer({name}={value!r}) has no short equivalent. Use strategy='ddp'")

    def _read_logger_argument(self, literal: Any, value: Any) -> None:
        if not isinstance(literal, bool):
            self.use.parameters.add("logger")
        if value not in (None, True, False):
            kind = ", ".join(type(one).__name__ for one in (value if isinstance(value, (list, tuple)) else [value]))
            self._note(f"logger={kind} left out: values go to metrics.jsonl")

    def _is_of_another_trainer(self, name: str, literal: Any, value: Any) -> bool:
        """Return whether an argument in the source differs from the Trainer's that was run, and matters."""
        if literal is value or name in _FREE:
            return False
        differs = literal != value if name not in VALUES else value is None
        return differs and not (literal in (None, False) or literal == self.facts.defaults.get(name))

    def _read_class(self, call: ProgramCall, name: str) -> None:
        use, source = self.use, self.source
        use.classes.add(name)
        known = SIGNATURES[name]
        if len(call.positional) > POSITIONAL.get(name, 0):
            example = f", as in {name}({known[-1]}=...)" if known else ""
            source.refuse(call.node, f"{name}: name its arguments{example}")
        for argument, value in call.named.items():
            if argument not in (*known, *QUIET):
                source.refuse(
                    call.node, f"{name}({argument}=...) has no short equivalent. It can have {', '.join(known)}"
                )
            if argument in _ONLY and _constant(value) != _ONLY[argument]:
                source.refuse(call.node, f"{name}({argument}=...) has no short equivalent. Leave it out")
            use.file_names |= argument == "filename" and _constant(value) is not None
            if argument == "monitor" and isinstance(value, ast.Constant):
                use.monitors.add(str(value.value))
        if name == "EarlyStopping" and call.positional and isinstance(call.positional[0], ast.Constant):
            use.monitors.add(str(call.positional[0].value))

    def _read_verb(self, call: ProgramCall, verb: str) -> None:
        names = {
            "fit": ("model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path"),
            "predict": ("model", "dataloaders", "datamodule", "return_predictions", "ckpt_path"),
        }.get(verb, ("model", "dataloaders", "ckpt_path", "verbose", "datamodule"))
        use, given = self.use, set(call.named)
        for place, value in enumerate(call.positional):
            given |= (
                set(names[place:4]) - {"datamodule", "ckpt_path"} if isinstance(value, ast.Starred) else {names[place]}
            )
        if verb == "fit" and self.facts.data_from == "datamodule" and "train_dataloaders" in given:
            given = given - {"train_dataloaders"} | {"datamodule"}
        elif "dataloaders" in given and self._is_datamodule(call, names.index("dataloaders")):
            given = given - {"dataloaders"} | {"datamodule"}
        self._check_validation(call, use.verbs.setdefault(verb, given) ^ given)
        use.verbs[verb] = use.verbs[verb] | given
        if verb != "fit":
            if not given & {"dataloaders", "datamodule"}:
                use.without_data.add(verb)
            if "model" not in given or _is_none(call, "model"):
                use.without_model.add(verb)
            verbose = call.named.get("verbose")
            if verb != "predict" and not (isinstance(verbose, ast.Constant) and verbose.value is False):
                use.loud.add(verb)

    def _check_validation(self, call: ProgramCall, differs: set[str]) -> None:
        if "val_dataloaders" in differs and self.facts.data_from == "call":
            self.source.refuse(call.node, "one fit has validation data, and another has none. Give it to both")

    def _is_datamodule(self, call: ProgramCall, place: int) -> bool:
        value = call.positional[place] if place < len(call.positional) else None
        if not isinstance(value, ast.Name):
            return False
        return any(
            _assigns(node, value.id) and isinstance(node.value, ast.Call)
            and any(one.name == getattr(node.value.func, "id", "") and self.source.kind_of(one) == DATA
                    for one in self.source.classes())
            for node in ast.walk(self.source.tree)
        )  # fmt: skip

    def _read_log(self, call: ProgramCall, method: str) -> None:
        use, source = self.use, self.source
        function = source.scope(call.node)
        hook = function.name if isinstance(function, ast.FunctionDef) else ""
        self._check_log_arguments(call, method)
        is_metric = "torchmetrics" in source.text and any(
            _may_hold_object(one, function) for one in _logged_values(call, method)
        )
        use.logs_metrics |= is_metric
        if "batch_size" in call.named:
            use.log_options.add("batch_size")
        else:
            use.unweighed_logs = True
        if hook.startswith(("validation", "test", "on_validation", "on_test")):
            use.evaluation_logs = True
            if _constant(call.named.get("on_step")) is True:
                source.refuse(
                    call.node, f"self.{method}(on_step=True) in {hook}: the ejected loop computes means there"
                )
        else:
            self._read_log_in_training(call, method, hook, is_metric=is_metric)
        if source.class_of(call.node) is None:
            source.refuse(call.node, f"self.{method} outside of a class")

    def _check_log_arguments(self, call: ProgramCall, method: str) -> None:
        for name, value in call.named.items():
            if name == "reduce_fx" and not (isinstance(value, ast.Constant) and value.value == "mean"):
                self.source.refuse(call.node, "self.log(reduce_fx=...): the ejected loop computes means")
            elif name not in (*SHOWN, "batch_size", "on_step", "on_epoch", "name", "value", "reduce_fx"):
                self.source.refuse(call.node, f"self.{method}({name}=...) has no short equivalent")

    def _read_log_in_training(self, call: ProgramCall, method: str, hook: str, *, is_metric: bool) -> None:
        use = self.use
        of_steps = {"training_step", "on_train_batch_start", "on_train_batch_end"}
        on_epoch = _constant(call.named.get("on_epoch"))
        if hook in of_steps or not hook.startswith("on_"):
            gives_mean = on_epoch is True or "on_step" in call.named or (on_epoch is None and "on_epoch" in call.named)
            # A metric gathers from batch to batch, and begins again with each epoch.
            gives_mean = gives_mean or is_metric
            use.train_epoch_logs |= gives_mean
            use.step_logs |= not gives_mean
            # A method that both kinds of steps call.
            use.evaluation_logs |= hook not in of_steps
        else:
            use.evaluation_logs = True
        first = call.positional[0] if call.positional else call.named.get("name")
        if method == "log" and isinstance(first, ast.Constant):
            use.logged_in_training.add(str(first.value))
        elif isinstance(first, ast.Dict):
            use.logged_in_training |= {str(one.value) for one in first.keys if isinstance(one, ast.Constant)}

    def _read_trainer_attribute(self, node: ast.Attribute) -> None:
        if node.attr in VERBS:
            return
        parent = self.source.parent(node)
        if isinstance(parent, ast.Attribute) and node.attr == "history" and parent.attr != "keys":
            self.source.refuse(parent, f"{self.source.segment(parent)}: the ejected history has rows and keys()")
        if node.attr not in OF_TRAINER:
            hint = did_you_mean(node.attr, OF_TRAINER)
            self.source.refuse(
                node, f"{self.source.segment(node)}: the ejected Trainer has no {node.attr}.{hint} Leave it out"
            )
        self.use.of_trainer.add(node.attr)
        hook = getattr(self.source.scope(node), "name", "")
        ends = hook in ("on_validation_epoch_end", "on_test_epoch_end")
        self.use.peeks |= ends and node.attr in ("callback_metrics", "logged_metrics")

    def _is_trainer(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "trainer"
        if isinstance(node, ast.Call):
            return self.source.hasten_name(node.func) == TRAINER
        return isinstance(node, ast.Name) and node.id in self.trainers

    @functools.cached_property
    def trainers(self) -> set[str]:
        """The variables that hold a Trainer."""
        found = {"trainer"} & loaded_names(self.source.tree)
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            if self.source.hasten_name(node.value.func) == TRAINER:
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found


def trainer_arguments(source: Source, call: ProgramCall, facts: Facts) -> dict[str, ast.expr | str]:
    """Return the arguments of ``Trainer(...)`` by name; those behind ``**`` are looked up."""
    found: dict[str, ast.expr | str] = dict(call.named)
    for spread in call.spread:
        literal = _only_value(source, spread.id) or spread if isinstance(spread, ast.Name) else spread
        if isinstance(literal, ast.Dict) and all(isinstance(key, ast.Constant) for key in literal.keys):
            for key, value in zip(literal.keys, literal.values, strict=True):
                assert isinstance(key, ast.Constant)
                found[str(key.value)] = value
        else:
            # What the first Trainer was given stands for it.
            for name, value in facts.arguments.items():
                found.setdefault(name, repr(value))
    return found


def _only_value(source: Source, name: str) -> ast.expr | None:
    """Return what a variable of the program is, if it is assigned once."""
    assigned = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                assigned.append(node.value)
    return assigned[0] if len(assigned) == 1 else None


def _is_none(call: ProgramCall, name: str) -> bool:
    return name in call.named and _gives_none(call.named[name])


def _assigns(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    """Return whether a statement assigns a value to a variable."""
    return isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets)


def _logged_values(call: ProgramCall, method: str) -> list[ast.expr]:
    """Return the expressions whose values ``self.log`` or ``self.log_dict`` is given."""
    if method == "log":
        return [*call.positional[1:2], *(call.named[one] for one in ("value",) if one in call.named)]
    given = [*call.positional[:1], *(call.named[one] for one in ("dictionary",) if one in call.named)]
    return [value for one in given for value in (one.values if isinstance(one, ast.Dict) else [one])]


def _may_hold_object(value: ast.expr, function: ast.AST | None) -> bool:
    """Return whether a logged value may be an object that the module keeps, such as a metric, and not a number."""
    if isinstance(value, (ast.Attribute, ast.Subscript)):
        return True
    if isinstance(value, ast.IfExp):
        return _may_hold_object(value.body, function) or _may_hold_object(value.orelse, function)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "getattr"
    if not isinstance(value, ast.Name) or function is None:
        return False
    return any(_may_give_object(node, value.id) for node in ast.walk(function))


def _may_give_object(node: ast.AST, name: str) -> bool:
    """Return whether an argument, a loop or an assignment may give a variable an object that the module keeps."""
    if isinstance(node, ast.arg):
        return node.arg == name
    if isinstance(node, (ast.For, ast.comprehension)):
        return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node.target))
    return _assigns(node, name) and not isinstance(node.value, ast.Name) and _may_hold_object(node.value, None)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "pl_module", "model")


def _gives_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _always_leaves(body: list[ast.stmt]) -> bool:
    """Return whether a function never runs past the end of these lines."""
    last = body[-1] if body else None
    if isinstance(last, (ast.Return, ast.Raise)):
        return True
    if isinstance(last, ast.With):
        return _always_leaves(last.body)
    if isinstance(last, ast.If):
        return _always_leaves(last.body) and _always_leaves(last.orelse)
    if isinstance(last, ast.Try):
        ends = _always_leaves(last.orelse or last.body) and all(_always_leaves(one.body) for one in last.handlers)
        return ends or _always_leaves(last.finalbody)
    return isinstance(last, ast.While) and isinstance(last.test, ast.Constant) and bool(last.test.value)


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None
