"""`millpond.store`: chooses where the cache is, and says so once."""

import os
from typing import Any

from millpond._millpond import Store

_MEMORY = 256 << 20
_has_told = False


def store(
    url: str,
    *,
    memory: "int | None" = None,
    disk: "tuple[str | os.PathLike[str], int] | None" = None,
    freshness: "str | float" = "revalidate",
    socket: "str | os.PathLike[str] | None" = None,
    options: "dict[str, str | int | bool | None] | None" = None,
) -> Store:
    """An object store, by its URL, with a cache in this process: a `Store`.

    `url` is `file:///DIRECTORY`, `memory://NAME` (of this process, for tests) or `s3://BUCKET/PREFIX`. All names are below it.

    `memory` is the limit of the cache in bytes, 256 MiB by default. `disk` is a tuple of a directory and the number of
    bytes that the cache may use there.

    `freshness` says when cached bytes may be returned: `"immutable"` for objects that never change, without a request;
    `"revalidate"` after asking the store whether the object has changed; a number of seconds without asking for that
    long after the last answer. After a write by this store, its reads never return an earlier version.

    `options` are those of S3: `endpoint`, `region`, `key`, `secret`, `token`, `allow_http`, `anonymous`, and the names of
    the crate `object_store`. Others come from the environment (`AWS_ACCESS_KEY_ID` and so on).

    `socket` is for a cache that several processes share, which does not exist yet: `NotImplementedError`.

    >>> import millpond
    >>> store = millpond.store("memory://doc", memory=16 << 20, freshness=60)
    >>> _ = store.put("pond", b"water lilies")
    >>> store.get("pond").bytes()
    b'water lilies'
    """
    if memory is None:
        memory = _MEMORY
    if disk is not None:
        folder, size = disk
        disk = (os.path.abspath(os.fspath(folder)), size)
    if socket is not None:
        _attach(socket)
    made = Store(url, memory=memory, disk=disk, freshness=freshness, options=options)
    _tell(made, memory)
    return made


def _attach(socket: "str | os.PathLike[str]") -> None:
    # The one place where a client of a server is to be made. Without `socket`, it is to look for a running server.
    what = "has no client for `millpond serve` yet; without socket= the cache is in this process"
    raise NotImplementedError(f"socket={os.fspath(socket)!r}: this version of millpond {what}")


def _tell(made: Store, memory: int) -> None:
    global _has_told
    if _has_told:
        return
    _has_told = True
    import logging

    text = "%s: cached in this process, up to %.0f MiB; each process has its own cache"
    logging.getLogger("millpond").info(text, made.url, memory / (1 << 20))


def from_settings(url: str, settings: "dict[str, Any]") -> Store:
    return store(url, **settings)
