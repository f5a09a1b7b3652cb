"""Goal: a file behaves as those of `io`: the tests of CPython's own `test_io` and `test_file` for binary files, run on ours.

Left out, each with its reason:

- test_io.IOTest: the tests of pipes, of descriptors (`fileno`, `closefd`, `opener`), of text, of `__del__` and flush
  (nothing is buffered), of `BytesIO`, and of classes that derive from those of `io`: only the tests named below open a
  regular file by its path.
- test_io.CommonBufferedTests and its subclasses: they wrap a raw file; ours has none below it (`detach`).
- test_fileio: the tests of descriptors, of `_blksize` and of the text of `repr`; its OtherFileTests open FileIO by
  descriptor, or are in test_files.py.
- test_file.OtherFileTests: modes and truncation are in test_files.py; the rest is text, stdin, and `buffering`.
"""

import io
import os
import unittest

import millpond
import pytest

test_io = pytest.importorskip("test.test_io", reason="this Python has no package of its tests")
test_fileio = pytest.importorskip("test.test_fileio", reason="this Python has no package of its tests")
test_file = pytest.importorskip("test.test_file", reason="this Python has no package of its tests")
os_helper = pytest.importorskip("test.support.os_helper", reason="this Python has no package of its tests")


def open_binary(path, mode="r", buffering=-1, **_):  # type: ignore[no-untyped-def]
    """`io.open`, for binary files."""
    return millpond.open(path, mode)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)


class IOTest(unittest.TestCase):
    """Of test_io.IOTest: the methods below, as they are."""

    open = staticmethod(open_binary)
    BytesIO = io.BytesIO
    SEEK_SET, SEEK_CUR, SEEK_END = os.SEEK_SET, os.SEEK_CUR, os.SEEK_END
    LARGE = test_io.IOTest.LARGE
    UnsupportedOperation = io.UnsupportedOperation
    IOBase = io.IOBase
    setUp = test_io.IOTest.setUp
    tearDown = test_io.IOTest.tearDown


for name in [
    "write_ops", "read_ops", "large_file_ops", "test_raw_file_io", "test_buffered_file_io", "test_readline",
    "test_large_file_ops", "test_with_open", "test_append_mode_tell",
]:  # fmt: skip
    setattr(IOTest, name, getattr(test_io.IOTest, name))


class AutoFileTests(test_file.AutoFileTests, unittest.TestCase):  # type: ignore[name-defined, misc]
    """test_file.AutoFileTests, without the one for text files."""

    open = staticmethod(open_binary)
    testReadinto_text = None


class FileIOTests(test_fileio.AutoFileTests, unittest.TestCase):  # type: ignore[name-defined, misc]
    """test_fileio.AutoFileTests, without those that need a descriptor or the text of FileIO's `repr`."""

    FileIO = staticmethod(millpond.open)
    modulename = "millpond"

    def setUp(self) -> None:
        self.f = millpond.open(os_helper.TESTFN, "w")

    testBlksize = testRepr = testReprNoCloseFD = testRecursiveRepr = test_subclass_repr = testErrors = None
    testOpenDirFD = testErrnoOnClose = None


# They close the descriptor below the file, and expect EBADF.
for name in dir(FileIOTests):
    if name.startswith("testErrnoOn"):
        setattr(FileIOTests, name, None)
