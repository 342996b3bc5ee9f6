"""A checkpoint is whole or not there; reading one runs no code; damage is found and the file named."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten._lib.files import replacing
from hasten.checkpoint import files
from hasten.checkpoint.files import CheckpointDamaged, CheckpointRefused
from tests.refusals import refused

CONTENTS: dict[str, Any] = {
    "state_dict": OrderedDict(weight=torch.arange(3000.0), bias=torch.ones(2, dtype=torch.bfloat16)),
    "numbers": [1, -(2**70), 2.5, float("inf"), True, None, 1j],
    "texts": {"name": "é\ud800", b"key": b"\x00\xff", 3: {"a", "b"}, (1, 2): bytearray(b"x")},
    "counts": Counter("aab"),
    "torch": (torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.nn.Parameter(torch.zeros(1))),
    "numpy": (np.float32(1.5), np.int64(3), np.bool_(True), np.arange(3), np.ones((2, 2), dtype=np.float16)),
}


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Colour(Enum):
    RED = 1


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other) and type(one) is type(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


# -- there and back


def test_contents_come_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.ckpt"
    files.save(CONTENTS, path)
    files.verify(path)
    assert same(files.load(path), CONTENTS)
    assert same(torch.load(path, weights_only=False), CONTENTS)
    assert [each.name for each in path.parent.iterdir()] == ["a.ckpt"]


def test_file_of_torch_save_is_read(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "zip.pt")
    torch.save({"step": 3}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "legacy.pt"):
        files.verify(tmp_path / name)
        assert files.load(tmp_path / name) == {"step": 3}


def test_ours_is_read_by_plain_torch_load(tmp_path: Path) -> None:
    plain = {key: value for key, value in CONTENTS.items() if key != "numpy"}
    files.save({"weight": torch.ones(5000), **plain}, tmp_path / "a.ckpt")
    for options in ({}, {"mmap": True}):
        loaded = torch.load(tmp_path / "a.ckpt", weights_only=True, **options)
        assert torch.equal(loaded["weight"], torch.ones(5000))
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        assert archive.testzip() is None


def test_a_file_to_which_another_program_adds_records_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    files.save({"w": torch.ones(3000), "b": 1}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/extra.json", "0123456789" * 500)
    assert torch.equal(files.load(path)["w"], torch.ones(3000))
    whole = path.read_bytes()
    for place in (whole.index(b"0123456789"), whole.index(torch.ones(9).numpy().tobytes())):
        path.write_bytes(whole[:place] + b"x" + whole[place + 1 :])
        with refused(CheckpointDamaged, says="is damaged"):
            files.load(path)


def test_other_file_systems(tmp_path: Path) -> None:
    url = "memory://runs/one/last.ckpt"
    for step in range(2):
        files.save({"step": step, "weight": torch.ones(5000)}, url)
        files.verify(url)
        assert files.load(url)["step"] == step
    import fsspec

    system = fsspec.filesystem("memory")
    assert [Path(each).name for each in system.ls("/runs/one", detail=False)] == ["last.ckpt"]
    files.remove(url)
    files.remove(url)
    assert not system.exists("/runs/one/last.ckpt")
    with pytest.raises(FileNotFoundError):
        files.load(url)
    files.save({"step": 3}, f"file://{tmp_path}/a.ckpt")
    assert files.load(tmp_path / "a.ckpt") == {"step": 3}


def test_options_of_a_file_system_are_refused_for_a_local_path(tmp_path: Path) -> None:
    files.TorchCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "a.ckpt", storage_options={})
    with refused(TypeError, "storage_options", says="local path"):
        files.TorchCheckpointIO().save_checkpoint({"step": 2}, tmp_path / "a.ckpt", storage_options={"anon": True})
    assert files.load(tmp_path / "a.ckpt") == {"step": 1}


def test_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    files.save({"step": 1}, tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    assert files.load(tmp_path / "last.ckpt") == {"step": 1}
    files.save({"step": 2}, tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert files.load(tmp_path / "best.ckpt") == {"step": 1}
    assert files.load(tmp_path / "last.ckpt") == {"step": 2}
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    files.save({"step": 1}, tmp_path / "link" / "a.ckpt")
    assert files.load(tmp_path / "real" / "a.ckpt") == {"step": 1}


def test_remove(tmp_path: Path) -> None:
    files.save({"step": 1}, tmp_path / "a.ckpt")
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "part").touch()
    for name in ("link.ckpt", "a.ckpt", "sharded", "absent"):
        files.remove(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_large_tensors_can_stay_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    files.save({"large": torch.ones(1000, 1000), "small": torch.ones(2)}, path)
    with files.mapped_tensors():
        read = files.load(path)
    mapped = Path("/proc/self/maps").read_text().count(str(path))
    assert mapped == 1
    assert same(read, files.load(path))
    path.unlink()
    read["large"].add_(1)  # In memory alone.
    assert int(read["large"][0, 0]) == 2
    torch.save({"large": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with files.mapped_tensors():
        assert files.load(path)["large"].tolist() == [1, 1, 1]


# -- kills, full disks and folders that cannot be written


def test_only_files_of_dead_writers_are_cleaned(tmp_path: Path) -> None:
    abandoned = tmp_path / ".last.ckpt.123-abcdef01.hasten-tmp"
    for name in ("b.hasten-tmp", ".hidden", abandoned.name):
        (tmp_path / name).touch()
    with replacing(tmp_path / "a.ckpt") as file:
        file.write(b"half")
        assert files.clean(tmp_path) == [abandoned]
    assert (tmp_path / "a.ckpt").read_bytes() == b"half"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".hidden", "a.ckpt", "b.hasten-tmp"]


@contextmanager
def size_limit(folder: Path) -> Iterator[None]:
    """Let this process write files of at most 1 MB."""
    import resource

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("limited", "code"), [(size_limit, errno.EFBIG), (small_disk, errno.ENOSPC)])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, limited: Any, code: int) -> None:
    path = tmp_path / "last.ckpt"
    with limited(tmp_path):
        files.save({"step": 1}, path)
        with refused(OSError, says=("bytes free in", "what was there before is untouched", str(path))) as caught:
            files.save({"step": 2, "weight": torch.zeros(3_000_000)}, path)
        assert caught.value.errno == code
        assert os.listdir(tmp_path) == ["last.ckpt"]
        assert files.load(path) == {"step": 1}


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that others may enter and only its owner may write to; pytest's own cannot be entered by others."""
    outer = Path(tempfile.mkdtemp())
    folder = outer / "closed"
    folder.mkdir()
    outer.chmod(0o755)
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    folder.chmod(0o755)
    shutil.rmtree(outer)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
def test_folder_that_cannot_be_written_is_named(closed: Path) -> None:
    message = f"could not write the checkpoint (nothing is left of it): Permission denied: '{closed}/a.ckpt'"
    with refused(PermissionError, says=message):
        files.save({}, closed / "a.ckpt")


def test_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    with refused(IsADirectoryError, says=f"{tmp_path}"):
        files.save({}, tmp_path)
    (tmp_path / "file").touch()
    with refused((FileExistsError, NotADirectoryError), says=("a file is in the way", f"Move {tmp_path}/file away")):
        files.save({}, tmp_path / "file" / "a.ckpt")
    with refused(CheckpointDamaged, says=f"{tmp_path}"):
        files.load(tmp_path)
    (tmp_path / "config.json").touch()
    with refused(CheckpointDamaged, fix="AutoModel.from_pretrained("):
        files.load(tmp_path)


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TMP", "TEMP"):  # The system's temporary folder is not used.
        monkeypatch.setenv(name, "/no/such/folder")
    monkeypatch.setattr(tempfile, "tempdir", None)
    files.save({"step": 1}, tmp_path / "a.ckpt")
    with pytest.raises(TypeError):
        files.save({"step": lambda: 2}, tmp_path / "a.ckpt")
    assert files.load(tmp_path / "a.ckpt") == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


# -- damage


@pytest.mark.parametrize("same_file", [True, False])
def test_a_changed_byte_of_a_large_tensor_is_found_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_file: bool
) -> None:
    """Also if another file takes the path while it is opened: the one that is read is checked."""
    path = tmp_path / "large.ckpt"
    contents = {"weight": torch.arange(500_000.0), "name": "large"}
    files.save(contents, path)
    monkeypatch.setattr(os.path, "samestat", lambda *_: same_file)
    loaded = files.load(path)
    assert torch.equal(loaded["weight"], contents["weight"])
    assert loaded["name"] == "large"
    written = bytearray(path.read_bytes())
    written[len(written) // 2] ^= 1
    path.write_bytes(written)
    with refused(CheckpointDamaged, says="archive/data/0"):
        files.load(path)
    with refused(CheckpointDamaged, says="archive/data/0"):
        files.verify(path)


def test_nothing_is_unpickled_before_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.ckpt"
    files.save({str(number): number for number in range(5000)}, path)
    written = bytearray(path.read_bytes())
    written[len(written) // 2] ^= 1
    path.write_bytes(written)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with refused(CheckpointDamaged, says="archive/data.pkl"):
        files.load(path, weights_only=False)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    weight = torch.randn(1500)
    files.save({"weight": weight, "bias": torch.randn(3)}, path)
    whole = path.read_bytes()
    bulk = whole.index(weight.numpy().tobytes())
    damaged = tmp_path / "damaged.ckpt"
    chance = random.Random(0)
    for place in [*range(bulk), *range(bulk, bulk + 6000, 31), *range(bulk + 6000, len(whole))]:
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        damaged.write_bytes(changed)
        with refused(CheckpointDamaged, says=str(damaged)):
            files.verify(damaged)
    with refused(CheckpointDamaged, says=str(damaged)):
        files.load(damaged)
    # A file of torch has the checksums of its archive.
    torch.save({"weight": torch.zeros(5000)}, path)
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    with refused(CheckpointDamaged, says=f"{path}"):
        files.verify(path)


def test_a_cut_or_longer_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    files.save({"weight": torch.randn(1500)}, path)
    whole = path.read_bytes()
    for end in [*range(0, len(whole) - 200, 61), *range(len(whole) - 200, len(whole))]:
        path.write_bytes(whole[:end])
        with refused(CheckpointDamaged, fix="download it again, or take an earlier checkpoint", says=str(path)):
            files.load(path)
    for longer in (whole + b"\0", whole + whole, whole[:1000] + b"x" + whole[1000:]):
        path.write_bytes(longer)
        with refused(CheckpointDamaged, says=str(path)):
            files.load(path)


def test_what_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for content in (b"", b"no checkpoint at all", b"PK\x03\x04 and no more", b"\x80\x02", b"{}"):
        path.write_bytes(content)
        with refused(CheckpointDamaged, says=str(path)):
            files.load(path)
    for length in (128, 160):
        path.write_bytes(length.to_bytes(8, "little") + b'{"weight":{}}'.ljust(length))
        with refused(CheckpointDamaged, fix=f"model.load_state_dict(safetensors.torch.load_file({str(path)!r}))"):
            files.load(path)
    for content, fix in ((b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"\n<html>", "page")):
        path.write_bytes(content)
        with refused(CheckpointDamaged, says=str(path), fix=fix):
            files.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "hello")
    with refused(CheckpointDamaged, fix="take an earlier checkpoint", says=f"{path}"):
        files.load(path)


def test_a_device_that_torch_does_not_know_is_no_fault_of_the_file(tmp_path: Path) -> None:
    files.save({"weight": torch.ones(2)}, tmp_path / "a.ckpt")
    with refused(ValueError, "map_location", fix="'cuda'", says="map_location='gpu'"):
        files.load(tmp_path / "a.ckpt", map_location="gpu")


def test_missing_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    files.save({}, tmp_path / "last.ckpt")
    with refused(FileNotFoundError, says=("'last.ckpt'", "lats.ckpt")):
        files.load(tmp_path / "lats.ckpt")
    with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist"):
        files.load(tmp_path / "none" / "last.ckpt")


# -- code


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "a.ckpt", tmp_path / "trace"
    for write in (
        lambda: torch.save({"x": Payload(trace)}, path),
        lambda: torch.save({"x": Payload(trace)}, path, _use_new_zipfile_serialization=False),
        lambda: path.write_bytes(pickle.dumps(Payload(trace), protocol=2)),
        lambda: path.write_bytes(pickle.dumps(Payload(trace), protocol=5)),
    ):
        write()
        with refused(CheckpointRefused, says=(f"{path}", "posix.system", "weights_only=False")):
            files.load(path)
        files.verify(path)
        assert not trace.exists()


def test_code_is_read_where_the_user_says_so(tmp_path: Path) -> None:
    torch.save({"colour": Colour.RED}, tmp_path / "a.ckpt")
    with refused(CheckpointRefused, fix="weights_only=False"):
        files.load(tmp_path / "a.ckpt")
    assert files.load(tmp_path / "a.ckpt", weights_only=False) == {"colour": Colour.RED}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 1, r"checkpoint\['a'\]\[0\]\['b'\] is a function, which a checkpoint does not hold"),
        (Path("x"), r"checkpoint\['a'\]\[0\]\['b'\] is a PosixPath.*Store str\(path\) instead"),
        (Colour.RED, r"checkpoint\['a'\]\[0\]\['b'\] is a Colour.*Store its \.value instead"),
        ({Colour.RED: 1}, r"a key of checkpoint\['a'\]\[0\]\['b'\] is a Colour"),
        (np.array([object()]), r"checkpoint\['a'\]\[0\]\['b'\] is a ndarray"),
        (torch.nn.Linear(1, 1), r"checkpoint\['a'\]\[0\]\['b'\] is a Linear"),
        (None, r"checkpoint\['a'\]\[0\]\['b'\] contains itself"),
    ],
)
def test_objects_are_refused_when_they_are_saved(tmp_path: Path, value: Any, message: str) -> None:
    contents: dict[str, Any] = {"a": [{"b": value}]}
    if value is None:
        contents["a"][0]["b"] = contents
    with pytest.raises(TypeError, match=f"^{message}"):
        files.save(contents, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_server_that_sends_files_only_from_their_beginning(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    files.save({"epoch": 3, "weight": torch.arange(100)}, tmp_path / "a.ckpt")
    # The server of the standard library ignores ranges.
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        loaded = files.load(f"http://127.0.0.1:{server.server_port}/a.ckpt")
        server.shutdown()
    assert loaded["epoch"] == 3
    assert loaded["weight"].equal(torch.arange(100))


def test_a_folder_that_becomes_a_file_meanwhile_is_named_with_what_to_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def write(contents: Any, file: Any) -> None:
        shutil.rmtree(folder)
        folder.touch()

    monkeypatch.setattr(files, "_write", write)
    with refused(NotADirectoryError, says=(f"{folder} cannot be a folder", f"Move {folder} away")):
        files.save({}, folder / "a.ckpt")
