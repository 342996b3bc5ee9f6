"""A tiny archive in the layout of aclImdb_v1.tar.gz."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest

WORDS = {"pos": ["wonderful", "moving", "brilliant"], "neg": ["boring", "dreadful", "clumsy"]}


def review(kind: str, number: int) -> str:
    chance = random.Random(f"{kind}{number}")
    words = [chance.choice([*WORDS[kind], "the", "film", "was", "a"]) for _ in range(chance.randint(4, 60))]
    return " ".join([*words, f"number {number}"])


def members(count: int) -> dict[str, str]:
    """File names and texts of ``4 * count`` labelled reviews, and two without a label."""
    found = {
        f"aclImdb/{part}/{kind}/{number}_7.txt": review(kind, number + (1000 if part == "test" else 0))
        for part in ("train", "test")
        for kind in ("pos", "neg")
        for number in range(count)
    }
    found["aclImdb/train/unsup/0_0.txt"] = "an unlabelled review"
    found["aclImdb/train/urls_pos.txt"] = "http://example.com"
    found["aclImdb/README"] = "read me"
    return found


def pack(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            content = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of 80 labelled reviews."""
    return pack(tmp_path / "aclImdb_v1.tar.gz", members(20))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that ``archive`` unpacks to."""
    for name, text in members(20).items():
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "unpacked" / "aclImdb"
