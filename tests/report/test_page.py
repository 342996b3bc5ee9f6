"""The report: what its page says, that nothing logged can break it, and that a browser shows it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hasten.commands import main
from hasten_tools.report import page, page_curves, page_run
from hasten_tools.report.curves import thinned
from hasten_tools.report.read import read_run
from tests.refusals import refused

EVIL = "</script><script>alert(1)</script><b>%{y}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def write(folder: Path, *, lr: float = 0.1, reason: str | None = "completed", resumed: bool = False) -> Path:
    """Write the record of a run of 40 steps and 2 epochs."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []

    def add(kind: str, time: float, step: int, **more: Any) -> None:
        lines.append({"kind": kind, "time": time, "step": step, "epoch": step // 20, **more})

    start = {
        "format": 1, "resumed_from": None, "attempt": 0, "command": ["python", "train.py", "--note", EVIL],
        "program": "/home/train.py", "arguments": {"max_epochs": 2, "note": EVIL}, "hparams": {"lr": lr},
        "model": {"name": "Net", "parameters": 1_200_000, "trainable": 1_200_000}, "data": {"train_batches": 20},
        "versions": {"torch": "2.13.0"}, "git": {"commit": "abc", "branch": None, "dirty": True},
        "machine": {"host": "node<1>", "accelerator": "cuda", "devices": ["H100", "H100"], "memory_bytes": 2**34},
    }  # fmt: skip
    add("start", 1000, 0, **start)
    for step in range(1, 40, 2):
        time = 1000 + step
        add("row", time, step, values={"train_loss": 4 / (step + 1), EVIL: step, "bad": "nan"})
        add("speed", time, step, steps=2, seconds=2.0, samples=64, tokens=6400, useful_tokens=3200, data_seconds=0.8,
            lr={"Adam": lr}, memory_bytes=2**30, flops=4e12, peak_flops=8e12)  # fmt: skip
        add("step_time", time, step, seconds=1.0, parts={"data": 0.4, "forward": 0.2, "backward": 0.3, "other": 0.1})
        if step % 20 == 19:
            add("row", time, step, values={"val_loss": 5 / (step + 1)})
            add("validation", time, step, seconds=2.0)
            add("checkpoint", time, step, path=f"/gone/{step}{EVIL}.ckpt", seconds=0.5, bytes=5 * 2**20,
                monitor={"val_loss": 5 / (step + 1)}, best=True)  # fmt: skip
        if step == 21 and resumed:
            add("start", 9000, 20, **{**start, "resumed_from": "last.ckpt"})
    for _ in range(3):
        add("warning", 1041, 39, message=EVIL, category="UserWarning")
    if reason is not None:
        add(
            "end",
            9041 if resumed else 1041,
            40,
            reason=reason,
            message=f"Error: {EVIL}" if reason == "failed" else None,
        )
    advice = {"rows": [{"name": "bf16", "factor": 1.5, "verdict": "wins"}], "line": "L.Trainer(precision='bf16')"}
    add("advice", 1041, 39, **advice)
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(autouse=True)
def _short_script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    plotly = pytest.importorskip("plotly.offline")
    pytest.importorskip("jinja2")
    if "chromium" not in request.node.name:
        monkeypatch.setattr(plotly, "get_plotlyjs", lambda: "/* plotly */")


def text_of(html: str) -> str:
    """Return what a reader sees, without scripts and tags."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def test_a_page_says_what_is_known_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", resumed=True)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    html = (folder / "report.html").read_text()
    text = text_of(html)
    for words in (
        "Completed", "Best val_loss 0.125 after 40 steps", "Steps 40", "Samples/s 32", "Tokens/s 3,200",
        "Useful tokens 50%", "MFU 25.0%", "Waiting for data 40%", "Device memory 1.07 GB", "Parameters 1.2 M",
        "Waiting for data takes 40% of the time. Trainer(num_workers=\"auto\")",
        "50% of the tokens are padding. Trainer(packed=True)", "Forward 20.0 %", "5.24 MB", "3 \u00d7", "last.ckpt",
        "2 x H100", "with uncommitted changes", "L.Trainer(precision='bf16')", "1.5x", "cut off",
        "Starts and resumes", EVIL,
    ):  # fmt: skip
        assert words in text, (words, text)
    # Nothing that was logged is read as HTML, also in the JSON for the script.
    assert "<script>alert" not in html
    assert html.count("</script>") == 4
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    panels = {panel["title"]: panel for panel in data["panels"]}
    loss = panels["Loss"]["curves"]
    assert [curve["stage"] for curve in loss] == ["training", "validation"]
    assert loss[0]["epoch"][9:11] == [1.0, 1.2]
    # The pause between the attempts is left out.
    assert max(loss[0]["time"]) < 100
    assert (
        next(curve for panel in data["panels"] for curve in panel["curves"] if curve["name"] == "bad")["last"] is None
    )
    assert any(curve["name"] == EVIL for panel in data["panels"] for curve in panel["curves"])


def test_a_checkpoint_that_was_still_being_written_when_it_was_noted_has_its_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    (folder / "a.ckpt").write_bytes(bytes(3 * 2**20))
    line = {"kind": "checkpoint", "time": 1041, "step": 39, "epoch": 1, "path": str(folder / "a.ckpt"), "seconds": 0.1}
    with (folder / "run.jsonl").open("a") as lines:
        lines.write(json.dumps({**line, "bytes": None, "monitor": None, "best": False}) + "\n")
    assert "3.15 MB" in text_of(page.render([read_run(folder)]))


def test_runs_side_by_side_say_what_changed(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a" / "version_0"), write(tmp_path / "b" / "version_0", lr=0.3, reason="failed")]
    text = text_of(page.render([read_run(path) for path in paths]))
    assert "lr hyperparameters 0.1 0.3" in text
    assert "a/version_0" in text
    assert f"Failed. Error: {EVIL}" in text
    assert text.count("2.13.0") == 1
    with refused(ValueError, says=("8 runs", "to 7")):
        page.render([read_run(paths[0])] * 8)


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 1
    assert "no run.jsonl" in capsys.readouterr().err
    program = tmp_path / "empty" / "fit.py"
    program.touch()
    for command in ("report", "plot"):
        assert main([command, str(program)]) == 1
        assert f"{program} is not the record of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty" / "run.jsonl").touch()
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path)]) == 0
    assert "no lines yet" in capsys.readouterr().err
    assert "Nothing was logged" in text_of((tmp_path / "report.html").read_text())
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "a.pdf")]) == 1
    assert "ends in .html" in capsys.readouterr().err
    (tmp_path / "empty" / "run.jsonl").unlink()
    (tmp_path / "empty" / "metrics.csv").write_text("epoch,step,loss\n0,9,0.5\n0,19,\n1,29,0.25\n")
    text = text_of(page.render([read_run(tmp_path / "empty")]))
    assert "There is no run.jsonl" in text
    assert "do not say how it was started" in text


def test_a_page_follows_a_run_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "run", reason=None)
    record, output = folder / "run.jsonl", tmp_path / "page.html"
    said: list[str] = []
    lines = record.read_text()
    lines = lines.replace('"time": 1041', f'"time": {time.time():.0f}')
    record.write_text(lines)
    pages: list[str] = []

    def sleep(seconds: float) -> None:
        pages.append(output.read_text())
        if len(pages) == 2:
            end = {"kind": "end", "time": 1042, "step": 40, "epoch": 2, "reason": "interrupted", "message": None}
            record.write_text(lines + json.dumps(end) + "\n")
        assert len(pages) < 4

    monkeypatch.setattr(page.time, "sleep", sleep)
    page.follow([folder], output, say=said.append)
    assert '"following":true' in pages[0]
    assert '"following":false' in output.read_text()
    assert "Interrupted" in text_of(output.read_text())
    assert said[-1] == "The run has ended: interrupted."
    # Ctrl-C leaves a page that is complete.
    record.write_text(lines)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(page.time, "sleep", interrupt)
    page.follow([folder], output, say=said.append)
    assert said[-1] == "Stopped following."
    assert '"following":false' in output.read_text()


def test_long_curves_keep_their_extremes() -> None:
    values = [math.sin(place) for place in range(50_000)]
    values[1234], values[40_001], values[7] = 9.0, -9.0, math.nan
    kept = thinned(values, page_curves.POINTS)
    assert len(kept) <= page_curves.POINTS
    assert {0, 1234, 40_001, 49_999} <= set(kept)
    epochs = page_curves.Epochs({0: 9, 1: 19, 2: 24})
    assert [epochs(9, 0), epochs(19, 1), epochs(24, 2), epochs(3, None)] == [1, 2, 2.5, None]


@pytest.mark.parametrize(
    ("parts", "arguments", "machine", "line"),
    [
        ({"data": 0.5, "forward": 0.5}, {"num_workers": 4}, "cpu", "Trainer(resident=True)"),
        ({"optimizer": 0.4, "forward": 0.6}, {}, "cpu", "Trainer(fused_optimizer=True)"),
        ({"transfer": 0.3, "forward": 0.7}, {}, "cuda", 'Trainer(resident="device")  # if the data fits'),
        ({"forward": 1.0}, {}, "cuda", 'Trainer(precision="bf16-mixed")'),
        ({"backward": 1.0}, {"precision": "bf16-mixed"}, "cuda", "Trainer(compile=True)"),
        ({"backward": 1.0}, {}, "cpu", "hasten advise train.py"),
        ({"logging": 0.5, "forward": 0.5}, {"log_every_n_steps": 1}, "cpu", "Trainer(log_every_n_steps=50)"),
        ({"checkpoints": 0.5, "forward": 0.5}, {}, "cpu", "ModelCheckpoint(every_n_train_steps=...)"),
        ({"other": 0.6, "forward": 0.4}, {}, "cpu", "hasten advise train.py"),
    ],
)
def test_the_hint_is_about_the_largest_part(
    tmp_path: Path, parts: dict[str, float], arguments: dict[str, Any], machine: str, line: str
) -> None:
    run = read_run(write(tmp_path / "run"))
    run.speed.clear()
    run.step_times = [{"parts": parts}]
    run.starts[-1] |= {"arguments": arguments, "machine": {"accelerator": machine}}
    assert page_run.view(run, "run", 0).hints[0].line.startswith(line)


_WIDTHS = """
<script>
addEventListener("load", () => setTimeout(() => parent.postMessage({
  wide: document.documentElement.scrollWidth, window: innerWidth,
  curves: document.querySelectorAll(".scatterlayer path.js-line").length,
  title: [...document.querySelectorAll("figcaption")].map((one) => one.textContent).join("|"),
}, "*"), 1500));
</script>
"""
_FRAME = """<!doctype html><pre id="found">nothing</pre>
<iframe src="page.html" style="width:390px;height:6000px;border:0"></iframe>
<script>addEventListener("message", (one) => {
  document.getElementById("found").textContent = JSON.stringify(one.data);
});</script>
"""


@pytest.mark.skipif(CHROMIUM is None or sys.platform != "linux", reason="there is no Chromium")
def test_chromium_shows_the_curves_on_a_phone_without_errors(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", resumed=True), write(tmp_path / "b", lr=0.3, reason="failed")]
    html = page.render([read_run(path) for path in paths])
    (tmp_path / "page.html").write_text(html.replace("</body>", _WIDTHS + "</body>"))
    (tmp_path / "frame.html").write_text(_FRAME)
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
         "--virtual-time-budget=5000", "--window-size=500,6000",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None
    found = json.loads(unescape(told[1]))
    assert found["window"] == 390
    assert found["wide"] <= 390
    assert found["curves"] >= 10
    assert "</script><script>alert(1)</script>" in found["title"]
