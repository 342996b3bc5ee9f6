"""hasten plot: which curves, what distinguishes them, and the same file for the same runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hasten.commands import main
from hasten_tools.report.compare import curves_of_runs, run_names
from hasten_tools.report.curves import Curve, can_smooth, draw, save, smoothed
from hasten_tools.report.read import read_run
from tests.refusals import refused

pytest.importorskip("matplotlib")


def write_run(
    folder: Path, *, rate: float = 1.0, names: tuple[str, ...] = ("train_loss", "val_loss", "val_acc")
) -> Path:
    """Write the record of a run of three epochs with ten steps each, whose losses fall."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"kind": "start", "time": 100.0, "format": 1, "step": 0, "epoch": 0}]
    for step in range(30):
        place = {"time": 100.0 + 60 * step, "step": step, "epoch": step // 10}
        value = math.exp(-rate * step / 30)
        values = {name: value for name in names if name.startswith("train")}
        if step % 10 == 9:
            values |= {name: value + 0.1 for name in names if not name.startswith("train")}
            lines.append({"kind": "speed", **place, "steps": 10, "seconds": 1.0, "samples": 320, "tokens": None,
                          "lr": {"SGD": 0.1 * rate}})  # fmt: skip
        lines.append({"kind": "row", **place, "values": values})
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs, one of which has logged one value more."""
    first = write_run(tmp_path / "logs" / "a" / "version_0")
    second = write_run(tmp_path / "logs" / "b" / "version_0", rate=2.0, names=("train_loss", "val_loss", "val_f1"))
    return [str(first), str(second)]


def test_runs_differ_in_color_and_marker_and_stages_in_dashes(runs: list[str]) -> None:
    figure = draw(curves_of_runs([read_run(run) for run in runs]))
    loss, accuracy = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["Loss", "Accuracy"]
    assert len(loss.lines) == 4
    assert len(accuracy.lines) == 1
    colors = [line.get_color() for line in loss.lines]
    markers = [line.get_marker() for line in loss.lines]
    dashes = [line.is_dashed() for line in loss.lines]
    assert len(set(colors)) == len(set(markers)) == 2
    assert len(set(zip(colors, dashes, strict=True))) == 4
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "training", "validation"]
    figure.draw_without_rendering()
    shown = legend.get_window_extent()
    assert all(not shown.overlaps(axes.get_window_extent()) for axes in figure.axes), "the legend hides data"


def test_many_runs_have_their_legend_beside_the_panels() -> None:
    figure = draw([Curve("_loss$x^", [0, 1], [1.0, seed], f"_seed$_{seed}$") for seed in range(12)])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().x0 > figure.axes[0].get_window_extent().x1
    # Names are text: neither formulas nor hidden.
    assert [text.get_text() for text in legend.get_texts()] == [f"_seed$_{seed}$" for seed in range(12)]
    looks = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(looks) == 12


def test_smoothing_keeps_the_values_behind_and_leaves_short_curves() -> None:
    noisy = [float(step % 2) for step in range(100)]
    figure = draw([Curve("train_loss", range(100), noisy), Curve("val_loss", [50, 99], [1.0, 0.0])], smooth=0.9)
    behind, front, short = figure.axes[0].lines
    assert list(behind.get_ydata()) == noisy
    assert behind.get_alpha() < 0.5
    assert all(0.4 < value < 0.6 for value in front.get_ydata()[5:-5])
    assert list(short.get_ydata()) == [1.0, 0.0]
    # A mean of both sides does not lag: that of a straight line is the line.
    line = [float(step) for step in range(200)]
    assert smoothed(line, 0.9)[100] == pytest.approx(100.0, abs=0.01)
    assert smoothed(line, 21)[100] == pytest.approx(100.0)
    assert not can_smooth(line[:59], 0.9)
    assert can_smooth(line[:60], 0.9)


def test_values_that_are_not_finite_are_marked_and_leave_gaps() -> None:
    y = [1.0, math.nan, 0.5, math.inf, 0.25]
    figure = draw([Curve("loss", range(5), y)], log=True)
    marks, curve = figure.axes[0].lines
    assert list(marks.get_xdata()) == [1, 3]
    assert [math.isnan(value) for value in curve.get_ydata()] == [False, True, False, True, False]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["training", "not finite"]
    assert smoothed(y, 3)[2] == 0.5
    with refused(ValueError, says=("'gain'", "above 0")):
        draw([Curve("gain", [0], [-1.0])], log=True)


def test_long_curves_are_drawn_with_their_peaks() -> None:
    y = [0.0] * 50_000
    y[31_111] = 7.0
    (line,) = draw([Curve("loss", range(50_000), y)]).axes[0].lines
    assert len(line.get_xdata()) < 5000
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True))[31_111] == 7.0


def test_epochs_count_from_one_and_time_has_a_unit_that_fits(runs: list[str]) -> None:
    curves = curves_of_runs([read_run(runs[0])], x="epoch", keys=["train_loss"])
    (line,) = draw(curves, x="epoch").axes[0].lines
    assert list(line.get_xdata()) == [1, 2, 3]
    assert line.get_ydata()[0] == pytest.approx(sum(math.exp(-step / 30) for step in range(10)) / 10)
    figure = draw(curves_of_runs([read_run(runs[0])], x="time"), x="time")
    assert figure.axes[0].get_xlabel() == "Time (minutes)"
    assert figure.axes[0].lines[0].get_xdata()[-1] == pytest.approx(29.0)


def test_names_that_mean_the_same_have_panels_of_their_own() -> None:
    names = ("train_loss_step", "train_loss_epoch", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "lr-Adam")
    figure = draw([Curve(name, [0, 1], [1.0, 2.0]) for name in names])
    assert [axes.get_title("left") for axes in figure.axes] == ["Loss", "Train loss epoch", "Learning rate, Adam"]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["training", "validation, loader 0", "validation, loader 1"]


def test_runs_are_named_by_what_differs_in_their_paths() -> None:
    assert run_names(["x/a/version_0"]) == [""]
    assert run_names(["logs/a/version_0", "logs/a/version_3"]) == ["version_0", "version_3"]
    assert run_names(["logs/lr1/adam/v", "logs/lr2/adam/v"]) == ["lr1", "lr2"]
    assert run_names(["x/lr1/mid/s0/v", "x/lr2/mid/s1/v"]) == ["lr1/s0", "lr2/s1"]
    assert run_names(["logs/a", "logs/a/b"]) == ["a", "a/b"]
    assert run_names(["one/a/version_0", "two"]) == ["one/a/version_0", "two"]


def test_the_command_compares_runs_and_says_what_it_leaves_out(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *runs]) == 0
    out, err = capsys.readouterr()
    assert out == "hasten-plot.png\n"
    assert err == f"hasten plot: {runs[1]} has no 'val_acc'.\n"
    words = ["--key", "val_*", "lr", "-x", "epoch", "--smooth", "5", "--log", "-o", "pictures/curves.svg"]
    assert main(["plot", *runs, *words]) == 0
    assert Path("pictures/curves.svg").read_bytes().startswith(b"<?xml")
    capsys.readouterr()
    # A run without a metrics.csv has the same files in its folder.
    assert main(["plot", runs[0]]) == 0
    drawn = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.parent for path in drawn} == {Path(runs[0])}
    assert {"loss.png", "loss.pdf"} <= {path.name for path in drawn}


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_same_values_give_the_same_file(tmp_path: Path, suffix: str, begins: bytes) -> None:
    files = [save(draw([Curve("loss", [0, 1], [1.0, 0.5])]), tmp_path / f"{name}{suffix}") for name in ("one", "two")]
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(begins)
    assert first == second


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--key", "val_los"], "--key val_los: no run has it. Did you mean 'val_loss'? Logged: train_loss, val_loss, "),
        (["--key", "test_*"], "--key test_*: no run has it."),
        (["-o", "curves.jpg"], "'curves.jpg': use a name that ends in .png, .pdf or .svg."),
        (["nowhere"], "nowhere does not exist."),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    runs: list[str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", *runs, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hasten plot: {message}")


@pytest.mark.parametrize("value", ["1", "-0.5", "2.5", "nan", "strong"])
def test_smooth_is_a_weight_or_a_window(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plot", "run", f"--smooth={value}"])
    assert "use a weight below 1, such as 0.9, or a number of values, such as 20." in capsys.readouterr().err


def test_constants_and_rates_are_shown_from_zero() -> None:
    figure = draw([Curve("lr", [0, 1], [0.01, 0.01]), Curve("samples_per_sec", [0, 1], [900.0, 1000.0])])
    assert [axes.get_ylim()[0] for axes in figure.axes] == [0.0, 0.0]
    assert not figure.legends, "a legend with one entry says nothing"
