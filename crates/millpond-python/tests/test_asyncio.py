"""Goal: asyncio's reads and writes end with the right bytes, without a thread for each; a cancelled one keeps its memory."""

import asyncio
import ctypes
import gc
import io
import os
import select
import weakref
from pathlib import Path

import millpond
import pytest
from conftest import child_status, content


def engine() -> millpond.Engine:
    return millpond.Engine(cache_bytes=1 << 20, readahead_bytes=0)


def test_reads_and_writes(data: Path) -> None:
    async def main() -> None:
        with engine().open(data, "r+b") as file:
            for size in [0, 10, 4096, 100_000, 900_000]:
                for _ in range(2):
                    assert await file.apread(size, 77) == content(77, size)
                    buffer = bytearray(size)
                    assert await file.apreadinto(buffer, 77) == size
                    assert buffer == content(77, size)
            assert await file.apread(10, (1 << 20) - 3) == content((1 << 20) - 3, 3)
            assert await file.apread(10, 1 << 30) == b""
            assert await file.apwrite(b"pond" * 30_000, 3) == 120_000
            await file.sync_async()
            await file.sync_async(data_only=True)
            assert await file.apread(120_000, 3) == b"pond" * 30_000

    asyncio.run(main())
    asyncio.run(main_of_second_loop(data))


async def main_of_second_loop(data: Path) -> None:
    assert await engine().open(data).apread(4, 3) == b"pond"


def test_many_at_once_start_no_thread_for_each(data: Path) -> None:
    async def main() -> None:
        with engine().open(data) as file:
            await file.apread(10, 0)
            before = len(os.listdir("/proc/self/task"))
            offsets = [n * 997 % 1_000_000 for n in range(3000)]  # more than the queue has room for
            read = await asyncio.gather(*(file.apread(5000, offset) for offset in offsets))
            assert all(got == content(offset, 5000) for got, offset in zip(read, offsets))
            assert len(os.listdir("/proc/self/task")) <= before + 16

    asyncio.run(main())


def test_wrong_use_raises(data: Path) -> None:
    async def main() -> None:
        file = engine().open(data)
        for wrong, error in [
            (lambda: file.apread(-1, 0), OSError),
            (lambda: file.apread(1, -1), OSError),
            (lambda: file.apreadinto(b"constant", 0), TypeError),
            (lambda: file.apreadinto(bytearray(1), -1), OSError),
            (lambda: file.apwrite(b"x", 0), io.UnsupportedOperation),
            (lambda: file.apwrite("text", 0), TypeError),
        ]:
            with pytest.raises(error):
                await wrong()  # type: ignore[no-untyped-call]
        file.close()
        for closed in [lambda: file.apread(1, 0), lambda: file.apreadinto(bytearray(1), 0), file.sync_async]:
            with pytest.raises(ValueError, match="closed"):
                await closed()

    asyncio.run(main())


def test_cancelled_reads_keep_their_memory(data: Path) -> None:
    async def main() -> None:
        file = engine().open(data)
        for n in range(200):
            buffer = bytearray(60_000)
            task = asyncio.create_task(file.apreadinto(buffer, n * 4096))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(BufferError):
                buffer.append(0)
            del buffer
            gc.collect()
        await asyncio.sleep(0.05)
        assert await file.apread(10, 5) == content(5, 10)

    asyncio.run(main())


def test_writes_of_any_buffer(data: Path) -> None:
    async def main() -> None:
        with engine().open(data, "r+b") as file:
            numbers = (ctypes.c_int32.__ctype_be__ * 5)(*range(5))
            assert await file.apwrite(numbers, 7) == 20
            assert await file.apread(20, 7) == bytes(numbers)
            # `memoryview.cast` does not take its shape.
            assert await file.apwrite((ctypes.c_int32 * 0 * 2)(), 7) == 0

    asyncio.run(main())


def test_a_read_may_be_cancelled_in_the_turn_of_its_end(data: Path) -> None:
    from millpond import _aio

    async def main() -> None:
        loop = asyncio.get_running_loop()
        failures: "list[dict[str, object]]" = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        file = engine().open(data)
        task = loop.create_task(file.apread(100_000, 7))
        await asyncio.sleep(0)
        (own,) = _aio._queues[loop].values()
        # Without a turn of the loop.
        select.select([own.queue.fileno()], [], [])
        # The loop cancels it, and takes its end before the task goes on.
        loop.call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert failures == [] and await file.apread(9, 7) == content(7, 9)

    asyncio.run(main())


def is_freed(known: "weakref.ref[asyncio.AbstractEventLoop]") -> bool:
    gc.collect()
    return known() is None


def test_a_loop_may_end_with_reads_in_flight(data: Path) -> None:
    from millpond import _aio

    for cancels in [True, False]:
        for _ in range(20):
            file = engine().open(data)
            loop = asyncio.new_event_loop()
            task = loop.create_task(file.apread(100_000, 7))
            loop.call_soon(loop.stop)
            loop.run_forever()
            if cancels:
                # So that its end is not taken.
                (own,) = _aio._queues[loop].values()
                loop.remove_reader(own.queue.fileno())
                del own
                task.cancel()
                loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            loop.close()
            known = weakref.ref(loop)
            del loop, task
            if not cancels:
                # The entry of a closed loop ends with the first call of the next loop.
                asyncio.run(engine().open(data).sync_async())
            assert is_freed(known)
            del file


def test_a_loop_may_end_with_calls_of_a_store_in_flight(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow")
    store = millpond.store(f"file://{tmp_path}")
    for cancels in [True, False]:
        loop = asyncio.new_event_loop()
        task = loop.create_task(store.get_async("slow"))
        loop.run_until_complete(asyncio.sleep(0.01))
        if cancels:
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        known = weakref.ref(loop)
        del loop, task
        if not cancels:
            (tmp_path / "pond").touch()
            asyncio.run(asyncio.wait_for(store.get_async("pond"), 60))
        assert is_freed(known)
    os.close(os.open(tmp_path / "slow", os.O_RDWR | os.O_NONBLOCK))  # ends the threads' waits


def test_loops_are_freed(data: Path) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(millpond.open(data).apread(300_000, 0))
    loop.close()
    known = weakref.ref(loop)
    del loop
    assert is_freed(known)


def test_the_queue_of_an_engine_ends_with_it(data: Path) -> None:
    """Incident: the loop held the queue, and so the memory of the engine."""

    from millpond import _aio

    async def main() -> None:
        for _ in range(5):
            file = engine().open(data)
            assert await file.apread(100_000, 7) == content(7, 100_000)
            (own,) = _aio._queues[asyncio.get_running_loop()].values()
            known = [weakref.ref(file.engine), weakref.ref(own), weakref.ref(own.queue)]
            del file, own
            gc.collect()
            # The loop removes its reader.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [one() for one in known] == [None] * 3

    asyncio.run(main())


def test_a_child_has_loops_of_its_own(data: Path) -> None:
    file = engine().open(data)
    assert asyncio.run(file.apread(9000, 0)) == content(0, 9000)

    def work() -> None:
        assert asyncio.run(file.apread(9000, 1)) == content(1, 9000)

    assert child_status(work) == 0
