"""``hasten launch`` starts programs in several processes, and restarts them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
from tests.programs import ROOT, Forked, copying_python, fork_python

from hasten.commands import main
from hasten_tools.commands import launch

RESTARTS = ROOT / "benchmarks" / "restarts.py"
TWO_PROCESSES = ROOT / "tests" / "machine" / "programs.py"

PROGRAM = """
import os, signal, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
if os.environ["RANK"] == "1":
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "name a program: hasten launch train.py"),
        ("nowhere.py", "no file 'nowhere.py'"),
        ("-m no_such_module", "-m no_such_module: not found"),
        ("--nodes 2 x.py", "2 machines need a place to meet: add --rdzv HOST:PORT"),
        ("--nodes 2 --rdzv host:port x.py", "--rdzv host:port: use HOST:PORT, such as node1:29400."),
        ("--nodes 2 --rdzv host:0 x.py", "--rdzv host:0: use HOST:PORT"),
        ("--nodes 2:1 x.py", "'1' is not a whole number of at least 2."),
        ("--nodes two x.py", "'two' is not a whole number of at least 1."),
        ("--min-nodes 3 --max-nodes 2 x.py", "--min-nodes 3 is more than the 2 of --max-nodes."),
        ("--min-nodes 2 x.py", "--min-nodes 2: name --max-nodes, too."),
        ("--max-nodes 2 x.py", "--max-nodes 2: name --min-nodes, too, or write --nodes 2."),
        ("--nodes 2 --max-nodes 3 x.py", "--nodes 2 and --max-nodes 3 contradict each other."),
        ("--nnodes=1:2 --min-nodes 1 x.py", "--nodes 1:2 says it all."),
        ("--standalone --nnodes=2 x.py", "--standalone is for one machine, not 2."),
        ("--procs 0 x.py", "'0': use a whole number of at least 1, auto, gpu or cpu."),
        ("--restarts -1 x.py", "'-1' is not a whole number of at least 0."),
        ("--devices 2 x.py", "unknown option --devices. Did you mean '--procs'?"),
        ("--num_processes=2 x.py", "unknown option --num_processes. Did you mean '--procs'?"),
        ("--num-nodes 2 x.py", "unknown option --num-nodes. Did you mean '--nodes'?"),
        (f"--log-dir {__file__} x.py", "is a file, or below one."),
        ("--colour red x.py", "unknown option --colour. See hasten launch --help."),
        ("--config_file saved.yaml x.py", "unknown option --config_file. Did you mean '--config'?"),
        ("--save no_folder/saved.yaml x.py", "--save no_folder/saved.yaml cannot be written: No such file"),
        ("--restart 3 x.py", "unknown option --restart. Did you mean '--restarts'?"),
        ("--master_addr host x.py", "machines meet at --rdzv HOST:PORT here"),
        ("--rdzv-backend=etcd x.py", "torchrun has other ways"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *arguments.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_machine_that_cannot_be_reached_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_FIRST_NOTICE_SECONDS", 0)
    monkeypatch.setattr(launch, "_MEETING_SECONDS", 1)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # Launching sets variables for its processes.
    (tmp_path / "train.py").touch()
    assert main(["launch", "--rdzv", "nowhere.invalid:29400", str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().err
    assert said.count("nowhere.invalid:29400 cannot be reached yet (") == 1
    assert "the machine at nowhere.invalid:29400, where all meet, does not answer" in said


def test_options_may_be_spelled_as_torchrun_spells_them_and_exit_codes_are_the_program_s(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def launch(*words: str, **environment: str) -> tuple[int, str, str]:
        done = fork_python("-m", "hasten", "launch", *words, cwd=tmp_path, **environment)
        return done.returncode, done.stdout, done.stderr

    code, printed, _ = launch("--nproc_per_node=2", "--nnodes", "1", "--log_dir", "logs", "program.py", "0", "--nodes")
    assert code == 0
    assert "0 2 ['0', '--nodes']" in printed
    written = sorted(path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stdout.log"))
    assert written == ["0 2 ['0', '--nodes']\n", "1 2 ['0', '--nodes']\n"]

    code, _, said = launch("--procs", "2", "-m", "program", "3")
    assert code == 3
    assert "hasten launch: the process of rank 1 ended with exit code 3" in said

    code, _, said = launch(
        "--procs", "2", str(TWO_PROCESSES), "ddp", "rank1 exits with 0", ".", **copying_python(tmp_path)
    )
    assert code == 1
    # Not the first one, whose connection broke.
    assert "RuntimeError: the process of rank 1 ended in the middle of the run, without an error" in said
    assert "hasten launch: the process of rank 1 ended in the middle of the run, without an error" in said

    code, _, said = launch("--procs", "2", "--restarts", "1", "program.py", "die")
    assert code == 137
    assert "hasten launch: restart 1 of 1, with 2 processes." in said
    assert "the process of rank 1 was killed by SIGKILL" in said


def test_options_are_saved_in_a_file_and_taken_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    launched: list[argparse.Namespace] = []
    monkeypatch.setattr(launch, "_launch", lambda given, *others: launched.append(given) or 0)
    Path("train.py").write_text("")

    assert (
        main(["launch", "--nnodes", "1:2", "--rdzv", "node1:29400", "--restarts", "3", "--save", "cluster.yaml"]) == 0
    )
    assert launched == []
    assert Path("cluster.yaml").read_text() == "nodes: '1:2'\nrdzv: node1:29400\nrestarts: 3\n"
    assert "hasten launch --config cluster.yaml train.py" in capsys.readouterr().err

    # The command line comes first, also where it says what is the default; --restarts after the program is its own.
    words = "launch --restarts 0 --config cluster.yaml --procs 2 train.py --restarts 5"
    assert main(words.split()) == 0
    assert [getattr(launched[-1], name) for name in ("nodes", "rdzv", "restarts", "procs")] == [
        (1, 2), "node1:29400", 0, 2
    ]  # fmt: skip
    assert capsys.readouterr().err.count("--restarts comes after train.py") == 1

    # With a program, it is started, too; a file can be made from another.
    assert main(["launch", "--config", "cluster.yaml", "--nodes", "2", "--save", "other.yaml", "-m", "json.tool"]) == 0
    assert launched[-1].module == "json.tool"
    assert Path("other.yaml").read_text() == "nodes: 2\nrdzv: node1:29400\nrestarts: 3\n"

    Path("by_hand.yaml").write_text("nodes: 1:2\nrdzv: node1")
    assert main(["launch", "--config", "by_hand.yaml", "train.py"]) == 0
    assert launched[-1].nodes == (1, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--config saved.yaml: no such file. Write one: hasten launch --procs 4 --save saved.yaml"),
        ("proc: 4", "--config saved.yaml: unknown option 'proc'. Did you mean 'procs'?"),
        ("num_processes: 4", "--config saved.yaml: unknown option 'num_processes'."),
        ("procs: none", "'none': use a whole number of at least 1, auto, gpu or cpu."),
        ("- procs", "--config saved.yaml: use lines such as procs: 4"),
        ("procs: [", "--config saved.yaml cannot be read:"),
    ],
)
def test_a_file_of_options_that_is_wrong_is_refused(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("saved.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--config", "saved.yaml", "train.py"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_restarted_runs_end_with_the_same_weights_under_both_launchers(tmp_path: Path) -> None:
    launchers = {
        "hasten": ("hasten", "launch", "--procs=2", "--restarts=1"),
        "torchrun": ("torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
    }
    runs = {}
    for number, (name, words) in enumerate(launchers.items()):
        (tmp_path / name).mkdir()
        # Different processes are killed, at different steps.
        killed = (str(number), str(5 + 3 * number))
        runs[name] = Forked(("-m", *words, RESTARTS, "--worker", tmp_path / name, *killed), **copying_python(tmp_path))
    for name, run in runs.items():
        try:
            output, _ = run.communicate(timeout=600)
        finally:
            run.kill()
        assert run.returncode == 0, output
        assert (tmp_path / name / "killed").exists()
    digests = [(tmp_path / name / "digest").read_text() for name in launchers]
    assert digests[0] == digests[1]


def test_help_fits_the_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hasten"])
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 105
