"""The report of runs: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hasten._lib.files import write_atomically
from hasten._lib.optional import need
from hasten_tools.report import page_curves, page_run
from hasten_tools.report.read import SILENT_SECONDS, RecordedRun, find_run, read_runs

_PURPOSE = "hasten report"
_FILES = Path(__file__).with_name("web")
# How often a page that follows a run is written, and how often it loads itself again.
FOLLOW_SECONDS = 5.0
# More runs than this have colors that cannot be told apart.
MOST_RUNS = 7


def render(runs: Sequence[RecordedRun], *, following: bool = False) -> str:
    """Return the page of one run, or of several side by side.

    With ``following`` the page loads itself again every few seconds.

    Raises:
        ModuleNotFoundError: plotly or jinja2 is not installed.
        ValueError: there are more runs than colors.

    """
    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs: a page shows up to {MOST_RUNS} side by side. Name fewer.")
    jinja2 = need("jinja2", purpose=_PURPOSE)
    plotly = need("plotly.offline", purpose=_PURPOSE)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    views = [page_run.view(run, name, place) for place, (run, name) in enumerate(zip(runs, names(runs), strict=True))]
    logged, speeds, notes = page_curves.panels(runs)
    differing, common = page_run.differences(views) if len(views) > 1 else ([], [])
    data = {
        "runs": [{"name": view.name, "attempts": view.attempts} for view in views],
        "panels": [
            {"id": f"{group}-{place}", "title": panel.title, "unit": panel.unit, "curves": panel.curves}
            for group, found in (("logged", logged), ("speed", speeds))
            for place, panel in enumerate(found)
        ],
        "following": following,
        "interval": FOLLOW_SECONDS,
    }
    script = plotly.get_plotlyjs()
    return str(
        environment.get_template("page.html").render(
            title=views[0].name if len(views) == 1 else f"{len(views)} runs",
            views=views, logged=logged, speeds=speeds, notes=notes, differing=differing, common=common,
            following=following, written=datetime.now().strftime("%Y-%m-%d %H:%M:%S"), data=_for_script(data),
            # These are files of hasten and plotly, and not what a run wrote.
            style=(_FILES / "page.css").read_text(encoding="utf-8"),
            script=(_FILES / "page.js").read_text(encoding="utf-8"), plotly=script,
        )
    )  # fmt: skip


def names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the shortest ends of the folders' names that tell runs apart."""
    if len(runs) == 1:
        return [runs[0].name]
    parts = [Path(os.path.abspath(run.folder)).parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part for part in each[-count:] if part != "lightning_logs") for each in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{run.name} ({place})" for place, run in enumerate(runs, start=1)]


def write(paths: Sequence[str | os.PathLike[str]], output: Path, *, following: bool = False) -> list[RecordedRun]:
    """Read runs, write their page, of which a browser never sees half, and return the runs.

    Raises:
        FileNotFoundError: there is no run there.
        OSError: the page cannot be written.

    """
    runs = read_runs(paths)
    page = render(runs, following=following).encode("utf-8", errors="replace")
    write_atomically(output, page, durable=False)
    return runs


def follow(
    paths: Sequence[str | os.PathLike[str]], output: Path, *, say: Callable[[str], None], wait: float = FOLLOW_SECONDS
) -> None:
    """Write the page again whenever a run has written something, until all have ended or a key interrupts.

    There are ``wait`` seconds between two looks.
    """
    files = [find_run(path) for path in paths]
    written: list[float] = []
    try:
        while True:
            now = [os.path.getmtime(file) for file in files]
            if now != written:
                runs = write(paths, output, following=True)
            if not written:
                say(f"{output}: written again while the run continues. Ctrl-C ends this; the run is not touched.")
            written = now
            if not any(_goes_on(run, changed) for run, changed in zip(runs, now, strict=True)):
                say("All runs have ended." if len(files) > 1 else f"The run has ended: {runs[0].state}.")
                break
            time.sleep(wait)
    except KeyboardInterrupt:
        say("Stopped following.")
    # The last page does not load itself again.
    write(paths, output)


def _goes_on(run: RecordedRun, changed: float) -> bool:
    return run.state == "running" or (run.state == "unknown" and time.time() - changed < SILENT_SECONDS)


def _for_script(data: Any) -> str:
    """Return JSON that can stand in a script element: no name in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
