"""Goal: a multipart upload that fails, or whose call is interrupted or cancelled, leaves no parts on the store.

Run by `scripts/long python_objects`. The store is a server of this test, which holds requests until the program was interrupted."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator

import pytest

TIMEOUT_S = 60


class Uploads(ThreadingHTTPServer):
    """The multipart uploads of S3. Requests of the stage `held` wait."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.held = ""
        self.fails = ""
        self.reached = threading.Event()
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.begun: "set[str]" = set()
        self.open: "set[str]" = set()
        self.objects: "set[str]" = set()

    def pass_stage(self, stage: str) -> bool:
        if stage == self.held:
            self.reached.set()
            self.released.wait(TIMEOUT_S)
        return stage != self.fails

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # The client closes connections of requests that it has dropped.


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Uploads

    def reply(self, status: int, text: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        name, upload = self.request_parts()
        uploads = self.server
        if not upload:
            uploads.pass_stage("begin")
            with uploads.lock:
                upload = f"upload-{len(uploads.begun)}"
                uploads.begun.add(upload)
                uploads.open.add(upload)
            self.reply(200, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>")
            return
        is_good = uploads.pass_stage("complete")
        with uploads.lock:
            if not is_good or upload not in uploads.open:
                self.reply(400)
                return
            uploads.open.remove(upload)
            uploads.objects.add(name)
        self.reply(200, "<CompleteMultipartUploadResult><ETag>whole</ETag></CompleteMultipartUploadResult>")

    def do_PUT(self) -> None:
        self.request_parts()
        is_good = self.server.pass_stage("part")
        self.reply(200 if is_good else 400, ETag='"part"')

    def do_DELETE(self) -> None:
        _, upload = self.request_parts()
        with self.server.lock:
            self.server.open.discard(upload)
        self.reply(204)

    def request_parts(self) -> "tuple[str, str]":
        """The name of the object and of the upload; reads the body."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        found = re.search("uploadId=([^&]+)", url.query)
        return url.path, found.group(1) if found else ""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    with Uploads() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


def start(uploads: Uploads, call: str, folder: Path) -> "subprocess.Popen[str]":
    program = f"""
        import asyncio, fsspec, millpond
        options = {{"endpoint": "http://127.0.0.1:{uploads.server_address[1]}", "allow_http": True, "region": "us-east-1"}}
        options |= {{"key": "key", "secret": "secret"}}
        store = millpond.store("s3://bucket", socket=False, options=options)
        def close():
            writer = store.open_writer("lake", buffer_size=5 << 20)
            writer.write(bytes(11 << 20))
            writer.close()
        def end_block():
            with store.open_writer("lake", buffer_size=5 << 20) as writer:
                writer.write(bytes(11 << 20))
        def end_block_of_file():
            fs = fsspec.filesystem("millpond+s3", socket=False, **options)
            with fs.open("bucket/lake", "wb", block_size=11 << 20) as file:
                file.write(bytes(11 << 20))
        def go_on():
            with store.open_writer("lake", buffer_size=5 << 20, max_concurrency=1) as writer:
                try:
                    writer.write(bytes(11 << 20))
                except KeyboardInterrupt:
                    for more in [lambda: writer.write(bytes(11 << 20)), writer.close]:
                        try:
                            more()
                        except millpond.StoreError as error:
                            assert "an earlier write of this object has failed: it was interrupted" in str(error), error
                    raise
        def put():
            store.put("lake", bytes(20 << 20))
        def put_async():
            asyncio.run(store_async())
        async def store_async():
            await store.put_async("lake", bytes(20 << 20))
        try:
            {call}()
        except (KeyboardInterrupt, OSError) as error:
            print(type(error).__name__, flush=True)
        else:
            print("done", flush=True)
    """
    (folder / "program.py").write_text(textwrap.dedent(program))
    words = [sys.executable, str(folder / "program.py")]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONFAULTHANDLER": "1"})


def end(program: "subprocess.Popen[str]") -> str:
    out, _ = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 0, program.returncode
    return out


CALLS = ["close", "end_block", "end_block_of_file", "put", "put_async"]


@pytest.mark.parametrize(
    ("call", "stage"),
    [(call, stage) for call in CALLS for stage in ["begin", "part", "complete"]] + [("go_on", "begin"), ("go_on", "part")],
)
def test_an_interrupted_upload_is_aborted(uploads: Uploads, call: str, stage: str, tmp_path: Path) -> None:
    uploads.held = stage
    program = start(uploads, call, tmp_path)
    try:
        assert uploads.reached.wait(TIMEOUT_S)
        program.send_signal(signal.SIGINT)
        assert program.stdout is not None and program.stdout.readline() == "KeyboardInterrupt\n"
        # The program is about to end, and so has to wait: in the first stage for the number of the upload.
        if stage == "begin":
            uploads.released.set()
        end(program)
    finally:
        program.kill()
        program.wait()
    assert uploads.begun == {"upload-0"} and uploads.open == set() and uploads.objects == set()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stage", ["part", "complete", ""])
def test_a_failed_upload_is_aborted(uploads: Uploads, call: str, stage: str, tmp_path: Path) -> None:
    uploads.fails = stage
    assert end(start(uploads, call, tmp_path)) == ("StoreError\n" if stage else "done\n")
    assert uploads.begun == {"upload-0"} and uploads.open == set()
    assert uploads.objects == (set() if stage else {"/bucket/lake"})
