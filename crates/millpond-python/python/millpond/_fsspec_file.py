"""Open files of `millpond.fsspec`."""

import errno
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

from millpond._millpond import ObjectWriter, StoreError

if TYPE_CHECKING:
    from millpond.fsspec import MillpondFileSystem

COPY_BYTES = 8 << 20
# The first read for a line; each further one is twice as long.
_LINE_BYTES = 8 << 10
# S3 has at most 10,000 parts of an object. Parts of a writer grow after these.
_PARTS = 5000


def part_bytes(size: int) -> int:
    """The length of the parts of an object of `size` bytes."""
    return max(COPY_BYTES, -(-size // _PARTS))


class MillpondFile(AbstractBufferedFile):
    """An object that is open for reading or writing. Reads go to the store's cache; only lines have a buffer between.

    All reads are of the version that was opened. If another one is found, they raise `PreconditionError`.
    """

    DEFAULT_BLOCK_SIZE = COPY_BYTES
    kwargs: "dict[str, Any]"
    loc: int

    def __init__(
        self, fs: "MillpondFileSystem", path: str, mode: str, e_tag: "str | None" = None, **kwargs: Any
    ) -> None:
        self._object, self._name = fs._find_object(path)
        self._writer: "ObjectWriter | None" = None
        self._has_failed = False
        if mode == "ab":
            raise NotImplementedError(f"{path!r}: an object can't be appended to")
        if mode == "xb" and fs.exists(path):
            raise FileExistsError(17, "The object exists", path)
        # The version of an object that never changes is not compared: it takes longer than a read of cached bytes.
        self._e_tag: "str | None" = None
        self.fs, self.path = fs, path
        if mode == "rb" and fs._settings["freshness"] != "immutable":
            self._e_tag = e_tag or self.details.get("ETag")
        # The bytes that were read for lines, and their place.
        self._ahead = b""
        self._ahead_start = 0
        # Some caches of fsspec read here.
        super().__init__(fs, path, mode, **kwargs)
        # A given size is that of an object.
        if mode == "rb" and kwargs.get("size") is None and self.details["type"] == "directory":
            self.closed = True
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path)

    def __reduce__(self) -> "tuple[Any, ...]":
        self.kwargs = {**self.kwargs, "e_tag": self._e_tag}
        return super().__reduce__()

    def _fetch_range(self, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        if self._e_tag is None:
            return self._object.get_range(self._name, start=start, end=end)
        return self._object._get_version_range(self._name, start=start, end=end, e_tag=self._e_tag)

    def _is_direct(self) -> bool:
        """Whether reads go without the layers of fsspec, whose caches are not used."""
        return self.mode == "rb" and not self.closed and self.cache.name == "none"

    def read(self, length: "int | None" = -1) -> bytes:
        if not self._is_direct():
            return super().read(-1 if length is None else length)
        end = self.size if length is None or length < 0 else min(self.loc + length, self.size)
        data = self._fetch_range(self.loc, end)
        self.loc += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        if not self._is_direct():
            return super().readinto(buffer)
        read = self._object._get_range_into(
            self._name, buffer, start=self.loc, end=max(self.loc, self.size), e_tag=self._e_tag
        )
        self.loc += read
        return read

    def readuntil(self, char: bytes = b"\n", blocks: "int | None" = None) -> bytes:
        if not self._is_direct():
            return super().readuntil(char, blocks)
        held = self.loc - self._ahead_start
        if not 0 <= held <= len(self._ahead):
            self._ahead, self._ahead_start, held = b"", self.loc, 0
        searched, length = held, blocks or _LINE_BYTES
        while (at := self._ahead.find(char, searched)) < 0:
            more_start = self._ahead_start + len(self._ahead)
            more = self._fetch_range(more_start, min(more_start + length, self.size))
            if not more:
                break
            self._ahead, self._ahead_start, held = self._ahead[held:], self.loc, 0
            # `char` may lie across the bytes that were there and those that have come.
            searched = max(0, len(self._ahead) - len(char) + 1)
            self._ahead += more
            length = min(2 * length, self.blocksize)
        end = len(self._ahead) if at < 0 else at + len(char)
        self.loc = self._ahead_start + end
        return self._ahead[held:end]

    # Writes collect a block, and send it as a part of the object.

    def _initiate_upload(self) -> None:
        if not self.autocommit:
            raise NotImplementedError("transactions are not supported")

    def _upload_chunk(self, final: bool = False) -> bool:
        if final and self._writer is None:
            # A multipart upload has no condition: an object that another program makes during the write is overwritten.
            self._object.put(self._name, self.buffer.getbuffer(), mode="create" if self.mode == "xb" else "overwrite")
            return True
        if self._writer is None:
            self._writer = self._object.open_writer(self._name, buffer_size=max(self.blocksize, COPY_BYTES))
        self._writer.write(self.buffer.getbuffer())
        if final:
            self._writer.close()
        return True

    def write(self, data: Any) -> int:
        if not self.closed:
            self._check_earlier_writes()
        return super().write(data)

    def flush(self, force: bool = False) -> None:
        if self.closed or self.mode == "rb":
            super().flush(force)
            return
        self._check_earlier_writes()
        # fsspec keeps the block until it is sent. After an interruption it may be sent and kept, so it is not sent again.
        self._has_failed = True
        super().flush(force)
        self._has_failed = False

    def _check_earlier_writes(self) -> None:
        if self._has_failed:
            raise StoreError(errno.EIO, "an earlier write of this object has failed", self.path)

    def discard(self) -> None:
        """Ends the file; no object is made."""
        self.closed = True
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def close(self) -> None:
        if self._has_failed and not self.closed:
            self.discard()
            self._check_earlier_writes()
        try:
            super().close()
        finally:
            # The end of a writer that was not closed aborts its upload.
            self._writer = None

    def __exit__(self, *details: Any) -> None:
        if details[0] is not None and self.mode != "rb" and not self.closed:
            self.discard()
        else:
            self.close()

    def __del__(self) -> None:
        if not self.closed and not self._has_failed:
            self.close()
