"""What packages built on Lightning use of it, and how much of that hasten has.

    python scripts/census.py fetch FOLDER                    # download the packages of scripts/census_packages.txt
    python scripts/census.py scan FOLDER uses.json           # read their sources
    python scripts/census.py observe uses.json theirs.json   # with Lightning installed: which uses it has
    python scripts/census.py observe --hasten uses.json ours.json
    python scripts/census.py write uses.json theirs.json ours.json

Packages are unpacked and parsed, never installed nor run. A use is a name that is imported or reached through a module,
an attribute of the trainer, of Fabric or of a class of Lightning that the package subclasses, or a keyword argument of
a call. It counts once for each package. Names are looked up, attributes are read from the objects of a short run, and
arguments are compared with signatures, in the same way under both libraries. ``write`` renews the tables of
``docs/census.md`` and ``tests/compat/census.txt``, which a test reads.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import email
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = Path(__file__).with_name("census_packages.txt")
PAGE, LIST = ROOT / "docs" / "census.md", ROOT / "tests" / "compat" / "census.txt"

ROOTS = {"lightning": "lightning", "pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
DOTTED = re.compile(rf"(?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+")
MENTIONED = re.compile(rf"(?<![\w./-])(?:{'|'.join(ROOTS)})\.[A-Za-z_][\w.]*\w")

# Variables and attributes that hold these objects in the programs of the field.
TRAINERS = {"trainer", "_trainer", "pl_trainer", "lightning_trainer"}
FABRICS = {"fabric", "_fabric"}
MODULES = {"pl_module", "lightning_module"}
# An attribute is followed this far: trainer.fit_loop.epoch_loop.batch_progress.current.ready.
DEPTH = 6

# What `observe` writes for an attribute that Lightning's classes inherit from torch or Python.
OF_OTHERS = "of another library"

Use = tuple[str, str]  # kind ("name", "attribute" or "argument"), and the text that `observe` understands.


def read_packages() -> dict[str, str]:
    """Return package -> field."""
    rows = [line.partition(":") for line in PACKAGES.read_text().splitlines() if line and line[0] != "#"]
    return {name: field for field, _, names in rows for name in names.split()}


# -- fetch


def fetch(folder: Path) -> None:
    """Download the newest wheel of every package and keep its sources, about 200 MB; nothing of it is run."""
    for name in read_packages():
        if (folder / name).exists():
            continue
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
            subprocess.run([*command, "--only-binary=:all:", "--no-cache-dir", "-d", place, name], check=True)
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
                for one in wheel.infolist():
                    if one.filename.endswith((".py", ".yaml", ".yml", "METADATA")) and ".." not in one.filename:
                        wheel.extract(one, folder / name)
        print(name, flush=True)


# -- scan


def common(dotted: str) -> str:
    """Return a name as it is under ``lightning``: one name, whichever package it is imported from."""
    root, _, rest = dotted.partition(".")
    return ".".join(filter(None, (ROOTS[root], rest)))


def in_lightning(dotted: str | None) -> bool:
    return dotted is not None and dotted.partition(".")[0] in ROOTS


def chain_of(node: ast.AST) -> list[str]:
    """Return the words of ``a.b.c``, or an empty list for anything else."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return [*reversed([*words, node.id])]
    # self.trainers[0].strategy: what is before the last known word does not matter.
    return ["?", *reversed(words)] if words else []


class Package:
    """Reads the sources of a package.

    Args:
        folder: where they are.

    """

    def __init__(self, folder: Path) -> None:
        self.uses: Counter[Use] = Counter()
        self.guarded: Counter[Use] = Counter()
        self.files = 0
        self.version, self.requires = "", []
        for path in folder.glob("*.dist-info/METADATA"):
            message = email.message_from_string(path.read_text(encoding="utf-8"))
            self.version = str(message["Version"])
            wanted = re.compile(r"(pytorch[-_])?lightning([-_]fabric)?(?![\w-])")
            self.requires = [row for row in message.get_all("Requires-Dist") or () if wanted.match(row)]
        sources = [(path, _parsed(path)) for path in sorted(folder.rglob("*.py"))]
        trees = [(path, tree) for path, tree in sources if tree is not None]
        # Class of the package -> names of its bases, as they are in the file.
        self._bases: dict[str, set[str]] = defaultdict(set)
        files = [_File(self, tree) for _, tree in trees]
        for file in files:
            file.read_imports()
        for file in files:
            file.read_uses()
        for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
            for found in MENTIONED.findall(path.read_text(encoding="utf-8", errors="replace")):
                self.add("name", common(found))

    def add(self, kind: str, text: str, guarded: bool = False) -> None:
        (self.guarded if guarded else self.uses)[kind, text] += 1

    def lightning_bases(self, name: str) -> set[str]:
        """Return the classes of Lightning that a class of the package inherits from."""
        found: set[str] = set()
        todo, seen = [name], set()
        while todo:
            one = todo.pop()
            for base in self._bases.get(one, ()):
                if in_lightning(base):
                    found.add(base)
                elif base not in seen:
                    seen.add(base)
                    todo.append(base)
        return found


def _parsed(path: Path) -> ast.Module | None:
    data = path.read_bytes()
    if not re.search(rb"lightning|trainer|fabric", data):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data)
    except (SyntaxError, ValueError):
        return None


class _File:
    """Reads one file: first what it imports and which classes it has, then what it uses."""

    def __init__(self, package: Package, tree: ast.Module) -> None:
        self._package, self._tree = package, tree
        self._bound: dict[str, str] = {}  # Name in the file -> name of Lightning.
        self._imports_it = False

    def read_imports(self) -> None:
        for node, guarded in _walk_guarded(self._tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    if in_lightning(one.name):
                        self._import(one.name, guarded)
                        first = one.name.partition(".")[0]
                        self._bound[one.asname or first] = common(one.name if one.asname else first)
            elif isinstance(node, ast.ImportFrom) and not node.level and in_lightning(node.module):
                for one in node.names:
                    if one.name == "*":
                        self._import(str(node.module), guarded)
                        continue
                    self._import(f"{node.module}.{one.name}", guarded)
                    self._bound[one.asname or one.name] = common(f"{node.module}.{one.name}")
        self._package.files += self._imports_it
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    words = chain_of(base)
                    name = self._of_lightning(words) or (words[-1] if words else "")
                    if name and name != node.name:
                        self._package._bases[node.name].add(name)

    def _import(self, dotted: str, guarded: bool) -> None:
        self._imports_it = True
        self._package.add("name", common(dotted), guarded)

    def _of_lightning(self, words: list[str]) -> str | None:
        return ".".join([self._bound[words[0]], *words[1:]]) if words and words[0] in self._bound else None

    def read_uses(self) -> None:
        self._visit(self._tree, None, False)

    def _visit(self, node: ast.AST, owner: tuple[set[str], set[str]] | None, quiet: bool) -> None:
        """Collect the uses below a node; ``owner`` is the class around it: its bases, and what it defines itself."""
        if isinstance(node, ast.ClassDef):
            bases = self._package.lightning_bases(node.name)
            own = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
            for base in bases:
                for name in own:
                    self._package.add("attribute", f"{base} {name}")
            own |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and _is_set(one)}
            owner = (bases, own) if bases else None
        elif isinstance(node, ast.Call):
            self._call(node, owner)
        elif isinstance(node, ast.Attribute) and not quiet:
            self._attribute(chain_of(node), owner)
            if owner is not None and _is_super(node.value):
                for base in owner[0]:
                    self._package.add("attribute", f"{base} {node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            self._package.add("name", common(node.value))
        for child in ast.iter_child_nodes(node):
            # Of a.b.c, only the whole chain counts.
            self._visit(child, owner, isinstance(node, ast.Attribute) and isinstance(child, ast.Attribute))

    def _attribute(self, words: list[str], owner: tuple[set[str], set[str]] | None) -> None:
        for place in self._places(words, owner):
            self._package.add(*place)

    def _places(self, words: list[str], owner: tuple[set[str], set[str]] | None) -> Iterator[Use]:
        """Yield what a chain of attributes means."""
        of_lightning = self._of_lightning(words)
        if of_lightning is not None:
            yield "name", of_lightning
            return
        # From the last word that holds a trainer on: self.model.trainer.strategy.
        for place in reversed(range(len(words) - 1)):
            for holders, root in ((TRAINERS, "trainer"), (FABRICS, "fabric"), (MODULES, "module")):
                if words[place] in holders and (self._imports_it or owner is not None):
                    yield "attribute", f"{root} {'.'.join(words[place + 1 :][:DEPTH])}"
                    return
        if owner is not None and len(words) > 1 and words[0] == "self" and words[1] not in owner[1]:
            for base in owner[0]:
                yield "attribute", f"{base} {'.'.join(words[1:][:DEPTH])}"

    def _call(self, node: ast.Call, owner: tuple[set[str], set[str]] | None) -> None:
        keywords = [one.arg for one in node.keywords if one.arg]
        if not keywords:
            return
        words = chain_of(node.func)
        targets: list[Use] = []
        if isinstance(node.func, ast.Name) and node.func.id in self._bound:
            targets = [("name", self._bound[node.func.id])]
        elif len(words) > 1:
            targets = list(self._places(words, owner))
        if isinstance(node.func, ast.Attribute) and _is_super(node.func.value) and owner is not None:
            name = node.func.attr
            targets = [("name", base if name == "__init__" else f"{base}.{name}") for base in owner[0]]
        for _, target in targets:
            for keyword in keywords:
                self._package.add("argument", f"{target}({keyword})")


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_set(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _walk_guarded(tree: ast.AST, guarded: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node, and whether a missing name is caught around it."""
    for node in ast.iter_child_nodes(tree):
        inside = guarded or isinstance(node, ast.ExceptHandler)
        if isinstance(node, ast.Try) and any(_catches(handler) for handler in node.handlers):
            inside = True
        yield node, inside
        yield from _walk_guarded(node, inside)


def _catches(handler: ast.ExceptHandler) -> bool:
    caught = "" if handler.type is None else ast.dump(handler.type)
    return not caught or any(name in caught for name in ("ImportError", "ModuleNotFoundError", "'Exception'"))


def scan(folder: Path) -> dict[str, Any]:
    """Return package -> its version, what it requires, and its uses with their number."""
    result = {}
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        package = Package(place)
        if not package.files:
            print(f"{place.name} does not import Lightning", file=sys.stderr)
            continue
        both = package.uses + package.guarded
        result[place.name] = {
            "version": package.version,
            "requires": package.requires,
            "files": package.files,
            "uses": sorted([kind, text, number] for (kind, text), number in both.items()),
            "guarded": sorted([kind, text] for kind, text in package.guarded if (kind, text) not in package.uses),
        }
    return result


# -- observe


def observe(uses: Iterable[Use]) -> dict[str, str]:
    """Return "kind text" -> "" if the library imported as ``lightning`` has it, otherwise what is wrong."""
    names = sorted({text for kind, text in uses if kind == "name"})
    attributes = sorted({text for kind, text in uses if kind == "attribute"})
    arguments = sorted({text for kind, text in uses if kind == "argument"})
    found: dict[str, str] = {}
    for name in names:
        found[f"name {name}"] = _problem(lambda name=name: look_up(name))
    objects = Objects()
    wanted = {text.partition("(")[0] for text in arguments}
    callables: dict[str, Any] = {}
    for text in [*attributes, *sorted(one for one in wanted if " " in one)]:
        root, _, chain = text.partition(" ")
        problem, value = objects.follow(root, chain.split("."))
        if text in attributes:
            found[f"attribute {text}"] = problem
        if not problem:
            callables[text] = value
    for text in arguments:
        target, _, keyword = text.rstrip(")").partition("(")
        try:
            called = callables[target] if " " in target else look_up(target)
        except Exception as error:
            found[f"argument {text}"] = f"not there: {error}"
            continue
        found[f"argument {text}"] = "" if _accepts(called, keyword) else "not accepted"
    return found


def look_up(dotted: str) -> Any:
    """Return a module or a name of a module, or raise what a program would get."""
    words = dotted.split(".")
    module = importlib.import_module(words[0])
    value: Any = module
    for place, word in enumerate(words[1:], 2):
        try:
            value = getattr(value, word)
        except AttributeError:
            if not inspect.ismodule(value):
                raise
            value = importlib.import_module(".".join(words[:place]))
    if _absent(value):
        raise ImportError(f"{dotted} can be imported, but not made")
    return value


def _absent(value: Any) -> bool:
    if "hasten" not in sys.modules:
        return False
    from hasten._lib.errors import is_absent

    return bool(is_absent(value))


def _problem(look: Any) -> str:
    try:
        look()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _of_others(value: Any, name: str) -> bool:
    """Return whether a class of another library, such as torch.nn.Module, has an attribute."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    owner = next((kind for kind in kinds if name in vars(kind)), None)
    if owner is None:
        return name in vars(torch.nn.Module()) or name == "__dict__"
    known = (*ROOTS, "hasten", "hasten_lightning", "lightning_utilities", __name__)
    return owner.__module__.partition(".")[0] not in known


def _accepts(called: Any, keyword: str) -> bool:
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return True
    return keyword in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


class Objects:
    """Objects of a short run, from which attributes are read while it lasts."""

    def __init__(self) -> None:
        # Root -> objects that it may be. Attributes are looked up in the order of the list.
        self._roots: dict[str, list[Any]] = {"trainer": [], "fabric": [], "module": []}
        # An attribute may exist only during a run: (root, chain) -> value.
        self._seen: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._folder = tempfile.mkdtemp()
        self._made: dict[str, list[Any]] = {}

    def follow(self, root: str, chain: list[str]) -> tuple[str, Any]:
        """Return what is wrong with a chain of attributes, and its value."""
        objects = self._run(root) if root in self._roots else self._instances(root)
        problem = ""
        for one in objects:
            value: Any = one
            if _of_others(one, chain[0]):
                return OF_OTHERS, None
            try:
                for word in chain:
                    value = getattr(value, word)
            except AttributeError as error:
                problem = problem or f"AttributeError: {error}".partition("\n")[0]
                continue
            except Exception:
                value = None  # A property that says why it has no value now.
            return "", value
        return problem or f"there is no {root} to read it from", None

    def _run(self, root: str) -> list[Any]:
        if not self._roots[root]:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                (self._use_fabric if root == "fabric" else self._use_trainer)()
        return self._roots[root]

    def _instances(self, name: str) -> list[Any]:
        """Return an object of a class of Lightning, if it can be made without arguments, and the class."""
        if name not in self._made:
            try:
                kind = look_up(common(name))
            except Exception:
                self._made[name] = []
                return []
            objects: list[Any] = []
            known = {
                "LightningModule": "module", "BoringModel": "module", "Trainer": "trainer", "Fabric": "fabric",
            }.get(name.rpartition(".")[2])  # fmt: skip
            if known:
                objects = [*self._run(known)]
            ways: list[dict[str, Any]] = [{}, {"monitor": "x"}, {"save_dir": self._folder}, {"parallel_devices": []}]
            # A LightningCLI would read the command line and run, and some loggers reach their service.
            for arguments in ways if not re.search("CLI|Wandb|MLFlow|Comet|Neptune", name) else ():
                with contextlib.suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    objects.append(kind(**arguments))
                    break
            self._made[name] = [*objects, kind]
        return self._made[name]

    def _use_trainer(self) -> None:
        pytorch = importlib.import_module("lightning.pytorch")
        callbacks = importlib.import_module("lightning.pytorch.callbacks")
        boring = importlib.import_module("lightning.pytorch.demos.boring_classes")
        loggers = importlib.import_module("lightning.pytorch.loggers")
        strategies = importlib.import_module("lightning.pytorch.strategies")
        collected = self._roots

        class Model(boring.BoringModel):  # type: ignore[misc]
            def validation_step(self, batch: Any, index: int) -> Any:
                self.log("x", 1.0)
                return super().validation_step(batch, index)

        trainer = pytorch.Trainer(
            accelerator="cpu", max_epochs=1, limit_train_batches=2, limit_val_batches=1, limit_test_batches=1,
            limit_predict_batches=1, log_every_n_steps=1, enable_progress_bar=True, num_sanity_val_steps=0,
            logger=loggers.CSVLogger(self._folder), default_root_dir=self._folder,
            callbacks=[callbacks.ModelCheckpoint(self._folder, monitor="x"), callbacks.EarlyStopping("x")],
        )  # fmt: skip
        model = Model()
        with contextlib.redirect_stderr(io.StringIO()):
            trainer.fit(model, datamodule=boring.BoringDataModule())
        others = []
        for made in (
            lambda: strategies.DDPStrategy(),
            lambda: strategies.FSDPStrategy(),
            lambda: strategies.ModelParallelStrategy(),
        ):
            with contextlib.suppress(Exception):
                others.append(_Holder(made()))
        collected["trainer"] = [trainer, *others]
        collected["module"] = [model]

    def _use_fabric(self) -> None:
        fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        self._roots["fabric"] = [fabric]


class _Holder:
    """Stands for a trainer whose strategy is another one."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy


# -- write

BEGIN, END = "<!-- census: begin -->", "<!-- census: end -->"
KINDS = {"name": "names", "attribute": "attributes", "argument": "arguments"}


class Count:
    """Uses of packages that Lightning has, and those of them that hasten has."""

    def __init__(self) -> None:
        self.there: Counter[str] = Counter()
        self.had: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()

    def add(self, kind: str, had: bool) -> None:
        self.there[kind] += 1
        self.had[kind] += had

    def of(self, kind: str) -> str:
        return f"{self.had[kind]} of {self.there[kind]}" if self.there[kind] else ""


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


class Result:
    """The uses of all packages, compared."""

    def __init__(self, uses: dict[str, Any], theirs: dict[str, str], ours: dict[str, str]) -> None:
        self.uses, self.total = uses, Count()
        self.packages: dict[str, Count] = {}
        # Use -> packages.
        self.missing: dict[str, list[str]] = defaultdict(list)
        self.had: Counter[str] = Counter()
        self.says = ours
        for package, row in uses.items():
            count = self.packages[package] = Count()
            for kind, text, _ in row["uses"]:
                key = f"{kind} {text}"
                there = theirs[key]
                if there == OF_OTHERS or theirs.get(f"attribute {text.partition('(')[0]}") == OF_OTHERS:
                    continue
                if there:
                    # Attributes that Lightning does not have are of the package's own objects.
                    count.elsewhere[kind] += kind == "name"
                    self.total.elsewhere[kind] += kind == "name"
                    continue
                had = ours[key] in ("", OF_OTHERS)
                count.add(kind, had)
                self.total.add(kind, had)
                if had:
                    self.had[key] += 1
                else:
                    self.missing[key].append(package)

    def tables(self) -> str:
        """Return the part of the page between the markers."""
        total = self.total
        there, had = sum(total.there.values()), sum(total.had.values())
        names, older = total.there["name"], total.elsewhere["name"]
        lines = [
            f"{len(self.packages)} packages use {there} names, attributes and arguments that Lightning 2.6 has; hasten "
            f"has {had} of them, {percent(had, there)}. A use counts once for each package. Besides these, {older} "
            "imports are of names that Lightning 2.6 does not have either; counting them too, hasten has "
            f"{percent(total.had['name'], names + older)} of the names.",
            "",
            "| | used | in hasten | |",
            "|---|---|---|---|",
            *(
                f"| {KINDS[kind]} | {total.there[kind]} | {total.had[kind]} | "
                f"{percent(total.had[kind], total.there[kind])} |"
                for kind in KINDS
            ),
            "",
            "| package | of | names | attributes | arguments |",
            "|---|---|---|---|---|",
        ]
        for package, field in sorted(read_packages().items()):
            if package in self.packages:
                count = self.packages[package]
                cells = " | ".join(count.of(kind) for kind in KINDS)
                lines.append(f"| {package} {self.uses[package]['version']} | {field} | {cells} |")
        # The arguments of a missing class need no rows.
        missing = {
            key: packages
            for key, packages in self.missing.items()
            if key.startswith("name ") or f"name {key.removeprefix('argument ').partition('(')[0]}" not in self.missing
        }
        public = {key: packages for key, packages in missing.items() if not re.search(r"(?<!\w)_", key)}
        lines += [
            *("", f"What is missing, besides {len(missing) - len(public)} private names:", ""),
            *("| use | in | |", "|---|---|---|"),
        ]
        for key, packages in sorted(public.items(), key=lambda row: (row[0].partition(" ")[0] != "name", row[0])):
            lines.append(f"| `{_shown(key)}` | {', '.join(packages)} | {self._advice(key)} |")
        return "\n".join(lines)

    def _advice(self, key: str) -> str:
        found = re.search(r"hasten has no \S+\. (.*)", self.says[key])
        return "" if found is None or found[1].startswith(("See docs", "Did you")) else found[1]

    def short_list(self) -> str:
        """Return the uses that hasten has and a test looks up: all names, and what several packages use."""
        rows = [
            f"{key} {number}"
            for key, number in sorted(self.had.items())
            if number > 1 or key.startswith(("name ", "attribute trainer", "attribute fabric"))
        ]
        return "\n".join(["# Kind, use, and how many packages use it. Written by scripts/census.py.", *rows, ""])


def _shown(key: str) -> str:
    kind, _, text = key.partition(" ")
    root, space, chain = text.partition(" ")
    text = text if not space else f"{'pl_module' if root == 'module' else root}.{chain}"
    return text.removesuffix(")").replace("(", "(..., ") + "=...)" if kind == "argument" else text


def write(uses: Path, theirs: Path, ours: Path) -> None:
    """Renew the tables of the page, and the list for the test."""
    result = Result(*(json.loads(path.read_text()) for path in (uses, theirs, ours)))
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    page = f"{before}{BEGIN}\n{result.tables()}\n{END}{rest.partition(END)[2]}"
    PAGE.write_text(page, encoding="utf-8")
    LIST.write_text(result.short_list(), encoding="utf-8")


def read_list() -> list[Use]:
    """Return the uses in the list."""
    rows = [
        line.rpartition(" ")[0].partition(" ") for line in LIST.read_text().splitlines() if line[:1] not in ("", "#")
    ]
    return [(kind, text) for kind, _, text in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["fetch", "scan", "observe", "write"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--hasten", action="store_true", help="observe hasten's alias, not Lightning itself")
    given = parser.parse_intermixed_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    if given.command == "fetch":
        fetch(*given.paths)
    elif given.command == "scan":
        folder, target = given.paths
        target.write_text(json.dumps(scan(folder), indent=1))
    elif given.command == "observe":
        source, target = given.paths
        if given.hasten:
            import hasten_lightning

            hasten_lightning.install()
        uses = {(kind, text) for row in json.loads(source.read_text()).values() for kind, text, _ in row["uses"]}
        target.write_text(json.dumps(observe(uses), indent=1, sort_keys=True))
    else:
        write(*given.paths)


if __name__ == "__main__":
    main()
