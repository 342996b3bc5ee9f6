"""Find out what a program uses of hasten; refuse what cannot be ejected, naming the line."""

from __future__ import annotations

import ast
import functools
import sys
from typing import Any

from torch import nn

from hasten._lib.names import did_you_mean
from hasten.eject.facts import Facts
from hasten.eject.source import CALLBACK, DATA, MODEL, TRAINER, ProgramCall, Source, loaded_names
from hasten.eject.writer import CLASSES, LEFT_OUT, SILENT, VALUES, Use
from hasten.hooks import HOOK_NAMES
from hasten.module import LightningModule

VERBS = ("fit", "validate", "test", "predict")
# Members of a LightningModule that the templates have.
MEMBERS = frozenset(
    {
        "automatic_optimization", "clip_gradients", "current_epoch", "device", "freeze", "global_step", "log",
        "log_dict", "lr_scheduler_step", "lr_schedulers", "manual_backward", "optimizer_step", "optimizer_zero_grad",
        "optimizers", "print", "toggle_optimizer", "toggled", "trainer", "unfreeze", "untoggle_optimizer",
    }
)  # fmt: skip
# Hooks of a module that the ejected loop calls.
MODEL_HOOKS = frozenset(
    {
        "backward", "configure_gradient_clipping", "configure_model", "lr_scheduler_step", "on_after_backward",
        "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_fit_end", "on_fit_start",
        "on_train_batch_end", "on_train_batch_start", "on_train_end", "on_train_epoch_end", "on_train_epoch_start",
        "on_train_start", "optimizer_step", "optimizer_zero_grad", "prepare_data", "setup",
    }
    | {f"on_{stage}{part}" for stage in ("validation", "test")
       for part in ("_start", "_end", "_epoch_start", "_epoch_end", "_batch_start", "_batch_end")}
)  # fmt: skip
CALLBACK_HOOKS = MODEL_HOOKS & HOOK_NAMES - {"configure_model", "prepare_data"}
DATA_METHODS = frozenset(
    {"prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
)
OF_TRAINER = frozenset(
    {
        "accumulate_grad_batches", "callback_metrics", "callbacks", "current_epoch", "datamodule",
        "estimated_stepping_batches", "fast_dev_run", "global_rank", "global_step", "is_global_zero", "local_rank",
        "max_epochs", "max_steps", "num_training_batches", "optimizers", "sanity_checking", "save_checkpoint",
        "should_stop", "world_size",
    }
)  # fmt: skip
# Options of self.log that change nothing here.
SHOWN = frozenset(
    {"prog_bar", "logger", "sync_dist", "rank_zero_only", "add_dataloader_idx", "sync_dist_group", "enable_graph"}
)
# Arguments of callbacks that are about what is printed.
QUIET = frozenset({"verbose", "rounding", "log_rank_zero_only", "check_finite", "filename", "auto_insert_metric_name",
                    "device", "logging_interval", "strict"})  # fmt: skip
SIGNATURES = {
    "EarlyStopping": ("monitor", "min_delta", "patience", "mode"),
    "ModelCheckpoint": ("dirpath", "monitor", "save_last", "save_top_k", "mode"),
    "LearningRateMonitor": (),
    "GradientAccumulationScheduler": ("scheduling",),
    "BackboneFinetuning": ("unfreeze_backbone_at_epoch", "backbone_initial_ratio_lr"),
    "EMAWeightAveraging": ("decay", "update_every_n_steps"),
    "StochasticWeightAveraging": ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy"),
}  # fmt: skip
# Arguments of these that stand in the same place here.
POSITIONAL = {
    "EarlyStopping": 3, "ModelCheckpoint": 1, "GradientAccumulationScheduler": 1, "BackboneFinetuning": 1,
    "StochasticWeightAveraging": 4,
}  # fmt: skip
# Arguments in which the Trainers of a program may differ.
_FREE = frozenset(
    {
        "callbacks", "default_root_dir", "enable_autolog_hparams", "enable_model_summary", "enable_progress_bar",
        "log_every_n_steps", "max_epochs", "num_sanity_val_steps",
    }
)  # fmt: skip
_DDP = frozenset({"ddp", "ddp_find_unused_parameters_true", "ddp_fork", "ddp_notebook", "ddp_spawn"})
# Callbacks that only show or measure something.
ONLY_SHOW = frozenset(
    {
        "DeviceStatsMonitor", "ModelSummary", "ProgressBar", "RichModelSummary", "RichProgressBar", "SpikeDetection",
        "ThroughputMonitor", "Timer", "TQDMProgressBar",
    }
)  # fmt: skip


class UseReader:
    """Finds out what the program uses of hasten; refuses what cannot be ejected, naming the line."""

    def __init__(self, source: Source, facts: Facts, use: Use, comments: list[str]) -> None:
        self.source, self.facts, self.use, self.comments = source, facts, use, comments

    def read(self) -> None:
        source, use = self.source, self.use
        models = [node for node in source.classes() if source.kind_of(node) == MODEL]
        if self.facts.trained.__name__ not in {node.name for node in models}:
            trained = self.facts.trained
            source.refuse(
                source.tree.body[0],
                f"{trained.__name__} comes from {trained.__module__}; eject writes one file. Move the class here",
            )
        for kind in source.classes():
            self._read_class_of_program(kind)
        owned = [{one.name for one in node.body if isinstance(one, ast.FunctionDef)} for node in models]
        use.missing_hooks = {name for name in use.model_hooks if not all(name in names for names in owned)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                self._read_call(ProgramCall.of(node))
            elif isinstance(node, ast.Attribute) and self._is_trainer(node.value):
                self._read_trainer_attribute(node)
        if "fit" not in use.verbs:
            source.refuse(source.tree.body[0], "it does not call Trainer.fit")
        modules = {(n.module or "") if isinstance(n, ast.ImportFrom) else n.names[0].name
                   for n in ast.walk(source.tree) if isinstance(n, (ast.Import, ast.ImportFrom))}  # fmt: skip
        known = {*sys.stdlib_module_names, "torch", "hasten", "lightning", "pytorch_lightning", ""}
        use.third_party = any(module.split(".")[0] not in known for module in modules)

    # -- classes

    def _read_class_of_program(self, node: ast.ClassDef) -> None:
        kind = self.source.kind_of(node)
        if kind == MODEL:
            self._read_model(node)
        elif kind == DATA:
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            self.use.data_methods |= methods
            self.use.data_hooks |= methods & {"teardown", *MODEL_HOOKS} - {"setup", "prepare_data"}
        elif kind == CALLBACK:
            self._read_callback(node)
        elif kind == TRAINER:
            self.source.refuse(node, f"{node.name} is a Trainer: its methods have no place in the ejected loop")

    def _read_model(self, node: ast.ClassDef) -> None:
        source, use = self.source, self.use
        own = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        assigned = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        for name, function in own.items():
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
            if name == "on_train_batch_start" and any(map(_is_minus_one, ast.walk(function))):
                source.refuse(function, "on_train_batch_start ends epochs by returning -1, which the loop does not do")
        if "automatic_optimization" in assigned or not self.facts.automatic:
            use.members.add("automatic_optimization")
        for one in ast.walk(node):
            if not isinstance(one, ast.Attribute):
                continue
            of_self = isinstance(one.value, ast.Name) and one.value.id == "self"
            of_super = (
                isinstance(one.value, ast.Call)
                and isinstance(one.value.func, ast.Name)
                and one.value.func.id == "super"
            )
            if not (of_self or of_super) or (one.attr in own and of_self):
                continue
            self._read_member(one, assigned if of_self else set())

    def _read_member(self, node: ast.Attribute, assigned: set[str]) -> None:
        name, source, use = node.attr, self.source, self.use
        if name in ("save_hyperparameters", "hparams", "__init__") or not hasattr(LightningModule, name):
            return
        if name in MEMBERS:
            use.members.add(name)
            if name == "untoggle_optimizer":
                use.members.add("toggle_optimizer")
        elif name in HOOK_NAMES and name.startswith(("on_", "setup")):
            use.missing_hooks.add(name)
        elif name not in assigned and not hasattr(nn.Module, name):
            source.refuse(node, f"{source.segment(node)} is hasten's, and the ejected model does not have it")

    def _read_returns(self, function: ast.FunctionDef) -> None:
        kinds = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and self.source.scope(node) is function:
                value = node.value
                if value is None or (isinstance(value, ast.Constant) and value.value is None):
                    kinds.add("none")
                elif isinstance(value, ast.Dict):
                    keys = {one.value for one in value.keys if isinstance(one, ast.Constant)}
                    if "loss_weight" in keys:
                        self.source.refuse(
                            node, '"loss_weight" weighs the batches of an accumulation; divide in training_step'
                        )
                    kinds.add("dict")
                elif isinstance(value, ast.Name) and _holds_dict(function, value.id):
                    kinds.add("dict")
                else:
                    kinds.add("tensor")
        kinds = kinds or {"none"}
        if not self.facts.automatic:
            return
        self.use.may_skip = "none" in kinds
        self.use.output = "any" if {"dict", "tensor"} <= kinds else ("dict" if "dict" in kinds else "tensor")
        if self.use.may_skip and self.use.output != "tensor":
            self.source.refuse(function, "training_step returns a dict or nothing. Return the loss or None")

    def _read_callback(self, node: ast.ClassDef) -> None:
        use = self.use
        use.user_callbacks = True
        base = next((name for one in node.bases if (name := self.source.hasten_name(one)) is not None), None)
        if base not in (None, CALLBACK):
            self.source.refuse(node, f"{node.name} changes hasten's {base}, which the ejected program does not have")
        for one in node.body:
            if not isinstance(one, ast.FunctionDef):
                continue
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
            note = f"{name} left out: it changes nothing in training"
            if note not in self.comments:
                self.comments.append(note)
        elif name is not None and name[:1].isupper() and not self._is_known(call, name):
            source.refuse(call.node, f"{name} is hasten's, and has no short equivalent")
        if isinstance(function, ast.Attribute):
            if function.attr in VERBS and self._is_trainer(function.value):
                self._read_verb(call, function.attr)
            elif function.attr in ("log", "log_dict") and is_self(function.value):
                self._read_log(call, function.attr)
            elif function.attr == "toggle_model":
                use.members.add("toggled")
            elif function.attr in ("load_from_checkpoint", "to_onnx", "to_torchscript"):
                source.refuse(call.node, f"{function.attr} is hasten's. Use torch.load and load_state_dict")

    def _is_known(self, call: ProgramCall, name: str) -> bool:
        """Return whether a call makes an object of a base class, or a logger as an argument of a Trainer."""
        parent = self.source.parent(call.node)
        if name in (MODEL, DATA, CALLBACK):
            return True
        return name.endswith("Logger") and isinstance(parent, (ast.keyword, ast.List))

    def _read_argument(self, call: ProgramCall, name: str, written: ast.expr | str) -> None:
        source, use, given = self.source, self.use, self.facts.arguments
        value = given.get(name)
        literal = written.value if isinstance(written, ast.Constant) else value
        off = literal in (None, False) or (name == "accumulate_grad_batches" and literal == 1)
        differs = literal != value if name not in VALUES else value is None
        if literal is not value and differs and not off and name not in _FREE:
            source.refuse(
                call.node, f"another Trainer has not {name}={literal!r}: one loop serves both. Give it to both"
            )
        if name in VALUES:
            use.parameters.add(name)
        elif name in LEFT_OUT and value not in (None, False):
            if LEFT_OUT[name] not in self.comments:
                self.comments.append(LEFT_OUT[name])
        elif name in given and name not in SILENT and name not in LEFT_OUT:
            source.refuse(call.node, f"Trainer({name}={value!r}) has no short equivalent. Leave it out before ejecting")
        if name == "logger" and value not in (None, True, False):
            kind = ", ".join(type(one).__name__ for one in (value if isinstance(value, (list, tuple)) else [value]))
            note = f"logger={kind} left out: values go to metrics.jsonl"
            if note not in self.comments:
                self.comments.append(note)
        if name in ("devices", "num_nodes", "strategy") and not _is_single(name, value):
            source.refuse(call.node, f"Trainer({name}={value!r}) has no short equivalent. Use strategy='ddp'")

    def _read_class(self, call: ProgramCall, name: str) -> None:
        use, source = self.use, self.source
        use.classes.add(name)
        known = SIGNATURES[name]
        if len(call.positional) > POSITIONAL.get(name, 0):
            source.refuse(call.node, f"{name}: name its arguments, as in {name}({known[-1]}=...)")
        for argument, value in call.named.items():
            if argument not in (*known, *QUIET):
                source.refuse(
                    call.node, f"{name}({argument}=...) has no short equivalent. It can have {', '.join(known)}"
                )
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
        use.verbs.setdefault(verb, set()).update(given)
        if verb != "fit":
            if not given & {"dataloaders", "datamodule"}:
                use.without_data.add(verb)
            if "model" not in given or _is_none(call, "model"):
                use.without_model.add(verb)
            verbose = call.named.get("verbose")
            if verb != "predict" and not (isinstance(verbose, ast.Constant) and verbose.value is False):
                use.loud.add(verb)

    def _is_datamodule(self, call: ProgramCall, place: int) -> bool:
        value = call.positional[place] if place < len(call.positional) else None
        if not isinstance(value, ast.Name):
            return False
        return any(
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and any(isinstance(target, ast.Name) and target.id == value.id for target in node.targets)
            and any(one.name == getattr(node.value.func, "id", "") and self.source.kind_of(one) == DATA
                    for one in self.source.classes())
            for node in ast.walk(self.source.tree)
        )  # fmt: skip

    def _read_log(self, call: ProgramCall, method: str) -> None:
        use, source = self.use, self.source
        function = source.scope(call.node)
        hook = function.name if isinstance(function, ast.FunctionDef) else ""
        for name, value in call.named.items():
            if name == "reduce_fx" and not (isinstance(value, ast.Constant) and value.value == "mean"):
                source.refuse(call.node, "self.log(reduce_fx=...): the ejected loop computes means")
            elif name not in (*SHOWN, "batch_size", "on_step", "on_epoch", "name", "value", "reduce_fx"):
                source.refuse(call.node, f"self.{method}({name}=...) has no short equivalent")
        values = [*call.positional[1:], *(call.named[one] for one in ("value",) if one in call.named)]
        if "torchmetrics" in source.text and any(isinstance(one, ast.Attribute) for one in values):
            source.refuse(call.node, "a torchmetrics.Metric is logged. Log its compute() when the epoch ends")
        if "batch_size" in call.named:
            use.log_options.add("batch_size")
        else:
            use.unweighed_logs = True
        in_training = not hook.startswith(("validation", "test", "on_validation", "on_test"))
        evaluates = {"training_step", "on_train_batch_start", "on_train_batch_end"}
        on_epoch = _constant(call.named.get("on_epoch"))
        if not in_training:
            use.evaluation_logs = True
            if _constant(call.named.get("on_step")) is True:
                source.refuse(
                    call.node, f"self.{method}(on_step=True) in {hook}: the ejected loop computes means there"
                )
        elif hook in evaluates or not hook.startswith("on_"):
            own = on_epoch is True or "on_step" in call.named or (on_epoch is None and "on_epoch" in call.named)
            use.train_epoch_logs |= own
            use.step_logs |= not own
            # A method that both kinds of steps call.
            use.evaluation_logs |= hook not in evaluates
        else:
            use.evaluation_logs = True
        if in_training:
            first = call.positional[0] if call.positional else call.named.get("name")
            if method == "log" and isinstance(first, ast.Constant):
                use.logged_in_training.add(str(first.value))
            elif isinstance(first, ast.Dict):
                use.logged_in_training |= {str(one.value) for one in first.keys if isinstance(one, ast.Constant)}
        if source.class_of(call.node) is None:
            source.refuse(call.node, f"self.{method} outside of a class")

    def _read_trainer_attribute(self, node: ast.Attribute) -> None:
        if node.attr in VERBS:
            return
        if node.attr not in OF_TRAINER:
            hint = did_you_mean(node.attr, OF_TRAINER)
            self.source.refuse(
                node,
                f"{self.source.segment(node)}: the ejected Trainer has no {node.attr}.{hint} Leave it out",
            )
        self.use.of_trainer.add(node.attr)

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
            made = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            if made and self.source.hasten_name(node.value.func) == TRAINER:  # type: ignore[attr-defined]
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}  # type: ignore[attr-defined]
        return found


def trainer_arguments(source: Source, call: ProgramCall, facts: Facts) -> dict[str, ast.expr | str]:
    """Return the arguments of ``Trainer(...)`` by name; those behind ``**`` are looked up."""
    found: dict[str, ast.expr | str] = dict(call.named)
    for spread in call.spread:
        literal = spread
        if isinstance(spread, ast.Name):
            assigned = [
                node.value
                for node in ast.walk(source.tree)
                if isinstance(node, (ast.Assign, ast.AnnAssign))
                and any(
                    isinstance(target, ast.Name) and target.id == spread.id
                    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                )
            ]
            literal = assigned[0] if len(assigned) == 1 and assigned[0] is not None else spread
        if isinstance(literal, ast.Dict) and all(isinstance(key, ast.Constant) for key in literal.keys):
            for key, value in zip(literal.keys, literal.values, strict=True):
                assert isinstance(key, ast.Constant)
                found[str(key.value)] = value
        else:
            # What the first Trainer was given stands for it.
            for name, value in facts.arguments.items():
                found.setdefault(name, repr(value))
    return found


def _holds_dict(function: ast.FunctionDef, name: str) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        for node in ast.walk(function)
    )


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "pl_module", "model")


def _is_minus_one(node: ast.AST) -> bool:
    return isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) == "-1"


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _is_none(call: ProgramCall, name: str) -> bool:
    value = call.named.get(name)
    return isinstance(value, ast.Constant) and value.value is None


def _is_single(name: str, value: object) -> bool:
    """Return whether an argument stands for one device, or for several that DDP joins."""
    if name != "strategy":
        return True
    return value in (None, "auto", "single_device") or (isinstance(value, str) and value in _DDP)
