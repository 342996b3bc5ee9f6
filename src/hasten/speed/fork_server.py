"""A process that has imported what trials need: each trial is a fork of it, which starts in milliseconds."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_BYTES = 1 << 16
# What every trial needs; the first optimizer of a process imports torch._dynamo, which takes longer than torch.
_ALWAYS = ("torch", "torch._dynamo", "hasten.trainer", "hasten.callbacks", "hasten.speed.trial")
# Start threads or devices when they are imported; or stand for hasten in the programs that import them.
_NEVER = ("tensorflow", "jax", "jaxlib", "grpc", "lightning", "pytorch_lightning", "lightning_fabric")


class ForkServer:
    """The parent's side of the server.

    Args:
        environment: of the server and its forks.
        scratch: a folder that the server removes if its parent dies.

    """

    def __init__(self, environment: Mapping[str, str], scratch: Path) -> None:
        self.works = hasattr(os, "fork") and sys.platform != "darwin"
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = 0
        if not self.works:
            return
        self._socket, other = socket.socketpair()
        with other:
            program = "from hasten.speed.fork_server import serve; serve()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(other.fileno()), str(scratch)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
                env=environment,
            )
        self._answers = self._socket.makefile("r", encoding="utf-8")
        self.preload(_ALWAYS)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules for all trials to come; this returns before they are imported."""
        if self.works:
            self._send({"preload": list(modules)})
            self._unread += 1

    def is_ready(self) -> bool:
        """Wait until all modules are imported; return whether trials can be forks."""
        while self._unread:
            self._unread -= 1
            self.works = self._read().get("works", False)
        return self.works

    def start(self, path: str, read_fd: int, write_fd: int, log: int) -> ForkedProcess:
        """Fork a trial; see ``hasten.speed.trial.run``."""
        self._send({"path": path}, (read_fd, write_fd, log))
        return ForkedProcess(self._read()["pid"], self)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a trial; None while it runs."""
        self.is_ready()
        self._send({"wait": pid})
        code: int | None = self._read().get("code", -signal.SIGKILL)
        return code

    def close(self) -> None:
        """End the server and its forks."""
        if self._process is None:
            return
        self._answers.close()
        self._socket.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        data = (json.dumps(request) + "\n").encode()
        with suppress(BrokenPipeError):
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            self._socket.sendall(data[sent:])

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        # Empty where the server has died: an import may have ended it.
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer


class ForkedProcess:
    """A trial, which is a child of the server."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self._code is None:
            self._code = self._server.exit_code(self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("trial", timeout or 0.0)
            time.sleep(0.005)
        return code


# -- the server itself


def serve() -> None:
    """Answer the parent's requests until it closes the socket or dies; then end all forks."""
    server, scratch = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    children: set[int] = set()
    del sys.argv[1:]
    for request, fds in _requests(server):
        if "preload" in request:
            for name in request["preload"]:
                _import(name)
            # What was imported is never collected: its pages stay shared.
            gc.collect()
            gc.freeze()
            answer: dict[str, Any] = {"works": _can_fork()}
        elif "wait" in request:
            answer = {"code": _exit_code(request["wait"], children)}
        else:
            pid = os.fork()
            if not pid:
                server.close()
                _run(request["path"], *fds)
            children.add(pid)
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        server.sendall((json.dumps(answer) + "\n").encode())
    for pid in children:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _requests(server: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield each request with the file descriptors that came with it, until the parent is gone."""
    data, fds = b"", list[int]()
    while True:
        while b"\n" not in data:
            part, more, _, _ = socket.recv_fds(server, _BYTES, 3)
            if not part:
                return
            data += part
            fds += more
        line, _, data = data.partition(b"\n")
        yield json.loads(line), fds
        fds = []


def _import(name: str) -> None:
    """Import an installed module; the program's own ones may do more than define things."""
    package = name.partition(".")[0]
    if name in sys.modules or package in _NEVER:
        return
    with suppress(Exception, SystemExit):
        spec = importlib.util.find_spec(package)
        origin = spec.origin if spec is not None else None
        installed = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
        if package == "hasten" or origin in ("built-in", "frozen") or (origin or "").startswith(installed):
            importlib.import_module(name)


def _can_fork() -> bool:
    """Return whether forks work: there are no threads that a fork would lose, and CUDA has not started."""
    if threading.active_count() > 1:
        return False
    pid = os.fork()
    if not pid:
        torch = sys.modules["torch"]
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _exit_code(pid: int, children: set[int]) -> int | None:
    if pid not in children:
        return 0
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _run(path: str, read_fd: int, write_fd: int, log: int) -> None:
    """Be the trial."""
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        from hasten.speed import trial

        trial.run(path, read_fd, write_fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
