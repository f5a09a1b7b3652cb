"""Goal: `millpond.store` does what docs/python.md says: the calls, their errors, and what is cached."""

import asyncio
import datetime
import errno
import logging
import os
from pathlib import Path
from typing import Any, Callable, Iterator

import millpond
import pytest
from conftest import content

Run = Callable[..., Any]


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> millpond.Store:
    if request.param == "file":
        return millpond.store(f"file://{tmp_path}")
    return millpond.store(f"memory://{tmp_path}".replace("///", "//").replace("/", "-").replace(":--", "://"))


def test_calls(store: millpond.Store) -> None:
    put = store.put("a/pond", content(0, 100_000))
    assert put["e_tag"]
    meta = store.head("a/pond")
    assert meta["path"] == "a/pond" and meta["size"] == 100_000 and meta["e_tag"] == put["e_tag"]
    age = datetime.datetime.now(datetime.timezone.utc) - meta["last_modified"]
    assert abs(age) < datetime.timedelta(minutes=1)
    result = store.get("a/pond")
    assert result.meta == meta and result.range == (0, 100_000)
    assert result.bytes() == content(0, 100_000)
    with pytest.raises(ValueError, match="read already"):
        result.bytes()
    assert store.get_range("a/pond", start=70_000, end=70_010) == content(70_000, 10)
    assert store.get_range("a/pond", start=99_990, length=50) == content(99_990, 10)
    assert store.get_range("a/pond", start=5, end=5) == b""
    ranges = store.get_ranges("a/pond", starts=[50_000, 7, 3], lengths=[3, 0, 4])
    assert ranges == [content(50_000, 3), b"", content(3, 4)]
    assert store.get_ranges("a/pond", starts=[1], ends=[2]) == [content(1, 1)]
    for options, expected in [
        ({"range": (10, 20)}, content(10, 10)),
        ({"range": {"offset": 99_999}}, content(99_999, 1)),
        ({"range": {"suffix": 7}}, content(99_993, 7)),
        ({"if_match": put["e_tag"]}, content(0, 100_000)),
        ({"head": True}, b""),
    ]:
        assert store.get("a/pond", options=options).bytes() == expected  # type: ignore[arg-type]
    store.copy("a/pond", "b/copy")
    store.rename("b/copy", "b/other")
    assert [one["path"] for one in store.list("b").collect()] == ["b/other"]
    below = store.list_with_delimiter()
    assert sorted(below["common_prefixes"]) == ["a", "b"] and below["objects"] == []
    store.delete(["a/pond", "b/other"])
    assert store.list().collect() == []


def test_calls_of_asyncio(store: millpond.Store) -> None:
    async def main() -> None:
        await store.put_async("pond", content(0, 50_000))
        assert (await store.head_async("pond"))["size"] == 50_000
        result = await store.get_async("pond")
        assert await result.bytes_async() == content(0, 50_000)
        reads = [store.get_range_async("pond", start=n * 100, length=100) for n in range(500)]
        assert b"".join(await asyncio.gather(*reads)) == content(0, 50_000)
        assert await store.get_ranges_async("pond", starts=[0, 9], lengths=[1, 1]) == [content(0, 1), content(9, 1)]
        await store.copy_async("pond", "lake")
        await store.rename_async("lake", "sea")
        assert {one["path"] for one in await store.list().collect_async()} == {"pond", "sea"}
        assert len((await store.list_with_delimiter_async())["objects"]) == 2
        pieces = [piece async for piece in (await store.get_async("pond")).stream(10_000)]
        assert b"".join(pieces) == content(0, 50_000)
        assert [len(chunk) async for chunk in store.list(chunk_size=1)] == [1, 1]
        await store.delete_async(["pond", "sea"])
        with pytest.raises(FileNotFoundError):
            await store.get_range_async("pond", start=0, length=1)

    asyncio.run(main())


def test_long_objects_come_and_go_in_pieces(store: millpond.Store) -> None:
    data = content(0, 20 << 20)
    store.put("long", data)
    assert store.get("long").bytes() == data
    pieces = list(store.get("long").stream(3 << 20))
    assert b"".join(pieces) == data and all(len(piece) >= 3 << 20 for piece in pieces[:-1])
    with store.open_writer("written", buffer_size=5 << 20, max_concurrency=2) as writer:
        for at in range(0, len(data), 1_234_567):
            assert writer.write(memoryview(data)[at : at + 1_234_567]) > 0
        assert store.list("written").collect() == []
        with pytest.raises(FileNotFoundError):
            store.head("written")
    assert writer.closed and store.get("written").bytes() == data
    with pytest.raises(ValueError, match="written"):
        writer.write(b"late")
    with pytest.raises(ZeroDivisionError):
        with store.open_writer("aborted") as writer:
            writer.write(data)
            1 / 0
    with pytest.raises(FileNotFoundError):
        store.head("aborted")
    with store.open_writer("short") as writer:
        writer.write(b"short")
    assert store.get("short").bytes() == b"short"
    with pytest.raises(ValueError, match="buffer_size"):
        store.open_writer("pond", buffer_size=1)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_file_may_be_truncated_while_it_is_read(tmp_path: Path, cached: bool, whole: bool) -> None:
    """Incident: the stream of such a file had empty pieces for ever, and never ended."""
    store = millpond.store(f"file://{tmp_path}")
    put = store.put("pond", content(0, 30 << 20))
    # A version is requested from the store itself.
    result = store.get("pond") if cached else store.get("pond", options={"if_match": put["e_tag"]})
    pieces = None if whole else result.stream(1)
    begun = b"" if pieces is None else next(pieces)
    os.truncate(tmp_path / "pond", len(begun))
    with pytest.raises(millpond.StoreError, match=f"pond: {len(begun)} bytes were received of {30 << 20} announced ones") as raised:
        result.bytes() if pieces is None else b"".join(pieces)
    assert raised.value.filename == f"file://{tmp_path}/pond"


def test_many_objects_are_listed(store: millpond.Store) -> None:
    names = [f"folder/{n:04}" for n in range(300)]
    for name in names:
        store.put(name, b"")
    store.put("folder-2", b"")
    chunks = list(store.list("folder", chunk_size=70))
    assert sorted(one["path"] for chunk in chunks for one in chunk) == names
    assert [len(chunk) for chunk in chunks] == [70, 70, 70, 70, 20]
    later = store.list("folder", offset="folder/0290").collect()
    assert sorted(one["path"] for one in later) == names[291:]
    assert store.list("no such folder").collect() == []


def test_errors_name_the_object(store: millpond.Store) -> None:
    name = f"{store.url}/no/pond"
    for call in [
        lambda: store.get("no/pond"),
        lambda: store.head("no/pond"),
        lambda: store.get_range("no/pond", start=0, length=1),
        lambda: store.get_range("no/pond", start=0, length=0),
        lambda: store.get_ranges("no/pond", starts=[0], lengths=[1]),
        lambda: store.copy("no/pond", "x"),
    ]:
        with pytest.raises(FileNotFoundError) as raised:
            call()
        assert raised.value.errno == errno.ENOENT and raised.value.filename == name
    store.put("pond", b"water")
    old = store.head("pond")["e_tag"]
    with pytest.raises(FileExistsError):
        store.put("pond", b"", mode="create")
    store.put("lake", b"")
    for change in [store.copy, store.rename]:
        with pytest.raises(FileExistsError):
            change("pond", "lake", overwrite=False)
    with pytest.raises(millpond.NotModifiedError):
        store.get("pond", options={"if_none_match": old})
    with pytest.raises(millpond.PreconditionError) as stale:
        store.get("pond", options={"if_match": '"no such tag"'})
    assert isinstance(stale.value, millpond.StoreError) and stale.value.filename == f"{store.url}/pond"
    with pytest.raises(millpond.StoreError) as beyond:
        store.get_range("pond", start=100, length=1)
    assert beyond.value.filename == f"{store.url}/pond"


def test_wrong_arguments(store: millpond.Store, tmp_path: Path) -> None:
    store.put("pond", b"water")
    wrong: list[Any] = [
        lambda: store.get("a//b"),
        lambda: store.get("../pond"),
        lambda: store.get_range("pond", start=3, end=1),
        lambda: store.get_range("pond", start=2**64 - 1, length=9),
        lambda: store.get_ranges("pond", starts=[1], lengths=[1, 2]),
        lambda: store.put("pond", b"", mode="no mode"),  # type: ignore[arg-type]
        lambda: store.get("pond", options={"no option": 1}),  # type: ignore[typeddict-unknown-key]
        lambda: store.get("pond", options={"range": "1-2"}),  # type: ignore[typeddict-item]
        lambda: millpond.store("pond"),
        lambda: millpond.store("ftp://pond"),
        lambda: millpond.store("file://relative"),
        lambda: millpond.store("memory://a/b"),
        lambda: millpond.store("memory://", freshness="fresh"),
        lambda: millpond.store("memory://", freshness=-1),
        lambda: millpond.store("memory://", options={"region": "here"}),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
    with pytest.raises(OverflowError):
        store.get_range("pond", start=-1, length=1)
    for call in [
        lambda: store.get_range("pond", start=0),
        lambda: store.put("pond", "text"),  # type: ignore[arg-type]
        lambda: millpond.store("memory://", options={"key": 1.5}),  # type: ignore[dict-item]
    ]:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(FileNotFoundError):
        millpond.store("file:///no/such/folder")
    with pytest.raises(millpond.StoreError, match="memory of 1 bytes"):
        millpond.store("memory://", memory=1)
    with pytest.raises(ValueError, match="no server can read"):
        millpond.store("memory://", socket=tmp_path / "socket")


def test_a_read_into_a_buffer(tmp_path: Path) -> None:
    store = millpond.store(f"file://{tmp_path}", freshness="immutable")
    store.put("pond", content(0, 300_000))
    for _ in range(2):
        for start, length in [(0, 5), (7, 100_000), (250_000, 50_000), (290_000, 20_000), (0, 300_000)]:
            buffer = bytearray(length)
            read = min(length, 300_000 - start)
            assert store.get_range_into("pond", buffer, start=start) == read
            assert buffer == content(start, read) + bytes(length - read)
            assert store.get_range("pond", start=start, length=length) == content(start, read)
    assert store.get_range_into("pond", bytearray(), start=0) == 0
    hits = store.stats()["requests_saved"]
    part = memoryview(bytearray(10))[2:6]
    assert store.get_range_into("pond", part, start=3) == 4 and part == content(3, 4)
    assert store.stats()["requests_saved"] == hits + 1
    with pytest.raises(TypeError, match="writable"):
        store.get_range_into("pond", b"water", start=0)
    with pytest.raises(FileNotFoundError):
        store.get_range_into("none", bytearray(5), start=0)
    # Another length of the object, after a write.
    store.put("pond", b"short")
    assert store.get_range("pond", start=2, length=300_000) == b"ort"
    assert store.get_range("pond", start=2, length=300_000) == b"ort"
    store.put("pond", content(1, 400_000))
    for _ in range(2):
        assert store.get_range("pond", start=0, end=500_000) == content(1, 400_000)


def test_errors_of_the_system_keep_their_class(tmp_path: Path) -> None:
    store = millpond.store(f"file://{tmp_path}")
    store.put("pond", b"water")
    with pytest.raises(OSError) as raised:
        store.put("pond/below", b"")
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)
    if os.geteuid() != 0:
        (tmp_path / "pond").chmod(0)
        with pytest.raises(PermissionError):
            store.get("pond")


def test_cached_bytes_are_read_without_a_request(tmp_path: Path) -> None:
    store = millpond.store(f"file://{tmp_path}", freshness="immutable", memory=8 << 20)
    (tmp_path / "pond").write_bytes(content(0, 1 << 20))
    assert store.get_range("pond", start=0, length=1 << 20) == content(0, 1 << 20)
    requests = store.stats()["requests"]
    (tmp_path / "pond").write_bytes(b"changed by another program")
    assert store.get_range("pond", start=500_000, length=10) == content(500_000, 10)
    assert store.get("pond").bytes() == content(0, 1 << 20)
    assert store.stats()["requests"] == requests
    store.forget("pond")
    assert store.get("pond").bytes() == b"changed by another program"


@pytest.mark.parametrize("freshness", ["immutable", "revalidate", 3600])
def test_own_writes_are_seen(store: millpond.Store, freshness: "str | float") -> None:
    own = millpond.store(store.url, freshness=freshness)
    for n in range(1, 20):
        own.put("pond", content(n, n * 1000))
        assert own.get_range("pond", start=0, length=100_000) == content(n, n * 1000)
        own.put("other", content(n + 7, n * 1000))
        own.rename("other", "pond")
        assert own.get("pond").bytes() == content(n + 7, n * 1000)


def test_cached_bytes_take_no_turn_of_the_loop(tmp_path: Path) -> None:
    store = millpond.store(f"file://{tmp_path}", freshness="immutable")
    data = content(0, 3_000_000)
    store.put("pond", data)
    store.put("lake", data)
    assert store._get_cached("pond") is None and store._get_ranges_cached("pond", [0], [1]) is None
    assert store.get("pond").bytes() == data
    before = store.stats()

    def at_once(coroutine: Any) -> Any:
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
        return ended.value.value

    assert at_once(store.get_range_async("pond", start=5, end=1_000_000)) == data[5:1_000_000]
    assert at_once(store.get_range_async("pond", start=2_999_999, length=9)) == data[-1:]
    starts, ends = [7, 2_999_990, 0], [1_000_000, 3_000_010, 1]
    expected = [data[start:end] for start, end in zip(starts, ends)]
    assert at_once(store.get_ranges_async("pond", starts=starts, ends=ends)) == expected
    assert store.get_ranges("pond", starts=starts, ends=ends) == expected
    assert store._get_ranges_cached("pond", starts, ends) == expected
    assert store._get_cached("pond") == data
    after = store.stats()
    assert after["requests"] == before["requests"] and after["requests_saved"] == before["requests_saved"] + 6
    # Not at once: an empty range, one beyond the end, more than one copy takes, and an object that is not cached.
    for starts, ends in [([5], [5]), ([3_000_000], [3_000_001]), ([0, 0], [2_500_000, 2_500_000]), ([], [])]:
        assert store._get_ranges_cached("pond", starts, ends) is None, (starts, ends)
    assert store.get_ranges("pond", starts=[5, 0], ends=[5, 2]) == [b"", data[:2]]
    assert len(store.get_ranges("pond", starts=[0, 0], ends=[2_500_000, 2_500_000])[1]) == 2_500_000
    assert store._get_ranges_cached("lake", [0], [1]) is None and store._get_cached("lake") is None
    with pytest.raises(ValueError):
        store._get_ranges_cached("pond", [1], [0])


def test_revalidation_sees_other_writers(store: millpond.Store) -> None:
    fresh = millpond.store(store.url, freshness="revalidate")
    for n in range(1, 10):
        store.put("pond", content(n, n * 1000))
        assert fresh.get_range("pond", start=0, length=100_000) == content(n, n * 1000)
    assert fresh.get_range("pond", start=0, length=9) == content(9, 9)
    assert fresh.stats()["not_modified"] >= 1


def test_put_modes_and_attributes() -> None:
    store = millpond.store("memory://modes")
    one = store.put("pond", b"one", attributes={"content-type": "text/plain", "depth": "3"})
    assert store.get("pond").attributes == {"Content-Type": "text/plain", "depth": "3"}
    store.put("pond", b"two", mode=one)
    with pytest.raises(millpond.PreconditionError):
        store.put("pond", b"three", mode=one)
    assert store.get("pond").bytes() == b"two"


def test_put_takes_any_buffer(store: millpond.Store) -> None:
    import array
    import mmap

    memory = mmap.mmap(-1, 4096)
    memory[:4] = b"pond"
    for data in [b"pond", bytearray(b"pond"), memoryview(b"xpond")[1:], array.array("B", b"pond"), memory]:
        store.put("pond", data)
        assert store.get_range("pond", start=0, length=4) == b"pond"
    store.put("empty", b"")
    assert store.get("empty").bytes() == b""
    data = bytearray(b"pond")
    store.put("pond", data)
    data[:] = b"lake"
    assert store.get("pond").bytes() == b"pond"


@pytest.fixture
def records() -> Iterator[list[str]]:
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(f"{record.levelname} {record.getMessage()}")

    logger, handler = logging.getLogger("millpond"), Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield texts
    logger.removeHandler(handler)


def test_the_place_of_the_cache_is_logged_once(records: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond._objects._has_told", False)
    millpond.store("memory://log", memory=64 << 20)
    millpond.store("memory://log-2")
    assert records == [
        "INFO memory://log: cached in this process, up to 64 MiB; each process has its own cache"
    ]


def test_secrets_are_not_shown() -> None:
    with pytest.raises((millpond.StoreError, ValueError)) as raised:
        millpond.store("s3://", options={"secret": "pond-secret"})
    assert "pond-secret" not in str(raised.value)
    assert "s3" in str(raised.value)


def test_a_disk_tier(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    store = millpond.store(f"file://{tmp_path}/objects", memory=16 << 20, disk=(tmp_path / "tier", 64 << 20))
    data = content(0, 40 << 20)
    store.put("pond", data)
    for _ in range(3):
        assert store.get("pond").bytes() == data
    assert store.stats()["disk_bytes_written"] > 0
    with pytest.raises(millpond.StoreError, match="tier"):
        millpond.store(f"file://{tmp_path}/objects", disk=(tmp_path / "tier", 64 << 20))
    del store
    again = millpond.store(f"file://{tmp_path}/objects", memory=16 << 20, disk=(tmp_path / "tier", 64 << 20))
    assert again.get("pond").bytes() == data
    assert again.stats()["disk_hits"] > 0
