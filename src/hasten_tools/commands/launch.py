"""``hasten launch``: start a program in several processes, on one or several machines, and restart them."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import make_error
from hasten._lib.files import write_atomically
from hasten._lib.names import did_you_mean
from hasten.commands.parser import Parser, folder, whole
from hasten_lightning.commands.run import add_program, check_program, parse_program, program_words

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_DEFAULT_PORT = 29400
# How long machines may take to meet, at the start and after a restart.
_MEETING_SECONDS = 600
_FIRST_NOTICE_SECONDS, _NEXT_NOTICE_SECONDS = 10.0, 60.0
# How long before a process fails it may have noted why.
_CAUSE_SECONDS = 30
# A process that was asked to stop saves a checkpoint, which may take longer than the 30 s that torchrun gives it.
_STOP_SECONDS = 300
# The options that --save writes.
_SAVED = ("procs", "nodes", "min-nodes", "max-nodes", "rdzv", "rdzv-id", "local-addr", "restarts", "log-dir")
# What the Trainer, torchrun's fellows and schedulers call the options.
_ELSEWHERE = {
    **dict.fromkeys(
        ("devices", "device", "gpus", "num-gpus", "n-gpus", "ngpus", "nproc", "nprocs", "n", "np", "num-procs",
         "num-processes", "processes", "world-size", "workers", "num-workers", "ntasks", "ntasks-per-node"),
        "procs",
    ),
    **dict.fromkeys(("num-nodes", "n-nodes", "machines", "num-machines"), "nodes"),
    **dict.fromkeys(("retries", "max-retries"), "restarts"),
    "config-file": "config",
}  # fmt: skip
_RULES = """\
A process that fails ends all others. With --restarts, all start again, and a program that trains with
ckpt_path="last" continues from its newest checkpoint. The exit code is 0, or that of the process that
failed first: 143 after SIGTERM, 130 after Ctrl-C, 137 for one that was killed. See docs/launch.md."""


def main(arguments: Sequence[str]) -> int:
    """Launch a program; return its exit code."""
    parser = make_parser()
    given, rest = parse_program(parser, arguments)
    if given.config is not None:
        given = parser.parse([*_saved_options(given.config, parser), *arguments[: len(arguments) - len(rest)]])
    nodes = _nodes(given, parser)
    if given.save is not None:
        _save_options(given, parser)
        if given.program is None and given.module is None:
            return 0
    check_program(parser, given)
    endpoint = _endpoint(given, nodes, parser)
    return _launch(given, nodes, endpoint, ["-u", *program_words(parser, given, rest)])


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten launch",
        description=(
            "Start a program in several processes, on one or several machines. Trainer(devices='auto') uses all of "
            "them. Everything after PROGRAM belongs to the program. Options may be spelled as torchrun spells them."
        ),
        epilog=_RULES,
        elsewhere=_ELSEWHERE,
    )

    def add(*names: str, **options: Any) -> None:
        spelled = [name for one in names for name in dict.fromkeys((one, "--" + one[2:].replace("-", "_")))]
        parser.add_argument(*spelled, **options)

    add("--procs", "--nproc-per-node", metavar="N", type=_procs, default="auto",
        help='processes on this machine; "auto" (default): one for each GPU, or one')  # fmt: skip
    add("--nodes", "--nnodes", metavar="N", type=_node_range, help="machines (default 1), or MIN:MAX of them")
    add("--min-nodes", metavar="N", type=whole(1), help="continue with as few machines as this when others are lost")
    add("--max-nodes", metavar="N", type=whole(1), help="accept as many machines as this")
    add(
        "--rdzv", "--rdzv-endpoint", metavar="HOST:PORT", help="where machines meet: one of them, which must stay alive"
    )
    add("--rdzv-id", metavar="NAME", default="hasten", help="tells several runs with one HOST:PORT apart")
    add("--local-addr", metavar="ADDRESS", help="the address of this machine for the others, if its name is not enough")
    add("--restarts", "--max-restarts", metavar="N", type=whole(0), default=0,
        help="start all processes again so often when one has failed (default 0)")  # fmt: skip
    add("--log-dir", metavar="FOLDER", type=folder, help="write the output of each process to a file there, too")
    add("--save", metavar="FILE", help="write the other options to this YAML file; without PROGRAM, do nothing else")
    add("--config", metavar="FILE", help="take options from this file; those of the command line come first")
    add("--standalone", action="store_true", help="as torchrun has it: one machine, which is the default")
    for name in ("--master-addr", "--master-port", "--node-rank", "--rdzv-backend"):
        add(name, metavar="X", type=_not_needed(name), help=argparse.SUPPRESS)
    add_program(parser)
    return parser


def _saved_options(file: str, parser: Parser) -> list[str]:
    """Return the options in a file that ``--save`` has written, as words of a command line."""
    import yaml

    try:
        # Each value stays the text that is written there: YAML itself reads 1:2 as 62.
        saved = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        parser.error(f"--config {file}: no such file. Write one: hasten launch --procs 4 --save {file}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"--config {file} cannot be read: {shown(error)}")
    if not isinstance(saved, dict):
        parser.error(f"--config {file}: use lines such as procs: 4, one for each option.")
    for name in saved:
        if name not in _SAVED:
            parser.error(f"--config {file}: unknown option {name!r}.{did_you_mean(str(name), _SAVED)}")
    return [f"--{name}={value}" for name, value in saved.items()]


def _save_options(given: argparse.Namespace, parser: Parser) -> None:
    """Write the options that differ from their defaults to the file of ``--save``."""
    import yaml

    values = {name: getattr(given, name.replace("-", "_")) for name in _SAVED}
    if given.nodes is not None:
        smallest, largest = given.nodes
        values["nodes"] = largest if smallest == largest else f"{smallest}:{largest}"
    changed = {name: value for name, value in values.items() if value != parser.get_default(name.replace("-", "_"))}
    try:
        write_atomically(given.save, yaml.safe_dump(changed, sort_keys=False))
    except OSError as error:
        parser.error(f"--save {given.save} cannot be written: {error.strerror}.")
    _say(f"wrote {given.save}. To use it: hasten launch --config {given.save} train.py")


def _procs(text: str) -> int | str:
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number of at least 1, auto, gpu or cpu.") from None


def _node_range(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of machines of "N" or "MIN:MAX"."""
    first, _, last = text.partition(":")
    smallest = whole(1)(first)
    return smallest, whole(smallest)(last) if last else smallest


def _not_needed(name: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if name == "--rdzv-backend" and text == "c10d":
            return text
        raise argparse.ArgumentTypeError(
            "machines meet at --rdzv HOST:PORT here, and get their numbers there. torchrun has other ways, and hasten "
            "programs run under it as well."
        )

    return read


def _nodes(given: argparse.Namespace, parser: Parser) -> tuple[int, int]:
    """Return the smallest and the largest number of machines."""
    smallest, largest = given.nodes or (given.min_nodes or 1, given.max_nodes or 1)
    if given.nodes is None:
        if smallest > 1 and given.max_nodes is None:
            parser.error(f"--min-nodes {given.min_nodes}: name --max-nodes, too.")
        if largest > 1 and given.min_nodes is None:
            parser.error(f"--max-nodes {given.max_nodes}: name --min-nodes, too, or write --nodes {given.max_nodes}.")
    else:
        if smallest != largest and (given.min_nodes or given.max_nodes):
            parser.error(f"--nodes {smallest}:{largest} says it all. Leave out --min-nodes and --max-nodes.")
        if given.max_nodes not in (None, largest):
            parser.error(f"--nodes {largest} and --max-nodes {given.max_nodes} contradict each other. Leave one out.")
        smallest = given.min_nodes or smallest
    if smallest > largest:
        parser.error(f"--min-nodes {smallest} is more than the {largest} of --max-nodes.")
    if given.standalone and largest > 1:
        parser.error(f"--standalone is for one machine, not {largest}. Leave it out, and add --rdzv HOST:PORT.")
    return smallest, largest


def _endpoint(given: argparse.Namespace, nodes: tuple[int, int], parser: Parser) -> tuple[str, int]:
    """Return host and port where the machines meet; port 0 for one machine, where any free one will do."""
    if given.rdzv is None:
        if nodes[1] > 1:
            parser.error(
                f"{nodes[1]} machines need a place to meet: add --rdzv HOST:PORT with the name of one of them and a "
                f"free port, such as {_DEFAULT_PORT}, the same on each."
            )
        return "localhost", 0
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        host, port = parse_rendezvous_endpoint(given.rdzv, _DEFAULT_PORT)
    except ValueError:
        port = -1
    if not 0 < port < 2**16:
        parser.error(f"--rdzv {given.rdzv}: use HOST:PORT, such as node1:{_DEFAULT_PORT}.")
    return host, port


def _launch(given: argparse.Namespace, nodes: tuple[int, int], endpoint: tuple[str, int], program: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from hasten.machine.cluster import LAUNCHER_VARIABLE
    from hasten.machine.collectives import CAUSE_VARIABLE
    from hasten.machine.launch import describe_death, quiet_torch, threads_for_each

    procs = _number_of_processes(given.procs)
    if procs > 1 and (threads := threads_for_each(procs)) is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ[LAUNCHER_VARIABLE] = "hasten launch"
    for name, value in quiet_torch().items():
        os.environ.setdefault(name, value)
    # Otherwise a restarted process finds the addresses of dead ones: https://github.com/pytorch/pytorch/issues/135712.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_STOP_SECONDS))
    host, port = endpoint
    with tempfile.TemporaryDirectory(prefix="hasten-launch-") as unused, _notices(nodes, endpoint) as started:
        cause = Path(unused, "cause")
        os.environ[CAUSE_VARIABLE] = str(cause)
        config = LaunchConfig(
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            nproc_per_node=procs,
            logs_specs=_log_files(given.log_dir, unused, given.restarts, started),
            run_id=given.rdzv_id,
            rdzv_backend="c10d",
            rdzv_endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            rdzv_configs={"join_timeout": _MEETING_SECONDS},
            max_restarts=given.restarts,
            # Names of laptops often cannot be looked up.
            local_addr=given.local_addr or (host if host in ("localhost", "127.0.0.1", "::1") else None),
        )
        try:
            _wait_for_host(endpoint)
            elastic_launch(config, sys.executable)(*program)
        except ChildFailedError as error:
            rank, failure = _first_failure(error.failures)
            code = failure.exitcode
            if code not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
                what = _cause(cause, failure) if code == 1 else None
                _say(
                    (what or describe_death(rank, code))
                    + (f" No restart of {given.restarts} is left." if given.restarts else "")
                )
            return code if code > 0 else 128 - code
        except SignalException as error:
            return 128 + int(error.sigval)
        except RendezvousClosedError:
            _say(f"the run {given.rdzv_id!r} at {host}:{port} has ended. Start it again on all machines.")
            return 1
        except (RendezvousError, ConnectionError, TimeoutError) as error:
            _say(
                f"the machine at {host}:{port}, where all meet, does not answer ({shown(error)}). It has to run "
                "`hasten launch` with the same --rdzv, as long as the others do."
            )
            return 1
    return 0


def _cause(file: Path, failure: ProcessFailure) -> str | None:
    """Return what other processes say about the one that ended first; None if they did not."""
    # An error file from an earlier start says nothing about this one.
    if not file.exists() or file.stat().st_mtime < failure.timestamp - _CAUSE_SECONDS:
        return None
    return f"{file.read_text('utf-8')}. All processes of the run were stopped."


def shown(error: BaseException) -> str:
    """Return what happened at first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _say(text: str) -> None:
    print(f"hasten launch: {text}", file=sys.stderr, flush=True)


def _number_of_processes(procs: int | str) -> int:
    if isinstance(procs, int):
        return procs
    from hasten.machine.devices import CPUAccelerator, best_accelerator
    from hasten.machine.host import usable_cores

    if procs == "cpu":
        return usable_cores()
    accelerator = best_accelerator()
    if procs == "gpu" and isinstance(accelerator, CPUAccelerator):
        raise make_error(
            SystemExit, "hasten launch: error: --procs gpu: torch finds no GPU here.", fix="Use --procs with a number."
        )
    return accelerator.auto_device_count()


def _first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank and the failure of the process that failed first, not of one that ended because of it."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        code = item[1].exitcode
        # The others are asked to stop, or lose their connection to one that was killed.
        return code in (-signal.SIGTERM, 128 + signal.SIGTERM), code >= 0, item[1].timestamp

    return min(failures.items(), key=order)


def _log_files(folder: str | None, unused: str, restarts: int, started: Callable[[], None]) -> Any:
    """Return where the output of the processes goes; ``started`` is called whenever they start."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class LogFiles(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            started()
            if (count := int(envs[0]["TORCHELASTIC_RESTART_COUNT"])) > 0 and envs[0]["RANK"] == "0":
                _say(f"restart {count} of {restarts}, with {envs[0]['WORLD_SIZE']} processes.")
            return super().reify(envs)

    return LogFiles(log_dir=folder or unused, tee=Std.ALL if folder else Std.NONE)


@contextlib.contextmanager
def _notices(nodes: tuple[int, int], endpoint: tuple[str, int]) -> Iterator[Callable[[], None]]:
    """Print now and then that this machine waits for others, until the function that is yielded was called."""
    met = threading.Event()

    def print_until_met() -> None:
        began, seconds = time.monotonic(), _FIRST_NOTICE_SECONDS
        while not met.wait(seconds):
            seconds = _NEXT_NOTICE_SECONDS
            needed = f"{nodes[0]} to {nodes[1]}" if nodes[0] < nodes[1] else str(nodes[1])
            _say(
                f"this machine has waited {time.monotonic() - began:.0f} s at {endpoint[0]}:{endpoint[1]} for others; "
                f"the run needs {needed} machines."
            )

    if nodes[1] > 1:
        threading.Thread(target=print_until_met, name="hasten-waiting", daemon=True).start()
    try:
        yield met.set
    finally:
        met.set()


def _wait_for_host(endpoint: tuple[str, int]) -> None:
    """Wait until the machine where all meet listens, if it is another one."""
    host, port = endpoint
    if port == 0 or _is_here(host):
        return
    began, is_told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            waited = time.monotonic() - began
            if waited > _FIRST_NOTICE_SECONDS and not is_told:
                is_told = True
                _say(f"{host}:{port} cannot be reached yet ({shown(error)}); waits up to {_MEETING_SECONDS} s for it.")
            if waited > _MEETING_SECONDS:
                raise ConnectionError from error
            time.sleep(0.5)
        else:
            return


def _is_here(host: str) -> bool:
    """Return whether a host is this machine: only its own addresses can be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind((address[0], 0))
    except OSError:
        return False
    return True
