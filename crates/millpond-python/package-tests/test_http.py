"""Goal: files of a web server are read by the cache, and nothing is written to it. Needs a wheel with the feature `s3`."""

import errno
import http.server
import threading
from pathlib import Path
from typing import Iterator

import millpond
import pytest

DATA = bytes(range(251)) * 4000


class Files(http.server.BaseHTTPRequestHandler):
    """One file, with ranges and an ETag."""

    protocol_version = "HTTP/1.1"
    requests: "list[str]" = []

    def do_GET(self) -> None:
        self.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        if self.path == "/lakes/cut" and len(self.requests) == 1:
            self.send_response(200)
            self.send_header("ETag", '"one"')
            self.send_header("Content-Length", str(len(DATA)))
            self.end_headers()
            self.wfile.write(DATA[: len(DATA) // 2])
            self.close_connection = True
            return
        if self.path != "/lakes/pond":
            self.send_error(404)
            return
        start, end = 0, len(DATA)
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(DATA))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(DATA)}")
        else:
            self.send_response(200)
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(DATA[start:end])

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Files.requests.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/lakes"
        server.shutdown()


def test_reads(url: str, tmp_path: Path) -> None:
    store = millpond.store(url, freshness="immutable", options={"timeout": "10s"})
    for _ in range(3):
        assert store.get_range("pond", start=1000, length=5000) == DATA[1000:6000]
        assert store.get("pond").bytes() == DATA
    assert store.head("pond")["size"] == len(DATA)
    assert 1 <= len(Files.requests) <= 3, Files.requests
    with pytest.raises(FileNotFoundError):
        store.get("none")
    assert store.stats()["requests_saved"] >= 4


def test_it_is_read_only(url: str) -> None:
    store = millpond.store(url)
    for call in [
        lambda: store.put("pond", b""),
        lambda: store.delete("pond"),
        lambda: store.copy("pond", "lake"),
        lambda: store.rename("pond", "lake"),
        lambda: store.open_writer("pond").close(),
    ]:
        with pytest.raises(millpond.StoreError, match="read-only") as raised:
            call()
        assert raised.value.errno == errno.ENOTSUP
    assert Files.requests == []


def test_wrong_use(url: str) -> None:
    with pytest.raises(ValueError, match="no_option"):
        millpond.store(url, options={"no_option": 1})
    with pytest.raises((ValueError, OSError)):
        millpond.store("http://")


def test_a_stream_that_failed_does_not_end(url: str) -> None:
    """Incident: a loop that went on after an error ended as if it had read the whole object."""
    pieces = millpond.store(url, freshness="immutable").get("cut").stream(100_000)
    got = b""
    for _ in range(3):
        with pytest.raises(OSError):
            for piece in pieces:
                got += piece
    assert DATA.startswith(got) and len(got) < len(DATA)
