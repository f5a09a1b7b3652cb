"""Files in a page cache of the program itself: docs/python.md of Millpond.

>>> import millpond
>>> with millpond.open("pond.bin", "w+b") as file:
...     file.write(b"a pond")
...     file.pread(4, 2)
6
b'pond'
"""

import io

from millpond._millpond import Engine, File, LockedRange, __version__, configure, open

__all__ = ["Engine", "File", "LockedRange", "__version__", "configure", "open"]

# An extension class for all versions of Python can't derive from a class of `io`.
io.BufferedIOBase.register(File)
