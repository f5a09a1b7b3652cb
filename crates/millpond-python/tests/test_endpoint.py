"""Goal: `millpond.s3_endpoint` finds the endpoint of a running server by its settings file, starts one otherwise, and the
settings that it writes are those of the libraries. Their use is in `package-tests`."""

import fcntl
import hashlib
import hmac
import json
import os
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Callable, Iterator

import millpond
import pytest
from conftest import child_status, content
from servers import Server, millpond_command

Run = Callable[..., Any]


def get(endpoint: millpond.S3Endpoint, path: str, secret: "str | None" = None) -> bytes:
    """An object, by a presigned URL of Signature Version 4."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{now[:8]}/{endpoint.region}/s3/aws4_request"
    query = urllib.parse.urlencode(
        {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{endpoint.access_key_id}/{scope}",
            "X-Amz-Date": now,
            "X-Amz-Expires": "60",
            "X-Amz-SignedHeaders": "host",
        }
    )
    host = endpoint.url.removeprefix("http://")
    canonical = f"GET\n/{path}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{secret or endpoint.secret_access_key}".encode()
    for part in [*scope.split("/")]:
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    with urllib.request.urlopen(f"{endpoint.url}/{path}?{query}&X-Amz-Signature={signature}", timeout=30) as reply:
        return bytes(reply.read())


def test_an_endpoint_of_this_process(tmp_path: Path) -> None:
    folder = tmp_path / "Lakes of 2026"
    folder.mkdir()
    (folder / "pond").write_bytes(content(0, 300_000))
    memory = millpond.store("memory://endpoint")
    memory.put("mill", b"stones")
    endpoint = millpond.s3_endpoint(f"file://{folder}", freshness="immutable")
    assert endpoint.buckets == ("lakes-of-2026",) and not endpoint.of_server
    assert get(endpoint, "lakes-of-2026/pond") == content(0, 300_000)
    (folder / "pond").unlink()
    assert get(endpoint, "lakes-of-2026/pond") == content(0, 300_000), "it is cached"
    assert millpond.s3_endpoint(f"file://{folder}", freshness="immutable") is endpoint
    both = millpond.s3_endpoint({"lakes": f"file://{folder}", "mills": memory})
    assert both.buckets == ("lakes", "mills") and both.url != endpoint.url
    assert get(both, "mills/mill") == b"stones"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(both, "mills/mill", secret="wrong")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(both, "mills/none")


def test_a_child_is_a_client_of_its_parent() -> None:
    store = millpond.store("memory://of-parent")
    store.put("pond", b"water")
    endpoint = millpond.s3_endpoint(store)

    def work() -> None:
        assert get(endpoint, "of-parent/pond") == b"water"
        assert millpond.s3_endpoint(store) is endpoint
        other = millpond.s3_endpoint({"child": "memory://child"})
        millpond.store("memory://child").put("pond", b"child")
        assert get(other, "child/pond") == b"child"

    assert child_status(work) == 0
    assert get(endpoint, "of-parent/pond") == b"water"


def test_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProcessLookupError, match="no `millpond serve --endpoint` runs at .*millpond/serve.sock"):
        millpond.s3_endpoint()
    with pytest.raises(ProcessLookupError, match="no `millpond serve"):
        millpond.s3_endpoint(socket=False)
    with pytest.raises(ValueError, match="no stores"):
        millpond.s3_endpoint({})
    with pytest.raises(ValueError, match="not a URL"):
        millpond.s3_endpoint("lakes")
    with pytest.raises(ValueError, match="Bad_Name"):
        millpond.s3_endpoint({"Bad_Name": "memory://x"})
    with pytest.raises(FileNotFoundError):
        millpond.s3_endpoint("file:///no/such/folder")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    for user, place in (1000, "XDG_RUNTIME_DIR"), (0, "/run/millpond/serve.sock"):
        with monkeypatch.context() as other:
            other.setattr(os, "geteuid", lambda user=user: user)
            with pytest.raises(ProcessLookupError, match=place):
                millpond.s3_endpoint()
    millpond.store("memory://no-run-dir").put("pond", b"water")
    assert get(millpond.s3_endpoint("memory://no-run-dir"), "no-run-dir/pond") == b"water"


def test_no_file_is_left_without_a_run_directory(run: Run, tmp_path: Path) -> None:
    program = """
        import os, tempfile, millpond
        os.environ.pop("XDG_RUNTIME_DIR", None)
        tempfile.tempdir = os.getcwd()
        millpond.s3_endpoint("memory://lakes")
        [folder] = [name for name in os.listdir() if name.startswith("millpond-")]
        assert os.stat(folder).st_mode & 0o777 == 0o700 and os.stat(folder + "/credentials").st_mode & 0o777 == 0o600
    """
    run(program)
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


class SettingsFile:
    """The settings file of a server, and its lock."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "serve.sock"
        self.path = folder / "serve.sock.endpoint.json"
        self.described: "dict[str, Any]" = {
            "version": 1,
            "url": "http://127.0.0.1:43210",
            "socket": None,
            "bucket": "data",
            "buckets": [{"name": "data", "store": "s3://data"}, {"name": "lakes", "store": "file:///srv/lakes/"}],
            "region": "us-east-1",
            "access_key_id": "MILLKEY",
            "secret_access_key": "pond-secret",
            "later": "ignored",
        }
        self.write()
        self.lock = open(self.path)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def write(self, **changed: Any) -> None:
        with open(self.path, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump(self.described | changed, file)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[SettingsFile]:
    settings = SettingsFile(tmp_path)
    yield settings
    settings.lock.close()


def test_the_endpoint_of_a_server(settings: SettingsFile) -> None:
    for stores in [None, "s3://data", "s3://data/prefix", {"lakes": "file:///srv/lakes"}]:
        endpoint = millpond.s3_endpoint(stores, socket=settings.socket)  # type: ignore[arg-type]
        assert endpoint == millpond.S3Endpoint(
            "http://127.0.0.1:43210", "MILLKEY", "pond-secret", "us-east-1", ("data", "lakes"), True
        )
    assert "pond-secret" not in repr(endpoint)
    # Stores that the server has not are served by this process.
    millpond.store("memory://data").put("pond", b"water")
    own = millpond.s3_endpoint("memory://data", socket=settings.socket)
    assert not own.of_server and get(own, "data/pond") == b"water"


def test_a_server_that_is_gone(settings: SettingsFile) -> None:
    settings.lock.close()
    with pytest.raises(ProcessLookupError):
        millpond.s3_endpoint(socket=settings.socket)


def test_settings_that_cannot_be_used(settings: SettingsFile) -> None:
    settings.write(version=2)
    with pytest.raises(ValueError, match="version 2"):
        millpond.s3_endpoint(socket=settings.socket)
    settings.write(buckets=7)
    with pytest.raises(ValueError, match="not the settings"):
        millpond.s3_endpoint(socket=settings.socket)
    settings.path.write_text("pond")
    with pytest.raises(ValueError, match="not the settings"):
        millpond.s3_endpoint(socket=settings.socket)
    settings.write(url=None, socket="/run/s3.sock")
    with pytest.raises(ProcessLookupError):
        millpond.s3_endpoint(socket=settings.socket)
    settings.write()
    settings.path.chmod(0o640)
    with pytest.raises(PermissionError, match="mode 600"):
        millpond.s3_endpoint(socket=settings.socket)


def test_settings_of_libraries(settings: SettingsFile) -> None:
    endpoint = millpond.s3_endpoint(socket=settings.socket)
    own = {"http://127.0.0.1:43210", "MILLKEY", "pond-secret"}
    for written in [
        endpoint.polars(),
        endpoint.deltalake(),
        endpoint.lance(),
        endpoint.obstore(),
        endpoint.boto3(),
        endpoint.s3fs(),
        endpoint.pyarrow(),
        endpoint.environment(),
    ]:
        assert own <= {value for value in written.values() if isinstance(value, str)}, written
    assert endpoint.gdal_env()["AWS_S3_ENDPOINT"] == "127.0.0.1:43210"
    assert endpoint.tensorstore("data", "a/")["bucket"] == "data"
    assert endpoint.duckdb_sql('po"nd') == (
        "CREATE OR REPLACE SECRET \"po\"\"nd\" (TYPE s3, KEY_ID 'MILLKEY', SECRET 'pond-secret', "
        "ENDPOINT '127.0.0.1:43210', REGION 'us-east-1', URL_STYLE 'path', USE_SSL false)"
    )


def test_the_endpoint_of_a_running_server(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "lakes").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "lakes" / "pond").write_bytes(content(0, 300_000))
    server = Server(tmp_path / "lakes", tmp_path / "run" / "serve.sock")
    described = subprocess.run([millpond_command(), "serve", "--help"], capture_output=True, text=True).stdout
    if "--endpoint" not in described:
        pytest.skip("the command millpond has no endpoint")
    try:
        server.start("--endpoint")
        for stores in [None, server.url]:
            endpoint = millpond.s3_endpoint(stores, socket=server.socket)
            assert endpoint.of_server and endpoint.buckets == ("lakes",)
            assert get(endpoint, "lakes/pond") == content(0, 300_000)
        # Both read one cache.
        store = millpond.store(server.url, socket=server.socket)
        (server.folder / "pond").unlink()
        assert store.get("pond").bytes() == get(endpoint, "lakes/pond") == content(0, 300_000)
        # Another store is served by this process.
        (tmp_path / "mills").mkdir()
        assert not millpond.s3_endpoint(f"file://{tmp_path}/mills", socket=server.socket).of_server
        server.end(signal.SIGKILL)
        with pytest.raises(ProcessLookupError):
            millpond.s3_endpoint(socket=server.socket)
    finally:
        server.end(signal.SIGKILL)
