"""Fetch a file of known size and digest: shows progress, goes on where it was cut, and checks what came."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from hasten._lib.optional import need
from hasten.demo.task import DemoError

BLOCK_BYTES = 1 << 18
TRIES = 3


@dataclass(frozen=True)
class Remote:
    """A file on the network whose content is known beforehand.

    Args:
        url: where it is.
        size_bytes: its size.
        sha256: its digest, in hexadecimal.

    """

    url: str
    size_bytes: int
    sha256: str


class _CutShort(Exception):
    """The connection ended before the file did."""


def download(remote: Remote, target: Path, *, timeout_seconds: float = 30.0, progress: bool = True) -> Path:
    """Fetch ``remote`` to ``target``, unless it is there already.

    What has come so far stays in ``<target>.part``: after a cut the next try, or the next call, asks the
    server for the rest only. The file appears under its name only when size and digest are right.

    Args:
        remote: what to fetch.
        target: where to put it; its folder is created.
        timeout_seconds: how long the server may be silent.
        progress: show a bar.

    Returns:
        ``target``.

    Raises:
        DemoError: no network, a server that refuses, a connection cut again and again, or a wrong content.

    """
    if target.is_file() and target.stat().st_size == remote.size_bytes and _sha256(target) == remote.sha256:
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch_whole(remote, part, timeout_seconds, progress)
        found = _sha256(part)
        if found != remote.sha256:
            part.unlink()
            raise DemoError(
                f"{remote.url} has the right size but another content than expected (sha256 {found}, "
                f"expected {remote.sha256}). It was thrown away; run again, or give a copy you trust with --data."
            )
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except _CutShort as error:
        raise DemoError(
            f"The download of {remote.url} was cut {TRIES} times, last {error}. What came is kept: run again to "
            "continue."
        ) from error
    except urllib.error.HTTPError as error:
        raise DemoError(
            f"{remote.url} answered {error.code} {error.reason}. Fetch the archive another way and name it "
            "with --data."
        ) from error
    except (urllib.error.URLError, TimeoutError, http.client.HTTPException, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DemoError(
            f"No network, or {remote.url} cannot be reached ({reason}). Fetch the archive on another machine and "
            f"name it with --data {Path(remote.url).name}."
        ) from error
    except OSError as error:
        raise DemoError(f"{target} cannot be written: {error}. Choose a folder with --cache-dir.") from error
    return target


def _fetch_whole(remote: Remote, part: Path, timeout_seconds: float, progress: bool) -> None:
    for attempt in range(1, TRIES + 1):
        try:
            _fetch_rest(remote, part, timeout_seconds, progress)
            return
        except _CutShort:
            if attempt == TRIES:
                raise


def _fetch_rest(remote: Remote, part: Path, timeout_seconds: float, progress: bool) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have > remote.size_bytes:
        part.unlink()
        have = 0
    if have == remote.size_bytes:
        return
    request = urllib.request.Request(remote.url, headers={"User-Agent": "hasten-demo"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
        goes_on = (
            have > 0
            and answer.status == 206
            and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        )
        if not goes_on:
            # The server sends the whole file, asked for a part or not.
            have = 0
        _check_size(remote, have, answer.headers.get("Content-Length"))
        tqdm = need("tqdm", purpose="the download of an archive").tqdm
        with (
            part.open("ab" if goes_on else "wb") as file,
            tqdm(
                total=remote.size_bytes,
                initial=have,
                unit="B",
                unit_scale=True,
                desc=Path(remote.url).name,
                disable=None if progress else True,
            ) as bar,
        ):
            while True:
                try:
                    block = answer.read(BLOCK_BYTES)
                except (TimeoutError, http.client.IncompleteRead, ConnectionError) as error:
                    raise _CutShort(f"after {have:,} of {remote.size_bytes:,} bytes ({error!r})") from error
                if not block:
                    break
                file.write(block)
                have += len(block)
                bar.update(len(block))
    if have < remote.size_bytes:
        raise _CutShort(f"after {have:,} of {remote.size_bytes:,} bytes")
    if have > remote.size_bytes:
        part.unlink()
        raise DemoError(_wrong_size(remote, have))


def _check_size(remote: Remote, have: int, length: str | None) -> None:
    if length is not None and length.isdecimal() and have + int(length) != remote.size_bytes:
        raise DemoError(_wrong_size(remote, have + int(length)))


def _wrong_size(remote: Remote, size_bytes: int) -> str:
    return (
        f"{remote.url} has {size_bytes:,} bytes, expected {remote.size_bytes:,}: it is not the archive "
        "this demo knows. Give a copy you trust with --data."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
