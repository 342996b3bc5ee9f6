"""How a fit of one process ends when a file system, a bucket, a worker process or the clock fails: a table.

    python benchmarks/fault_table.py
    python benchmarks/fault_table.py --only bucket --show
    python benchmarks/fault_table.py --write         # renew the table in docs/faults.md

Each row is a program of 40 steps that saves every 10. The fault begins after step 15 and, where it passes, ends after
step 35. *Kept* are the checkpoints that are there and whole when the program has ended. Rows that need a file system of
their own are mounted, and those that need a limit of memory get a control group, as root on Linux. Rows of an S3 server
need ``pip install 'moto[s3,server]' s3fs``. Rows that cannot be run are named, and --write refuses. Calls that fail in
a way that no mount gives, such as a stale handle of NFS, are functions of Python's ``os`` that raise that error.

``faults.py`` and ``scale_faults.py`` have the faults of several processes.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import ctypes
import errno
import functools
import importlib.util
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 240.0
STEPS, EVERY, BEGINS, ENDS = 40, 10, 15, 35
NOBODY = 65534
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_GROUP = MEMORY_GROUPS / "hasten_faults"
PAGE, BEGIN, END = ROOT / "docs" / "faults.md", "<!-- faults: begin -->", "<!-- faults: end -->"

Undo = Callable[[], object]


class Case(NamedTuple):
    """What fails, and how the run has to end.

    Args:
        place: what fails.
        fault: how it fails.
        setup: makes the program.
        begin: begins the fault in the folder, and returns a function that ends it.
        code: the exit code.
        says: a pattern in the output.
        kept: a pattern of the names of the whole checkpoints.
        mount: options of a tmpfs to mount at the place.
        shared_memory: options of a tmpfs to mount at /dev/shm, for this program alone.
        needs: what must be there beside root for mounts: "control group" or "S3".

    """

    place: str
    fault: str
    setup: Callable[[Path], Setup]
    begin: Callable[[Path], Undo | None]
    code: int
    says: str
    kept: str
    mount: str = ""
    shared_memory: str = ""
    needs: str = ""

    def missing(self) -> str:
        """Return what this machine lacks to run the case."""
        if (self.mount or self.shared_memory or self.begin is no_permission) and os.geteuid() != 0:
            return "root"
        if self.needs == "control group" and not os.access(MEMORY_GROUPS, os.W_OK):
            return f"write access to {MEMORY_GROUPS}"
        if self.needs == "S3" and not all(map(importlib.util.find_spec, ("moto", "s3fs"))):
            return "moto[s3,server] and s3fs"
        return ""


# -- faults


def nothing(folder: Path) -> None:
    """Have no fault: the place is unusual from the beginning."""


def read_only(folder: Path) -> Undo:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    return lambda: subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


def removed(folder: Path) -> None:
    shutil.rmtree(folder / "run")


def unmounted(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def no_permission(folder: Path) -> Undo:
    parts = [path for path in folder.rglob("*") if path.is_dir()]
    for path in parts:
        path.chmod(0o500)
    os.seteuid(NOBODY)

    def undo() -> None:
        os.seteuid(0)
        for path in parts:
            path.chmod(0o700)

    return undo


def full(folder: Path) -> Undo:
    stuffing = folder / "stuffing"
    with open(stuffing, "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError:
            pass
    return stuffing.unlink


def too_large(folder: Path) -> Undo:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


_PATHS = ("open", "replace", "rename", "mkdir", "stat", "lstat", "listdir", "scandir", "unlink", "symlink")
_FILES = ("fsync", "write", "ftruncate")


def failing(names: tuple[str, ...], error: int | None, delay: float = 0.0) -> Callable[[Path], Undo]:
    """Return a fault in which calls for a folder fail, or take longer."""

    def change(folder: Path, given: Any) -> Any:
        if in_folder(folder, given):
            time.sleep(delay)
            if error is not None:
                raise OSError(error, os.strerror(error), str(given))
        return given

    return lambda folder: changing(names, functools.partial(change, folder))


def in_folder(folder: Path, given: Any) -> bool:
    """Return whether a path or an open file is in the folder."""
    try:
        path = os.readlink(f"/proc/self/fd/{given}") if isinstance(given, int) else os.fspath(given)
    except (OSError, TypeError):
        return False
    return str(path).startswith(str(folder))


def changing(names: tuple[str, ...], change: Callable[[Any], Any]) -> Undo:
    """Have functions of ``os`` called with what ``change`` makes of their first two arguments."""
    undo: list[Callable[[], object]] = []

    def wrap(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            paths = 2 if name in ("replace", "rename") else 1
            return real(*map(change, args[:paths]), *args[paths:], **options)

        setattr(module, name, call)
        undo.append(lambda: setattr(module, name, real))

    for name in names:
        wrap(os, name)
    if "open" in names:
        wrap(builtins, "open")
    return lambda: [function() for function in undo]


# -- buckets


def flaky_bucket(*, every: int = 0, delay: float = 0.0) -> None:
    """Register the protocol ``flaky``: a folder as a bucket, which refuses every n-th call, or answers late."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    lock, calls = threading.Lock(), [0]

    def fails(name: str) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with lock:
                calls[0] += 1
                number = calls[0]
            time.sleep(delay)
            if every and number % every == 0:
                raise OSError(f"503 Slow Down ({name}, call {number})")
            return getattr(LocalFileSystem, name)(self, *args, **options)

        return call

    names = ("_open", "cp_file", "rm_file", "rm", "info", "makedirs", "mv")
    kind: Any = type("Flaky", (LocalFileSystem,), {name: fails(name) for name in names})
    kind.protocol = "flaky"
    kind._strip_protocol = classmethod(lambda cls, path: LocalFileSystem._strip_protocol(path.removeprefix("flaky://")))
    fsspec.register_implementation("flaky", kind)


@contextmanager
def s3_server(case: Case, folder: Path) -> Iterator[None]:
    """Serve a bucket from a process of its own, and copy what is in it to the place when the program has ended.

    Every third request is refused; while a file ``refuse`` is in the folder, all are.
    """
    if case.needs != "S3":
        yield
        return
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto, lock, calls = DomainDispatcherApplication(create_backend_app), threading.Lock(), [0]
    refuse = folder / "refuse"

    def serve(environment: Any, respond: Any) -> Any:
        with lock:
            calls[0] += 1
            number = calls[0]
        if number % 3 and not refuse.exists():
            return moto(environment, respond)
        respond("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(SLOW_DOWN)))])
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [SLOW_DOWN]

    server = make_server("127.0.0.1", 0, serve, threaded=True)
    process = os.fork()
    if not process:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        server.serve_forever()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}", AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1", AWS_MAX_ATTEMPTS="2",
    )  # fmt: skip
    try:
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield
        refuse.unlink(missing_ok=True)
        bucket = boto3.resource("s3").Bucket("bucket")
        for item in bucket.objects.all():
            (folder / "place" / item.key).parent.mkdir(parents=True, exist_ok=True)
            bucket.download_file(item.key, str(folder / "place" / item.key))
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def all_refused(folder: Path) -> None:
    (folder.parent / "refuse").touch()


# -- what a program writes to the place, or reads from there


class Setup(NamedTuple):
    """What a program is made of.

    Args:
        saves_in: the folder of its checkpoints.
        options: arguments of the Trainer.
        loader: arguments of its ``DataLoader``.
        callbacks: further callbacks.
        waits: begin the fault when the first checkpoint is complete.

    """

    saves_in: str
    options: dict[str, Any]
    loader: Mapping[str, Any] = MappingProxyType({})
    callbacks: tuple[Any, ...] = ()
    waits: bool = False


def checkpoints(folder: Path) -> Setup:
    return Setup(f"{folder}/place/run", {})


def without_case(folder: Path) -> Setup:
    """Return a program of two ModelCheckpoints whose names differ in case alone, where all names become small."""
    from hasten.callbacks import ModelCheckpoint

    place = f"{folder}/place/run"
    changing(_PATHS, lambda given: given if not in_folder(folder / "place", given) else os.fspath(given).lower())
    other = ModelCheckpoint(
        place, "STEP={step}", every_n_train_steps=2 * EVERY, save_top_k=-1, auto_insert_metric_name=False
    )
    return Setup(place, {}, callbacks=(other,))


def background(folder: Path) -> Setup:
    from hasten.plugins import AsyncCheckpointIO

    return Setup(f"{folder}/place/run", {"plugins": AsyncCheckpointIO()}, waits=True)


def sharded(folder: Path) -> Setup:
    from hasten.strategies import SingleDeviceStrategy

    strategy = SingleDeviceStrategy()
    strategy.state.saves_folders = True
    return Setup(f"{folder}/place/run", {"strategy": strategy})


def uploads(folder: Path, **fault: Any) -> Setup:
    from hasten.plugins import UploadedCheckpointIO

    flaky_bucket(**fault)
    return Setup(f"{folder}/run", {"plugins": UploadedCheckpointIO(f"flaky://{folder}/place/run", retry_seconds=0.1)})


def uploads_third(folder: Path) -> Setup:
    return uploads(folder, every=3)


def uploads_late(folder: Path) -> Setup:
    return uploads(folder, delay=5.0)


def in_bucket(folder: Path) -> Setup:
    flaky_bucket(every=3)
    return Setup(f"flaky://{folder}/place/run", {})


def in_s3(folder: Path) -> Setup:
    return Setup("s3://bucket/run", {})


def uploads_to_s3(folder: Path) -> Setup:
    from hasten.plugins import UploadedCheckpointIO

    return Setup(f"{folder}/run", {"plugins": UploadedCheckpointIO("s3://bucket/run", retry_seconds=0.1)})


def csv(folder: Path) -> Setup:
    from hasten.loggers import CSVLogger

    return Setup(f"{folder}/run", {"logger": CSVLogger(folder / "place/run", "", 0, flush_logs_every_n_steps=5)})


def tensorboard(folder: Path) -> Setup:
    from hasten.loggers import TensorBoardLogger

    return Setup(f"{folder}/run", {"logger": TensorBoardLogger(folder / "place/run", "", 0, flush_secs=0)})


def record(folder: Path) -> Setup:
    """Return a program whose logger writes no files, so that the record is alone in the folder."""
    from hasten.loggers import Logger
    from hasten.record import file

    class Service(Logger):
        name, version = "", 0
        save_dir = property(lambda self: f"{folder}/place/run")

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    file.FLUSH_SECONDS = 0.0
    return Setup(f"{folder}/run", {"logger": Service()})


def cache(folder: Path) -> Setup:
    os.environ["HASTEN_CACHE"] = f"{folder}/place/cache"
    return Setup(f"{folder}/run", {"speed": "auto"})


# -- worker processes and clocks


def rows(where: Callable[[], object] = int, *, number: int = 80, size: int = 64) -> Any:
    """Return a dataset; ``where`` is called before sample ``number`` is returned."""
    import torch
    from torch.utils.data import Dataset

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 4 * STEPS

        def __getitem__(self, index: int) -> Any:
            if index == number:
                where()
            return torch.randn(size)

    return Rows()


def workers(where: Callable[[], object], *, size: int = 64, timeout: float = 0.0) -> Callable[[Path], Setup]:
    """Return a program whose loader has worker processes."""

    def setup(folder: Path) -> Setup:
        from hasten.data.resume import sources

        sources._SAY_SECONDS = 10.0
        loader = {"dataset": rows(where, size=size), "num_workers": 2, "timeout": timeout}
        return Setup(f"{folder}/place/run", {}, loader)

    return setup


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.RLIM_INFINITY))
    bytearray(1 << 40)


def limited(folder: Path) -> Setup:
    """Return a program with a control group of 64 MiB, for a worker that enters it."""
    MEMORY_GROUP.mkdir(exist_ok=True)
    (MEMORY_GROUP / "memory.limit_in_bytes").write_text("64M")
    return workers(take_memory_in_group)(folder)


def take_memory_in_group() -> None:
    (MEMORY_GROUP / "cgroup.procs").write_text(str(os.getpid()))
    bytearray(b"x") * (1 << 28)


def hang() -> None:
    time.sleep(PATIENCE_SECONDS)


def be_late() -> None:
    time.sleep(22.0)


_held = threading.Lock()


def wait_for_the_lock() -> None:
    with _held:
        pass


def lock_is_held(folder: Path) -> Setup:
    """Return a program with a thread that holds a lock while workers are forked: nobody releases it in their copies."""
    threading.Thread(target=lambda: (_held.acquire(), time.sleep(PATIENCE_SECONDS)), daemon=True).start()
    return workers(wait_for_the_lock)(folder)


def terminate_soon(folder: Path) -> None:
    """Have SIGTERM sent while the run waits for the worker."""
    subprocess.Popen(["sh", "-c", f"sleep 12; kill -TERM {os.getpid()}"])


def timed(folder: Path) -> Setup:
    """Return a program with a record, and with steps that take 0.1 s where 12 s are allowed for 40 of them."""
    from hasten.loggers import CSVLogger

    data = rows()
    type(data).__getitem__ = _slowly(type(data).__getitem__)
    options = {"logger": CSVLogger(folder / "place/run", "", 0), "max_time": {"seconds": 12}}
    return Setup(f"{folder}/place/run", options, {"dataset": data})


def _slowly(get: Any) -> Any:
    def slow(self: Any, index: int) -> Any:
        time.sleep(0.025)
        return get(self, index)

    return slow


def stop_and_go_on(folder: Path) -> None:
    """Stop this process for longer than ``max_time``."""
    pid = os.getpid()
    subprocess.run(["sh", "-c", f"(kill -STOP {pid}; sleep 15; kill -CONT {pid}) & sleep 0.2"], check=True)


def clocks(*names: str, seconds: float, continues: bool = False) -> Callable[[Path], None]:
    """Return a fault in which clocks jump; ``continues``: as if the process had been stopped meanwhile."""

    def begin(folder: Path) -> None:
        for name in names:
            real = getattr(time, name)
            setattr(time, name, lambda real=real: real() + seconds)
        if continues:
            os.kill(os.getpid(), signal.SIGCONT)

    return begin


# -- the program


def program(case: Case, folder: Path) -> None:
    """Train, with the fault."""
    import torch
    from torch.utils.data import DataLoader

    import hasten as L
    from hasten.callbacks import ModelCheckpoint

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[:, :64]).square().mean()
            self.log_dict({f"value_{number}": loss / (number + 3) for number in range(40)})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Fault(L.Callback):
        undo: Undo | None = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == BEGINS:
                # The first checkpoint, which may be written in the background.
                while not list(folder.rglob("*.ckpt")) and setup.waits:
                    time.sleep(0.1)
                self.undo = case.begin(folder / "place")
            elif trainer.global_step == ENDS and self.undo is not None:
                self.undo()

    setup = case.setup(folder)
    keep = ModelCheckpoint(setup.saves_in, "{step}", every_n_train_steps=EVERY, save_top_k=-1, save_on_exception=True)
    options = {
        "max_steps": STEPS,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **setup.options,
    }
    L.seed_everything(0)
    trainer = L.Trainer(accelerator="cpu", callbacks=[keep, Fault(), *setup.callbacks], **options)
    loader = DataLoader(**{"dataset": rows(), "batch_size": 4, **setup.loader})
    trainer.fit(Model(), loader)
    print(f"trained {trainer.global_step} steps", file=sys.stderr)


# -- the table

SLOW = failing((*_PATHS, *_FILES), None, 5.0)
STALE = failing((*_PATHS, *_FILES), errno.ESTALE)
QUOTA = failing(_FILES, errno.EDQUOT)
TMPFS, SMALL = "size=8m", "size=400k"

CASES = (
    # place, fault, program, begin, exit code, what is said, what is kept, mount
    Case("file system", "read-only", checkpoints, read_only, 1, "Read-only file system", "10", TMPFS),
    Case("file system", "unmounted", checkpoints, unmounted, 0, "trained 40", "20 30 40", TMPFS),
    Case("file system", "folder removed", checkpoints, removed, 0, "trained 40", "20 30 40"),
    Case("file system", "permission lost", checkpoints, no_permission, 1, "Permission denied", "10", TMPFS),
    Case("file system", "full", checkpoints, full, 1, "No space left on device .* bytes free", "10", SMALL),
    Case("file system", "quota (EDQUOT when synced)", checkpoints, QUOTA, 1, "quota exceeded", "10"),
    Case("file system", "files too large (RLIMIT_FSIZE)", checkpoints, too_large, 1, "File too large", "10"),
    Case("file system", "stale handle (ESTALE)", checkpoints, STALE, 1, "Stale file handle", "10"),
    Case("file system", "each call takes 5 s", checkpoints, SLOW, 0, "trained 40", "10 20 30 40"),
    Case(
        "file system", "rename across devices (EXDEV)", checkpoints,
        failing(("replace", "rename"), errno.EXDEV), 1, "cross-device", "10",
    ),
    Case("file system", "case-insensitive names", without_case, nothing, 0, "trained 40", "10 20 30 40 20-v1 40-v1"),
    Case("background saves", "read-only", background, read_only, 1, "Read-only file system", "10", TMPFS),
    Case("background saves", "full", background, full, 1, "No space left on device", "10", SMALL),
    Case("background saves", "stale handle (ESTALE)", background, STALE, 1, "Stale file handle", "10"),
    Case("background saves", "each call takes 5 s", background, SLOW, 0, "trained 40", "10 20 30 40"),
    Case("sharded folders", "read-only", sharded, read_only, 1, "Read-only file system", "10", TMPFS),
    Case("sharded folders", "full", sharded, full, 1, "No space left on device", "10", SMALL),
    Case("sharded folders", "quota (EDQUOT when synced)", sharded, QUOTA, 1, "quota exceeded", "10"),
    Case(
        "sharded folders", "rename across devices (EXDEV)", sharded,
        failing(("replace", "rename"), errno.EXDEV), 1, "cross-device", "10",
    ),
    Case("bucket", "every third call fails", in_bucket, nothing, 1, "503 Slow Down", ""),
    Case("uploads", "every third call fails", uploads_third, nothing, 1, "only on this machine", "10 20 30 40"),
    Case(
        "uploads", "each call takes 5 s", uploads_late, nothing, 0, "trained 40",
        "10 20 30 40, and copies of 10 20 30 40",
    ),
    Case("S3", "every third request is refused", in_s3, nothing, 0, "trained 40", "10 20 30 40", needs="S3"),
    Case(
        "S3", "all requests are refused from then on", in_s3, all_refused, 1, "OSError: .Errno 16", "10", needs="S3",
    ),
    Case(
        "uploads to S3", "every third request is refused", uploads_to_s3, nothing, 0, "trained 40",
        "10 20 30 40, and copies of 10 20 30 40", needs="S3",
    ),
    Case(
        "uploads to S3", "all requests are refused from then on", uploads_to_s3, all_refused, 1, "only on this machine",
        "10 20 30 40(, and copies of 10)?", needs="S3",
    ),
    Case("CSVLogger", "read-only", csv, read_only, 1, "Read-only file system", "10 15", TMPFS),
    Case("CSVLogger", "full", csv, full, 1, "No space left", "10 15", SMALL),
    Case("CSVLogger", "folder removed", csv, removed, 0, "was removed", "10 20 30 40"),
    Case("TensorBoardLogger", "full", tensorboard, full, 1, "No space left", "10 1.", SMALL),
    Case("TensorBoardLogger", "folder removed", tensorboard, removed, 1, "No such file", "10 1."),
    Case("record (run.jsonl)", "folder removed", record, removed, 0, "record of this run cannot", "10 20 30 40"),
    Case("record (run.jsonl)", "full", record, full, 0, "record of this run cannot", "10 20 30 40", SMALL),
    Case("cache", "read-only from the beginning", cache, nothing, 0, "trained 40", "10 20 30 40", "size=8m,ro"),
    Case(
        "worker", "killed, as by the OOM killer", workers(die), nothing, 1,
        "killed by signal: Killed|has ended before its batch", "10 (1.|20)",
    ),
    Case("worker", "out of memory (RLIMIT_AS)", workers(take_memory), nothing, 1, "MemoryError", "10 20"),
    Case(
        "worker", "out of memory (control group)", limited, nothing, 1, "killed by signal: Killed", "10 (1.|20)",
        needs="control group",
    ),
    Case("worker", "late by 22 s", workers(be_late), nothing, 0, "has not arrived from the 2 worker", "10 20 30 40"),
    Case("worker", "stuck, then SIGTERM", workers(hang), terminate_soon, 143, "has not arrived from the 2", "10 20"),
    Case("worker", "stuck, with timeout=5", workers(hang, timeout=5.0), nothing, 1, "timed out after 5", "10 20"),
    Case("worker", "forked while a thread holds a lock", lock_is_held, terminate_soon, 143, "has not", "10 20"),
    Case(
        "worker", "/dev/shm is full", workers(int, size=1 << 16), nothing, 1, "shared memory|No space left",
        "", "", SMALL,
    ),
    Case("process", "stopped for 15 s, max_time=12 s", timed, stop_and_go_on, 0, "trained 40", "10 20 30 40"),
    Case(
        "clock", "an hour passes while it is stopped", timed,
        clocks("monotonic", "perf_counter", "time", seconds=3600.0, continues=True), 0, "trained 40", "10 20 30 40",
    ),
    Case("clock", "set back by an hour", timed, clocks("time", seconds=-3600.0), 0, "trained 40", "10 20 30 40"),
    Case("clock", "an hour asleep", timed, clocks("time", seconds=3600.0), 0, "trained 40", "10 20 30 40"),
)  # fmt: skip


def kept(folder: Path) -> str:
    """Return the names of the whole checkpoints of the program, of their copies, and of what else was left there."""
    own, copies = whole(folder / "run"), whole(folder / "place")
    left = [path.name for path in folder.rglob("*.hasten-*")]
    return " ".join([*own, *left]) + (", and copies of " if own and copies else "") + " ".join(copies)


def whole(folder: Path) -> list[str]:
    """Return the names of the checkpoints below a folder; damaged ones are marked."""
    from hasten.callbacks.checkpoint_files import find
    from hasten.checkpoint.files import verify

    names = []
    for path in find(str(folder), ".ckpt"):
        name = Path(path).stem.removeprefix("step=")
        try:
            verify(path)
        except RuntimeError:
            name += " (damaged)"
        names.append(name)
    return sorted(names, key=lambda name: (len(name), name))


@contextmanager
def mounted(place: Path, kind: str) -> Iterator[None]:
    """Mount a file system at the place."""
    place.mkdir()
    if not kind:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", kind, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, stderr=subprocess.DEVNULL)


def run(case: Case) -> dict[str, Any]:
    """Return how one case ended."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        with mounted(folder / "place", case.mount), open(folder / "output", "w+b") as output:
            with s3_server(case, folder):
                began = time.monotonic()
                # A copy of this process, which has imported torch.
                child = os.fork()
                if not child:
                    in_child(case, folder, output.fileno())
                code = wait(child)
                seconds = time.monotonic() - began
            output.seek(0)
            text, found = output.read().decode(errors="replace"), kept(folder)
    said = [line.strip() for line in text.splitlines() if re.search(case.says, line)]
    return {
        "ok": code == case.code and bool(said) and bool(re.fullmatch(case.kept, found)),
        "code": code,
        "kept": found,
        # The last one: a traceback quotes messages before it.
        "said": re.sub(r"^\S+:\d+: |__main__.rows.<locals>.", "", said[-1].replace(name, "")) if said else "",
        "seconds": seconds,
        "output": text,
    }


def in_child(case: Case, folder: Path, output: int) -> NoReturn:
    """Run the program as Python runs one, and end this process."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ["HASTEN_CACHE"] = f"{folder}/cache"
    code = 0
    try:
        if case.shared_memory:
            own_mounts()
            subprocess.run(["mount", "-t", "tmpfs", "-o", case.shared_memory, "tmpfs", "/dev/shm"], check=True)
        program(case, folder)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        code = 1
        traceback.print_exc()
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare() -> None:
    """Import what all programs need."""
    import torch

    import hasten
    import hasten.loggers
    import hasten.plugins

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert hasten.loggers.TensorBoardLogger
    assert hasten.plugins.UploadedCheckpointIO


def own_mounts() -> None:
    """Keep what is mounted from now on from other processes."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def wait(child: int) -> int:
    """Return the exit code of a process, which is killed when it takes too long."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a place and a fault, such as 'bucket' or 'worker, stuck'")
    parser.add_argument("--show", action="store_true", help="print the whole output of each program")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare()
    rows: dict[str, list[str]] = {}
    bad = left_out = 0
    for case in CASES:
        if arguments.only not in f"{case.place}, {case.fault}":
            continue
        if lacks := case.missing():
            print(f"--  {case.place}, {case.fault}: not run, it needs {lacks}", flush=True)
            left_out += 1
            continue
        row = run(case)
        bad += not row["ok"]
        mark = "ok " if row["ok"] else "BAD"
        print(
            f"{mark} {case.place}, {case.fault}: exit {row['code']}, {row['seconds']:.0f} s, kept [{row['kept']}], "
            f"said: {row['said'][:200]}",
            flush=True,
        )
        if arguments.show or not row["ok"]:
            print(row["output"])
        said = "" if row["said"] == f"trained {STEPS} steps" else f"`{_cut(row['said'])}`"
        rows.setdefault(case.place, []).append(
            f"| {case.fault} | {row['kept'] or 'nothing'} | {said or 'nothing'} | {row['code']} |"
        )
    if arguments.write and left_out:
        parser.error(f"the table is written when all rows are there; {left_out} could not be run")
    if arguments.write and not arguments.only:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        tables = "\n\n".join("\n".join([f"### {_titled(place)}", "", *_HEAD, *rows[place]]) for place in rows)
        PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    with contextlib.suppress(OSError):
        MEMORY_GROUP.rmdir()
    raise SystemExit(bool(bad))


_HEAD = ("| fault | steps kept | message | exit code |", "|---|---|---|---|")


def _titled(place: str) -> str:
    return place[:1].upper() + place[1:]


def _cut(text: str) -> str:
    """Return what a message says, without the number of the error and the path that all rows share."""
    text = re.sub(r"\[Errno \d+\] |(: b?'/place/[^']*')$", "", text.replace("|", "/").replace("`", "'"))
    return text if len(text) <= 120 else f"{text[:117]}..."


if __name__ == "__main__":
    main()
