"""Change the source of a program where it uses hasten."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any, TypeGuard

from hasten_tools.eject.facts import Facts
from hasten_tools.eject.objects import LOGGER_QUIET, ONLY_SHOW, Objects, is_append
from hasten_tools.eject.reader import QUIET, SHOWN, VERBS, is_self, trainer_arguments
from hasten_tools.eject.source import CALLBACK, DATA, MODEL, TRAINER, ProgramCall, Source, remove_unused_imports
from hasten_tools.eject.use import CLASSES, Use

# What stands for arguments that only another Trainer of the program gives.
_BY_DEFAULT = {"accumulate_grad_batches": "1", "check_val_every_n_epoch": "1", "log_every_n_steps": "50"}


class Changes:
    """Changes the source of the program where it uses hasten."""

    def __init__(self, source: Source, facts: Facts, use: Use, objects: Objects, filled: dict[str, Any]) -> None:
        self.source, self.facts, self.use, self.objects, self.filled = source, facts, use, objects, filled

    def make(self) -> None:
        source = self.source
        for statement in source.imports:
            remove_unused_imports(source, statement, lambda name: name not in source.imported)
        for each in source.classes():
            self._change_class(each)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                self._change_inner_call(ProgramCall.of(node))
        for node, name in list(source.uses()):
            self._change_name(node, name)
        # Outer calls are written last, with what was changed inside of them.
        for node in reversed(list(ast.walk(source.tree))):
            if isinstance(node, ast.Call):
                self._change_call(ProgramCall.of(node))
            elif isinstance(node, ast.List):
                shown = [one for one in node.elts if not self.objects.is_dropped(one)]
                if len(shown) < len(node.elts):
                    self.source.replace(node, f"[{', '.join(self.source.changed(one) for one in shown)}]")
        for node in ast.walk(source.tree):
            if self._goes(node):
                source.remove_statement(node)

    def _goes(self, node: ast.AST) -> TypeGuard[ast.stmt]:
        """Return whether a statement is about an object that the plain program does not have."""
        objects = self.objects
        if isinstance(node, ast.ClassDef):
            return node.name in objects.dropped
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            return node.value is not None and isinstance(node.value, ast.Call) and objects.is_dropped(node.value)
        return is_append(node) and objects.is_dropped(node.value.args[0])  # type: ignore[attr-defined]

    def _change_class(self, node: ast.ClassDef) -> None:
        source = self.source
        kind = source.kind_of(node)
        if kind == DATA:
            bases = [base for base in node.bases if source.hasten_name(base) is None]
            if len(bases) < len(node.bases):
                self._without_bases(node, bases)
        if kind not in (MODEL, DATA):
            return
        for statement in ast.walk(node):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                function = statement.value.func
                if isinstance(function, ast.Attribute) and function.attr == "save_hyperparameters":
                    self._change_hyperparameters(statement, ProgramCall.of(statement.value))

    def _without_bases(self, node: ast.ClassDef, bases: list[ast.expr]) -> None:
        source = self.source
        end = node.bases[-1]
        # The parentheses go with the last base.
        text = source.segment(node)
        head = text[: text.index("(")]
        for_all = ast.copy_location(ast.Pass(), node)
        for_all.end_lineno, for_all.end_col_offset = end.end_lineno, (end.end_col_offset or 0) + 1
        for_all.col_offset = node.col_offset
        shown = ", ".join(source.segment(base) for base in bases)
        source.replace(for_all, f"{head}({shown})" if bases else head)

    def _change_hyperparameters(self, statement: ast.Expr, call: ProgramCall) -> None:
        """Replace ``save_hyperparameters`` by an assignment of ``self.hparams``, or remove it if nothing reads them."""
        source = self.source
        read = any(isinstance(one, ast.Attribute) and one.attr == "hparams" for one in ast.walk(source.tree))
        loads = "load_from_checkpoint" in self.use.members
        if not (read or loads):
            source.remove_statement(statement)
            return
        kind = "Hparams" if self.use.hparams_are_dict else "SimpleNamespace"
        function = source.scope(statement)
        if not isinstance(function, ast.FunctionDef):
            source.refuse(statement, "save_hyperparameters outside of __init__")
        chosen = [one.value for one in call.positional if isinstance(one, ast.Constant)]
        if len(chosen) < len(call.positional):
            if loads or chosen or len(call.positional) > 1:
                source.refuse(statement, "save_hyperparameters of an object. Name the arguments that are saved")
            given = source.segment(call.positional[0])
            source.replace(
                statement, f"self.hparams = {kind}(**({given} if isinstance({given}, dict) else vars({given})))"
            )
            return
        shown = self._saved_arguments(statement, call, function.args, chosen)
        line = f"self.hparams = {kind}({', '.join(shown)})"
        if len(line) + statement.col_offset > 100:
            pad = " " * (statement.col_offset + 4)
            listed = "".join(f"{pad}{one},\n" for one in shown)
            line = f"self.hparams = {kind}(\n{listed}{' ' * statement.col_offset})"
        source.replace(statement, line)

    def _saved_arguments(
        self, statement: ast.Expr, call: ProgramCall, arguments: ast.arguments, chosen: list[Any]
    ) -> list[str]:
        """Return the arguments of ``__init__`` that ``save_hyperparameters`` saves, as code that passes them on."""
        source = self.source
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)][1:]
        if arguments.vararg:
            source.refuse(statement, f"save_hyperparameters of *{arguments.vararg.arg}. Name the arguments")
        ignored: list[Any] = []
        if (given_names := call.named.get("ignore")) is not None:
            ignored = [one.value for one in ast.walk(given_names) if isinstance(one, ast.Constant)]
        rest = [f"**{arguments.kwarg.arg}"] if arguments.kwarg and not chosen else []
        if rest and not {*ignored} <= {*names}:
            source.refuse(statement, f"save_hyperparameters ignores a name of {rest[0]}. Name the arguments")
        names = [name for name in names if name not in ignored and (not chosen or name in chosen)]
        return [*(f"{name}={name}" for name in names), *rest]

    def _change_inner_call(self, call: ProgramCall) -> None:
        source, function = self.source, call.node.func
        if not isinstance(function, ast.Attribute):
            return
        if function.attr in ("log", "log_dict") and is_self(function.value) and call.named:
            kept = [name for name in call.named if name not in SHOWN and name != "reduce_fx"]
            if self.use.train_epoch_logs is False:
                kept = [name for name in kept if name not in ("on_step", "on_epoch")]
            if len(kept) < len(call.named):
                arguments = [source.segment(one) for one in call.positional]
                source.replace_call(call, None, [*arguments, *(f"{n}={source.segment(call.named[n])}" for n in kept)])
        elif function.attr == "toggle_model":
            source.replace_call(call, "self.toggled", [source.segment(function.value)])

    def _change_name(self, node: ast.expr, name: str) -> None:
        source = self.source
        parent = source.parent(node)
        if isinstance(parent, ast.ClassDef) and name == DATA:
            return
        if isinstance(parent, ast.Attribute) and source.hasten_name(parent) is not None:
            return
        if source.is_type(node):
            source.replace(node, "Any")
            return
        new = {MODEL: "Module" if self.filled["module"] else "torch.nn.Module", DATA: "object"}.get(name, name)
        if new != source.segment(node):
            source.replace(node, new)
        known = {MODEL, DATA, CALLBACK, TRAINER, "seed_everything", *CLASSES, *ONLY_SHOW}
        if name not in known and not name.endswith("Logger"):
            source.refuse(node, f"{source.segment(node)} is hasten's, and has no short equivalent")

    def _change_call(self, call: ProgramCall) -> None:
        source, function = self.source, call.node.func
        name = source.hasten_name(function)
        if name == TRAINER:
            self._change_trainer(call)
        elif name == "seed_everything":
            seed = call.positional[0] if call.positional else call.named.get("seed")
            source.replace_call(call, name, ["0" if seed is None else source.segment(seed)])
        elif name in CLASSES:
            self._drop(call, name, QUIET)
        elif name in self.use.loggers:
            self._drop(call, name, LOGGER_QUIET)
        elif isinstance(function, ast.Attribute) and function.attr == "load_from_checkpoint":
            self._drop(call, None, {"strict", "weights_only"})
        elif isinstance(function, ast.Attribute) and function.attr in VERBS:
            self._drop(call, None, {"verbose", "weights_only", "return_predictions"})

    def _change_trainer(self, call: ProgramCall) -> None:
        arguments = trainer_arguments(self.source, call, self.facts)
        kept = [(one, value) for one, value in arguments.items() if one in self.filled["kept"]]
        for one in self.filled["kept"]:
            if one in _BY_DEFAULT and one not in arguments:
                kept.append((one, _BY_DEFAULT[one]))
            elif one not in arguments and one != "callbacks":
                self.source.refuse(call.node, f"this Trainer has no {one}, and another has. Give it to both")
        self.source.replace_call(call, TRAINER, [f"{one}={self._listed(one, value)}" for one, value in kept])

    def _drop(self, call: ProgramCall, function: str | None, dropped: Collection[str]) -> None:
        """Write a call without these arguments, if it has any of them."""
        if not call.named.keys().isdisjoint(dropped):
            named = [f"{one}={self._value(value)}" for one, value in call.named.items() if one not in dropped]
            self.source.replace_call(call, function, [*(self._value(one) for one in call.positional), *named])

    def _listed(self, name: str, value: ast.expr | str) -> str:
        """Return the text of an argument; a single callback as a list."""
        if name == "callbacks" and isinstance(value, ast.expr) and self.objects.is_dropped(value):
            return "[]"
        text = self._value(value)
        single = isinstance(value, ast.Call) or self.objects.kinds.get(getattr(value, "id", "")) in CLASSES
        return f"[{text}]" if name == "callbacks" and single else text

    def _value(self, value: ast.expr | str) -> str:
        return value if isinstance(value, str) else self.source.changed(value)
