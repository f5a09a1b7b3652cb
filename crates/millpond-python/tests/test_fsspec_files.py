"""Goal: an open file of `millpond.fsspec` makes the whole object or none, and reads one version of it."""

import asyncio
import ctypes
import multiprocessing
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import millpond
import pytest
from conftest import child_status, content

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


def test_an_open_file_is_of_one_version(place: "tuple[Any, str]") -> None:
    """Incident: each read returned the newest version, so a reader had the footer of one file and the rows of another."""
    fs, root = place
    old, new = content(0, 100_000), content(7, 150_000)
    for change in [new, new[:100_000], new[:10]]:
        fs.pipe_file(f"{root}/pond", old)
        file = fs.open(f"{root}/pond")
        buffer = bytearray(9)
        assert file.read(9) == old[:9] and file.readinto(buffer) == 9 and buffer == old[9:18]
        file.seek(-9, 2)
        assert file.readinto(bytearray(100)) == 9
        fs.pipe_file(f"{root}/pond", change)
        for read in [lambda: file.read(9), file.read, lambda: file.readinto(bytearray(9)), file.readline]:
            file.seek(99_000)
            with pytest.raises(millpond.PreconditionError, match="changed since it was opened"):
                read()
        file.close()
        assert fs.cat_file(f"{root}/pond") == change


def test_no_bytes_after_the_end_of_the_version_are_read(tmp_path: Path) -> None:
    """The version of an immutable object is not compared."""
    fs = fsspec.filesystem("millpond+file", freshness="immutable", skip_instance_cache=True)
    (tmp_path / "pond").write_bytes(b"water")
    with fs.open(f"{tmp_path}/pond") as file:
        (tmp_path / "pond").write_bytes(b"water lilies")
        buffer = bytearray(9)
        assert file.readinto(buffer) == 5 and buffer == b"water" + bytes(4)
        assert file.readinto(buffer) == 0


def test_caches_of_fsspec_read_one_version(place: "tuple[Any, str]") -> None:
    fs, root = place
    data = content(0, 100_000)
    fs.pipe_file(f"{root}/pond", data)
    for kind in ["all", "readahead", "bytes", "first"]:
        with fs.open(f"{root}/pond", cache_type=kind, block_size=1000) as file:
            assert file.read(7) == data[:7] and file.readline() == data[7:11] and file.read() == data[11:]
    with fs.open(f"{root}/pond", cache_type="readahead", block_size=1000) as file:
        fs.pipe_file(f"{root}/pond", data[1:])
        with pytest.raises(millpond.PreconditionError):
            file.read(7)


def test_a_pickled_file_is_of_one_version(place: "tuple[Any, str]") -> None:
    fs, root = place
    fs.pipe_file(f"{root}/pond", content(0, 1000))
    file = fs.open(f"{root}/pond")
    file.seek(5)
    pickled = pickle.dumps(file)
    assert pickle.loads(pickled).read(9) == content(5, 9)
    fs.pipe_file(f"{root}/pond", content(9, 1000))
    with pytest.raises(millpond.PreconditionError):
        pickle.loads(pickled).read(9)


def test_open_bounds_are_of_one_version(place: "tuple[Any, str]", monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program changes the object after each look at its size."""
    fs, root = place
    path = f"{root}/pond"
    sizes = list(range(1000, 2000))
    store, name = fs._find_object(path)

    async def change() -> None:
        if sizes:
            await fs._pipe_file(path, content(0, sizes.pop(0)))

    class Changing:
        def __getattr__(self, called: str) -> Any:
            return getattr(store, called)

        def head(self, name: str) -> Any:
            meta = store.head(name)
            asyncio.run(change())
            return meta

        async def head_async(self, name: str) -> Any:
            meta = await store.head_async(name)
            await change()
            return meta

    fs.pipe_file(path, content(0, 999))
    monkeypatch.setattr(fs, "_find_object", lambda path: (Changing(), name))
    read = [fs.cat_file(path, -9), fs.cat_file(path, 3), fs.cat_file(path, None, 5)]
    assert read == [content(999 - 9, 9), content(3, 999 - 3), content(0, 5)]
    read = fs.cat_ranges([path] * 3, [-9, 3, None], [None, None, 5])
    assert read == [content(999 - 9, 9), content(3, 999 - 3), content(0, 5)]
    with pytest.raises(millpond.PreconditionError):
        fs.cat_file(path, -9, -3)
    (error,) = fs.cat_ranges([path], [-9], [-3])
    assert isinstance(error, millpond.PreconditionError)
    # After the last change both are of the last version.
    for read_middle in [lambda: fs.cat_file(path, -9, -3), lambda: fs.cat_ranges([path], [-9], [-3])[0]]:
        sizes[:] = [2000, 2001]
        assert read_middle() == content(2001 - 9, 6)


def test_lines_are_few_requests(tmp_path: Path) -> None:
    """Incident: each line was a read of 8 MiB, and a request."""
    fs = fsspec.filesystem("millpond+file", skip_instance_cache=True)
    lines = [b"%d: " % n + content(n, n % 300).replace(b"\n", b"") + b"\n" for n in range(5000)]
    lines += [b"long" * 100_000 + b"\n", b"\n", b"without end"]
    path = str(tmp_path / "lines")
    fs.pipe_file(path, b"".join(lines))
    with fs.open(path) as file:
        (store,) = fs._stores.values()
        before = store.stats()["requests"]
        assert list(file) == lines
        assert file.tell() == file.size and file.readline() == b""
        assert store.stats()["requests"] - before < 250
        file.seek(len(lines[0]) + 1)
        assert file.readline() == lines[1][1:] and file.read(3) == lines[2][:3]
        assert file.tell() == len(lines[0] + lines[1]) + 3 and file.readline() == lines[2][3:]
        file.seek(0)
        found = b"".join(lines).index(b"99: ")
        assert file.readuntil(b"99: ", blocks=7) == b"".join(lines)[: found + 4]
        assert file.readuntil(b"no such bytes") == b"".join(lines)[found + 4 :]


def test_lines_are_read_ahead_as_far_as_they_are_long(tmp_path: Path) -> None:
    fs = fsspec.filesystem("millpond+file", skip_instance_cache=True, memory=64 << 20)
    path = str(tmp_path / "lines")
    fs.pipe_file(path, b"short\n" + b"l" * (1 << 20) + b"\n" + bytes(8 << 20))
    with fs.open(path) as file:
        (store,) = fs._stores.values()
        before = store.stats()
        assert file.readline() == b"short\n"
        after = store.stats()
        assert after["bytes_from_store"] - before["bytes_from_store"] <= 64 << 10
        assert len(file.readline()) == (1 << 20) + 1
        assert store.stats()["requests"] - after["requests"] < 20
    # An end of two bytes that lie in two reads.
    fs.pipe_file(path, b"x" * 8191 + b"\r\nrest\r\n")
    with fs.open(path) as file:
        assert file.readuntil(b"\r\n") == b"x" * 8191 + b"\r\n" and file.readuntil(b"\r\n") == b"rest\r\n"


def test_any_buffer_is_read_into(place: "tuple[Any, str]") -> None:
    fs, root = place
    fs.pipe_file(f"{root}/pond", content(0, 1000))
    array = (ctypes.c_int32.__ctype_be__ * 5)()
    # `memoryview.cast` does not take its shape.
    empty = (ctypes.c_int32 * 0 * 2)()
    with fs.open(f"{root}/pond") as file:
        assert file.readinto(array) == 20 and bytes(array) == content(0, 20)
        assert file.readinto(bytearray()) == 0 == file.readinto(empty)


def test_copies_are_files_of_their_own(tmp_path: Path) -> None:
    """Incident: a copy was a hard link, and the second copy left a file that kept the folder from being removed."""
    fs = fsspec.filesystem("millpond+file")
    fs.pipe_file(f"{tmp_path}/d/a", b"water")
    for _ in range(2):
        fs.cp_file(f"{tmp_path}/d/a", f"{tmp_path}/d/b")
    fs.cp_file(f"{tmp_path}/d/a", f"{tmp_path}/d/below/c")
    assert sorted(one.name for one in (tmp_path / "d").iterdir()) == ["a", "b", "below"]
    with open(tmp_path / "d" / "b", "r+b") as file:
        file.write(b"W")
    assert fs.cat_file(f"{tmp_path}/d/a") == b"water" == fs.cat_file(f"{tmp_path}/d/below/c")
    with pytest.raises(FileNotFoundError):
        fs.cp_file(f"{tmp_path}/d/none", f"{tmp_path}/d/b")
    assert fs.cat_file(f"{tmp_path}/d/b") == b"Water"
    store = millpond.store(f"file://{tmp_path}")
    with pytest.raises(FileExistsError):
        store.copy("d/a", "d/b", overwrite=False)
    store.copy("d/a", "d/new", overwrite=False)
    assert store.get("d/new").bytes() == b"water"
    fs.rm(f"{tmp_path}/d", recursive=True)
    assert not (tmp_path / "d").exists()


def test_rm(place: "tuple[Any, str]") -> None:
    fs, root = place
    names = ["a/1", "a/b/2", "a/b/3.txt", "ab", "c/4"]
    fs.pipe({f"{root}/{name}": b"x" for name in names})
    for folder in ["a", "a/b"]:
        with pytest.raises(OSError):
            fs.rm(f"{root}/{folder}")
    assert fs.find(root) == [f"{root}/{name}" for name in names]
    found = fs.find(f"{root}/a", withdirs=True, detail=True)
    assert [(name.removeprefix(root), info["type"]) for name, info in found.items()] == [
        ("/a", "directory"), ("/a/1", "file"), ("/a/b", "directory"), ("/a/b/2", "file"), ("/a/b/3.txt", "file")
    ]  # fmt: skip
    assert fs.find(f"{root}/ab") == [f"{root}/ab"] and fs.find(f"{root}/none") == []
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{root}/none", recursive=True)
    fs.rm([f"{root}/a/b/*.txt", f"{root}/ab"], recursive=True)
    assert fs.find(root) == [f"{root}/{name}" for name in ["a/1", "a/b/2", "c/4"]]
    fs.rm(f"{root}/a", recursive=True)
    assert fs.find(root) == [f"{root}/c/4"]


def test_a_folder_is_removed_without_a_look_at_each_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fs = fsspec.filesystem("millpond+memory")
    root = str(tmp_path).strip("/")
    fs.pipe({f"{root}/{n // 10}/{n}": b"" for n in range(100)})
    looks: "list[str]" = []
    info = type(fs)._info

    async def counted(self: Any, path: str, **named: Any) -> Any:
        looks.append(path)
        return await info(self, path, **named)

    monkeypatch.setattr(type(fs), "_info", counted)
    assert len(fs.find(root)) == 100
    fs.rm(root, recursive=True)
    assert looks == [] and fs.find(root) == []


def test_parts_reach_the_longest_objects() -> None:
    """Incident: an object of more than 80,000 MiB failed at its part 10,001, after all others had been sent."""
    from millpond._fsspec_file import part_bytes
    from millpond._millpond import _part_bytes

    lengths = [_part_bytes(8 << 20, number) for number in range(10_000)]
    assert sum(lengths) >= 5 << 40 and set(lengths[:5000]) == {8 << 20} and max(lengths) <= 5 << 30
    for size in [0, 8 << 20, 100 << 30, 1 << 40]:
        assert 10_000 * part_bytes(size) >= size and part_bytes(size) >= 8 << 20


def test_the_length_of_parts_is_that_of_blocks(place: "tuple[Any, str]", monkeypatch: pytest.MonkeyPatch) -> None:
    fs, root = place
    asked = []

    class Store:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, called: str) -> Any:
            return getattr(self.store, called)

        def open_writer(self, name: str, buffer_size: int) -> Any:
            asked.append(buffer_size)
            return self.store.open_writer(name, buffer_size=buffer_size)

    for block, length in [(20 << 20, 21 << 20), (1 << 20, 9 << 20)]:
        with fs.open(f"{root}/pond", "wb", block_size=block) as file:
            file._object = Store(file._object)
            file.write(content(0, length))
        assert fs.cat_file(f"{root}/pond") == content(0, length)
    assert asked == [20 << 20, 8 << 20]


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_to_another_store_is_a_long_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    fs = fsspec.filesystem("millpond+file", skip_instance_cache=True)
    for name in ["one", "other"]:
        (tmp_path / name).mkdir()
    one, other = [millpond.store(f"file://{tmp_path}/{name}") for name in ["one", "other"]]
    data = content(0, 20 << 20)
    one.put("pond", data)
    threads, asked = [], []

    class Writer:
        def __init__(self, writer: Any) -> None:
            self.writer = writer

        def __getattr__(self, called: str) -> Any:
            def call(*arguments: Any) -> Any:
                threads.append(threading.current_thread())
                if fails and called == "write" and len(threads) == 2:
                    raise ZeroDivisionError
                return getattr(self.writer, called)(*arguments)

            return call

    class Target:
        def open_writer(self, name: str, buffer_size: int = 0) -> Any:
            asked.append(buffer_size)
            return Writer(other.open_writer(name))

    monkeypatch.setattr(fs, "_find_object", lambda path: (one if path == "/one/pond" else Target(), "pond"))
    monkeypatch.setattr("millpond.fsspec.part_bytes", lambda size: size - 7)
    if fails:
        with pytest.raises(ZeroDivisionError):
            fs.cp_file("/one/pond", "/other/pond")
        assert list((tmp_path / "other").iterdir()) == []
    else:
        fs.cp_file("/one/pond", "/other/pond")
        assert other.get("pond").bytes() == data
    # The calls wait, so none is on the thread of fsspec's loop.
    assert asked == [len(data) - 7] and len(threads) > 2 and "fsspecIO" not in {one.name for one in threads}


def test_a_fork_while_a_bucket_is_opened(tmp_path: Path) -> None:
    import millpond.fsspec

    (tmp_path / "pond").write_bytes(b"water")

    def work() -> None:
        fs = fsspec.filesystem("millpond+file", skip_instance_cache=True)
        assert fs.cat_file(f"{tmp_path}/pond") == b"water"

    with millpond.fsspec._opening:
        assert child_status(work) == 0


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
