"""Goal: stores work in children of fork and spawned processes; nothing hangs when a read is interrupted, cancelled, or in
flight at the end of the interpreter."""

import asyncio
import logging
import multiprocessing
import os
import pickle
import random
import select
import threading
from pathlib import Path
from typing import Any, Callable

import millpond
import pytest
from conftest import child_status, content

Run = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path) -> millpond.Store:
    (tmp_path / "pond").write_bytes(content(0, 1 << 20))
    return millpond.store(f"file://{tmp_path}", freshness="immutable", memory=4 << 20)


def read(store: millpond.Store) -> bytes:
    return store.get_range("pond", start=5000, length=9000)


def test_a_child_makes_a_cache_of_its_own(store: millpond.Store) -> None:
    assert read(store) == content(5000, 9000)

    def work() -> None:
        assert store.stats()["requests"] == 0
        assert read(store) == read(store) == content(5000, 9000)
        assert store.stats()["requests"] == 1
        assert asyncio.run(store.get_range_async("pond", start=7, length=9)) == content(7, 9)
        assert child_status(lambda: store.put("child", read(store)) and None) == 0

    assert child_status(work) == 0
    assert store.get("child").bytes() == content(5000, 9000)


def test_a_child_of_a_process_that_read_nothing(store: millpond.Store) -> None:
    def work() -> None:
        assert read(store) == content(5000, 9000)

    assert child_status(work) == 0


@pytest.mark.parametrize("kind", ["file", "memory", "disk"])
def test_forks_beside_busy_threads(tmp_path: Path, kind: str) -> None:
    url = f"memory://busy-{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}"
    disk = (str(tmp_path / "tier"), 16 << 20) if kind == "disk" else None
    store = millpond.store(url, freshness="immutable", memory=4 << 20, disk=disk)
    store.put("pond", content(0, 1 << 20))
    stop = threading.Event()

    def busy(seed: int) -> None:
        async def reads() -> None:
            opened = 0
            while not stop.is_set():
                await asyncio.gather(*(store.get_range_async("pond", start=n * 9000, length=9000) for n in range(50)))
                store.forget("pond")
                opened += 1
                other = f"memory://busy-{seed}-{opened % 99}" if kind == "memory" else url
                other_disk = (str(tmp_path / f"tier-{seed}"), 16 << 20) if kind == "disk" else None
                try:
                    millpond.store(other, memory=4 << 20, disk=other_disk).put(f"busy-{seed}", content(seed, 9))
                except millpond.StoreError as error:
                    # A child has the lock until its first instructions have closed it.
                    assert "another store uses this directory" in str(error)

        asyncio.run(reads())

    threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):

            def work() -> None:
                if kind == "memory":
                    with pytest.raises(FileNotFoundError):
                        read(store)
                    store.put("pond", content(0, 1 << 20))
                assert read(store) == content(5000, 9000)
                store.put("of-child", b"1")
                assert asyncio.run(store.get_range_async("pond", start=5, length=5)) == content(5, 5)
                if kind == "memory":
                    assert millpond.store("memory://of-child").list().collect() == []

            assert child_status(work) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_what_belongs_to_the_parent_is_refused_in_a_child(store: millpond.Store) -> None:
    result, listing, pieces = store.get("pond"), store.list(), store.get("pond").stream()
    writer = store.open_writer("written")
    writer.write(b"parent")

    def work() -> None:
        for call in [result.bytes, listing.collect, lambda: next(pieces), writer.close, writer.abort]:
            with pytest.raises(millpond.StoreError, match="before a fork"):
                call()

    assert child_status(work) == 0
    writer.close()
    assert store.get("written").bytes() == b"parent"
    assert result.bytes() == content(0, 1 << 20)


def test_a_store_in_memory_is_of_one_process() -> None:
    store = millpond.store("memory://process")
    store.put("pond", b"water")
    assert millpond.store("memory://process").get("pond").bytes() == b"water"

    def work() -> None:
        with pytest.raises(FileNotFoundError):
            store.get("pond")
        store.put("pond", b"child")

    assert child_status(work) == 0
    assert store.get("pond").bytes() == b"water"


def test_pickles_share_a_cache(store: millpond.Store) -> None:
    one, two = pickle.loads(pickle.dumps([store, store]))
    assert one is two is store
    other = millpond.store(store.url)
    assert pickle.loads(pickle.dumps(other)) is other


def work_in_pool(store: millpond.Store) -> tuple[bytes, int, str]:
    return read(store), id(store), repr(store)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools(store: millpond.Store, method: str) -> None:
    read(store)
    with multiprocessing.get_context(method).Pool(2) as pool:
        done = pool.map(work_in_pool, [store] * 16, chunksize=1)
    assert {one[0] for one in done} == {content(5000, 9000)}
    assert len({one[1] for one in done}) <= 2
    assert {one[2] for one in done} == {repr(store)}


def test_the_first_use_starts_the_threads(run: Run) -> None:
    program = """
        import os, sys
        import millpond
        assert len(os.listdir("/proc/self/task")) == 1
        assert not {"asyncio", "logging", "fsspec"} & set(sys.modules), sys.modules
        open("pond", "w").write("water")
        store = millpond.store("file://" + os.getcwd())
        assert store.get("pond").bytes() == b"water"
        print(sorted({open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}))
    """
    assert "millpond-store" in run(program).stdout


@pytest.mark.parametrize("call", ["store.get('slow')", "asyncio.run(store.get_async('slow'))"])
def test_ctrl_c_ends_a_wait(run: Run, call: str) -> None:
    """A FIFO without a writer is an object that never answers."""
    program = f"""
        import asyncio, os, signal, threading, time, millpond
        os.mkfifo("slow")
        store = millpond.store("file://" + os.getcwd())
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        try:
            {call}
        except KeyboardInterrupt:
            assert time.monotonic() - begun < 5
            store.put("pond", b"water")
            assert store.get("pond").bytes() == b"water"
            print("interrupted", flush=True)
    """
    assert run(program).stdout == "interrupted\n"


def test_a_cancelled_task_ends(store: millpond.Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow")

    async def main() -> None:
        task = asyncio.ensure_future(store.get_async("slow"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(task, 0.2)
        assert task.cancelled()
        assert await store.get_range_async("pond", start=0, length=3) == content(0, 3)

    asyncio.run(main())
    os.close(os.open(tmp_path / "slow", os.O_RDWR | os.O_NONBLOCK))  # ends the thread's wait


def test_the_interpreter_ends_with_reads_in_flight(run: Run) -> None:
    program = """
        import asyncio, os, threading, millpond
        if not os.path.exists("slow"):
            os.mkfifo("slow")
        open("pond", "wb").write(bytes(3_000_000))
        store = millpond.store("file://" + os.getcwd(), memory=1 << 20)
        def read():
            while True:
                store.get("pond").bytes()
        for _ in range(3):
            threading.Thread(target=read, daemon=True).start()
        threading.Thread(target=store.get, args=("slow",), daemon=True).start()
        def read_async():
            async def reads():
                while True:
                    await asyncio.gather(*(store.get_range_async("pond", start=n * 1000, length=1000) for n in range(99)))
            asyncio.run(reads())
        threading.Thread(target=read_async, daemon=True).start()
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(store.get_async("slow")) for _ in range(5)]
        loop.run_until_complete(asyncio.sleep(0.05))
        writer = store.open_writer("half")
        writer.write(bytes(20_000_000))
        class Late:
            def __del__(self):
                store.get_range("pond", start=0, length=1)
        late = Late()
        print("end", flush=True)
    """
    for _ in range(5):
        done = run(program)
        assert done.stdout == "end\n", done.stderr


def test_no_object_is_made_after_a_failed_write(run: Run, tmp_path: Path) -> None:
    """Incident: a program that caught the error of a part and went on made an object with a hole."""
    (tmp_path / "pond").mkdir()
    program = """
        import os, resource, sys
        import millpond
        part = 5 << 20
        store = millpond.store("file://" + sys.argv[1])
        writer = store.open_writer("holed", buffer_size=part, max_concurrency=1)
        writer.write(b"a" * part)
        none, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (part + 4096, hard))
        for _ in range(5):
            try:
                writer.write(b"b" * part)
            except OSError as error:
                first = str(error)
                break
        else:
            sys.exit("no write failed")
        resource.setrlimit(resource.RLIMIT_FSIZE, (none, hard))
        for go_on in [lambda: writer.write(b"c" * part), writer.close]:
            try:
                go_on()
            except OSError as error:
                assert "an earlier write of this object has failed" in str(error), error
            else:
                sys.exit("it went on")
        assert os.listdir(sys.argv[1]) == [], os.listdir(sys.argv[1])
    """
    run(program, tmp_path / "pond")


def test_a_close_that_failed_is_not_a_success_later(tmp_path: Path) -> None:
    """Incident: the second close after a failed one returned as after a success, and there was no object."""
    (tmp_path / "file").touch()
    store = millpond.store(f"file://{tmp_path}", socket=False)
    writer = store.open_writer("file/below")
    writer.write(b"water")
    with pytest.raises(millpond.StoreError, match="[Nn]ot a directory"):
        writer.close()
    for _ in range(2):
        with pytest.raises(millpond.StoreError, match="an earlier close of this object has failed: .*[Nn]ot a directory"):
            writer.close()
    writer.abort()
    with pytest.raises(millpond.StoreError, match="an earlier close"):
        with writer:
            pass
    # After a success and after an abort, a further close has no effect.
    writer = store.open_writer("pond")
    writer.write(b"water")
    assert writer.close() is not None and writer.close() is None and store.get("pond").bytes() == b"water"
    writer = store.open_writer("aborted")
    writer.write(b"water")
    writer.abort()
    assert writer.close() is None and not (tmp_path / "aborted").exists()


def test_a_close_that_was_interrupted_is_not_a_success_later(run: Run, tmp_path: Path) -> None:
    program = """
        import signal, sys
        import millpond
        store = millpond.store("file://" + sys.argv[1], socket=False)
        def interrupt(*_):
            raise ZeroDivisionError
        signal.signal(signal.SIGALRM, interrupt)
        for attempt in range(100):
            writer = store.open_writer("pond", buffer_size=64 << 20)
            writer.write(bytes(60 << 20))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 * (attempt % 10 + 1))
                writer.close()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except ZeroDivisionError:
                try:
                    writer.close()
                except millpond.StoreError as error:
                    assert "an earlier close of this object has failed: it was interrupted" in str(error), error
                    sys.exit()
        sys.exit("no close was interrupted, or each was a success later")
    """
    run(program, tmp_path)


def test_a_cancelled_call_loses_no_piece(tmp_path: Path) -> None:
    """Incident: the pieces that a cancelled call had read were missing from what the next ones returned."""
    data = content(0, 32 << 20)
    (tmp_path / "pond").write_bytes(data)
    for n in range(2000):
        (tmp_path / f"{n:04}").touch()
    store = millpond.store(f"file://{tmp_path}", memory=4 << 20)

    async def after_cancellations(stream: Any, delay: float) -> "tuple[list[Any], int]":
        got, cancelled = [], 0
        for _ in range(5):
            call = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(delay)
            cancelled += call.cancel()
            try:
                got.append(await call)
            except asyncio.CancelledError:
                pass
        return [*(one for one in got if one is not None), *[one async for one in stream]], cancelled

    async def main() -> None:
        cancelled = [0, 0]
        for delay in [0.0, 0.0005, 0.001, 0.002, 0.003]:
            stream = (await store.get_async("pond")).stream(32 << 20)
            got, count = await after_cancellations(stream, delay)
            assert b"".join(got) == data
            cancelled[0] += count
            got, count = await after_cancellations(store.list(chunk_size=2000), delay)
            assert len({meta["path"] for chunk in got for meta in chunk}) == 2001
            cancelled[1] += count
        assert min(cancelled) > 0

    asyncio.run(main())


@pytest.mark.parametrize("is_taken_first", [False, True])
@pytest.mark.parametrize("kind", ["piece", "chunk", "collect"])
def test_a_call_that_is_cancelled_in_the_turn_of_its_end_loses_nothing(
    tmp_path: Path, kind: str, is_taken_first: bool
) -> None:
    """Incident: a call that was cancelled after its future had the result lost what it had read."""
    from millpond import _store_aio

    data = content(0, 1 << 20)
    (tmp_path / "pond").write_bytes(data)
    for n in range(50):
        (tmp_path / f"{n:02}").touch()
    store = millpond.store(f"file://{tmp_path}", socket=False)

    async def main() -> None:
        for _ in range(1000):
            stream: Any = (await store.get_async("pond")).stream(300_000) if kind == "piece" else store.list(chunk_size=20)
            call = asyncio.ensure_future(stream.collect_async() if kind == "collect" else anext(stream))
            await asyncio.sleep(0)
            if not call.done():
                break  # Some calls end without a wait.
        # Without a turn of the loop.
        ends = _store_aio._of_loops[asyncio.get_running_loop()]
        assert not call.done() and select.select([ends], [], [], 60)[0] == [ends]
        if is_taken_first:
            _store_aio._complete(ends)
            call.cancel()
        else:
            # The loop cancels it, and takes its end before the task goes on.
            asyncio.get_running_loop().call_soon(call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call
        # At once: items that came back after this call would be out of order.
        left = [await anext(stream), *[one async for one in stream]]
        if kind == "piece":
            assert b"".join(left) == data
        else:
            assert sorted(meta["path"] for chunk in left for meta in chunk) == [*(f"{n:02}" for n in range(50)), "pond"]

    asyncio.run(main())


def test_calls_that_end_at_once_share_a_stream(tmp_path: Path) -> None:
    """A call whose items another one has taken reads on: it is not at the end."""
    # Each piece is there once.
    data = random.Random(1).randbytes(3 << 20)
    (tmp_path / "pond").write_bytes(data)
    for n in range(50):
        (tmp_path / f"{n:02}").touch()
    store = millpond.store(f"file://{tmp_path}", socket=False)

    async def main() -> None:
        for _ in range(20):
            stream = (await store.get_async("pond")).stream(100_000)
            pieces = await asyncio.gather(*(anext(stream, b"") for _ in range(40)))
            assert b"".join(sorted(pieces, key=data.find)) == data and b"" in pieces
            chunks = await asyncio.gather(*(anext(metas, []) for metas in [store.list(chunk_size=7)] * 12))
            assert [len(chunk) for chunk in chunks].count(7) == 7 and sum(map(len, chunks)) == 51

    asyncio.run(main())


@pytest.fixture
def disk(tmp_path: Path) -> "tuple[str, int]":
    return str(tmp_path / "tier"), 64 << 20


def test_a_child_does_without_the_disk_of_its_parent(
    tmp_path: Path, disk: "tuple[str, int]", caplog: pytest.LogCaptureFixture
) -> None:
    """Incident: each read in a child failed, as the parent's lock of the directory is not the child's."""
    caplog.set_level(logging.INFO, "millpond")
    (tmp_path / "pond").write_bytes(content(0, 1 << 20))
    store = millpond.store(f"file://{tmp_path}", disk=disk)
    assert read(store) == content(5000, 9000)

    def work() -> None:
        caplog.clear()
        assert read(store) == content(5000, 9000)
        assert [record.message for record in caplog.records if "cached without a disk" in record.message]
        with pytest.raises(millpond.StoreError, match="another store uses this directory"):
            millpond.store(f"file://{tmp_path}", disk=disk)

    assert child_status(work) == 0
    with pytest.raises(millpond.StoreError, match="another store uses this directory"):
        millpond.store(f"file://{tmp_path}", disk=disk)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pools_of_a_store_with_a_disk(tmp_path: Path, disk: "tuple[str, int]", method: str) -> None:
    (tmp_path / "pond").write_bytes(content(0, 1 << 20))
    store = millpond.store(f"file://{tmp_path}", disk=disk)
    assert read(store) == content(5000, 9000)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert set(pool.map(read, [store] * 8, chunksize=1)) == {content(5000, 9000)}


def test_the_disk_is_free_while_a_child_lives(tmp_path: Path, disk: "tuple[str, int]") -> None:
    """Incident: the children of a server that was restarted kept the directory locked."""
    (tmp_path / "pond").write_bytes(content(0, 1 << 20))
    store = millpond.store(f"file://{tmp_path}", disk=disk)
    read(store)
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b".")
        os.close(end[1])
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        del store
        assert read(millpond.store(f"file://{tmp_path}", disk=disk)) == content(5000, 9000)
    finally:
        for fd in (*end, *ready):
            os.close(fd)
        os.waitpid(child, 0)


def leave_uploads(store: millpond.Store) -> None:
    for n in range(20):
        store.open_writer(f"half-{n}").write(bytes(9 << 20))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_waits_for_its_aborts(tmp_path: Path, method: str) -> None:
    """Incident: a worker of multiprocessing ended by `os._exit` before its uploads were removed."""
    store = millpond.store(f"file://{tmp_path}")
    worker = multiprocessing.get_context(method).Process(target=leave_uploads, args=(store,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0 and os.listdir(tmp_path) == []
