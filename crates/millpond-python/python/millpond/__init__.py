"""Files in a page cache of the program itself: docs/python.md of Millpond.

>>> import millpond
>>> with millpond.open("pond.bin", "w+b") as file:
...     file.write(b"a pond")
...     file.pread(4, 2)
6
b'pond'
"""

import io

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
    "Store",
    "StoreError",
    "__version__",
    "configure",
    "open",
    "store",
]

# An extension class for all versions of Python can't derive from a class of `io`.
io.BufferedIOBase.register(File)
