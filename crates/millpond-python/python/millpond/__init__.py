"""Files in a page cache of the program itself: docs/python.md of Millpond.

>>> import millpond
>>> with millpond.open("pond.bin", "w+b") as file:
...     file.write(b"a pond")
...     file.pread(4, 2)
6
b'pond'
"""

import io
from typing import TYPE_CHECKING, Any

from millpond._millpond import (
    BytesStream,
    Engine,
    File,
    GetResult,
    ListStream,
    LockedRange,
    NotModifiedError,
    ObjectWriter,
    PreconditionError,
    Store,
    StoreError,
    __version__,
    configure,
    open,
)
from millpond._objects import store

if TYPE_CHECKING:
    from millpond._endpoint import S3Endpoint, s3_endpoint

__all__ = [
    "BytesStream",
    "Engine",
    "File",
    "GetResult",
    "ListStream",
    "LockedRange",
    "NotModifiedError",
    "ObjectWriter",
    "PreconditionError",
    "S3Endpoint",
    "Store",
    "StoreError",
    "__version__",
    "configure",
    "open",
    "s3_endpoint",
    "store",
]


def __getattr__(name: str) -> Any:
    # Imported at the first use: dataclasses alone takes a third of the time of this import.
    if name in ("S3Endpoint", "s3_endpoint"):
        from millpond import _endpoint

        return getattr(_endpoint, name)
    raise AttributeError(f"module 'millpond' has no attribute {name!r}")


# An extension class for all versions of Python can't derive from a class of `io`.
io.BufferedIOBase.register(File)
