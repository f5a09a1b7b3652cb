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
    """The queue of a loop and an engine. It does not refer to the loop, whose dictionary entry it is, nor the loop to it: it
    ends with the engine or the loop, whichever is first."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.queue = _Queue(engine)
        self.without_room: "deque[asyncio.Future[None]]" = deque()
        self.loop = weakref.ref(loop)
        loop.add_reader(self.queue.fileno(), _complete, weakref.ref(self))

    def __del__(self) -> None:
        queue: "_Queue | None" = getattr(self, "queue", None)
        loop: "asyncio.AbstractEventLoop | None" = getattr(self, "loop", lambda: None)()
        # In a child of fork the loop is the parent's.
        if queue is None or loop is None or not queue.is_usable():
            return
        try:
            # This may be another thread. The loop holds the queue until then, so that its descriptor has no other use.
            loop.call_soon_threadsafe(_remove, weakref.ref(loop), queue)
        except RuntimeError:
            pass  # The loop is closed.

    def complete(self) -> None:
        for future, result, error in self.queue.completions():
            # A future that was cancelled waits for nothing.
            if future.done():
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


def _complete(own: "weakref.ref[_LoopQueue]") -> None:
    queue = own()
    if queue is not None:
        queue.complete()


def _remove(loop: "weakref.ref[asyncio.AbstractEventLoop]", queue: _Queue) -> None:
    known = loop()
    if known is not None:
        known.remove_reader(queue.fileno())


_queues: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakKeyDictionary[Engine, _LoopQueue]]"
_queues = weakref.WeakKeyDictionary()


def _queue_of(file: File) -> _LoopQueue:
    loop = asyncio.get_running_loop()
    queues = _queues.get(loop)
    if queues is None:
        # The futures of requests that are in flight refer to their loop.
        for known in _queues.keyrefs():
            other = known()
            if other is not None and other.is_closed():
                ended = _queues.pop(other, None)
                for one in ended.values() if ended is not None else ():
                    one.queue.forget_futures()
        queues = _queues[loop] = weakref.WeakKeyDictionary()
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
    size = memoryview(data).nbytes
    done = 0
    own = _queue_of(file)
    while True:
        skipped = done
        done += await own.run(lambda future: own.queue.write(file, future, data, offset + skipped, skipped))
        if done >= size:
            return done


async def sync(file: File, data_only: bool) -> None:
    own = _queue_of(file)
    await own.run(lambda future: own.queue.sync(file, future, data_only))
