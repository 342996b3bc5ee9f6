"""``hasten migrate``: rewrite the imports of Lightning in programs, after asking."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten._lib.files import replacing
from hasten._lib.names import did_you_mean_file
from hasten._lib.optional import need
from hasten.commands.parser import Parser

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_REQUIREMENTS = re.compile(r"^(requirements.*\.txt|pyproject\.toml|setup\.(py|cfg)|environment.*\.ya?ml|Pipfile)$")
_REQUIRED = re.compile(r"(?<![\w./-])(pytorch[-_]lightning|lightning[-_]fabric|lightning)(?=[\s\"'\[=<>~!,;]|$)")


@dataclass
class _File:
    path: Path
    old: bytes
    new: bytes


def main(arguments: Sequence[str]) -> int:
    """Rewrite; return the exit code."""
    parser = make_parser()
    options = parser.parse(arguments)
    for path in options.paths:
        if not path.exists():
            hint = did_you_mean_file(str(path), map(str, path.parent.glob("*")))
            parser.error(f"{str(path)!r} does not exist.{hint}")
    need("libcst", purpose="hasten migrate")

    files, by_hand = _planned(options.paths)
    for file in files:
        _show(file)
    for path, line, text in by_hand:
        print(f"by hand  {path}:{line}  {text}")
    if not files:
        print("Nothing to rewrite." if not by_hand else "Nothing else to rewrite.")
        return 0
    count = f"{len(files)} file(s)"
    if options.dry_run:
        print(f"{count} would be rewritten.")
        return 0
    if not options.yes and not _agreed(f"Rewrite {count}? [y/N] "):
        print("Nothing was written.", file=sys.stderr)
        return 1
    for done, file in enumerate(files):
        try:
            _write(file)
        except OSError as error:
            print(
                f"hasten migrate: {file.path}: {error.strerror or error}. {done} of {count} were rewritten; "
                "run it again for the others.",
                file=sys.stderr,
            )
            return 1
    print(f"{count} rewritten.")
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten migrate",
        description=(
            "Rewrite imports of Lightning to those of hasten in Python files and the class paths in YAML "
            "files. Shows the change first, waits for your answer, and lists what it cannot rewrite."
        ),
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="DIR", help="folders and files")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--yes", action="store_true", help="rewrite without asking")
    how.add_argument("--dry-run", action="store_true", help="show the change only")
    return parser


def _planned(paths: Sequence[Path]) -> tuple[list[_File], list[tuple[Path, int, str]]]:
    """Read everything before anything is written."""
    from hasten_lightning import rewrite

    files: list[_File] = []
    by_hand: list[tuple[Path, int, str]] = []
    # A file that links lead to as well is one file.
    found = {os.path.realpath(path): path for given in paths for path in sorted(_files_under(given), reverse=True)}
    for path in sorted(found.values()):
        try:
            data = path.read_bytes()
            if _REQUIREMENTS.match(path.name):
                by_hand.extend((path, line, "add hasten to what is installed") for line in _required_in(data))
            if path.suffix == ".ipynb":
                if b"lightning" in data:
                    by_hand.append((path, 1, "a notebook: change its imports there"))
                continue
            if path.suffix not in (".py", ".yaml", ".yml"):
                continue
            result = rewrite.python(data) if path.suffix == ".py" else rewrite.yaml(data)
        except UnicodeDecodeError:
            continue
        except ValueError as error:
            line, _, text = str(error).removeprefix("line ").partition(": ")
            by_hand.append((path, int(line), text))
            continue
        except OSError as error:
            by_hand.append((path, 1, f"it cannot be read: {error.strerror}"))
            continue
        by_hand.extend((path, line, text) for line, text in result.by_hand)
        if result.data != data:
            files.append(_File(path, data, result.data))
    return files, by_hand


def _files_under(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED
            and not name.startswith(".")
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        for name in names:
            if name.endswith((".py", ".yaml", ".yml", ".ipynb")) or _REQUIREMENTS.match(name):
                yield Path(folder, name)


def _required_in(data: bytes) -> list[int]:
    lines = data.decode("utf-8", errors="replace").splitlines()
    return [
        number
        for number, line in enumerate(lines, 1)
        if _REQUIRED.search(line.partition("#")[0]) and not re.match(r"\s*(import|from)\b", line)
    ]


def _show(file: _File) -> None:
    old, new = (data.decode("utf-8", errors="replace").splitlines() for data in (file.old, file.new))
    for line in difflib.unified_diff(old, new, str(file.path), str(file.path), n=1, lineterm=""):
        print(line)


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def _write(file: _File) -> None:
    """Replace the file atomically, with the same permissions."""
    target = Path(os.path.realpath(file.path))
    if target.read_bytes() != file.old:
        raise OSError(0, "it was changed meanwhile")
    with replacing(target) as stream:
        stream.write(file.new)
        os.chmod(stream.name, target.stat().st_mode & 0o7777)
