"""The download, against a real server on this machine that serves ranges, cuts bodies or lies."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.refusals import refused

from hasten_tools.demo.download import Remote, download
from hasten_tools.demo.task import DemoError

CONTENT = random.Random(0).randbytes(1_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT, or what a test puts in its place."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.ranges = True
        self.status = 200
        # For each request in turn, after how many bytes of its body the connection is cut; None: never.
        self.cuts: list[int | None] = []
        self.asked: list[str | None] = []

    @property
    def remote(self) -> Remote:
        return Remote(f"http://127.0.0.1:{self.server_port}/archive.tar.gz", len(CONTENT), SHA256)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        body, begin = self.server.content, 0
        if asked and self.server.ranges:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - begin))
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else None
        self.wfile.write(body[begin:] if cut is None else body[begin : begin + cut])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_file_is_fetched_once_in_one_request(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "made" / "archive.tar.gz"
    for _ in range(2):
        assert download(server.remote, target.parent) == target
        assert target.read_bytes() == CONTENT
        assert [path.name for path in target.parent.iterdir()] == ["archive.tar.gz"]
        assert server.asked == [None]
    target.write_bytes(CONTENT[:-1] + b"?")
    download(server.remote, target.parent)
    assert server.asked == [None, None]
    assert target.read_bytes() == CONTENT


def test_a_cut_body_is_continued_at_once_and_after_three_cuts_by_the_next_run(server: Server, tmp_path: Path) -> None:
    server.cuts = [400_000, 200_000, 100_000]
    with refused(DemoError, says=("3 times", "700,000", "1,000,000")):
        download(server.remote, tmp_path)
    assert not (tmp_path / "archive.tar.gz").exists()
    assert download(server.remote, tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=400000-", "bytes=600000-", "bytes=700000-"]


def test_a_server_without_ranges_sends_the_whole_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cuts = [400_000]
    assert download(server.remote, tmp_path).read_bytes() == CONTENT


def test_a_wrong_content_is_thrown_away(server: Server, tmp_path: Path) -> None:
    server.content = b"!" + CONTENT[1:]
    with pytest.raises(DemoError, match=r"another content.*--data"):
        download(server.remote, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [CONTENT + b"more", CONTENT[:1000]])
def test_a_wrong_size_is_seen_before_the_body(server: Server, tmp_path: Path, content: bytes) -> None:
    server.content = content
    with refused(DemoError, says=(f"{len(content):,}", "1,000,000")):
        download(server.remote, tmp_path)
    assert not (tmp_path / "archive.tar.gz").exists()


def test_what_goes_wrong_is_said_with_what_to_do(server: Server, tmp_path: Path) -> None:
    def refused(folder: Path, said: str) -> None:
        with pytest.raises(DemoError, match=said):
            download(server.remote, folder)

    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", r"cannot be written.*--cache-dir")
    server.status = 404
    refused(tmp_path, r"404.*--data")
    server.shutdown()
    server.server_close()
    refused(tmp_path, r"No network.*--data archive\.tar\.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
