"""Change the text of a program where it uses hasten."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any

from hasten.eject.facts import Facts
from hasten.eject.reader import ONLY_SHOW, QUIET, SHOWN, VERBS, is_self, trainer_arguments
from hasten.eject.source import CALLBACK, DATA, MODEL, TRAINER, ProgramCall, Source
from hasten.eject.writer import CLASSES, Use


class Changes:
    """Changes the text of the program where it uses hasten."""

    def __init__(self, source: Source, facts: Facts, use: Use, comments: list[str], filled: dict[str, Any]) -> None:
        self.source, self.facts, self.use, self.comments, self.filled = source, facts, use, comments, filled

    def make(self) -> None:
        source = self.source
        for node in source.imports:
            source.remove_statement(node)  # type: ignore[arg-type]
        for each in source.classes():
            self._change_class(each)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                self._change_inner_call(ProgramCall.of(node))
        for node, name in list(source.uses()):
            self._change_name(node, name)
        # Outer calls are written last, with what was changed inside of them.
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                self._change_call(ProgramCall.of(node))

    def _change_class(self, node: ast.ClassDef) -> None:
        source = self.source
        kind = source.kind_of(node)
        if kind == DATA:
            bases = [base for base in node.bases if source.hasten_name(base) is None]
            if len(bases) < len(node.bases):
                self._without_bases(node, bases)
        if kind != MODEL:
            return
        for statement in ast.walk(node):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                function = statement.value.func
                if isinstance(function, ast.Attribute) and function.attr == "save_hyperparameters":
                    self._change_hyperparameters(node, statement, ProgramCall.of(statement.value))

    def _without_bases(self, node: ast.ClassDef, bases: list[ast.expr]) -> None:
        source = self.source
        start, end = node.bases[0], node.bases[-1]
        # The parentheses go with the last base.
        text = source.segment(node)
        head = text[: text.index("(")]
        for_all = ast.copy_location(ast.Pass(), node)
        for_all.end_lineno, for_all.end_col_offset = end.end_lineno, (end.end_col_offset or 0) + 1
        for_all.col_offset = node.col_offset
        shown = ", ".join(source.segment(base) for base in bases)
        source.replace(for_all, f"{head}({shown})" if bases else head)
        del start

    def _change_hyperparameters(self, node: ast.ClassDef, statement: ast.Expr, call: ProgramCall) -> None:
        source = self.source
        if not any(isinstance(one, ast.Attribute) and one.attr == "hparams" for one in ast.walk(source.tree)):
            source.remove_statement(statement)
            return
        function = source.scope(statement)
        if not isinstance(function, ast.FunctionDef):
            source.refuse(statement, "save_hyperparameters outside of __init__")
        arguments = function.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)][1:]
        if arguments.vararg or arguments.kwarg:
            source.refuse(statement, "save_hyperparameters of *args or **kwargs. Name the arguments")
        chosen = [one.value for one in call.positional if isinstance(one, ast.Constant)]
        ignored: list[Any] = []
        if (given := call.named.get("ignore")) is not None:
            ignored = [one.value for one in ast.walk(given) if isinstance(one, ast.Constant)]
        if len(chosen) < len(call.positional):
            source.refuse(statement, "save_hyperparameters of an object. Assign it to an attribute")
        names = [name for name in names if name not in ignored and (not chosen or name in chosen)]
        for one in ast.walk(source.tree):
            if isinstance(one, ast.Subscript) and isinstance(one.value, ast.Attribute) and one.value.attr == "hparams":
                self.filled["dictionary"] = True
        text = ", ".join(f"{name}={name}" for name in names)
        line = f"self.hparams = SimpleNamespace({text})"
        if len(line) + statement.col_offset > 100:
            pad = " " * (statement.col_offset + 4)
            listed = "".join(f"{pad}{name}={name},\n" for name in names)
            line = f"self.hparams = SimpleNamespace(\n{listed}{' ' * statement.col_offset})"
        source.replace(statement, line)
        if self.filled.get("dictionary"):
            source.refuse(statement, "self.hparams[...] is read as a dict. Write self.hparams.name")

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
        if name == MODEL and not isinstance(parent, ast.ClassDef) and not self.filled["module"]:
            new = "torch.nn.Module"
        if new != source.segment(node):
            source.replace(node, new)
        known = {MODEL, DATA, CALLBACK, TRAINER, "seed_everything", *CLASSES, *ONLY_SHOW}
        if name not in known and not name.endswith("Logger"):
            source.refuse(node, f"{source.segment(node)} is hasten's, and has no short equivalent")

    def _change_call(self, call: ProgramCall) -> None:
        source, function = self.source, call.node.func
        name = source.hasten_name(function)
        if name == TRAINER:
            arguments = trainer_arguments(source, call, self.facts)
            kept = [(one, value) for one, value in arguments.items() if one in self.filled["kept"]]
            for one in self.filled["kept"]:
                if one not in arguments and one != "callbacks":
                    source.refuse(call.node, f"this Trainer has no {one}, and another has. Give it to both")
            source.replace_call(call, TRAINER, [f"{one}={self._listed(one, value)}" for one, value in kept])
        elif name == "seed_everything":
            seed = call.positional[0] if call.positional else call.named.get("seed")
            source.replace_call(call, name, ["0" if seed is None else source.segment(seed)])
        elif name in CLASSES:
            self._drop(call, name, QUIET)
        elif isinstance(function, ast.Attribute) and function.attr in VERBS:
            self._drop(call, None, {"verbose", "weights_only", "return_predictions"})

    def _drop(self, call: ProgramCall, function: str | None, dropped: Collection[str]) -> None:
        """Write a call without these arguments, if it has any of them."""
        if not call.named.keys().isdisjoint(dropped):
            named = [f"{one}={self._value(value)}" for one, value in call.named.items() if one not in dropped]
            self.source.replace_call(call, function, [*(self._value(one) for one in call.positional), *named])

    def _listed(self, name: str, value: ast.expr | str) -> str:
        """Return the text of an argument; a single callback as a list."""
        text = self._value(value)
        return f"[{text}]" if name == "callbacks" and isinstance(value, ast.Call) else text

    def _value(self, value: ast.expr | str) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, ast.List):
            shown = [one for one in value.elts if not self._only_shows(one)]
            if len(shown) < len(value.elts):
                return f"[{', '.join(self.source.changed(one) for one in shown)}]"
        return self.source.changed(value)

    def _only_shows(self, value: ast.expr) -> bool:
        return isinstance(value, ast.Call) and self.source.hasten_name(value.func) in ONLY_SHOW
