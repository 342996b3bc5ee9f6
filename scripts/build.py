"""Build the wheel and the source package of a commit twice, and keep them if both builds have the same bytes.

Run: python scripts/build.py [--outdir dist] [--commit HEAD]   (`make dist`)

The first build is made from the files of the commit, the second from the source package of the first, in another
folder, with other permissions and times, another time zone and another PYTHONHASHSEED. Both take the time of the commit
as that of their files (SOURCE_DATE_EPOCH). It prints the SHA-256 hashes as `sha256sum` does. Needs hatchling and git.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def export(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=archive, check=True)


def time_of(commit: str) -> str:
    """Return the time of a commit in seconds."""
    shown = subprocess.run(
        ["git", "show", "--no-patch", "--format=%ct", commit], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return shown.stdout.strip()


def build(source: Path, packages: Path, time: str, **variables: str) -> list[Path]:
    """Build a folder's wheel and source package into the folder ``packages``; return their paths."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--target", "wheel"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": time, **variables}
    done = subprocess.run(
        [*command, "--directory", str(packages)],
        cwd=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"hatchling ended with code {done.returncode}:\n{done.stdout}")
    return sorted(packages.iterdir())


def members(package: Path) -> dict[str, str]:
    """Return a text for each file in a package: what two builds of it may not differ in."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return {
                one.filename: f"{one.date_time} {one.external_attr:x} {hashlib.sha256(wheel.read(one)).hexdigest()}"
                for one in wheel.infolist()
            }
    with tarfile.open(package) as archive:
        contents = {one: archive.extractfile(one) for one in archive.getmembers()}
        return {
            one.name: f"{one.mtime} {one.mode:o} {hashlib.sha256(file.read() if file else b'').hexdigest()}"
            for one, file in contents.items()
        }


def differences(first: Path, second: Path) -> list[str]:
    """Return a line for each file that two builds of a package do not have alike, or one line about their order."""
    if first.read_bytes() == second.read_bytes():
        return []
    one, other = members(first), members(second)
    changed = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return [f"{first.name}: {name}" for name in changed] or [f"{first.name}: the order or the compression of its files"]


def build_twice(commit: str, folder: Path) -> list[Path]:
    """Return the packages of a commit, built in ``folder``; a difference between the two builds ends this program."""
    time = time_of(commit)
    source, first, second = folder / "source", folder / "first", folder / "a folder with another name" / "second"
    for each in (source, first, second):
        each.mkdir(parents=True)
    export(commit, source)
    packages = build(source, first, time, PYTHONHASHSEED="1", TZ="UTC")
    with tarfile.open(next(path for path in packages if path.suffix == ".gz")) as archive:
        archive.extractall(second.parent, filter="data")
    (unpacked,) = (path for path in second.parent.iterdir() if path != second)
    for path in unpacked.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path)
    again = build(unpacked, second, time, PYTHONHASHSEED="2", TZ="Pacific/Auckland")
    wrong = [line for one, other in zip(packages, again, strict=True) for line in differences(one, other)]
    if wrong:
        raise SystemExit("\n".join(["The two builds differ:", *wrong]))
    return packages


def main() -> None:
    """Build twice, compare, and copy the packages to their folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="the folder of the packages; default: dist")
    parser.add_argument("--commit", default="HEAD", help="the commit to build; default: HEAD")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-build-") as name:
        packages = build_twice(options.commit, Path(name))
        options.outdir.mkdir(parents=True, exist_ok=True)
        for old in (*options.outdir.glob("hasten-*.whl"), *options.outdir.glob("hasten-*.tar.gz")):
            old.unlink()
        for package in packages:
            copy = shutil.copy(package, options.outdir)
            print(f"{hashlib.sha256(Path(copy).read_bytes()).hexdigest()}  {package.name}")


if __name__ == "__main__":
    main()
