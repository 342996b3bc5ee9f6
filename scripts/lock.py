"""Lock the development environment: the versions of constraints.txt, each with the hashes of its files.

Run: python scripts/lock.py write               (`make lock`: writes requirements-dev.txt)
     python scripts/lock.py install [NAME ...]  (`make env`: installs all packages of that file, or those named)
     python scripts/lock.py unlocked            (names the installed packages that the file does not have)

pip refuses a file whose hash is not in requirements-dev.txt. All files are wheels, so nothing of a package runs before
it was checked. The hashes are those of CPython on Linux, x86-64. On other systems only the versions are checked, and
`install` says so.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements-dev.txt"
PYPI = "https://pypi.org/simple"
# The versions of CPython whose files are locked.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# What builds the packages, with all that it needs: pip installs these before hasten itself.
BUILD = ("editables", "hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers")
HEAD = f"""\
# The versions of constraints.txt with the SHA-256 hashes of their files, for Linux on x86-64 and CPython {PYTHONS[0]}
# to {PYTHONS[-1]}. Written by `make lock`; change constraints.txt instead. torch has the hashes of two builds: that of
# PyPI, with CUDA, and the one for CPUs, CPython {PYTHONS[0]}. The CUDA libraries that the first requires are not here:
# its own metadata, which its hash covers, names their exact versions.
"""


def plain(name: str) -> str:
    """Return the name of a package as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(text: str) -> dict[str, str]:
    """Return the version of each package of a file of constraints or of the lock."""
    return {plain(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.+!]+)", text, re.MULTILINE)}


def locked() -> dict[str, str]:
    """Return the lines of each package of the lock: its version and the hashes of its files."""
    entries = re.split(r"^(?=[\w.-]+==)", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {plain(entry.partition("==")[0]): entry for entry in entries}


def without_hashes() -> str:
    """Return why the hashes do not hold for this Python; "" where they do."""
    here = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}, {platform.machine()}"
    fits = here.startswith(tuple(f"CPython {version}." for version in PYTHONS)) and here.endswith("on linux, x86_64")
    return "" if fits else f"requirements-dev.txt has no hashes for {here}: only versions are checked."


def pip(command: str, *words: str | Path, **variables: str) -> None:
    """Run pip of this Python; its failure ends this program."""
    command_line = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command_line, env={**os.environ, **variables}, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def install(names: list[str]) -> None:
    """Install packages of the lock, all of them without names; no file is accepted whose hash is not there."""
    if reason := without_hashes():
        print(reason)
        pip("install", "--no-compile", "--constraint", CONSTRAINTS, *(names or BUILD))
        return
    entries = locked()
    chosen = {plain(name) for name in names} or set(entries)
    if missing := chosen - set(entries):
        sys.exit(
            f"requirements-dev.txt has no {', '.join(sorted(missing))}: add it to constraints.txt, then `make lock`."
        )
    absent = [name for name in sorted(chosen) if not is_installed(name, entries[name])]
    with tempfile.TemporaryDirectory() as folder:
        named, hashed = Path(folder, "versions.txt"), Path(folder, "hashes.txt")
        named.write_text("".join(f"{name}=={versions(entries[name])[name]}\n" for name in absent), encoding="utf-8")
        hashed.write_text("".join(entries[name] for name in absent), encoding="utf-8")
        # In two steps: told to check hashes, pip prefers files whose index has told them, and so the torch of PyPI to
        # the build for CPUs of another index or folder.
        if absent:
            pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, "--requirement", named)
            checked = ("--no-index", "--find-links", folder, "--require-hashes", "--requirement", hashed)
            pip("install", "--no-compile", "--no-deps", *checked)


def is_installed(name: str, entry: str) -> bool:
    """Return whether a package is there in the version of the lock, in whichever build."""
    try:
        return importlib.metadata.version(name).partition("+")[0] == versions(entry)[name]
    except importlib.metadata.PackageNotFoundError:
        return False


def unlocked() -> list[str]:
    """Return the installed packages that the lock does not have, hasten aside."""
    known = {*locked(), "hasten"}
    return sorted({plain(each.metadata["Name"]) for each in importlib.metadata.distributions()} - known)


def files(python: str, wanted: dict[str, str], *, only_pypi: bool) -> dict[str, tuple[str, str]]:
    """Return the address and the hash of the file that pip chooses for each package, for a version of Python."""
    native = python == ".".join(platform.python_version_tuple()[:2])
    other = [] if native else ["--python-version", python]
    variables = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""} if only_pypi else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (f"{package}=={version}\n" for package, version in wanted.items())
        (folder / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        pip(
            *("install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:"),
            *("--target", folder / "nothing", *other),
            *("--report", folder / "report.json", "--requirement", folder / "requirements.txt"),
            *(("--index-url", PYPI) if only_pypi else ()),
            **variables,
        )
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {
        plain(one["metadata"]["name"]): (
            one["download_info"]["url"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in report["install"]
    }


def write() -> None:
    """Write the lock: for each package the hashes of the files that pip chooses, from PyPI and as pip is configured."""
    if reason := without_hashes():
        sys.exit(reason)
    wanted = versions(CONSTRAINTS.read_text(encoding="utf-8"))
    here = ".".join(platform.python_version_tuple()[:2])
    native = files(here, wanted, only_pypi=True)
    # Pure Python has one file for all versions of Python.
    compiled = {name: wanted[name] for name, (url, _) in native.items() if not url.endswith("-any.whl")}
    others = [files(python, compiled, only_pypi=True) for python in PYTHONS if python != here]
    found: dict[str, set[str]] = {name: set() for name in wanted}
    for chosen in (native, *others, files(here, wanted, only_pypi=False)):
        for name, (_, digest) in chosen.items():
            found[name].add(digest)
    entries = (
        " \\\n    ".join([f"{name}=={wanted[name]}", *(f"--hash=sha256:{digest}" for digest in sorted(digests))])
        for name, digests in sorted(found.items())
    )
    LOCK.write_text(HEAD + "\n".join(entries) + "\n", encoding="utf-8")
    print(f"{LOCK.name}: {len(found)} packages, {sum(map(len, found.values()))} hashes")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write"]:
            write()
        case ["install", *names]:
            install(names)
        case ["unlocked"]:
            print(f"Installed without a hash: {', '.join(unlocked()) or 'nothing'}.")
        case _:
            sys.exit(__doc__)
