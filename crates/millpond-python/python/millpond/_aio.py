"""Reads and writes for asyncio, by one queue of the engine for each loop.

The loop watches the queue's descriptor and takes completions itself: the engine starts no thread for a read, and none of
its threads enters Python.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from millpond._millpond import Engine, File, _Queue

if TYPE_CHECKING:
    from typing_extensions import Buffer

Result = TypeVar("Result", int, bytes)


class _LoopQueue:
    """The queue of a loop and an engine. It does not refer to the loop, whose dictionary entry it is."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.queue = _Queue(engine)
        self.without_room: "deque[asyncio.Future[None]]" = deque()
        loop.add_reader(self.queue.fileno(), self.complete)

    def complete(self) -> None:
        for future, result, error in self.queue.completions():
            # A future that was cancelled, or whose loop has ended, waits for nothing.
            if future.done() or future.get_loop().is_closed():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        while self.without_room:
            waiter = self.without_room.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def run(self, start: "Callable[[asyncio.Future[Result]], int | None]") -> Result:
        loop = asyncio.get_running_loop()
        while True:
            future: "asyncio.Future[Result]" = loop.create_future()
            number = start(future)
            if number is not None:
                break
            room: "asyncio.Future[None]" = loop.create_future()
            self.without_room.append(room)
            await room
        try:
            return await future
        except asyncio.CancelledError:
            self.queue.cancel(number)
            raise


_queues: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakKeyDictionary[Engine, _LoopQueue]]"
_queues = weakref.WeakKeyDictionary()


def _queue_of(file: File) -> _LoopQueue:
    loop = asyncio.get_running_loop()
    queues = _queues.setdefault(loop, weakref.WeakKeyDictionary())
    queue = queues.get(file.engine)
    # In a child of fork the queue is the parent's.
    if queue is None or not queue.queue.is_usable():
        queue = queues[file.engine] = _LoopQueue(file.engine, loop)
    return queue


async def pread(file: File, size: int, offset: int) -> bytes:
    if size < 0:
        return file.pread(size, offset)  # raises
    cached = file._pread_cached(size, offset)
    if cached is not None:
        return cached
    own = _queue_of(file)
    return await own.run(lambda future: own.queue.read_bytes(file, future, size, offset))


async def preadinto(file: File, buffer: "Buffer", offset: int) -> int:
    cached = file._preadinto_cached(buffer, offset)
    if cached is not None:
        return cached
    own = _queue_of(file)
    return await own.run(lambda future: own.queue.read(file, future, buffer, offset))


async def pwrite(file: File, data: "Buffer", offset: int) -> int:
    view = memoryview(data).cast("B")
    done = 0
    own = _queue_of(file)
    while True:
        rest = view[done:]
        at = offset + done
        done += await own.run(lambda future: own.queue.write(file, future, rest, at))
        if done >= len(view):
            return done


async def sync(file: File, data_only: bool) -> None:
    own = _queue_of(file)
    await own.run(lambda future: own.queue.sync(file, future, data_only))
