"""Goal: the workers of a web server share the cache of `millpond serve`: an object that all of them serve is one request.

Run by `scripts/long python_objects`."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Iterator

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from servers import Opens, Server

PROGRAM = """
import os

import fastapi
import millpond

store = millpond.store(os.environ["LAKES"], socket=os.environ["LAKES_SOCKET"])
app = fastapi.FastAPI()


@app.get("/pond/{start}")
async def pond(start: int) -> dict:
    data = await store.get_range_async("pond", start=start, length=4)
    stats = store.stats()
    return {"pid": os.getpid(), "bytes": data.hex(), "is_attached": stats["is_attached"], "fallbacks": stats["fallbacks"]}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "objects").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    server = Server(tmp_path / "objects", tmp_path / "run" / "serve.sock")
    yield server
    server.end(signal.SIGKILL)


def test_fastapi_with_four_workers(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="there is no fastapi")
    pytest.importorskip("uvicorn", reason="there is no uvicorn")
    data = os.urandom(500_000)
    (server.folder / "pond").write_bytes(data)
    server.start()
    opens = Opens(server.folder)
    (tmp_path / "lakes.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "uvicorn", "lakes:app", "--workers", "4", "--port", str(port), "--log-level", "error"]
    environment = {**os.environ, "LAKES": server.url, "LAKES_SOCKET": str(server.socket)}
    web = subprocess.Popen(words, cwd=tmp_path, env=environment)

    def ask(number: int) -> "dict[str, object]":
        start = number * 1237 % (len(data) - 4)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/pond/{start}", timeout=30) as reply:
            answer = json.load(reply)
        assert answer["bytes"] == data[start : start + 4].hex()
        return answer  # type: ignore[no-any-return]

    try:
        end = time.monotonic() + 60
        while True:
            try:
                ask(0)
                break
            except OSError:
                assert time.monotonic() < end and web.poll() is None
                time.sleep(0.1)
        workers = set()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            while len(workers) < 4:
                answers = list(pool.map(ask, range(200)))
                assert all(answer["is_attached"] and not answer["fallbacks"] for answer in answers)
                workers |= {answer["pid"] for answer in answers}
                assert time.monotonic() < end, workers
        # Read-ahead may have split the object into several requests, but no page is requested twice.
        assert 1 <= len(opens.names()) <= 4
    finally:
        web.terminate()
        web.wait(30)
        opens.close()
