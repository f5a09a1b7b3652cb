"""Goal: an open file of `millpond.fsspec` makes the whole object or none, and reads one version of it."""

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import millpond
import pytest
from conftest import content

fsspec = pytest.importorskip("fsspec", reason="there is no fsspec")

BLOCK = 8 << 20


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> "tuple[Any, str]":
    """A file system, and a path in it."""
    fs = fsspec.filesystem(f"millpond+{request.param}", skip_instance_cache=True)
    return fs, str(tmp_path) if request.param == "file" else str(tmp_path).strip("/")


class Interrupted:
    """A writer whose second write is interrupted after it has taken the bytes."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self.writes = 0

    def write(self, data: Any) -> None:
        self.writer.write(data)
        self.writes += 1
        if self.writes == 2:
            raise KeyboardInterrupt

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.abort()


def test_an_interrupted_write_makes_no_object(place: "tuple[Any, str]", monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: the end of the `with` block sent the block again, and the object had it twice."""
    fs, root = place
    fs.pipe_file(f"{root}/pond", b"old")
    with pytest.raises(KeyboardInterrupt):
        with fs.open(f"{root}/pond", "wb") as file:
            file.write(content(0, BLOCK))
            file._writer = Interrupted(file._writer)
            file.write(content(1, BLOCK))
            file.write(content(2, BLOCK))
    assert file.closed and fs.cat_file(f"{root}/pond") == b"old"

    file = fs.open(f"{root}/pond", "wb")
    file.write(content(0, BLOCK))
    file._writer = Interrupted(file._writer)
    file.write(content(1, BLOCK))
    with pytest.raises(KeyboardInterrupt):
        file.write(content(2, BLOCK))
    for go_on in [lambda: file.write(b"more"), file.flush, file.close]:
        with pytest.raises(millpond.StoreError, match="an earlier write"):
            go_on()
    file.close()
    assert file.closed and fs.cat_file(f"{root}/pond") == b"old"

    file = fs.open(f"{root}/pond", "wb")
    file.write(content(0, BLOCK))
    file._writer = Interrupted(file._writer)
    file.write(content(1, BLOCK))
    with pytest.raises(KeyboardInterrupt):
        file.write(content(2, BLOCK))
    del file
    assert fs.cat_file(f"{root}/pond") == b"old"


@pytest.mark.parametrize("length", [9, BLOCK, 2 * BLOCK + 9])
def test_a_block_that_raises_makes_no_object(place: "tuple[Any, str]", length: int) -> None:
    fs, root = place
    with pytest.raises(ZeroDivisionError):
        with fs.open(f"{root}/pond", "wb") as file:
            file.write(content(0, length))
            1 / 0
    assert file.closed and not fs.exists(f"{root}/pond")
    with pytest.raises(ValueError):
        file.write(b"late")
    with pytest.raises(ZeroDivisionError):
        with fs.open(f"{root}/lake", "wb"):
            1 / 0
    assert not fs.exists(f"{root}/lake")
    fs.pipe_file(f"{root}/pond", b"water")
    with pytest.raises(ZeroDivisionError):
        with fs.open(f"{root}/pond") as file:
            1 / 0
    assert file.closed


def test_threads_open_a_bucket_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: two threads that used a bucket first opened it both, and one found the disk in use by the other."""
    import millpond.fsspec

    opened = []
    from_settings = millpond.fsspec.from_settings

    def slow(*arguments: Any) -> Any:
        opened.append(arguments)
        time.sleep(0.2)
        return from_settings(*arguments)

    monkeypatch.setattr("millpond.fsspec.from_settings", slow)
    fs = fsspec.filesystem("millpond+file", disk=(str(tmp_path / "tier"), 64 << 20), skip_instance_cache=True)
    (tmp_path / "pond").write_bytes(b"water")
    read: "list[bytes]" = []
    threads = [threading.Thread(target=lambda: read.append(fs.cat_file(f"{tmp_path}/pond"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [b"water"] * 4 and len(opened) == 1


def read_in_worker(fs: Any, path: str) -> bytes:
    return bytes(fs.cat_file(path))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pools_of_a_file_system_with_a_disk(tmp_path: Path, method: str) -> None:
    fs = fsspec.filesystem("millpond+file", disk=(str(tmp_path / "tier"), 64 << 20))
    fs.pipe_file(f"{tmp_path}/pond", b"water")
    assert read_in_worker(fs, f"{tmp_path}/pond") == b"water"
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap(read_in_worker, [(fs, f"{tmp_path}/pond")] * 6) == [b"water"] * 6
