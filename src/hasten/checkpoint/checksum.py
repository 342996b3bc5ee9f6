"""Checksums of a checkpoint file: appended when it is written, verified when it is read."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
import zlib
from typing import IO, cast

# In the comment at the end of the zip archive, which other readers skip.
_MARK = b"hasten sha256 "
_LINE_BYTES = len(_MARK) + 64
_END_BYTES = 22  # the record that ends a zip archive, without its comment
# Records of at least this size are checked by the CRC-32 that torch.save computes anyway; the sha256 covers the rest:
# headers, directory, padding and small records. So saving hashes little, and every byte is covered.
_LARGE_BYTES = 4096


class CheckpointDamaged(RuntimeError):
    """Raised for a file that is not a whole checkpoint."""


def add_checksum(file: IO[bytes]) -> None:
    """Append the sha256 to a file that ``torch.save`` has written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 2)
    file.write(_LINE_BYTES.to_bytes(2, "little"))
    file.write(_MARK + bytes(64))
    file.flush()
    digest, _ = _checksums(file, size)
    file.seek(size + len(_MARK))
    file.write(digest)


def check(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Raise CheckpointDamaged if a byte of the file has changed, as far as its checksums cover it."""
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
            digest, large = _checksums(file, size - _LINE_BYTES)
            whole = has_line and expects_line and digest == line[len(_MARK) :]
            damaged = None if whole else "its headers"
            for name, start, length, checksum in large if whole else ():
                if _crc32(file, start, length) != checksum:
                    damaged = name
                    break
        elif _ends_elsewhere(file, size):
            damaged = "its end"
        else:
            # Not written by hasten: it has only the checksums of the archive.
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
    """Return whether the length of the archive's comment is wrong: the file was cut off, or extended."""
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
    """Accept the formats of older torch versions, which have no checksums."""
    if not begin:
        raise CheckpointDamaged(f"{path} is empty.")
    if begin[:1] != b"\x80":
        raise CheckpointDamaged(
            f"{path} is not a checkpoint: it begins with {begin!r}, not as files of torch.save do."
        )


def _checksums(file: IO[bytes], size: int) -> tuple[bytes, list[tuple[str, int, int, int]]]:
    """Return the sha256 of the file without large records, and (name, start, length, CRC-32) of each of those."""
    with zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    digest, place = hashlib.sha256(), 0
    large: list[tuple[str, int, int, int]] = []
    for record in records:
        if record.compress_size < _LARGE_BYTES or record.compress_type != zipfile.ZIP_STORED:
            continue
        file.seek(record.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26xHH", file.read(30))
        start = record.header_offset + 30 + name_bytes + extra_bytes
        file.seek(place)
        digest.update(file.read(max(0, start - place)))
        large.append((f"the record {record.filename!r}", start, record.compress_size, record.CRC))
        place = start + record.compress_size
    file.seek(place)
    digest.update(file.read(max(0, size - place)))
    return digest.hexdigest().encode(), large


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
