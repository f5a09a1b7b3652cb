"""Goal: a file does what its documentation says, and wrong use raises the right exception."""

import array
import asyncio
import errno
import inspect
import io
import mmap
import os
import pickle
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import millpond
import pytest
from conftest import content


def test_reads_and_writes_by_offset(data: Path) -> None:
    with millpond.open(data, "r+b") as file:
        assert file.pread(100, 1000) == content(1000, 100)
        assert file.pread(1 << 30, (1 << 20) - 5) == content((1 << 20) - 5, 5)
        assert file.pread(10, 1 << 21) == b""
        assert file.pread(0, 0) == b""
        first, second = bytearray(3000), bytearray(70000)
        assert file.preadv([first, memoryview(second)[:50000]], 77) == 53000
        assert first + second[:50000] == content(77, 53000)
        assert second[50000:] == bytes(20000)
        assert file.preadv([], 0) == 0
        assert file.pwrite(b"pond", 5) == 4
        assert file.pread(8, 3) == content(3, 2) + b"pond" + content(9, 2)
        assert file.tell() == 0
    assert data.read_bytes()[5:9] == b"pond"


@pytest.mark.parametrize("size", [1, 4096, 65536, 65537, 1 << 20])
def test_readinto_of_any_buffer(data: Path, size: int) -> None:
    with millpond.open(data) as file:
        for buffer in [bytearray(size), array.array("B", bytes(size)), mmap.mmap(-1, size)]:
            for _ in range(2):  # a miss, and a hit
                file.seek(0)
                assert file.readinto(buffer) == size
                assert bytes(memoryview(buffer)) == content(0, size)
                assert file.tell() == size


def test_positions_and_lines(tmp_path: Path) -> None:
    lines = [b"a\n", b"\n", b"x" * 100_000 + b"\n", b"no end"]
    with millpond.open(tmp_path / "lines", "w+") as file:
        file.writelines(lines)
        assert file.seek(0) == 0
        assert list(file) == lines
        assert file.readline() == b""
        file.seek(0)
        assert file.readlines(3) == lines[:2]
        assert file.readline(5) == b"xxxxx"
        assert file.seek(-3, os.SEEK_END) == 100_010 - 3
        assert file.read() == b"end"
        assert file.seek(-6, os.SEEK_CUR) == file.tell() == 100_004
        assert file.truncate() == 100_004
        assert file.seek(10, os.SEEK_END) == 100_014
        file.write(b"!")
        assert file.pread(20, 100_004) == bytes(10) + b"!"
        assert file.truncate(1) == 1 and file.tell() == 100_015


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError) as raised:
        millpond.open(path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(path))
    with millpond.open(path, "xb") as file:
        assert (file.mode, file.name) == ("xb", path)
        assert file.writable() and not file.readable() and file.seekable() and not file.isatty()
        file.write(b"one")
    with pytest.raises(FileExistsError):
        millpond.open(path, "x")
    with millpond.open(os.fsencode(path), "a+b") as file:
        assert file.tell() == 3
        file.seek(0)
        assert file.write(b"two") == 3 and file.tell() == 6
        assert file.pread(9, 0) == b"onetwo"
    with millpond.open(path, "w"):
        pass
    assert path.read_bytes() == b""
    for mode in ["", "b", "rw", "rt", "r++", "rbb", "z", "U"]:
        with pytest.raises(ValueError):
            millpond.open(path, mode)
    for there in [tmp_path, "/dev/null"]:
        with pytest.raises(OSError):
            millpond.open(there)
    with pytest.raises(IsADirectoryError):
        millpond.open(tmp_path)
    for wrong in [None, 3, 1.5]:
        with pytest.raises(TypeError):
            millpond.open(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        millpond.open("a\0b")


def test_wrong_use_raises(data: Path) -> None:
    file = millpond.open(data)
    for write in [lambda: file.write(b""), lambda: file.pwrite(b"x", 0), lambda: file.truncate(0)]:
        with pytest.raises(io.UnsupportedOperation):
            write()
    with pytest.raises(io.UnsupportedOperation):
        file.fileno()
    with pytest.raises(io.UnsupportedOperation):
        file.detach()
    for negative in [
        lambda: file.pread(1, -1),
        lambda: file.pread(-1, 0),
        lambda: file.preadv([bytearray(1)], -1),
        lambda: file.seek(-1),
        lambda: file.lock_range(-1, 1),
    ]:
        with pytest.raises(OSError) as raised:
            negative()
        assert raised.value.errno == errno.EINVAL and raised.value.filename == str(data)
    for wrong in [
        lambda: file.readinto(b"constant"),  # type: ignore[arg-type]
        lambda: file.readinto(memoryview(bytearray(8))[::2]),
        lambda: file.readinto("text"),  # type: ignore[arg-type]
        lambda: file.preadv([bytes(1)], 0),
        lambda: file.preadv(7, 0),  # type: ignore[arg-type]
        lambda: file.pread("1", 0),  # type: ignore[arg-type]
        lambda: file.seek(1.5),  # type: ignore[arg-type]
    ]:
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(OverflowError):
        file.pread(1, 1 << 64)
    with pytest.raises(ValueError):
        file.seek(0, 9)
    with pytest.raises(TypeError):
        millpond.open(data, "r+").write("text")  # type: ignore[arg-type]
    with millpond.open(data, "ab") as appended:
        for read in [appended.read, appended.readline, lambda: appended.pread(1, 0), lambda: next(appended)]:
            with pytest.raises(io.UnsupportedOperation):
                read()
        with pytest.raises(io.UnsupportedOperation):
            appended.readinto(bytearray(1))


def test_closed_files_raise_value_error(data: Path) -> None:
    file = millpond.open(data, "r+")
    file.close()
    file.close()
    assert file.closed and "closed" in repr(file)
    for call in [
        file.read, file.readall, file.readline, file.readlines, file.tell, file.flush, file.fileno, file.sync,
        file.truncate, file.readable, file.writable, file.seekable, file.isatty, file.__enter__, file.__iter__,
        lambda: file.readinto(bytearray(1)), lambda: file.write(b"x"), lambda: file.pread(1, 0),
        lambda: file.preadv([bytearray(1)], 0), lambda: file.pwrite(b"x", 0), lambda: file.seek(0),
        lambda: file.lock_range(0, 1), lambda: file.writelines([]), lambda: pickle.dumps(file), lambda: next(file),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_close_beside_reads_ends_none_of_them(data: Path) -> None:
    for _ in range(20):
        file = millpond.open(data, cache=millpond.Engine(cache_bytes=1 << 20))
        reads: list[bytes] = []

        def read() -> None:
            try:
                while True:
                    reads.append(file.pread(100_000, 7))
            except ValueError:
                pass

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(reads) < 3:
            pass
        file.close()
        for thread in threads:
            thread.join()
        assert all(one == content(7, 100_000) for one in reads)


def test_readers_see_whole_writes(tmp_path: Path) -> None:
    size = 100_000
    with millpond.open(tmp_path / "file", "w+") as file:
        file.pwrite(bytes(size), 0)

        def write() -> None:
            for n in range(1, 50):
                file.pwrite(bytes([n]) * size, 0)

        writer = threading.Thread(target=write)
        writer.start()
        buffer = bytearray(size)
        while writer.is_alive():
            assert file.preadv([buffer], 0) == size
            assert buffer.count(buffer[0]) == size, "torn"
        writer.join()
    with millpond.open(tmp_path / "file", atomic=False) as torn:
        assert torn.pread(1, 0) == b"\x31"


def test_libraries_use_it_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    with millpond.open(path, "w+b") as file:
        assert isinstance(file, io.BufferedIOBase) and isinstance(file, io.IOBase)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("pond", "a pond")
        with zipfile.ZipFile(file) as archive:
            assert archive.read("pond") == b"a pond"
    with millpond.open(path, "w+b") as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        text.write("ein Teich\nä\n")
        text.seek(0)
        assert text.readlines() == ["ein Teich\n", "ä\n"]
        text.flush()
        pickle.dump([1, 2], file)
        file.seek(-len(pickle.dumps([1, 2])), 2)
        assert pickle.load(file) == [1, 2]
        file.seek(0)
        assert io.BufferedReader(file).peek(3)[:3] == b"ein"  # type: ignore[arg-type]


def test_subclasses_and_attributes(data: Path) -> None:
    file = millpond.open(data)
    file.note = 1  # type: ignore[attr-defined]
    assert file.engine is millpond.open(data).engine


def test_memory_is_released_after_its_use(data: Path) -> None:
    buffer = bytearray(100)
    with millpond.open(data) as file:
        assert file.readinto(buffer) == 100
    buffer.extend(b"resized, as it is released")


def test_unsuitable_buffers_are_type_errors(data: Path) -> None:
    class Numpy:
        """Raises `ValueError`, as numpy does."""

        def __init__(self, memory: memoryview) -> None:
            self.memory = memory

        def __buffer__(self, flags: int) -> memoryview:
            if flags == inspect.BufferFlags.SIMPLE or flags & inspect.BufferFlags.WRITABLE:
                raise ValueError("buffer source array is read-only, or not C-contiguous")
            return self.memory

    read_only, gaps = memoryview(bytes(8)), memoryview(bytearray(8))[::2]
    store = millpond.store("memory://buffers")
    store.put("pond", b"water lilies")
    unsuitable: "list[Any]" = [gaps]
    if sys.version_info >= (3, 12):
        unsuitable.append(Numpy(read_only))
    with millpond.open(data, "r+b") as file:
        for one in [read_only, *unsuitable]:
            for call in [
                lambda: file.readinto(one),
                lambda: file.preadv([one], 0),
                lambda: store.get_range_into("pond", one, start=0),
            ]:
                with pytest.raises(TypeError, match="a writable contiguous buffer is needed"):
                    call()
        for one in unsuitable:
            for call in [
                lambda: file.write(one),
                lambda: file.pwrite(one, 0),
                lambda: store.put("pond", one),
                lambda: asyncio.run(file.apwrite(one, 0)),
            ]:
                with pytest.raises(TypeError, match="a contiguous buffer is needed"):
                    call()
        released = memoryview(bytearray(8))
        released.release()
        with pytest.raises(ValueError, match="released"):
            file.readinto(released)


def test_lock_range(data: Path) -> None:
    one, two = millpond.open(data), millpond.open(data)
    with one.lock_range(0, 100):
        with two.lock_range(100, 100):
            pass
        with pytest.raises(TimeoutError) as raised:
            two.lock_range(50, 100, timeout=0.06)
        assert raised.value.errno == errno.ETIMEDOUT
        with pytest.raises(TimeoutError):
            two.lock_range(0, 0, exclusive=False, timeout=0)
    held = two.lock_range(0, 0, exclusive=False)
    with one.lock_range(0, 7, exclusive=False, timeout=0):
        pass
    held.release()
    held.release()
    with one.lock_range(0, 0, timeout=0):
        pass
    with pytest.raises(ValueError):
        one.lock_range(0, 1, timeout=-1)
    count = 0

    def add() -> None:
        nonlocal count
        for _ in range(200):
            with one.lock_range(0, 1):
                before = count
                one.pread(1, 0)
                os.sched_yield()
                count = before + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == 800


def test_engines(data: Path) -> None:
    engine = millpond.Engine(cache_bytes=4 << 20, readahead_bytes=0, backend="threads")
    with engine.open(data) as file:
        assert file.engine is engine
        file.pread(4096, 0)
        file.pread(4096, 0)
        stats = engine.stats()
        assert (stats["hits"], stats["misses"], stats["back_end"]) == (1, 1, "threads")
        assert 0 < stats["memory_bytes"] <= engine.cache_bytes == 4 << 20
    for wrong in [{"cache_bytes": 1}, {"admission": "no"}, {"backend": "no"}]:
        with pytest.raises(ValueError):
            millpond.Engine(**wrong)  # type: ignore[arg-type]
    for wrong in [{"cache_bytes": -1}, {"cache_bytes": "1"}, {"unknown": 1}]:
        with pytest.raises((TypeError, OverflowError)):
            millpond.Engine(**wrong)  # type: ignore[arg-type]


def test_an_error_of_a_write_is_an_os_error(tmp_path: Path) -> None:
    import resource
    import signal

    with millpond.open(tmp_path / "file", "wb") as file:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(OSError) as raised:
                file.pwrite(b"x", 8192)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, old)
        assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "file")
