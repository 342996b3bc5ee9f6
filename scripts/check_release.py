"""Install a release in empty environments, from its wheel and from its source package, and run what the README names.

Run: python scripts/check_release.py dist [--reuse PYTHON]   (`make release-check`)

dist is the folder that `make dist` has filled. With --reuse the environments see the packages of another Python, such
as .venv/bin/python, and get hasten alone: a minute instead of several. The commands run in an empty folder, `make` in
the unpacked source package. A command that fails, or a command of the README that this file does not know, ends it with
code 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from first_run import Stages, program  # noqa: E402

# The demo as the README names it, on fewer texts and with fewer turns.
SHORT_DEMO = "--limit 40 --rounds 1 --row-seconds 0.2"
# Commands of the README that are not run, and why.
NOT_RUN = {
    "git clone": "the source package stands for it",
    "cd hasten": "the source package stands for it",
    "pip install": "the packages are installed instead, with the same extras",
    "make test": "CI runs it for every change, in an environment of its own",
    "make docs": "CI runs it for every change, in an environment of its own",
}


def commands() -> list[str]:
    """Return the commands of the README: the lines of its shell blocks, then those within its sentences."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    shown = [line.partition("  #")[0].strip() for line in lines]
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = re.findall(r"`((?:hasten|make|pip|python|git) [^`]+)`", sentences)
    return list(dict.fromkeys(command for command in (*shown, *inline) if command))


def extras() -> str:
    """Return the extras of the install line of the README."""
    (found,) = (found[1] for each in commands() if (found := re.fullmatch(r"pip install '\.\[([\w,]+)\]'", each)))
    return found


def environment(stages: Stages, name: str, package: Path, reuse: str | None) -> Path:
    """Make an environment, install a package of hasten in it, and return its Python."""
    stages.run(f"{name}: venv", sys.executable, "-m", "venv", name)
    python = stages.folder / name / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    if reuse:
        show = "import sysconfig; print(sysconfig.get_path('purelib'))"
        theirs, own = (
            subprocess.run([one, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
            for one in (reuse, python)
        )
        # A .pth file brings the folder, and not what its own .pth files name, such as the clone.
        Path(own, "reused.pth").write_text(f"{theirs}\n", encoding="utf-8")
        install += ["--no-deps", "--no-build-isolation"]
    # pip warns about its own settings.
    stages.run(f"{name}: install", *install, f"{package.resolve()}[{extras()}]", quiet=False)
    return python


def installed(python: Path, folder: Path) -> dict[str, str]:
    """Return the files of the installed hasten with their hashes; they must be in the environment."""
    show = (
        "import hasten, importlib.metadata, sys\n"
        "assert hasten.__file__.startswith(sys.prefix), hasten.__file__\n"
        "for each in importlib.metadata.files('hasten'): print(each, each.hash and each.hash.value)"
    )
    printed = subprocess.run([python, "-c", show], cwd=folder, check=True, capture_output=True, text=True).stdout
    files = dict(line.rsplit(" ", 1) for line in printed.splitlines())
    # What pip writes about the installation itself, and the command with the path of its Python.
    own = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "bin/hasten", ".pyc")
    return {name: value for name, value in files.items() if not name.endswith(own)}


def run_readme(stages: Stages, python: Path, source: Path) -> None:
    """Run the program of the README and each of its commands."""
    (stages.folder / "train.py").write_text(program(), encoding="utf-8")
    stages.run("train.py", python, "train.py")
    for command in commands():
        words = command.split()
        if reason := next((NOT_RUN[start] for start in NOT_RUN if command.startswith(start)), None):
            print(f"not run: {command} ({reason})")
        elif words[0] == "hasten":
            # Each of them prints warnings of its own where the machine is slow or the program could be faster.
            stages.run(command, python.parent / "hasten", *words[1:], quiet=False)
        elif words[0] == "python":
            stages.run(command, python, *words[1:], quiet=False)
        elif command == "make demo":
            # The environment counts as complete, as after the first `make demo`.
            (python.parents[1] / ".installed-demo").touch()
            make = ("make", "--directory", source, "demo", f"VENV={python.parents[1]}", f"ARGS={SHORT_DEMO}")
            stages.run(f"{command} {SHORT_DEMO}", *make, quiet=False)
        else:
            raise SystemExit(f"README.md names `{command}`: say in scripts/check_release.py how it is run.")
    stages.run("plain.py", python, "plain.py", quiet=False)


def main() -> None:
    """Check the packages of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dist", type=Path, help="the folder with one wheel and one source package")
    parser.add_argument("--reuse", metavar="PYTHON", help="use the packages of this Python")
    options = parser.parse_args()
    (wheel,), (sources,) = options.dist.glob("*.whl"), options.dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="hasten-release-") as name:
        stages = Stages(Path(name))
        with tarfile.open(sources) as archive:
            archive.extractall(name, filter="data")
        source = Path(name, sources.name.removesuffix(".tar.gz"))
        from_wheel = environment(stages, "wheel", wheel, options.reuse)
        from_sources = environment(stages, "sdist", sources, options.reuse)
        one, other = installed(from_wheel, stages.folder), installed(from_sources, stages.folder)
        if one != other:
            raise SystemExit(f"wheel and sdist install different files: {sorted({*one.items()} ^ {*other.items()})}")
        print(f"Both install the same {len(one)} files.")
        for each in (from_wheel, from_sources):
            stages.run(f"{each.parents[1].name}: smoke", each, source / "scripts" / "smoke.py")
        run_readme(stages, from_wheel, source)
        stages.show("total", sum(stages.seconds.values()), sum(stages.cpu_seconds.values()))


if __name__ == "__main__":
    main()
