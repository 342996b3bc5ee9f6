"""Measure how the package is built: sizes, types, private accesses, and the files that four common paths run through.

    python scripts/structure.py                    this checkout
    python scripts/structure.py ../before .        two checkouts side by side

Sizes are read from the source with ``ast`` and ``tokenize``. The files of each path ("walk") are recorded with
``sys.setprofile`` in a new process that trains a tiny model on the CPU; ``--no-walks`` leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WALKS = ("batch", "logged value", "save", "restore", "Fabric.setup")

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# It gives public names to functions of torch, which are not counted where they are called by their own names.
_NAMES_OF_TORCH = "_lib/torch_private.py"

# Names of named tuples, and names of torch that parts of this package use too.
_FROM_ELSEWHERE = {
    "_fields",
    "_asdict",
    "_replace",
    "_make",
    "_parameters",
    "_buffers",
    "_modules",
    "_version",
    "_metadata",
    "_apply",
    "_world",
    "_compile",
    "_rebuild_buckets",
    "_computed",
}
_PUBLIC_SPECIAL_METHODS = {"__init__", "__call__"}


@dataclass(frozen=True)
class Source:
    """One file: its path below ``src/hasten``, or below ``src`` in another root; its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module
    root: str = "hasten"

    @property
    def room(self) -> str:
        """The package directly below a root, ``"hasten_tools/speed"``, without the root in the core, where the files
        beside it are one package, ``""``."""
        depth = 1 if self.root == "hasten" else 2
        return "/".join(self.path.parts[:-1][:depth])

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, which many measures look at."""
        return list(ast.walk(self.tree))

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.path.with_suffix("").parts if part != "__init__")


def read_sources(root: Path = ROOT) -> list[Source]:
    """Return the files of all packages in ``root/src``, those of the core first."""
    found = []
    with _collector_off():
        for package in sorted((root / "src").glob("hasten*/")):
            base = package if package.name == "hasten" else package.parent
            for path in sorted(package.rglob("*.py")):
                text = path.read_text(encoding="utf-8")
                found.append(Source(path.relative_to(base), text, ast.parse(text), package.name))
    return found


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the garbage collector from looking for garbage among nodes that all stay: 3 s of the 4 s of reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Lines


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that belong to docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def code_lines(source: Source) -> int:
    """Return the number of lines that are neither blank nor comment nor docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in _NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstring_lines(source.tree))


def files_per_package(sources: list[Source]) -> Counter[str]:
    """Return the number of files in each folder, which is named as below ``hasten``."""
    return Counter(source.path.parent.as_posix() for source in sources)


# Types


@dataclass(frozen=True)
class Typing:
    """How many parameters and results of public functions there are, and how many of them say nothing."""

    parameters: int
    untyped: list[str]
    functions: int
    untyped_results: list[str]


def _says_nothing(annotation: ast.expr | None) -> bool:
    return annotation is None or ast.unparse(annotation).strip("'\"") in ("Any", "typing.Any")


def _public_functions(
    body: list[ast.stmt], path: str, in_class: bool = False
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body, f"{path}.{node.name}", in_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_") or node.name in _PUBLIC_SPECIAL_METHODS:
                yield f"{path}.{node.name}", node, in_class
        elif isinstance(node, ast.If | ast.Try):
            yield from _public_functions([*node.body, *node.orelse], path, in_class)


def _is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).endswith("overload") for one in function.decorator_list)


def named_parameters(source: Source) -> Iterator[tuple[str, ast.arg]]:
    """Yield the parameters of public functions and methods, without ``self``, ``*args`` and ``**kwargs``."""
    for path, function, in_class in _public_functions(source.tree.body, source.path.as_posix()):
        named = [*function.args.posonlyargs, *function.args.args]
        if in_class and "staticmethod" not in [ast.unparse(each) for each in function.decorator_list]:
            named = named[1:]
        for parameter in (*named, *function.args.kwonlyargs):
            yield path, parameter


def typing_of(sources: list[Source]) -> Typing:
    """Count the parameters and results of public functions and methods that are bare ``Any`` or not annotated."""
    parameters, functions = 0, 0
    untyped: list[str] = []
    untyped_results: list[str] = []
    for source in sources:
        if not source.is_public:
            continue
        for path, function, in_class in _public_functions(source.tree.body, source.path.as_posix()):
            arguments = function.args
            named = [*arguments.posonlyargs, *arguments.args]
            if in_class and "staticmethod" not in [ast.unparse(one) for one in function.decorator_list]:
                named = named[1:]
            starred = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
            every = [*named, *arguments.kwonlyargs, *starred]
            parameters += len(every)
            untyped += [f"{path}({one.arg})" for one in every if _says_nothing(one.annotation)]
            if function.name != "__init__":
                functions += 1
                if _says_nothing(function.returns) and not _is_overload(function):
                    untyped_results.append(path)
    return Typing(parameters, untyped, functions, untyped_results)


# Names


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def _private_names_defined(source: Source) -> set[str]:
    """Return the private names that a file gives to its functions, classes, variables and attributes."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Call | ast.Subscript):
            accessed = _accessed_by_string(node)
            if accessed is not None and _is_own(accessed[0]):
                found.add(accessed[1])
        elif isinstance(node, ast.Assign) and any(ast.unparse(one) == "__slots__" for one in node.targets):
            found |= {one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    return {name for name in found if isinstance(name, str) and _is_private(name)}


def _is_own(receiver: ast.expr) -> bool:
    if isinstance(receiver, ast.Call):
        return ast.unparse(receiver.func) == "super"
    return isinstance(receiver, ast.Name) and receiver.id in ("self", "cls", "mcs")


def _accessed_by_string(node: ast.Call | ast.Subscript) -> tuple[ast.expr, str] | None:
    """Return (object, name) of ``getattr(object, "_name")``, ``object.__dict__["_name"]`` and the like."""
    if isinstance(node, ast.Subscript):
        holder, key = node.value, node.slice
        if isinstance(holder, ast.Attribute) and holder.attr == "__dict__":
            owner = holder.value
        elif isinstance(holder, ast.Call) and ast.unparse(holder.func) == "vars" and holder.args:
            owner = holder.args[0]
        else:
            return None
    elif isinstance(node.func, ast.Name) and len(node.args) >= 2:
        if node.func.id not in ("getattr", "setattr", "hasattr", "delattr"):
            return None
        owner, key = node.args[:2]
    else:
        return None
    if isinstance(key, ast.Constant) and isinstance(key.value, str) and _is_private(key.value):
        return owner, key.value
    return None


def _last_name(receiver: ast.expr) -> str:
    if isinstance(receiver, ast.Attribute):
        return receiver.attr.lstrip("_")
    return receiver.id.lstrip("_") if isinstance(receiver, ast.Name) else ""


def private_accesses(sources: list[Source]) -> list[str]:
    """Return each use of a private name of another package as ``file:line expression``.

    A name counts as another package's if only other packages define it, or if the object is called like a module of
    another package that defines it: ``trainer._run`` outside of the package of the trainer. ``hasten_lightning``
    is left out: its facades give internals the names that Lightning's have.
    """
    defined: dict[str, set[str]] = defaultdict(set)
    defined_in_module: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    for source in sources:
        names = _private_names_defined(source)
        defined[source.room] |= names
        stem = source.path.parent.name if source.path.stem == "__init__" else source.path.stem
        defined_in_module[stem].append((source.room, names))
        if source.room:
            defined_in_module[source.room.rpartition("/")[2]].append((source.room, names))
    everywhere = set().union(*defined.values())

    def is_foreign(room: str, receiver: ast.expr, name: str) -> bool:
        if not _is_private(name) or name in _FROM_ELSEWHERE or name not in everywhere:
            return False
        if _is_own(receiver) or _last_name(receiver) == "torch":
            return False
        if name not in defined[room]:
            return True
        owners = {owner for owner, names in defined_in_module[_last_name(receiver)] if name in names}
        return bool(owners) and room not in owners

    found = []
    for source in (source for source in sources if source.root != "hasten_lightning"):
        for node in source.nodes:
            where = f"{source.path.as_posix()}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and is_foreign(source.room, node.value, node.attr):
                found.append(f"{where} {ast.unparse(node)}")
            elif isinstance(node, ast.Call | ast.Subscript):
                accessed = _accessed_by_string(node)
                if accessed is not None and is_foreign(source.room, *accessed):
                    found.append(f"{where} {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hasten"):
                room = "/".join((node.module or "").split(".")[:2]).removeprefix("hasten/")
                home = room if room in defined else ""
                private = [alias.name for alias in node.names if _is_private(alias.name)]
                if private and home != source.room:
                    found.append(f"{where} from {node.module} import {', '.join(private)}")
    return sorted(found)


def duplicate_classes(sources: list[Source]) -> dict[str, list[str]]:
    """Return the names that classes of more than one file have, with those files, facades aside."""
    files: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not any(
                ast.unparse(word.value) == "Facade" for word in node.keywords
            ):
                files[node.name].add(source.path.as_posix())
    return {name: sorted(paths) for name, paths in sorted(files.items()) if len(paths) > 1}


# Walks


def walks(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the files of the package in which functions run on each walk, from a new process."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--record-walks"],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"recording the walks of {root} failed:\n{done.stderr[-3000:]}")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def record_walks() -> dict[str, list[str]]:
    """Train, log, save, restore and set up Fabric; return the files that run for each.

    The first time, each walk imports modules and fills caches, so the second time is recorded. The files that restore
    a checkpoint are those whose functions run in a resumed ``fit`` and not in a fresh one.

    A part that saves and restores itself by PyTorch's ``state_dict`` and ``load_state_dict`` is one step of the walk:
    what runs inside these two methods is not recorded.
    """
    import torch

    import hasten

    gc.disable()  # Finalizers and callbacks of the collector would be recorded by chance.
    package = os.path.dirname(os.path.abspath(hasten.__file__))

    class Recorder:
        """The functions of the package that run while it is on."""

        def __init__(self) -> None:
            self.called: set[tuple[str, str]] = set()
            self._part: Any = None  # The frame of a part that saves or restores itself.

        def _record(self, frame: Any, event: str, argument: object) -> None:
            code = frame.f_code
            if self._part is not None:
                self._part = None if event == "return" and frame is self._part else self._part
            elif event == "call" and code.co_filename.startswith(package):
                if code.co_name in ("state_dict", "load_state_dict"):
                    self._part = frame
                elif code.co_flags & 0x1:  # CO_OPTIMIZED: neither a module nor the body of a class.
                    self.called.add((os.path.relpath(code.co_filename, package), code.co_qualname))

        def __enter__(self) -> Recorder:
            sys.setprofile(self._record)
            return self

        def __exit__(self, *error: object) -> None:
            sys.setprofile(None)

        def files(self, without: Set[tuple[str, str]] = frozenset()) -> list[str]:
            return sorted({path for path, _ in self.called - without} - {_NAMES_OF_TORCH})

    class Regression(hasten.LightningModule):
        """A linear model that calls ``at_step(module, batch_idx)`` at the start of each training step."""

        def __init__(self, at_step: Callable[[Any, int], None] | None = None) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
            self.at_step = at_step

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.at_step is not None:
                self.at_step(self, batch_idx)
            x, y = batch
            return torch.nn.functional.mse_loss(self.layer(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    samples = torch.utils.data.TensorDataset(torch.randn(400, 8), torch.randn(400, 1))

    def loader() -> Any:
        return torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)

    def trainer(**arguments: Any) -> Any:
        return hasten.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **arguments,
        )

    found: dict[str, list[str]] = {}

    batch = Recorder()

    def observe_batch(module: Any, batch_idx: int) -> None:
        # From one training step to the next: whole turns of the loop.
        sys.setprofile(batch._record if batch_idx in range(60, 80) else None)

    trainer(max_epochs=1).fit(Regression(observe_batch), loader())
    found["batch"] = batch.files()

    logged = Recorder()

    def log(module: Any, batch_idx: int) -> None:
        value = torch.ones(())
        if batch_idx in range(60, 80):
            with logged:
                module.log("value", value, on_step=True, on_epoch=True)
        else:
            module.log("value", value, on_step=True, on_epoch=True)

    trainer(max_epochs=1).fit(Regression(log), loader())
    found["logged value"] = logged.files()

    saving = trainer(max_steps=10)
    saving.fit(Regression(), loader())
    saving.save_checkpoint("first.ckpt")
    with Recorder() as save:
        saving.save_checkpoint("second.ckpt")
    found["save"] = save.files()

    def fit(**arguments: Any) -> Recorder:
        resumed, module = trainer(max_steps=20), Regression()
        with Recorder() as recorder:
            resumed.fit(module, loader(), **arguments)
        return recorder

    for _ in range(2):
        fresh, restored = fit(), fit(ckpt_path="second.ckpt")
    found["restore"] = restored.files(without=fresh.called)

    def set_up() -> Recorder:
        fabric, model = hasten.Fabric(accelerator="cpu"), torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        with Recorder() as recorder:
            fabric.setup(model, optimizer)
        return recorder

    set_up()
    found["Fabric.setup"] = set_up().files()
    return found


def documented_walks(page: str) -> dict[str, list[str]]:
    """Return the files that ``docs/architecture.md`` lists for each walk, named as below ``hasten``."""
    blocks = re.findall(r"^<!-- walk: (.+?) -->\n(.*?)(?:\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    return {name: re.findall(r"`hasten/([^`]+)`", text) for name, text in blocks}


def with_walks(page: str, recorded: dict[str, list[str]]) -> str:
    """Return ``docs/architecture.md`` with the recorded files in place of those that it lists."""

    def block(found: re.Match[str]) -> str:
        files = ", ".join(f"`hasten/{path}`" for path in recorded[found[1]])
        return f"<!-- walk: {found[1]} -->\n" + textwrap.fill(f"Files that run: {files}.", 120, break_on_hyphens=False)

    return re.sub(r"^<!-- walk: (.+?) -->(?:\n(?!\n).+)*", block, page, flags=re.MULTILINE)


# The table


def measure(root: Path, with_walks: bool) -> dict[str, str]:
    """Return the figures of one checkout by name."""
    sources = read_sources(root)
    packages = files_per_package(sources)
    largest = max(sources, key=lambda source: source.lines)
    total = sum(source.lines for source in sources)
    typing = typing_of(sources)
    tests = [path.read_text(encoding="utf-8").splitlines() for path in (root / "tests").rglob("*.py")]
    figures = {
        "files": f"{len(sources):,}",
        "lines": f"{total:,}",
        "code lines": f"{sum(code_lines(source) for source in sources):,}",
        "docstring lines": f"{sum(len(docstring_lines(source.tree)) for source in sources):,}",
        "lines a file, mean": f"{total / len(sources):.0f}",
        "lines a file, largest": f"{largest.lines} ({largest.path.as_posix()})",
        "packages": f"{len(packages)}",
        "packages of more than 14 files": ", ".join(
            f"{'hasten' if name == '.' else name} {count}" for name, count in packages.most_common() if count > 14
        ),
        "public parameters": f"{typing.parameters:,}",
        "of them bare Any or untyped": _share(len(typing.untyped), typing.parameters),
        "of those *args and **kwargs": f"{_starred(typing.untyped, sources)}",
        "public results": f"{typing.functions:,}",
        "of them bare Any or untyped ": _share(len(typing.untyped_results), typing.functions),
        "private accesses across packages": f"{len(private_accesses(sources))}",
        "class names used twice": f"{len(duplicate_classes(sources))}",
        "test files": f"{len(tests):,}",
        "test lines": f"{sum(len(lines) for lines in tests):,}",
    }
    if with_walks:
        recorded = walks(root)
        figures |= {f"files of the walk: {name}": str(len(recorded[name])) for name in WALKS}
    return figures


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / max(whole, 1):.1f} %)"


def _starred(untyped: list[str], sources: list[Source]) -> int:
    names = {"args", "kwargs", "arguments", "options"}
    starred = {
        argument.arg
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.arguments)
        for argument in (node.vararg, node.kwarg)
        if argument is not None
    }
    return sum(one.rsplit("(", 1)[1].rstrip(")") in starred & names for one in untyped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("roots", nargs="*", type=Path, default=[ROOT], help="checkouts, one column each")
    parser.add_argument("--no-walks", action="store_true", help="do not train to record the walks")
    parser.add_argument("--list", choices=("private", "any", "results", "classes", "walks"))
    parser.add_argument("--write-walks", action="store_true", help="renew the lists in docs/architecture.md")
    parser.add_argument("--record-walks", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record_walks:
        print(json.dumps(record_walks()))
        return
    if given.write_walks:
        page = ROOT / "docs" / "architecture.md"
        page.write_text(with_walks(page.read_text(encoding="utf-8"), walks(ROOT)), encoding="utf-8")
        return
    if given.list:
        for root in given.roots:
            print(*_details(root.resolve(), given.list), sep="\n")
        return
    columns = [measure(root.resolve(), not given.no_walks) for root in given.roots]
    rows = [["", *(str(root) for root in given.roots)]]
    rows += [[name.rstrip(), *(column[name] for column in columns)] for name in columns[0]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _details(root: Path, which: str) -> list[str]:
    if which == "walks":
        return [f"{name}: {len(files)}: {', '.join(files)}" for name, files in walks(root).items()]
    sources = read_sources(root)
    if which == "private":
        return private_accesses(sources)
    if which == "classes":
        return [f"{name}: {', '.join(files)}" for name, files in duplicate_classes(sources).items()]
    typing = typing_of(sources)
    return typing.untyped if which == "any" else typing.untyped_results


if __name__ == "__main__":
    main()
