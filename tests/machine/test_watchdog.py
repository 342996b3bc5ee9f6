"""A run in which nothing moves ends soon, and says where each rank is; processes that differ are refused by name."""

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
from pathlib import Path

from tests.programs import fork_python, started_copies
from torch.distributed._functional_collectives import wait_tensor

from hasten.machine import stacks
from hasten.machine.watchdog import Beat, judge

TIMEOUT = 600.0


def waiting(idle: float, **more: object) -> Beat:
    return Beat(idle_seconds=idle, groups={"0": 8}, count=4, **more)  # type: ignore[arg-type]


def late(idle: float, **more: object) -> Beat:
    return Beat(idle_seconds=idle, groups={"0": 7}, count=4, **more)  # type: ignore[arg-type]


def decision(*beats: Beat, warned: bool = False) -> tuple[bool, int | None]:
    """Return whether there is a report, and the exit code with which the run ends."""
    verdict = judge(dict(enumerate(beats)), TIMEOUT, warned=warned)
    return verdict is not None, None if verdict is None else verdict.code


def test_a_rank_that_does_not_come_is_reported_once_and_ends_the_run_after_the_timeout() -> None:
    assert decision(waiting(119), late(119)) == (False, None)
    assert decision(waiting(121), late(121)) == (True, None)
    assert decision(waiting(121), late(121), warned=True) == (False, None)
    assert decision(waiting(601), late(601), warned=True) == (True, 1)
    # Whoever still moves keeps the run alive.
    assert decision(waiting(900), late(1)) == (False, None)
    verdict = judge({0: waiting(601), 1: late(601), 2: waiting(601)}, TIMEOUT, warned=True)
    assert verdict is not None
    assert verdict.late == [1]
    assert verdict.headline.startswith("Rank 1 did not arrive for 601 s, and ranks 0, 2 wait.")


def test_what_takes_long_on_all_ranks_and_checkpoints_are_no_standstill() -> None:
    assert decision(waiting(3000), waiting(3000)) == (False, None)
    saving = late(800, saves=True, is_long=True)
    assert decision(waiting(800), saving) == (False, None)
    assert decision(waiting(901), late(901, is_long=True)) == (True, None)
    assert decision(waiting(1801), late(1801, is_long=True), warned=True) == (True, 1)
    assert decision(waiting(9000, is_unlimited=True), late(9000)) == (False, None)


def test_a_stop_that_was_asked_for_ends_a_standstill_soon_and_lets_work_be_completed() -> None:
    asked = {"stop": int(signal.SIGTERM), "stop_seconds": 16.0, "presses": 1}
    assert decision(waiting(100), late(100, **asked)) == (True, 143)
    # With the time of the report and of killing what does not end, 12 seconds in all.
    assert decision(waiting(7.5), late(7.5, **asked)) == (True, 143)
    # Nobody waits for another: this step is the first, and long.
    assert decision(waiting(7.5), waiting(7.5, **asked)) == (False, None)
    # A step was completed since: it ends by itself.
    assert decision(waiting(5), late(5, **asked)) == (False, None)
    # Steps take 40 seconds.
    assert decision(waiting(30, usual_seconds=40.0), late(30, **asked)) == (False, None)
    # The first process writes the checkpoint of the stopped run.
    assert decision(late(100, saves=True, is_long=True), waiting(100, **asked)) == (False, None)
    # All work on a hook of the user's.
    assert decision(waiting(100, is_patient=True), waiting(100, **asked)) == (False, None)
    assert decision(waiting(100), waiting(100, **asked)) == (True, 143)
    twice = {"stop": int(signal.SIGINT), "stop_seconds": 3.0, "presses": 2}
    assert decision(waiting(100, **twice), late(100)) == (True, 130)


def test_a_standstill_that_cannot_end_ends_the_run_soon_and_says_what_to_change() -> None:
    saving = {"in_save_checkpoint": True, "is_long": True, "waits": True}
    verdict = judge({0: waiting(16, **saving), 1: waiting(16, waits=True)}, TIMEOUT, warned=False)
    assert verdict is not None
    assert verdict.code == 1
    assert verdict.headline.startswith(
        "Trainer.save_checkpoint() or Fabric.save() is called on rank 0 and not on rank 1."
    )
    assert decision(waiting(16, **saving), late(16, waits=True)) == (True, 1)
    assert decision(waiting(16, **saving), late(16, waits=True, saves=True)) == (False, None)
    # It may come to it.
    assert decision(waiting(16, **saving), waiting(16)) == (False, None)
    assert decision(waiting(16, **saving), waiting(16, **saving)) == (False, None)
    # Rank 0 has not completed a collective that is behind rank 1.
    assert decision(late(16, **saving), waiting(16, waits=True)) == (False, None)
    dead = judge({0: waiting(16, waits=True), 1: late(16)}, TIMEOUT, warned=False, ended=[1])
    assert dead is not None
    assert (dead.code, dead.headline) == (1, "Rank 1 has ended in the middle of the run.")
    gone = judge({1: waiting(16, in_backward=True)}, TIMEOUT, warned=False, left={0: late(0)})
    assert gone is not None
    assert gone.headline.startswith("Rank 0 has ended the program without a collective that rank 1 is in.")
    # Rank 0 took part in it, or rank 1 does work of its own.
    assert judge({1: waiting(16, waits=True)}, TIMEOUT, warned=False, left={0: waiting(0)}) is None
    assert judge({1: waiting(16)}, TIMEOUT, warned=False, left={0: late(0)}) is None


def test_a_process_that_gathers_shards_waits_for_the_others() -> None:
    file = inspect.getfile(wait_tensor)
    assert stacks.activity_of([stacks.Frame(file, 1, "wait_tensor", "torch")]).waits


def test_code_that_a_library_generates_is_not_marked_as_that_of_the_program() -> None:
    found: list[list[stacks.Frame]] = []
    exec(compile("look()", "<string>", "exec"), {"look": lambda: found.append(stacks.capture(threading.get_ident()))})
    index = stacks.marked(found[0][:-1])
    assert index is not None
    assert found[0][index].file == __file__


def test_a_process_that_has_lost_the_others_goes_by_itself() -> None:
    verdict = judge({3: Beat(idle_seconds=601, waits=True)}, TIMEOUT, warned=True)
    assert verdict is not None
    assert verdict.headline.startswith("Rank 3 has waited for 601 s.")
    # It may have its own work to do, when the others have ended.
    assert decision(Beat(idle_seconds=9000)) == (False, None)


def test_a_stack_says_what_its_process_does() -> None:
    def frames(*calls: tuple[str, int, str, str]) -> list[stacks.Frame]:
        return [stacks.Frame(*call) for call in calls]

    program = ("/home/me/train.py", 30, "<module>", "user")
    fit = ("/lib/hasten/loops/fit.py", 200, "train_batches", "hasten")
    hook = ("/home/me/train.py", 12, "Model.on_train_epoch_end", "user")
    barrier = ("/lib/hasten/machine/collectives.py", 9, "barrier", "hasten")
    torch_barrier = ("/lib/torch/distributed/distributed_c10d.py", 5000, "barrier", "torch")
    save = ("/lib/hasten/runtime.py", 5, "Runtime.save", "hasten")

    in_hook = stacks.activity_of(frames(program, fit, hook))
    assert (in_hook.doing, in_hook.hook) == ("in Model.on_train_epoch_end", "Model.on_train_epoch_end")
    assert not in_hook.waits
    assert in_hook.is_patient
    at_barrier = stacks.activity_of(frames(program, fit, hook, barrier, torch_barrier))
    assert (at_barrier.doing, at_barrier.waits, at_barrier.is_long) == ("waits in barrier", True, True)
    assert stacks.activity_of(frames(program, fit, save)).saves
    of_fabric = ("/lib/hasten/fabric/fabric.py", 7, "Fabric.save", "hasten")
    assert stacks.activity_of(frames(program, of_fabric, save)).in_save_checkpoint
    assert not stacks.activity_of(frames(program, fit)).is_long
    text = stacks.report("hasten: stuck", {1: ("late", frames(program, fit, hook)), 0: ("waits", frames(program, fit))})
    assert text.index("rank 0: waits, /home/me/train.py:30") < text.index("rank 1: late, /home/me/train.py:12")
    assert "  > /home/me/train.py:12 in Model.on_train_epoch_end" in text


def entry(
    number: int, name: str, size: int = 130, *, group: tuple[str, str] = ("0", "default_pg")
) -> dict[str, object]:
    """Return an entry of torch's flight record."""
    return {
        "process_group": list(group), "collective_seq_id": number, "is_p2p": False, "profiling_name": f"gloo:{name}",
        "input_sizes": [[size]], "input_dtypes": ["Float"],
    }  # fmt: skip


def described(ranks: dict[int, list[dict[str, object]]]) -> str:
    return stacks.describe_collectives({rank: stacks.last_collectives(found) for rank, found in ranks.items()})


def test_the_flight_record_says_which_collective_each_rank_is_in_and_who_never_came() -> None:
    before = [entry(6, "all_reduce"), entry(7, "broadcast")]
    after = [*before, entry(8, "all_reduce")]
    assert described({0: after, 1: before, 2: after, 3: []}).splitlines() == [
        "Last collectives of the process group default_pg:",
        "  ranks 0, 2: in number 8, all_reduce of Float (130)",
        "  rank 1: never reached number 8; its last is number 7, broadcast of Float (130)",
        "  rank 3: never reached number 8; nothing is known of earlier ones",
    ]


def test_ranks_that_call_different_collectives_are_named() -> None:
    half = ("12", "mesh_tp")
    found = {0: [entry(8, "all_reduce"), entry(3, "all_gather", group=half)], 1: [entry(8, "all_reduce", 131)]}
    assert described(found).splitlines() == [
        "Last collectives of the process group default_pg:",
        "  rank 0: in number 8, all_reduce of Float (130), another one than that of the other ranks",
        "  rank 1: in number 8, all_reduce of Float (131), another one than that of the other ranks",
        "Last collectives of the process group 12 mesh_tp:",
        "  rank 0: in number 3, all_gather of Float (130)",
    ]
    assert described({0: [], 1: []}) == ""


# -- real processes

PROGRAM = """
import os, signal, sys, threading, time
from datetime import timedelta

import torch
from hasten.machine import watchdog
from hasten.strategies import DDPStrategy
from tests.models import Classifier, loader, quiet

HOW, METHOD = sys.argv[1:]

class Model(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1 and HOW != "differ":
            if HOW == "SIGTERM":
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            print("stuck", file=sys.stderr, flush=True)
            time.sleep(1000)  # here
        return super().training_step(batch, batch_idx)

def trainer(seconds=100, **arguments):
    strategy = DDPStrategy(timeout=timedelta(seconds=seconds), start_method=METHOD)
    return quiet(devices=2, strategy=strategy, **arguments)

def refused(call):
    try:
        call()
    except RuntimeError as error:
        print(f"refused on {rank}: {error}", file=sys.stderr, flush=True)

def differ():
    global rank
    rank = int(os.environ.get("LOCAL_RANK", 0))
    refused(lambda: trainer(max_epochs=3 if rank else 1).fit(Model(), loader(8)))
    other = Model()
    other.more = torch.nn.Linear(2, 2 + rank)
    refused(lambda: trainer().fit(other, loader(8)))
    both = trainer()
    refused(lambda: both.validate(Model(), loader(8)) if rank else both.fit(Model(), loader(8)))
    if rank == 0:
        print("done", file=sys.stderr, flush=True)

if __name__ == "__main__":
    watchdog.WARN_SECONDS, watchdog.GRACE_SECONDS, watchdog.STALLED_SECONDS = 2.0, 2.0, 2.0
    if HOW == "stuck":
        differ()
    trainer(4 if HOW == "stuck" else 100).fit(Model(), loader(64))
"""


def run(tmp_path: Path, how: str, method: str) -> tuple[int, str]:
    """Run the program, whose rank 1 sleeps for longer than any program may take here."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = fork_python(program, how, method, cwd=tmp_path, **started_copies(1))
    assert done.stderr.splitlines().count("stuck") == 1, done.stderr[-3000:]
    return done.returncode, done.stderr


def test_processes_that_differ_are_refused_and_a_rank_that_is_stuck_ends_the_run_by_name(tmp_path: Path) -> None:
    code, output = run(tmp_path, "stuck", "popen")
    assert code == 1, output[-3000:]
    for rank in (0, 1):
        differ = f"refused on {rank}: Trainer.fit(): the processes of this run differ:"
        assert f"{differ} `max_epochs` is 1 on rank 0 and 3 on rank 1." in output
        assert f"{differ} the parameter more.weight is 'float32 of shape (2, 2)' on rank 0 and" in output
        assert (
            f"refused on {rank}: Trainer.fit() is called on rank 0 and Trainer.validate() is called on rank 1" in output
        )
    # As the end, and before that as a warning, unless this machine was too busy to print it in time.
    assert output.count("\nhasten: Rank 1 did not arrive for") in (1, 2)
    line = 1 + PROGRAM.splitlines().index("            time.sleep(1000)  # here")
    where = f"{tmp_path / 'program.py'}:{line}"
    assert "rank 0: fit, train, epoch 1, batch 3, step 3: waits for rank 1 in backward" in output
    assert f"rank 1: fit, train, epoch 1, batch 3, step 3: in Model.training_step, {where}" in output
    assert f"  > {where} in Model.training_step" in output
    # From torch's flight record.
    assert "Last collectives of the process group default_pg:\n  rank 0: in number " in output
    assert "  rank 1: never reached number " in output


def test_a_signal_in_a_run_that_is_stuck_ends_it_and_leaves_no_process(tmp_path: Path) -> None:
    code, output = run(tmp_path, "SIGTERM", "fork")
    assert code == 143, output[-3000:]
    assert "hasten: SIGTERM arrived, and rank 1 did not arrive for" in output
    assert not _processes_in(tmp_path)


# Three processes, started as by a launcher. The first one, which serves the store, is killed before the first save.
# Rank 2 waits for rank 1 alone, and rank 1 makes its first save when both are gone.
LOST = """
import os, signal, sys, time

import torch.distributed as dist
from hasten import Callback
from hasten.callbacks import ModelCheckpoint
from hasten.machine import watchdog
from hasten.machine.cluster import find_free_port
from hasten.machine.host import process_has_ended
from tests.models import Classifier, loader, quiet

class Lost(Callback):
    def on_train_start(self, trainer, module):
        self.others = dist.new_group([1, 2])

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 2:
            dist.barrier(self.others)
        while not all(map(process_has_ended, started.values())):
            time.sleep(0.01)

def train(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    saves = ModelCheckpoint(sys.argv[1], every_n_train_steps=1)
    quiet(devices=3, strategy="ddp", callbacks=[Lost(), saves], enable_checkpointing=True).fit(Classifier(), loader(64))

if __name__ == "__main__":
    watchdog.SILENT_SECONDS, watchdog.STALLED_SECONDS = 3.0, 1.0
    os.environ.update(WORLD_SIZE="3", LOCAL_WORLD_SIZE="3", TORCHELASTIC_RUN_ID="lost", TORCH_CPP_LOG_LEVEL="ERROR")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_port()))
    started = {}
    for rank in (0, 2, 1):
        if not (child := os.fork()):
            try:
                train(rank)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        started[rank] = child
    until = time.monotonic() + 500
    while not all(map(process_has_ended, started.values())) and time.monotonic() < until:
        time.sleep(0.01)
    print("ended:", sorted(rank for rank, child in started.items() if process_has_ended(child)))
    for child in started.values():
        os.kill(child, signal.SIGKILL)
"""


def test_processes_end_by_themselves_when_the_one_that_serves_the_store_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOST)
    done = fork_python(program, tmp_path / "saved")
    assert done.stdout == "ended: [0, 1, 2]\n", done.stderr[-3000:]
    assert "hasten: Rank 0 has ended in the middle of the run. Besides, rank 2 has not reached" in done.stderr
    assert "rank 2: fit, train, epoch 1, batch 1, step 1: waits in barrier" in done.stderr
    named = "the process that serves the store of the run has ended: rank 0, or its launcher. This run cannot continue"
    assert f"rank 1: RuntimeError('{named}" in done.stderr


def _processes_in(place: Path) -> list[Path]:
    """Return the processes whose working directory this is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cwd").readlink() == place:
                found.append(folder)
    return found
