"""`millpond.store`: finds the server of the machine, and says once where the cache is."""

import atexit
import os
import sys
from typing import Any, Literal

from millpond._millpond import Store, _wait_for_last_tasks

# A program that ends while the parts of an interrupted upload are removed waits for that.
atexit.register(_wait_for_last_tasks)


def _wait_at_end(_: object) -> None:
    import multiprocessing.util

    multiprocessing.util.Finalize(None, _wait_for_last_tasks, exitpriority=0)


def _watch_worker() -> None:
    # A worker of multiprocessing ends without `atexit`. It removes the parent's finalizers, and makes its own after that.
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.register_after_fork(_wait_at_end, _wait_at_end)


os.register_at_fork(after_in_child=_watch_worker)

_MEMORY = 256 << 20
_has_told = False


def store(
    url: str,
    *,
    memory: "int | None" = None,
    disk: "tuple[str | os.PathLike[str], int] | None" = None,
    freshness: "str | float | None" = None,
    socket: "str | os.PathLike[str] | Literal[False] | None" = None,
    options: "dict[str, str | int | bool | None] | None" = None,
) -> Store:
    """An object store, by its URL, with a cache: a `Store`.

    `url` is `file:///DIRECTORY`, `memory://NAME` (of this process, for tests), `s3://BUCKET/PREFIX`, or `http(s)://HOST/PATH`
    for reading. All names are below it.

    If `millpond serve` runs for this store, its cache is used, which all processes share. Otherwise the cache is in this process.
    `socket` is the server's socket; by default the server is looked for at its usual place. With `socket=False` no server is used.
    A server that starts later is found by reads that miss, within a second; when it ends, reads go on with a cache in this
    process. The logger `millpond` says which cache is used, and when that changes.

    `memory` is the limit of the cache in this process in bytes, 256 MiB by default. `disk` is a tuple of a directory and the
    number of bytes that this cache may use there. A server has its own limits.

    `freshness` says when cached bytes may be returned: `"immutable"` for objects that never change, without a request;
    `"revalidate"` after asking the store whether the object has changed; a number of seconds without asking for that
    long after the last answer. After a write by this store, its reads never return an earlier version. A server that asks the
    store less often is not used. By default the choice is the server's, and in this process `"revalidate"`.

    `options` are those of S3: `endpoint`, `region`, `key`, `secret`, `token`, `allow_http`, `anonymous`, and the names of
    the crate `object_store`. Others come from the environment (`AWS_ACCESS_KEY_ID` and so on).

    >>> import millpond
    >>> store = millpond.store("memory://doc", memory=16 << 20, freshness=60)
    >>> _ = store.put("pond", b"water lilies")
    >>> store.get("pond").bytes()
    b'water lilies'
    """
    settings: "dict[str, Any]" = {"memory": memory, "disk": disk, "freshness": freshness, "socket": socket}
    return _open(url, needs_disk=True, options=options, **settings)


def _open(
    url: str,
    *,
    memory: "int | None",
    disk: "tuple[str | os.PathLike[str], int] | None",
    needs_disk: bool,
    **settings: Any,
) -> Store:
    if memory is None:
        memory = _MEMORY
    if disk is not None:
        folder, size = disk
        disk = (os.path.abspath(os.fspath(folder)), size)
    made = Store(url, memory=memory, disk=disk, needs_disk=needs_disk, **settings)
    _tell(made, memory)
    return made


def _tell(made: Store, memory: int) -> None:
    global _has_told
    if _has_told:
        return
    _has_told = True
    import logging

    logger = logging.getLogger("millpond")
    if made._server is not None:
        logger.info("%s: cached by the server at %s", made.url, made._server)
    else:
        text = "%s: cached in this process, up to %.0f MiB; each process has its own cache"
        logger.info(text, made.url, memory / (1 << 20))


def log(level: int, text: str) -> None:
    """A line about a server, from the native part."""
    import logging

    logging.getLogger("millpond").log(level, "%s", text)


def from_settings(url: str, settings: "dict[str, Any]") -> Store:
    """A store that does without its disk tier if another process uses the directory."""
    return _open(url, needs_disk=False, **settings)
