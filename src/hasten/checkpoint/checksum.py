"""Checksums of a checkpoint file: put at its end when it is written, compared when it is read."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
import zlib
from typing import IO, cast

# The end of a file, in the comment that a zip archive may have: any reader of zip files skips it.
_MARK = b"hasten sha256 "
_LINE_BYTES = len(_MARK) + 64
_END_BYTES = 22  # the record that ends a zip archive, without its comment
# What the archive holds in records of at least this size has a CRC-32 there, which torch.save computes anyway. The
# sha256 covers all else: headers, directory, padding, small records. So saving hashes little, and no byte is unwatched.
_BULK_BYTES = 4096


class CheckpointDamaged(RuntimeError):
    """A file that is no whole checkpoint; the message names it and what is wrong."""


def seal(file: IO[bytes]) -> None:
    """Put the sha256 at the end of a file that ``torch.save`` has written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 2)
    file.write(_LINE_BYTES.to_bytes(2, "little"))
    file.write(_MARK + bytes(64))
    file.flush()
    digest, _ = _frame(file, size)
    file.seek(size + len(_MARK))
    file.write(digest)


def check(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Raise unless every byte is as it was written, as far as the file has checksums."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LINE_BYTES - _END_BYTES))
    end, line = file.read(_END_BYTES), file.read()
    file.seek(0)
    begin = file.read(4)
    has_line = line.startswith(_MARK)
    expects_line = end[:4] == b"PK\x05\x06" and end[-2:] == _LINE_BYTES.to_bytes(2, "little")
    if not has_line and not expects_line and begin != b"PK\x03\x04":
        _check_pickle(begin, path)
        return
    try:
        if has_line or expects_line:
            digest, bulk = _frame(file, size - _LINE_BYTES)
            whole = has_line and expects_line and digest == line[len(_MARK) :]
            damaged = None if whole else "its headers"
            for name, start, length, checksum in bulk if whole else ():
                if _crc32(file, start, length) != checksum:
                    damaged = name
                    break
        elif _ends_elsewhere(file, size):
            damaged = "its end"
        else:
            # Written by someone else, with the checksums of the archive alone.
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
    except _NOT_AN_ARCHIVE as error:
        raise CheckpointDamaged(
            f"{path} is damaged or cut off at {size} bytes: {first_line(error)}"
        ) from None
    if damaged is not None:
        raise CheckpointDamaged(
            f"{path} is damaged: {damaged} differs from what was written, by its checksum."
        )


def _ends_elsewhere(file: IO[bytes], size: int) -> bool:
    """Return whether an archive's comment is longer or shorter than announced: cut off, or something came after."""
    file.seek(max(0, size - _END_BYTES - 0xFFFF))
    tail = file.read()
    place = tail.rfind(b"PK\x05\x06")
    announced = tail[place + _END_BYTES - 2 : place + _END_BYTES]
    return place >= 0 and int.from_bytes(announced, "little") != len(tail) - place - _END_BYTES


_NOT_AN_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    NotImplementedError,
    EOFError,
    RuntimeError,
    ValueError,
    struct.error,
)


def _check_pickle(begin: bytes, path: str | os.PathLike[str]) -> None:
    """Let the formats of older torch versions pass: loading them, which runs no code, tells the rest."""
    if not begin:
        raise CheckpointDamaged(f"{path} is empty.")
    if begin[:1] != b"\x80":
        raise CheckpointDamaged(
            f"{path} is no checkpoint: it begins with {begin!r}, not as files of torch.save do."
        )


def _frame(file: IO[bytes], size: int) -> tuple[bytes, list[tuple[str, int, int, int]]]:
    """Return the sha256 of the first ``size`` bytes without the bulk; and the bulk: (name, start, length, CRC-32)."""
    with zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    digest, place = hashlib.sha256(), 0
    bulk: list[tuple[str, int, int, int]] = []
    for record in records:
        if record.compress_size < _BULK_BYTES or record.compress_type != zipfile.ZIP_STORED:
            continue
        file.seek(record.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26xHH", file.read(30))
        start = record.header_offset + 30 + name_bytes + extra_bytes
        file.seek(place)
        digest.update(file.read(max(0, start - place)))
        bulk.append((f"the record {record.filename!r}", start, record.compress_size, record.CRC))
        place = start + record.compress_size
    file.seek(place)
    digest.update(file.read(max(0, size - place)))
    return digest.hexdigest().encode(), bulk


def _crc32(file: IO[bytes], start: int, length: int) -> int:
    checksum, buffer = 0, memoryview(bytearray(min(length, 1 << 20)))
    file.seek(start)
    while length:
        count = cast(io.BufferedReader, file).readinto(buffer[: min(length, len(buffer))])
        if not count:
            break
        checksum = zlib.crc32(buffer[:count], checksum)
        length -= count
    return checksum


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
