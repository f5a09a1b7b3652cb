"""Goal: the file systems of `millpond.fsspec` do what fsspec's own tests do not look at: ranges, seeks, long writes, pickles,
forks, and what is cached."""

import asyncio
import io
import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
from conftest import child_status, content

fsspec = pytest.importorskip("fsspec", reason="there is no fsspec")


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> "tuple[Any, str]":
    """A file system, and a path in it with the object `pond`."""
    fs = fsspec.filesystem(f"millpond+{request.param}")
    root = str(tmp_path) if request.param == "file" else str(tmp_path).strip("/")
    fs.pipe_file(f"{root}/pond", content(0, 1 << 20))
    return fs, root


def test_urls(tmp_path: Path) -> None:
    for url in [f"millpond+file://{tmp_path}/a/pond", f"millpond+memory://{tmp_path.name}/a/pond"]:
        with fsspec.open(url, "wb") as file:
            file.write(b"water")
        with fsspec.open(url, "rt") as file:
            assert file.read() == "water"
        fs, path = fsspec.url_to_fs(url)
        assert fs.unstrip_protocol(path).endswith("/a/pond") and fs.exists(path)
        assert fsspec.url_to_fs(fs.unstrip_protocol(path)) == (fs, path)
    assert (tmp_path / "a" / "pond").read_bytes() == b"water"


def test_ranges_are_those_of_slices(place: "tuple[Any, str]") -> None:
    fs, root = place
    data, path = content(0, 1 << 20), f"{root}/pond"
    limits = [None, 0, 1, 500_000, 1 << 20, (1 << 20) + 5, -1, -500_000, -(2 << 20)]
    for start in limits:
        for end in limits:
            expected = data[start:end]
            assert fs.cat_file(path, start, end) == expected, (start, end)
            assert fsspec.asyn.sync(fs.loop, fs._cat_file, path, start, end) == expected, (start, end)
            assert fs.cat_ranges([path], [start], [end]) == [expected], (start, end)
    fs.pipe_file(f"{root}/lake", b"lake")
    paths = [path, f"{root}/lake", path, f"{root}/none"]
    read = fs.cat_ranges(paths, [5, 0, 7, 0], [8, 2, 7, 1])
    assert read[:3] == [content(5, 3), b"la", b""] and isinstance(read[3], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 1, on_error="raise")
    assert fs.cat([path, f"{root}/lake"]) == {path: data, f"{root}/lake": b"lake"}


def test_cached_bytes_need_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("millpond+file", freshness="immutable", skip_instance_cache=True)
    pond, lake, data = f"{tmp_path}/pond", f"{tmp_path}/lake", content(0, 1 << 20)
    fs.pipe({pond: data, lake: b"lake"})
    assert fs.cat_file(pond) == data
    file = fs.open(pond)

    def no_loop(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("a turn of the loop")

    monkeypatch.setattr("millpond.fsspec.sync", no_loop)
    monkeypatch.setattr("fsspec.asyn.sync", no_loop)
    assert fs.cat_file(pond) == data and fs.cat_file(pond, 5, 8) == data[5:8]
    assert fs.cat_ranges([pond, pond], [5, 0], [700_000, 2 << 20]) == [data[5:700_000], data]
    assert file.read(7) == data[:7] and file.read() == data[7:] and file.read(None) == b"" and file.tell() == len(data)
    file.seek(-3, 2)
    assert file.read(9) == data[-3:] and file.read(0) == b""
    file.seek(5 << 20)
    assert file.read(1) == b""
    with pytest.raises(RuntimeError, match="a turn of the loop"):
        fs.cat_ranges([pond, lake], [0, 0], [1, 1])
    file.close()
    with pytest.raises(ValueError):
        file.read(1)


def test_open_files(place: "tuple[Any, str]") -> None:
    fs, root = place
    with fs.open(f"{root}/pond") as file:
        assert file.seekable() and file.readable() and file.size == 1 << 20
        assert file.read(10) == content(0, 10) and file.tell() == 10
        assert file.seek(-5, io.SEEK_END) == (1 << 20) - 5
        assert file.read() == content((1 << 20) - 5, 5) and file.read(1) == b""
        file.seek(77_777)
        buffer = bytearray(1000)
        assert file.readinto(buffer) == 1000 and buffer == content(77_777, 1000)
        file.seek(0)
        assert file.readline() == content(0, 11)
    data = content(3, 21 << 20)
    for mode, name in [("wb", "long"), ("xb", "new")]:
        with fs.open(f"{root}/{name}", mode) as file:
            for at in range(0, len(data), 999_999):
                file.write(data[at : at + 999_999])
            assert file.tell() == len(data)
        assert fs.cat_file(f"{root}/{name}") == data
    with fs.open(f"{root}/empty", "wb"):
        pass
    assert fs.cat_file(f"{root}/empty") == b""
    with io.TextIOWrapper(fs.open(f"{root}/text", "wb")) as text:
        text.write("a pond\na mill\n")
    with fs.open(f"{root}/text", "r") as text:
        assert list(text) == ["a pond\n", "a mill\n"]
    with pytest.raises(FileNotFoundError):
        fs.open(f"{root}/none")
    with pytest.raises(NotImplementedError, match="append"):
        fs.open(f"{root}/pond", "ab")


def test_long_files_are_copied(place: "tuple[Any, str]", tmp_path: Path) -> None:
    fs, root = place
    local = tmp_path / "local"
    local.write_bytes(content(1, 20 << 20))
    fs.put_file(str(local), f"{root}/long")
    fs.get_file(f"{root}/long", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == local.read_bytes()
    fs.mv(f"{root}/long", f"{root}/moved")
    assert not fs.exists(f"{root}/long") and fs.size(f"{root}/moved") == 20 << 20


def test_directories(place: "tuple[Any, str]") -> None:
    fs, root = place
    for name in ["a/1", "a/b/2", "a/b/3.txt", "ab"]:
        fs.pipe_file(f"{root}/{name}", b"x")
    assert fs.ls(root, detail=False) == [f"{root}/{name}" for name in ["a", "ab", "pond"]]
    assert fs.isdir(f"{root}/a") and fs.isfile(f"{root}/ab") and not fs.exists(f"{root}/none")
    assert fs.find(f"{root}/a") == [f"{root}/a/{name}" for name in ["1", "b/2", "b/3.txt"]]
    assert fs.glob(f"{root}/a/**/*.txt") == [f"{root}/a/b/3.txt"]
    walked = [(path, sorted(folders), sorted(files)) for path, folders, files in fs.walk(f"{root}/a")]
    assert walked == [(f"{root}/a", ["b"], ["1"]), (f"{root}/a/b", [], ["2", "3.txt"])]
    assert fs.du(f"{root}/a") == 3
    info = fs.info(f"{root}/ab")
    assert (info["type"], info["size"]) == ("file", 1) and info["ETag"]
    fs.rm(f"{root}/a", recursive=True)
    assert fs.ls(root, detail=False) == [f"{root}/ab", f"{root}/pond"]
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{root}/a")
    with pytest.raises(FileNotFoundError):
        fs.info(f"{root}/a")
    with pytest.raises(OSError):
        fs.cat_file("")


def test_lists_are_never_old(place: "tuple[Any, str]") -> None:
    fs, root = place
    other = fsspec.filesystem(fs.protocol, memory=8 << 20)
    assert other is not fs
    for n in range(5):
        other.pipe_file(f"{root}/{n}", content(n, n))
        assert len(fs.ls(root)) == n + 2
        assert fs.cat_file(f"{root}/{n}") == content(n, n)


def test_instances_pickles_and_json(place: "tuple[Any, str]") -> None:
    fs, root = place
    own = fsspec.filesystem(fs.protocol, memory=8 << 20, freshness="immutable")
    assert fsspec.filesystem(fs.protocol, memory=8 << 20, freshness="immutable") is own
    assert own.cat_file(f"{root}/pond", 0, 9) == content(0, 9)
    assert pickle.loads(pickle.dumps(own)) is own
    assert fsspec.AbstractFileSystem.from_json(own.to_json()) is own
    json.loads(own.to_json())
    file = own.open(f"{root}/pond")
    file.seek(7)
    copy = pickle.loads(pickle.dumps(file))
    copy.seek(7)
    assert copy.read(5) == file.read(5) == content(7, 5)


def test_cached_bytes_are_read_without_a_request(tmp_path: Path) -> None:
    fs = fsspec.filesystem("millpond+file", freshness="immutable", memory=8 << 20)
    path = tmp_path / "pond"
    path.write_bytes(content(0, 1 << 20))
    assert fs.cat_file(str(path), 0, 1 << 20) == content(0, 1 << 20)
    (store,) = fs._stores.values()
    requests = store.stats()["requests"]
    with fs.open(str(path)) as file:
        assert file.read() == content(0, 1 << 20)
    assert fs.cat_ranges([str(path)] * 3, [0, 5, 9], [1, 6, 10]) == [content(n, 1) for n in (0, 5, 9)]
    assert store.stats()["requests"] == requests


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="no_option"):
        fsspec.filesystem("millpond+memory", no_option=1).ls("")
    with pytest.raises(ValueError, match="no server can read"):
        fsspec.filesystem("millpond+memory", socket="/run/socket").ls("")
    with pytest.raises(ValueError, match="freshness"):
        fsspec.filesystem("millpond+memory", freshness="old").ls("")


def test_asyncio(place: "tuple[Any, str]") -> None:
    own, root = place

    async def main() -> None:
        fs = fsspec.filesystem(own.protocol, asynchronous=True)
        await fs._pipe_file(f"{root}/lake", b"lake")
        assert await fs._cat_file(f"{root}/lake", 1, 3) == b"ak"
        read = await asyncio.gather(*(fs._cat_file(f"{root}/pond", n, n + 9) for n in range(200)))
        assert read == [content(n, 9) for n in range(200)]

    asyncio.run(main())


def read_in_worker(fs: Any, path: str) -> "tuple[bytes, list[str]]":
    with fs.open(path) as file:
        file.seek(5)
        return file.read(9), fs.find(path)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools(tmp_path: Path, method: str) -> None:
    fs = fsspec.filesystem("millpond+file", freshness="immutable")
    path = str(tmp_path / "pond")
    fs.pipe_file(path, content(0, 1 << 20))
    read_in_worker(fs, path)
    with multiprocessing.get_context(method).Pool(2) as pool:
        done = pool.starmap(read_in_worker, [(fs, path)] * 8)
    assert done == [(content(5, 9), [path])] * 8


def test_a_child_uses_the_parents_instance(tmp_path: Path) -> None:
    fs = fsspec.filesystem("millpond+file", freshness="immutable")
    path = str(tmp_path / "pond")
    fs.pipe_file(path, content(0, 1 << 20))
    file = fs.open(path)
    assert file.read(9) == content(0, 9) and fs.find(path) == [path]

    def work() -> None:
        assert file.read(9) == content(9, 9)
        assert read_in_worker(fs, path) == (content(5, 9), [path])
        with fs.open(str(tmp_path / "child"), "wb") as made:
            made.write(content(0, 10 << 20))

    assert child_status(work) == 0
    assert fs.size(str(tmp_path / "child")) == 10 << 20
