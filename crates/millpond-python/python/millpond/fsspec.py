"""File systems for fsspec: objects by `millpond.store`, for all that takes a URL of fsspec.

>>> import fsspec
>>> with fsspec.open("millpond+memory://doc/pond", "wb") as file:
...     file.write(b"water lilies")
12
>>> fs = fsspec.filesystem("millpond+memory")
>>> fs.cat_file("doc/pond", start=6)
b'lilies'
"""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Iterable
from glob import has_magic
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fsspec.asyn import AsyncFileSystem, get_loop, sync
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import stringify_path

from millpond._fsspec_file import COPY_BYTES, MillpondFile, part_bytes
from millpond._local_tree import follows_link, remove, tree_of
from millpond._millpond import PreconditionError, Store, StoreError
from millpond._objects import from_settings

if TYPE_CHECKING:
    from millpond._millpond import GetOptions, ObjectMeta

# Repeats of a read whose object changes between its size and its bytes. Untuned.
_REPEATS_MAX = 8

# Held while a file system opens a store.
_opening = threading.Lock()


def _renew_lock() -> None:
    global _opening
    _opening = threading.Lock()


# A thread of the parent may have held it.
os.register_at_fork(after_in_child=_renew_lock)


class MillpondFileSystem(AsyncFileSystem):
    """The common part of the file systems; they differ in the places of their stores.

    `memory`, `disk`, `freshness` and `socket` are those of `millpond.store`, for each bucket; other arguments are the
    options of the store. Nothing else is cached: lists of directories are always those of the store.
    """

    cachable = True
    root_marker = ""
    _scheme: ClassVar[str] = ""
    _pid: int
    _loop: Any

    def __init__(
        self,
        *,
        memory: "int | None" = None,
        disk: "tuple[str, int] | None" = None,
        freshness: "str | float | None" = None,
        socket: "str | Literal[False] | None" = None,
        asynchronous: bool = False,
        loop: Any = None,
        batch_size: "int | None" = None,
        **options: Any,
    ) -> None:
        own = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"}
        base = {name: options.pop(name) for name in own & options.keys()}
        super().__init__(asynchronous=asynchronous, loop=loop, batch_size=batch_size, **base)
        disk = None if disk is None else (disk[0], disk[1])
        self._settings = {"memory": memory, "disk": disk, "freshness": freshness, "socket": socket}
        self._options = options
        self._stores: "dict[str, Store]" = {}

    @property
    def loop(self) -> Any:
        # A child of fork has none of the parent's threads, so fsspec's loop there is another one.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._loop = None if self.asynchronous else get_loop()
        return self._loop

    @property
    def fsid(self) -> str:
        return f"millpond+{self._scheme}"

    # The store and the name of a path.

    def _place(self, path: str) -> "tuple[str, str]":
        """The URL of the store, and the name in it; without an object, the name is empty."""
        raise NotImplementedError

    def _path(self, url: str, name: str) -> str:
        """The path of a name in the store of a URL."""
        raise NotImplementedError

    def _store(self, url: str) -> Store:
        store = self._stores.get(url)
        if store is None:
            with _opening:
                store = self._stores.get(url)
                if store is None:
                    store = self._stores[url] = self._open_store(url)
        return store

    def _open_store(self, url: str) -> Store:
        settings: "dict[str, Any]" = dict(self._settings, options=self._options or None)
        disk = settings["disk"]
        if disk is not None:
            # A directory is for one store, so each bucket has one below it.
            settings["disk"] = (os.path.join(disk[0], url.split("://")[1].strip("/") or "root"), disk[1])
            os.makedirs(disk[0], mode=0o700, exist_ok=True)
        return from_settings(url, settings)

    def _find_object(self, path: str) -> "tuple[Store, str]":
        path = self._strip_protocol(path)
        url, name = self._place(path)
        if not name:
            raise IsADirectoryError(f"{path!r} is a bucket or a directory, not an object")
        return self._store(url), name

    def _info_of(self, url: str, meta: "ObjectMeta") -> "dict[str, Any]":
        return {
            "name": self._path(url, meta["path"]),
            "size": meta["size"],
            "type": "file",
            "LastModified": meta["last_modified"],
            "ETag": meta["e_tag"],
            "version": meta["version"],
        }

    def _directory(self, path: str) -> "dict[str, Any]":
        return {"name": path, "size": 0, "type": "directory"}

    # Reads.

    async def _info(self, path: str, **kwargs: Any) -> "dict[str, Any]":
        path = self._strip_protocol(path)
        url, name = self._place(path)
        if url and name:
            try:
                return self._info_of(url, await self._store(url).head_async(name))
            except FileNotFoundError:
                pass
        if not url or await self._is_prefix(url, name):
            return self._directory(path)
        raise FileNotFoundError(2, "No such object or directory", path)

    async def _is_prefix(self, url: str, name: str) -> bool:
        if not name:
            # A bucket that can be listed is a directory, also if it is empty.
            await self._store(url).list_with_delimiter_async()
            return True
        async for _ in self._store(url).list(name, chunk_size=1):
            return True
        return False

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> "list[Any]":
        path = self._strip_protocol(path)
        url, name = self._place(path)
        if not url:
            raise NotImplementedError(f"{self.fsid} can't list buckets: give one in the path")
        below = await self._store(url).list_with_delimiter_async(name or None)
        found = [self._directory(self._path(url, one)) for one in below["common_prefixes"]]
        found += [self._info_of(url, meta) for meta in below["objects"]]
        if not found:
            # An object, or nothing.
            info = await self._info(path)
            found = [info] if info["type"] == "file" else []
        found.sort(key=lambda info: info["name"])
        return found if detail else [info["name"] for info in found]

    def _bounds(self, size: int, start: "int | None", end: "int | None") -> "tuple[int, int]":
        first, last, _ = slice(start, end).indices(size)
        return first, max(first, last)

    def _range_of(self, start: "int | None", end: "int | None") -> "GetOptions | None":
        """The range as an option of `get`, for which the store resolves open bounds; `None` if it needs the size."""
        if end is None:
            return {"range": {"offset": start or 0} if (start or 0) >= 0 else {"suffix": -(start or 0)}}
        return {"range": (start or 0, end)} if end > (start or 0) >= 0 else None

    async def _cat_file(self, path: str, start: "int | None" = None, end: "int | None" = None, **kwargs: Any) -> bytes:
        store, name = self._find_object(path)
        if start is None and end is None:
            cached = store._get_cached(name)
            return await (await store.get_async(name)).bytes_async() if cached is None else cached
        asked = self._range_of(start, end)
        for repeat in range(_REPEATS_MAX + 1):
            try:
                if start is not None and end is not None and asked is not None:
                    return await store.get_range_async(name, start=start, end=end)
                if asked is not None:
                    return await (await store.get_async(name, options=asked)).bytes_async()
                meta = await store.head_async(name)
                first, last = self._bounds(meta["size"], start, end)
                return await store._get_version_range_async(name, start=first, end=last, e_tag=meta["e_tag"])
            except PreconditionError:
                # Another version has come after the size was read.
                if repeat == _REPEATS_MAX:
                    raise
            except StoreError:
                first, last = self._bounds((await store.head_async(name))["size"], start, end)
                if first < last:
                    raise
                return b""
        raise AssertionError("the last repeat returns or raises")

    def cat_file(self, path: str, start: "int | None" = None, end: "int | None" = None, **kwargs: Any) -> bytes:
        # Without a turn of fsspec's loop, which takes many times as long as a read of cached bytes.
        store, name = self._find_object(path)
        if start is None and end is None:
            cached = store._get_cached(name)
            return store.get(name).bytes() if cached is None else cached
        asked = self._range_of(start, end)
        for repeat in range(_REPEATS_MAX + 1):
            try:
                if start is not None and end is not None and asked is not None:
                    return store.get_range(name, start=start, end=end)
                if asked is not None:
                    return store.get(name, options=asked).bytes()
                meta = store.head(name)
                first, last = self._bounds(meta["size"], start, end)
                return store._get_version_range(name, start=first, end=last, e_tag=meta["e_tag"])
            except PreconditionError:
                if repeat == _REPEATS_MAX:
                    raise
            except StoreError:
                first, last = self._bounds(store.head(name)["size"], start, end)
                if first < last:
                    raise
                return b""
        raise AssertionError("the last repeat returns or raises")

    def cat_ranges(
        self,
        paths: "list[str]",
        starts: Any,
        ends: Any,
        max_gap: "int | None" = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> "list[Any]":
        starts, ends = self._bounds_of(paths, starts, ends)
        # Cached ranges without a turn of fsspec's loop; the rest goes there at once.
        results: "list[Any]" = [None] * len(paths)
        for path, numbers in self._by_path(paths).items():
            asked = [(starts[n], ends[n]) for n in numbers]
            if any(start is None or end is None or start < 0 or end <= start for start, end in asked):
                continue
            try:
                store, name = self._find_object(path)
                found = store._get_ranges_cached(name, [one[0] for one in asked], [one[1] for one in asked])
            except Exception:
                # The other way raises it, or returns it.
                continue
            for n, data in zip(numbers, found or ()):
                results[n] = data
        rest = [n for n, data in enumerate(results) if data is None]
        if rest:
            read = sync(
                self.loop,
                self._cat_ranges,
                [paths[n] for n in rest],
                [starts[n] for n in rest],
                [ends[n] for n in rest],
                max_gap=max_gap,
                on_error=on_error,
                **kwargs,
            )
            for n, data in zip(rest, read):
                results[n] = data
        return results

    def _bounds_of(self, paths: "list[str]", starts: Any, ends: Any) -> "tuple[list[Any], list[Any]]":
        """The starts and the ends of the ranges, one for each path."""
        if not isinstance(paths, list):
            raise TypeError(f"paths must be a list, not {type(paths)}")
        starts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        ends = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if len(starts) != len(paths) or len(ends) != len(paths):
            raise ValueError(f"{len(paths)} paths, {len(starts)} starts, {len(ends)} ends")
        return starts, ends

    def _by_path(self, paths: "list[str]") -> "dict[str, list[int]]":
        """The numbers of the ranges of each path."""
        groups: "dict[str, list[int]]" = {}
        for n, path in enumerate(paths):
            groups.setdefault(path, []).append(n)
        return groups

    async def _cat_ranges(
        self,
        paths: "list[str]",
        starts: Any,
        ends: Any,
        max_gap: "int | None" = None,
        batch_size: "int | None" = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> "list[Any]":
        # `max_gap` needs no work here: the store merges the ranges of an object itself.
        starts, ends = self._bounds_of(paths, starts, ends)
        results: "list[Any]" = [None] * len(paths)

        async def read(path: str, numbers: "list[int]") -> None:
            asked = [(starts[n], ends[n]) for n in numbers]
            if all(start is not None and end is not None and 0 <= start <= end for start, end in asked):
                try:
                    store, name = self._find_object(path)
                    read = await store.get_ranges_async(
                        name, starts=[one[0] for one in asked], ends=[one[1] for one in asked]
                    )
                    for n, data in zip(numbers, read):
                        results[n] = data
                    return
                except Exception:
                    pass  # One range may be at fault: each gets its own bytes or error.
            each = (self._cat_file(path, starts[n], ends[n]) for n in numbers)
            for n, result in zip(numbers, await asyncio.gather(*each, return_exceptions=True)):
                if isinstance(result, BaseException) and not isinstance(result, Exception):
                    raise result
                results[n] = result

        await asyncio.gather(*(read(path, numbers) for path, numbers in self._by_path(paths).items()))
        if on_error == "raise":
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return results

    async def _get_file(
        self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **kwargs: Any
    ) -> None:
        if os.path.isdir(lpath):
            return
        if await self._isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        store, name = self._find_object(rpath)
        result = await store.get_async(name)
        callback.set_size(result.meta["size"])
        folder = os.path.dirname(os.path.abspath(lpath))
        os.makedirs(folder, exist_ok=True)
        with open(lpath, "wb") as file:
            async for piece in result.stream(COPY_BYTES):
                file.write(piece)
                callback.relative_update(len(piece))

    # Writes.

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        store, name = self._find_object(path)
        await store.put_async(name, value, mode="create" if mode == "create" else "overwrite")

    async def _put_file(
        self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        if os.path.isdir(lpath):
            await self._makedirs(rpath, exist_ok=True)
            return
        store, name = self._find_object(rpath)
        size = os.path.getsize(lpath)
        callback.set_size(size)
        with open(lpath, "rb") as file:
            if mode == "create" or size <= COPY_BYTES:
                await self._pipe_file(rpath, file.read(), mode=mode)
                callback.relative_update(size)
                return

            def send() -> None:
                with store.open_writer(name, buffer_size=part_bytes(size)) as writer:
                    while data := file.read(COPY_BYTES):
                        writer.write(data)
                        callback.relative_update(len(data))

            await asyncio.get_running_loop().run_in_executor(None, send)

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        store, name = self._find_object(path)
        await store.delete_async(name)

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: "int | None" = None,
        maxdepth: "int | None" = None,
        **kwargs: Any,
    ) -> None:
        is_directory = await self._find_to_remove(path, recursive, maxdepth)
        names: "dict[str, list[str]]" = {}
        for one in is_directory:
            if not is_directory[one]:
                url, name = self._place(one)
                names.setdefault(url, []).append(name)
        for url, group in names.items():
            await self._store(url).delete_async(group)
        directories = [one for one in is_directory if is_directory[one]]
        for directory in sorted(directories, reverse=True):
            await self._rm_directory(directory, recursive)

    async def _find_to_remove(self, path: Any, recursive: bool, maxdepth: "int | None") -> "dict[str, bool]":
        """What `rm` removes, and whether it is a directory."""
        if not recursive or maxdepth is not None:
            expanded = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
            found = [self._strip_protocol(one) for one in expanded]
            return dict(zip(found, await asyncio.gather(*map(self._isdir, found))))
        is_directory: "dict[str, bool]" = {}
        # The names of `_expand_path` lack their types: each object would need a request.
        for given in self._strip_protocol([path] if isinstance(path, str) else list(path)):
            for one in await self._glob(given) if has_magic(given) else [given]:
                below: Any = await self._find(one, withdirs=True, detail=True)
                is_directory.update((name, info["type"] == "directory") for name, info in below.items())
                if one not in is_directory:
                    is_directory[one] = await self._isdir(one) or not await self._exists(one)
                    if is_directory[one]:
                        raise FileNotFoundError(2, "No such object or directory", one)
        return is_directory

    async def _rm_directory(self, path: str, recursive: bool) -> None:
        if not recursive:
            # It has objects, or it would not be there.
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    async def _find(
        self, path: str, maxdepth: "int | None" = None, withdirs: bool = False, **kwargs: Any
    ) -> "list[str] | dict[str, Any]":
        path = self._strip_protocol(path)
        url, name = self._place(path)
        if not url or maxdepth is not None:
            return await super()._find(path, maxdepth=maxdepth, withdirs=withdirs, **kwargs)
        # One list of all objects, in place of one for each folder.
        found: "dict[str, Any]" = {}
        async for metas in self._store(url).list(name or None, chunk_size=1000):
            found.update((info["name"], info) for info in (self._info_of(url, meta) for meta in metas))
        if withdirs:
            above = {parent for one in found for parent in self._folders_between(path, one)}
            found.update((one, self._directory(one)) for one in above - found.keys())
        if not found and await self._isfile(path):
            found[path] = await self._info(path)
        found = dict(sorted(found.items()))
        return found if kwargs.get("detail") else list(found)

    def _folders_between(self, path: str, name: str) -> "list[str]":
        """`path`, unless it is empty, and the folders below it that the object is in."""
        below = name[len(path) :].strip("/").split("/")[:-1]
        folders = [path] if path else []
        for one in below:
            folders.append(f"{folders[-1]}/{one}" if folders else one)
        return folders

    async def _cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if await self._isdir(path1):
            await self._makedirs(path2, exist_ok=True)
            return
        store, name = self._find_object(path1)
        other, other_name = self._find_object(path2)
        if store is other:
            await store.copy_async(name, other_name)
            return

        result = await store.get_async(name)
        size = result.meta["size"]
        if size <= COPY_BYTES:
            await other.put_async(other_name, await result.bytes_async())
            return
        # The calls of a writer wait, so that the loop is not for them.
        run = asyncio.get_running_loop().run_in_executor
        writer = other.open_writer(other_name, buffer_size=part_bytes(size))
        try:
            async for piece in result.stream(COPY_BYTES):
                await run(None, writer.write, piece)
            await run(None, writer.close)
        except BaseException:
            await run(None, writer.abort)
            raise

    async def _mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        pass  # A directory is there while it has objects.

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    async def _rmdir(self, path: str) -> None:
        pass

    def rmdir(self, path: str) -> None:
        sync(self.loop, self._rmdir, path)

    def created(self, path: str) -> Any:
        return self.modified(path)

    def modified(self, path: str) -> Any:
        return self.info(path)["LastModified"]

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        if not truncate:
            raise NotImplementedError("the time of an object can't be changed")
        self.pipe_file(path, b"")

    def ukey(self, path: str) -> str:
        return str(self.info(path)["ETag"])

    def sign(self, path: str, expiration: int = 100, **kwargs: Any) -> str:
        raise NotImplementedError(f"{self.fsid} has no signed URLs")

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: "int | str | None" = None,
        autocommit: bool = True,
        cache_options: "dict[str, Any] | None" = None,
        **kwargs: Any,
    ) -> MillpondFile:
        return MillpondFile(
            self,
            path,
            mode,
            block_size=block_size or "default",
            autocommit=autocommit,
            cache_options=cache_options,
            **{"cache_type": "none", **kwargs},
        )


class MillpondS3FileSystem(MillpondFileSystem):
    """`millpond+s3://BUCKET/NAME`."""

    protocol = "millpond+s3"
    _scheme = "s3"

    def _place(self, path: str) -> "tuple[str, str]":
        bucket, _, name = path.partition("/")
        return (f"s3://{bucket}" if bucket else ""), name

    def _path(self, url: str, name: str) -> str:
        return f"{url.removeprefix('s3://')}/{name}"


class MillpondLocalFileSystem(MillpondFileSystem):
    """`millpond+file:///PATH`: local files by the cache. Its directories are those of the system."""

    protocol = "millpond+file"
    root_marker = "/"
    _scheme = "file"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path).removeprefix("millpond+file://")
        return os.path.abspath(path)

    def _place(self, path: str) -> "tuple[str, str]":
        return "file:///", path.strip("/")

    def _path(self, url: str, name: str) -> str:
        return f"/{name}"

    async def _find(
        self, path: str, maxdepth: "int | None" = None, withdirs: bool = False, **kwargs: Any
    ) -> "list[str] | dict[str, Any]":
        # With directories that are empty. fsspec's own leaves out a directory that can't be listed, without an error.
        if maxdepth is not None and maxdepth < 1:
            raise ValueError(f"maxdepth must be at least 1, not {maxdepth}")
        path = self._strip_protocol(path)
        found: "dict[str, Any]" = {}
        if withdirs and await self._isdir(path):
            found[path] = await self._info(path)
        level, depth = [path], 0
        while level and (maxdepth is None or depth < maxdepth):
            below: "list[str]" = []
            for folder in level:
                try:
                    listed = await self._ls(folder)
                except FileNotFoundError:
                    continue  # There is none, or another program has removed it.
                for info in listed:
                    is_directory = info["type"] == "directory"
                    if is_directory:
                        below.append(info["name"])
                    if withdirs or not is_directory:
                        found[info["name"]] = info
            level, depth = below, depth + 1
        found = dict(sorted(found.items()))
        return found if kwargs.get("detail") else list(found)

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: "int | None" = None,
        maxdepth: "int | None" = None,
        **kwargs: Any,
    ) -> None:
        # Not by lists: they follow links, and lack the names that no object can have.
        if maxdepth is not None and maxdepth < 1:
            raise ValueError(f"maxdepth must be at least 1, not {maxdepth}")
        paths = await self._expand_unfollowed(path, recursive)
        await asyncio.get_running_loop().run_in_executor(None, self._remove, paths, recursive, maxdepth)

    async def _expand_unfollowed(self, path: Any, may_be_none: bool) -> "list[str]":
        """The paths, with those of patterns, each before the folder that it is in. `**` does not follow links."""
        found: "set[str]" = set()
        for given in [path] if isinstance(path, (str, os.PathLike)) else list(path):
            one: str = self._strip_protocol(given)
            if has_magic(one):
                found.update(name for name in await self._glob(one) if not follows_link(one, name))
            elif os.path.lexists(one):
                found.add(one)
            else:
                raise FileNotFoundError(errno.ENOENT, "No such object or directory", one)
        if not found and not may_be_none:
            raise FileNotFoundError(errno.ENOENT, "No such object or directory", str(path))
        return sorted(found, reverse=True)

    def _remove(self, paths: "list[str]", recursive: bool, maxdepth: "int | None") -> None:
        removed: "list[str]" = []
        try:
            for path in paths:
                remove(path, maxdepth if recursive else 0, removed)
        finally:
            self._forget(removed)

    def _forget(self, paths: "list[str]") -> None:
        """Drops what is cached of files that were changed without the store."""
        for path in paths:
            url, name = self._place(path)
            try:
                self._store(url).forget(name)
            except ValueError:
                pass  # No object can have this name.

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: "int | None" = None, **kwargs: Any
    ) -> None:
        """Moves files, links and directories with all below them, as fsspec's `file` does."""
        # A copy, as other file systems have it, lacks what lists lack: the removal after it would lose that.
        is_one = isinstance(path1, (str, os.PathLike)) and not has_magic(stringify_path(path1))
        into = stringify_path(path2).endswith("/") or not is_one
        target = self._strip_protocol(path2)
        paths = sync(self.loop, self._expand_unfollowed, path1, False)
        os.makedirs(target if into else os.path.dirname(target), exist_ok=True)
        # A path in another one of them moves with it.
        for path in [one for one in paths if not any(one.startswith(f"{other}/") for other in paths)]:
            if path == target:
                continue
            files, _ = tree_of(path, None)
            try:
                moved = shutil.move(path, target)
                self._forget([moved + one.removeprefix(path) for one in files])
            finally:
                self._forget(files)

    async def _is_prefix(self, url: str, name: str) -> bool:
        return os.path.isdir(self._path(url, name))

    async def _mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        os.makedirs(path) if create_parents else os.mkdir(path)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    async def _rmdir(self, path: str) -> None:
        os.rmdir(self._strip_protocol(path))


class MillpondMemoryFileSystem(MillpondFileSystem):
    """`millpond+memory://NAME/...`: objects in the memory of this process, for tests."""

    protocol = "millpond+memory"
    _scheme = "memory"

    def _place(self, path: str) -> "tuple[str, str]":
        return "memory://fsspec", path.strip("/")

    def _path(self, url: str, name: str) -> str:
        return name
