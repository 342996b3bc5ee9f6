"""Objects of hasten that a program keeps in variables: which of their names it uses, and which objects are removed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from hasten_tools.eject.source import CALLBACK, TRAINER, ProgramCall, Source, assigned

# Loggers that are written, and what the program may use of them.
LOGGERS = {
    "CSVLogger": ("log_dir", "log_hyperparams", "log_metrics", "name", "root_dir", "save_dir", "version"),
    "TensorBoardLogger": (
        "experiment", "log_dir", "log_hyperparams", "log_metrics", "name", "root_dir", "save_dir", "version",
    ),
}  # fmt: skip
LOGGER_ARGUMENTS = ("save_dir", "name", "version")
# Arguments of loggers without which the same values are written.
LOGGER_QUIET = frozenset({"flush_logs_every_n_steps", "log_graph", "default_hp_metric"})
# Callbacks that only show or measure something.
ONLY_SHOW = frozenset(
    {
        "DeviceStatsMonitor", "GarbageCollection", "MemorySnapshot", "ModelSummary", "ProgressBar", "RichModelSummary",
        "RichProgressBar", "SpikeDetection", "ThroughputMonitor", "Timer", "TQDMProgressBar",
    }
)  # fmt: skip
# Attributes that the written callbacks have besides the arguments that they are made with.
ATTRIBUTES = {
    "EarlyStopping": {"monitor", "min_delta", "patience", "mode", "wait_count", "best_score", "stopped_epoch"},
    "ModelCheckpoint": {
        "best_k_models", "best_model_path", "best_model_score", "dirpath", "last_model_path", "monitor", "save_last",
        "save_top_k",
    },
}  # fmt: skip


class Objects:
    """The objects of hasten that the program gives a name to, or a class of its own."""

    def __init__(self, source: Source) -> None:
        self.source = source
        # Whether those loggers stay that can be written.
        self.keeps_loggers = False

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Of each variable that holds one object, or class of the program: the class of hasten."""
        found: dict[str, str] = {}
        for own in self.source.classes():
            if (kind := self.source.kind_of(own)) is not None and kind != CALLBACK:
                found[own.name] = kind
        for node in ast.walk(self.source.tree):
            target, value = assigned(node)
            if target is not None and isinstance(value, ast.Call):
                kind = self.source.hasten_name(value.func) or found.get(getattr(value.func, "id", ""))
                if kind is not None:
                    found[target] = kind
        return found

    @functools.cached_property
    def dropped(self) -> set[str]:
        """The names whose objects or classes the plain program does not have."""
        loggers = {name for name, kind in self.kinds.items() if self._is_left_out(kind)}
        shown = {name for name, kind in self.kinds.items() if kind in ONLY_SHOW}
        for node, name in self._loads(shown | loggers):
            parent = self.source.parent(node)
            if not self._only_passed(node, parent, name in loggers):
                kind = self.kinds[name]
                what = self.source.segment(parent) if isinstance(parent, ast.Attribute) else name
                self.source.refuse(node, f"{what}: the ejected program has no {kind}. Leave it out")
        return shown | loggers

    def is_dropped(self, value: ast.AST) -> bool:
        """Return whether an expression is an object that the plain program does not have."""
        if isinstance(value, ast.Call):
            name = self.source.hasten_name(value.func)
            return name in ONLY_SHOW or self._is_left_out(name) or self.is_dropped(value.func)
        return isinstance(value, ast.Name) and value.id in self.dropped

    def _is_left_out(self, kind: str | None) -> bool:
        return is_logger(kind) and not (self.keeps_loggers and kind in LOGGERS)

    def check_attributes(self) -> None:
        """Refuse what the program reads of its callbacks and loggers, and the written ones do not have."""
        allowed = {**ATTRIBUTES, **{name: set(of) for name, of in LOGGERS.items()}}
        for node in ast.walk(self.source.tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            kind = self.kinds.get(node.value.id, "")
            if kind in allowed and node.attr not in allowed[kind]:
                known = ", ".join(sorted(allowed[kind]))
                self.source.refuse(
                    node, f"{self.source.segment(node)}: the ejected {kind} has {known}, and no {node.attr}"
                )

    def logger_is_used(self) -> bool:
        """Return whether the program uses a logger, and does not only pass it to a Trainer."""
        names = {name for name, kind in self.kinds.items() if kind in LOGGERS}
        return any(isinstance(self.source.parent(node), ast.Attribute) for node, _ in self._loads(names))

    def made_loggers(self) -> Iterator[tuple[ProgramCall, str]]:
        """Yield each call that makes a logger which is written."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Call) and (name := self.source.hasten_name(node.func)) in LOGGERS:
                yield ProgramCall.of(node), str(name)

    def _loads(self, names: set[str]) -> Iterator[tuple[ast.Name, str]]:
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
                yield node, node.id

    def _only_passed(self, node: ast.AST, parent: ast.AST | None, logger: bool) -> bool:
        if isinstance(parent, ast.Call) and parent.func is node:
            return True  # Makes an object, whose uses are looked at by themselves.
        if isinstance(parent, ast.List):
            return True
        if isinstance(parent, ast.keyword):
            call = self.source.parent(parent)
            is_trainer = isinstance(call, ast.Call) and self.source.hasten_name(call.func) == TRAINER
            return is_trainer and parent.arg == ("logger" if logger else "callbacks")
        return _appends(parent, node)


def is_logger(name: str | None) -> bool:
    return name is not None and name.endswith("Logger")


def is_append(statement: ast.AST) -> bool:
    """Return whether a statement is ``callbacks.append(value)``."""
    return isinstance(statement, ast.Expr) and _appends(statement.value, None)


def _appends(call: ast.AST | None, value: ast.AST | None) -> bool:
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "append"
        and len(call.args) == 1
        and (value is None or call.args[0] is value)
    )
