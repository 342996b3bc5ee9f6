"""Archives of the demo: downloaded if they are missing, checked, and read without unpacking them to disk."""

from __future__ import annotations

import hashlib
import http.client
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten_tools.demo.task import DemoError

BLOCK_BYTES = 1 << 18
TRIES = 3


@dataclass(frozen=True)
class Remote:
    """A file on the network whose size and digest, in hexadecimal, are known beforehand."""

    url: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


class _CutShort(Exception):
    """The connection ended before the file did."""


def download(remote: Remote, folder: Path, *, timeout_seconds: float = 30.0) -> Path:
    """Fetch a file, unless it is there already, with a progress bar in a terminal.

    What has come so far stays in ``<name>.part``: after a cut the next try, or the next call, asks the server for the
    rest only. The file appears under its name only when size and digest are right.

    Args:
        remote: what to fetch.
        folder: where to put it; it is created.
        timeout_seconds: how long the server may be silent.

    Raises:
        DemoError: no network, a server that refuses, a connection cut again and again, or a wrong content.

    """
    target = folder / remote.name
    part = folder / f"{remote.name}.part"
    try:
        if target.is_file() and sha256_of(target) == remote.sha256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        for tries_left in reversed(range(TRIES)):
            try:
                _fetch_rest(remote, part, timeout_seconds)
                break
            except _CutShort as error:
                if not tries_left:
                    what = f"The download of {remote.url} was cut {TRIES} times, last after {error}. What came is kept:"
                    raise make_error(DemoError, what, fix="run again to continue.") from error
        if (found := sha256_of(part)) != remote.sha256:
            part.unlink()
            raise make_error(
                DemoError,
                f"{remote.url} has the right size but another content than expected (sha256 {found}, not "
                f"{remote.sha256}).",
                fix="Run again, or give a copy you trust with --data.",
            )
        part.replace(target)
    except urllib.error.HTTPError as error:
        what = f"{remote.url} answered {error.code} {error.reason}."
        raise make_error(DemoError, what, fix="Fetch the archive another way and name it with --data.") from error
    except (urllib.error.URLError, TimeoutError, http.client.HTTPException, ConnectionError) as error:
        what = f"No network, or {remote.url} cannot be reached ({getattr(error, 'reason', None) or error})."
        fix = f"Fetch the archive on another machine and name it with --data {remote.name}."
        raise make_error(DemoError, what, fix=fix) from error
    except OSError as error:
        raise make_error(
            DemoError, f"{target} cannot be written: {error}.", fix="Choose a folder with --cache-dir."
        ) from error
    return target


def _fetch_rest(remote: Remote, part: Path, timeout_seconds: float) -> None:
    size = remote.size_bytes
    have = part.stat().st_size if part.exists() else 0
    if have == size:
        return
    headers = {"User-Agent": "hasten-demo"} | ({"Range": f"bytes={have}-"} if 0 < have < size else {})
    request = urllib.request.Request(remote.url, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
        # The server may send the whole file, asked for a part or not.
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal():
            _check_size(remote, have + int(length))
        bar = need("tqdm", purpose="the download of an archive").tqdm(
            total=size, initial=have, unit="B", unit_scale=True, desc=remote.name, disable=None
        )
        with part.open("ab" if goes_on else "wb") as file, bar:
            try:
                while block := answer.read(BLOCK_BYTES):
                    have += file.write(block)
                    bar.update(len(block))
            except (TimeoutError, http.client.IncompleteRead, ConnectionError) as error:
                raise _CutShort(f"{have:,} of {size:,} bytes ({error!r})") from error
    if have < size:
        raise _CutShort(f"{have:,} of {size:,} bytes")
    _check_size(remote, have)


def _check_size(remote: Remote, size_bytes: int) -> None:
    if size_bytes != remote.size_bytes:
        raise make_error(
            DemoError,
            f"{remote.url} has {size_bytes:,} bytes, expected {remote.size_bytes:,}: it is not the archive of this "
            "demo.",
            fix="Give a copy you trust with --data.",
        )


def sha256_of(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_files(data: Path, remote: Remote, wanted: Callable[[str], object]) -> Iterator[tuple[str, bytes]]:
    """Yield the paths and contents of some files of an archive, or of the folder that it unpacks to."""
    instead = f"Give {remote.name} or the folder it unpacks to."
    if not data.exists():
        raise make_error(DemoError, f"--data {data}: there is no such file or folder.", fix=instead)
    if data.is_dir():
        for path in sorted(path for path in data.rglob("*") if wanted(path.as_posix())):
            yield path.as_posix(), path.read_bytes()
        return
    try:
        with tarfile.open(data) as archive:
            for member in archive:
                content = archive.extractfile(member) if wanted(member.name) else None
                if content is not None:
                    yield member.name, content.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise make_error(DemoError, f"--data {data}: not a whole tar archive ({error}).", fix=instead) from error
