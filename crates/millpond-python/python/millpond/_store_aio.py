"""Calls for object stores from asyncio, by one list of completions for each loop.

The loop watches an eventfd and takes completions itself: no thread of the runtime enters Python.
"""

import asyncio
import weakref
from typing import Any

from millpond._millpond import _Completed, _Completions, _Operation

_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Completions]" = weakref.WeakKeyDictionary()


def _completions_of(loop: asyncio.AbstractEventLoop) -> _Completions:
    own = _of_loops.get(loop)
    # In a child of fork they are the parent's.
    if own is None or not own.is_usable():
        # The futures of operations that are in flight refer to their loop.
        for known in _of_loops.keyrefs():
            other = known()
            if other is not None and other.is_closed():
                ended = _of_loops.pop(other, None)
                if ended is not None:
                    ended.forget_futures()
        own = _of_loops[loop] = _Completions()
        loop.add_reader(own.fileno(), _complete, own)
    return own


def _complete(own: _Completions) -> None:
    for future, completed in own.completions():
        future.set_result(completed)


async def run(operation: _Operation) -> Any:
    while True:
        answer = operation.try_now()
        if answer is None:
            # The result of a call that is cancelled here is not taken, also if the future has it already.
            answer = (await _wait(operation)).take()
        if isinstance(answer, tuple):
            return answer[0]
        operation = answer


async def _wait(operation: _Operation) -> _Completed:
    loop = asyncio.get_running_loop()
    own = _completions_of(loop)
    future: "asyncio.Future[_Completed]" = loop.create_future()
    number = own.start(operation, future)
    try:
        return await future
    except asyncio.CancelledError:
        own.cancel(number)
        raise


async def ready(result: Any) -> Any:
    """The coroutine of a call that has ended already."""
    return result


async def run_next(operation: _Operation) -> Any:
    result = await run(operation)
    if result is None:
        raise StopAsyncIteration
    return result
