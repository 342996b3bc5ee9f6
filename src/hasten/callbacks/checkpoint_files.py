"""The files of a ModelCheckpoint: names made from templates such as ``{epoch}-{val_loss:.2f}``, and their folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.files import SET_ASIDE, TEMPORARY, put_in_place, replacing, replacing_folder, set_aside
from hasten._lib.names import defined_by_program, did_you_mean_value, right_mode
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten.checkpoint import files
from hasten.checkpoint.background import writer_of
from hasten.checkpoint.files import CheckpointIO, TorchCheckpointIO
from hasten.checkpoint.places import NO_COPIES
from hasten.checkpoint.stored import CONTENTS_FILE, is_checkpoint_folder
from hasten.elsewhere import conventions
from hasten.loggers.folders import entries, exists, file_system, is_url, local, version_folder

if TYPE_CHECKING:
    from hasten.callbacks.checkpoint import ModelCheckpoint
    from hasten.strategies.base import Strategy
    from hasten.trainer import Trainer

FOLDER_NAME = "checkpoints"
_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
# Characters of a value in a name, and bytes of a name.
_WIDEST, _LONGEST = 64, 200
# Characters that would lead to another folder.
_UNSAFE = re.compile(r"[/\\\x00-\x1f]")


# -- names


def check_template(template: str) -> None:
    """Check before the run that a template stays inside its folder and its fields can be filled."""
    problem, fix = "", ""
    if os.path.isabs(template) or ".." in re.split(r"[/\\]", template) or "\0" in template:
        problem, fix = " leaves the folder of the checkpoints.", "Give the folder as dirpath=."
    for name, spec in _FIELD.findall(template):
        if not name:
            problem, fix = ": a field without a name.", "Write {epoch}."
        elif not any(_fits(value, spec) for value in (1, 0.5)):
            allowed = f"a format of a number with at most {_WIDEST} digits"
            problem, fix = f": {spec!r} is not {allowed}.", f"Write for instance {{{name}:.2f}}."
    rest = re.sub(r"\{\{|\}\}", "", _FIELD.sub("", template))
    if rest.count("{") != rest.count("}"):
        problem, fix = ": a brace is missing.", "Write {epoch:02d}-{val_loss:.2f}."
    if not problem and not _is_name(_FIELD.sub(lambda field: f"{field.group(1)}=0.25", template)):
        problem, fix = ": file systems do not take such a name.", "Use a shorter one, of characters that UTF-8 has."
    if problem:
        given = f"ModelCheckpoint(filename={check.shown(template)}){problem}"
        raise MisconfigurationException(given, fix=fix, argument="filename")


def format_name(template: str, metrics: Mapping[str, Any], *, equals: str, insert_names: bool) -> str:
    """Fill a template with fields ``{name}`` or ``{name:format}``; a name that was not logged counts as 0.

    With ``insert_names``, it writes the name and ``equals`` before each value.

    Example::

        >>> format_name("{epoch:02d}-{val_loss:.2f}", {"epoch": 3, "val_loss": 0.517}, equals="=", insert_names=True)
        'epoch=03-val_loss=0.52'

    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        value = metrics.get(name, 0)
        if isinstance(value, Tensor):
            value = value.item()
        try:
            text = _UNSAFE.sub("_", format(value, spec))
            if len(text) > _WIDEST:
                # A loss that has grown beyond all bounds: the run goes on.
                text = f"{value:.3e}"
        except (ValueError, TypeError) as error:
            raise make_error(
                ValueError,
                f"The checkpoint name {template!r} cannot be filled: {name} is {value!r}, which has no format "
                f"{spec!r}.",
                fix=f"Write {{{name}:.2f}} for a fraction.",
            ) from error
        return f"{name}{equals}{text}" if insert_names else text

    return _FIELD.sub(fill, template)


def warn_of_unknown_fields(template: str | None, metrics: Mapping[str, Any]) -> None:
    """Warn of a field that nothing has logged: it is 0 in every name."""
    for name, _ in _FIELD.findall(template or ""):
        if name not in metrics:
            known = sorted(metrics)
            warn_once(
                f"checkpoint name {template} {name}",
                f"ModelCheckpoint(filename={template!r}): nothing has logged {name!r}, which is 0 in the name. Logged "
                f"are {', '.join(known)}.",
                fix=did_you_mean_value(name, known),
            )


def warn_of_shared_names(callback: ModelCheckpoint, others: Iterable[ModelCheckpoint]) -> None:
    """Warn if a callback before this one gives its files the same names in the same folder."""
    for other in others:
        if other is callback:
            return
        if os.path.abspath(other.dirpath or "") != os.path.abspath(callback.dirpath or ""):
            continue
        names = [
            (one.filename or "{epoch}-{step}", one.auto_insert_metric_name, one.FILE_EXTENSION)
            for one in (other, callback)
        ]
        shared = [names[0][0]] if names[0] == names[1] and other.save_top_k and callback.save_top_k else []
        if other.save_last and callback.save_last and other.CHECKPOINT_NAME_LAST == callback.CHECKPOINT_NAME_LAST:
            shared.append(callback.CHECKPOINT_NAME_LAST)
        if shared:
            rank_zero_warn(
                f"Two ModelCheckpoints write {' and '.join(map(repr, shared))} to {callback.dirpath}: a name that is "
                "taken gets a version such as -v1, and does not say whose file it is.",
                fix="Give one of the two its own dirpath=, or filename='best-{epoch}' and save_last=False.",
            )


def _fits(value: float, spec: str) -> bool:
    try:
        # A wide format would fill the memory, and "c" gives a letter.
        return not re.search(r"\d{4}|c$", spec) and len(format(value, spec)) <= _WIDEST
    except ValueError:
        return False


def _is_name(path: str) -> bool:
    """Return whether file systems take the names in a path, with an ending and a version."""
    try:
        return all(len(os.fsencode(part)) <= _LONGEST for part in path.replace(os.sep, "/").split("/"))
    except UnicodeEncodeError:
        return False


# -- the folder


def resolve(dirpath: str | os.PathLike[str] | None) -> str | None:
    """Return ``dirpath`` as an absolute path or URL; None (the logger's folder) stays None."""
    check.path("ModelCheckpoint", "dirpath", dirpath, allow_none=True)
    path = os.fspath(dirpath or "")
    if not path:
        return None
    return path if is_url(path) else os.path.realpath(os.path.expanduser(local(path)))


def warn_of_file(dirpath: str | os.PathLike[str] | None, monitor: str | None) -> None:
    """Say that ``dirpath`` is a folder where it has the name of a file or a value, and that it is taken as it is."""
    path = os.fspath(dirpath or "")
    if path and (unread := re.search(r"\$\w+|\{[a-z_]\w*(?::[^}]*)?\}", path)) is not None:
        rank_zero_warn(
            f"ModelCheckpoint(dirpath={path!r}): the folder is called so, with {unread[0]!r} in its name.",
            fix="Write os.path.expandvars(...)." if "$" in unread[0] else "Fill it in, or write it in filename=.",
        )
    if path.endswith(".ckpt") and not conventions.current().mistakes_are_warnings:
        given = f"ModelCheckpoint(dirpath={path!r}): dirpath, the first argument, is the folder of the files."
        rank_zero_warn(given, fix=f"Write ModelCheckpoint(filename={os.path.basename(path)[:-5]!r}).")
    if path and monitor is None and re.match("(train|val|valid|test)[_/]", path) and (mode := right_mode(path)):
        what = f"ModelCheckpoint(dirpath={path!r}): dirpath, the first argument, is a folder; no value is monitored."
        rank_zero_warn(what, fix=f"Write ModelCheckpoint(monitor={path!r}, mode={mode!r}).")


def default_folder(trainer: Trainer) -> str:
    """Return the folder of a run's checkpoints: in the first logger's folder of the run, if there is one."""
    if not trainer.loggers:
        return os.path.join(trainer.default_root_dir, FOLDER_NAME)
    logger = trainer.loggers[0]
    root = logger.save_dir if logger.save_dir is not None else trainer.default_root_dir
    return os.path.join(root, str(logger.name), version_folder(logger.version), FOLDER_NAME)


def folders_of_earlier_runs(trainer: Trainer, folder: str) -> list[str]:
    """Return the checkpoint folders of earlier runs of the same experiment, the latest first."""
    if not trainer.loggers or not isinstance(trainer.loggers[0].version, int):
        return []
    root = os.path.dirname(os.path.dirname(folder))
    numbers = [name.removeprefix("version_") for name in entries(root) if name.startswith("version_")]
    earlier = sorted((int(number) for number in numbers if number.isdigit()), reverse=True)
    paths = [os.path.join(root, f"version_{number}", FOLDER_NAME) for number in earlier]
    return [path for path in paths if path != folder]


def newest(folder: str, extension: str, reader: CheckpointIO, strategy: Strategy, *, prefix: str = "") -> str | None:
    """Return the newest checkpoint below a folder that can be read; warn of damaged ones.

    Only names that begin with ``prefix`` count, and files of another ``CheckpointIO`` are not checked. A folder that
    cannot be read is an error, so that the run does not begin anew.

    All processes call it together: each reads a part of the files of a sharded checkpoint.
    """

    def look() -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = find(folder, extension)
            if not found and not is_url(folder):
                # A folder that cannot be read is not an empty one.
                os.listdir(folder)
            return [path for path in found if os.path.basename(path).startswith(prefix)]
        return []

    found, failure = found_by_first(strategy, look)
    if failure:
        raise OSError(f"ckpt_path='last': the checkpoints in {folder} cannot be read: {failure}")
    return first_whole(found, reader, strategy)


def newest_copy(
    extension: str, reader: CheckpointIO, strategy: Strategy, *, instead_of: str | None, prefix: str = ""
) -> str | None:
    """Return the newest whole copy of a checkpoint behind a URL, if it is newer than the local one ``instead_of``.

    Without such a copy, ``instead_of`` is returned. All processes call it together.
    """
    if reader.copies is NO_COPIES or (instead_of is not None and is_url(instead_of)):
        return instead_of

    def look() -> list[str]:
        since_ns = -1 if instead_of is None else os.stat(instead_of).st_mtime_ns
        copies = [each.path for each in reader.copies.newest_first() if each.saved_ns > since_ns]
        return [path for path in copies if path.endswith(extension) and os.path.basename(path).startswith(prefix)]

    found, failure = found_by_first(strategy, look)
    if failure and instead_of is None:
        raise OSError(f"ckpt_path='last': there is no local checkpoint, and the copies cannot be read: {failure}")
    if failure:
        rank_zero_warn(f"The copies of checkpoints cannot be read, so {instead_of} is the newest: {failure}")
    return first_whole(found, reader, strategy) or instead_of


def found_by_first(strategy: Strategy, look: Callable[[], list[str]]) -> tuple[list[str], str]:
    """Return what ``look`` finds on the first process, and why it failed (empty if it did not), on all processes."""
    found: list[str] = []
    failure = ""
    if strategy.is_global_zero:
        try:
            found = look()
        except Exception as error:  # each file system has its own
            failure = f"{type(error).__name__}: {error}"
    return strategy.broadcast((found, failure))


def first_whole(
    paths: list[str], reader: CheckpointIO, strategy: Strategy, *, verify: Callable[..., None] = files.verify
) -> str | None:
    """Return the first of the first process's paths that ``verify`` finds whole; warn of those before.

    Files of weights alone, which cannot be resumed, come last.
    """
    while reader.wrapped is not None:
        reader = reader.wrapped
    weights: list[str] = []
    for path in itertools.chain(strategy.broadcast(paths), weights):
        if not isinstance(reader, TorchCheckpointIO):
            return path
        if path not in weights and not strategy.broadcast(strategy.is_global_zero and files.may_resume(path)):
            weights.append(path)
            continue
        problem = None
        try:
            verify(path, share=(strategy.global_rank, strategy.world_size))
        except (RuntimeError, OSError, ValueError) as error:
            problem = str(error)
        problems = [each for each in strategy.gather_objects(problem) if each is not None]
        if not problems:
            return path
        rank_zero_warn(f"A checkpoint is skipped: {problems[0]}")
    return None


def find(folder: str, extension: str) -> list[str]:
    """Return the checkpoints (files and folders) in a folder and its subfolders, each once, the newest first."""
    if is_url(folder):
        system = file_system(folder)
        scheme = folder.partition("://")[0]
        paths = [f"{scheme}://{path}" for path in _remote(system.find(folder)) if path.endswith(extension)]
        return sorted(paths, key=lambda path: _created(system, path), reverse=True)
    found: dict[str, tuple[int, str]] = {}
    for subfolder, names in _subfolders(folder):
        names += [path.name for path in set_aside(subfolder)]
        for path in (os.path.join(subfolder, name) for name in names if name.endswith(extension)):
            with contextlib.suppress(OSError):  # a broken link, or removed meanwhile
                files.present(path)
                found.setdefault(os.path.realpath(path), (os.stat(path).st_mtime_ns, path))
    return [path for _, path in sorted(found.values(), reverse=True)]


def _created(system: Any, path: str) -> str:
    inside = f"{path}/{CONTENTS_FILE}"
    return str(system.info(inside if system.exists(inside) else path).get("created", path))


def _remote(files: Iterable[object]) -> list[str]:
    """Return the paths of files and, in place of what is in them, of checkpoint folders."""
    paths = [str(path) for path in files]
    folders = [path.removesuffix(f"/{CONTENTS_FILE}") for path in paths if path.endswith(f"/{CONTENTS_FILE}")]
    return folders + [path for path in paths if not path.startswith(tuple(f"{folder}/" for folder in folders))]


def _subfolders(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and its subfolders, each with the names of the files and checkpoint folders in it."""
    for subfolder, folders, names in os.walk(folder):
        checkpoints = [name for name in folders if is_checkpoint_folder(os.path.join(subfolder, name))]
        folders[:] = [name for name in folders if name not in checkpoints and not name.endswith(TEMPORARY)]
        yield subfolder, names + [name for name in checkpoints if not name.endswith((TEMPORARY, SET_ASIDE))]


def clean(folder: str) -> None:
    """Remove what killed writers have left in a folder and its subfolders."""
    if not is_url(folder):
        for subfolder, _ in _subfolders(folder):
            files.clean(subfolder)


def is_followed(trainer: Trainer) -> bool:
    """Return whether methods of the program run as soon as a ModelCheckpoint has saved, and may expect its file."""
    of_strategy = ("save_checkpoint", "remove_checkpoint")
    if defined_by_program(trainer, "save_checkpoint") or defined_by_program(trainer.strategy, *of_strategy):
        return True
    return any(defined_by_program(logger, "after_save_checkpoint") for logger in trainer.loggers)


def link(target: str, path: str) -> None:
    """Make ``path`` a symbolic link to ``target``; a checkpoint that is there is replaced."""
    if os.path.abspath(target) == os.path.abspath(path):
        return
    # If this process dies before the rename, ``clean`` removes the file with this name.
    name = f".{os.path.basename(path)[:100]}.{os.getpid()}-{uuid.uuid4().hex[:8]}{TEMPORARY}"
    temporary = os.path.join(os.path.dirname(path), name)
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(path)), temporary)
    except OSError:
        # Windows lets few users make links, and some file systems have none. A copy is whole or absent, too.
        _copy(target, path)
    else:
        put_in_place(temporary, path)


def _copy(target: str, path: str) -> None:
    if os.path.isdir(target):
        with replacing_folder(path) as folder:
            shutil.copytree(target, folder, dirs_exist_ok=True)
            put_in_place(folder, path)
    else:
        with replacing(path, over_folder=True) as file, open(target, "rb") as source:
            shutil.copyfileobj(source, file)


def is_same(one: str, other: str) -> bool:
    """Return whether two names are of the same file or folder, which is there; a link is not what it points to."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(one), os.lstat(other))
    return False


def remove(path: str, writer: CheckpointIO) -> None:
    """Remove a checkpoint; if that fails, warn and let training continue."""
    try:
        # A file that is still being written in the background is removed when it is complete.
        if writer_of(writer) is not None or exists(path) or os.path.lexists(path):
            writer.remove_checkpoint(path)
    except OSError as error:
        rank_zero_warn(f"The checkpoint {path} is no longer needed and could not be removed: {error}.")
