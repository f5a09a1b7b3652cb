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


class ReadlineTest(unittest.TestCase):
    """`readline` and iteration of the three classes agree with io.FileIO, for each limit."""

    def test_lines(self) -> None:
        contents = [b"", b"\n", b"a", b"a\nb\n\nccc", os.urandom(5000), b"x" * 600 + b"\n" + b"y" * 513]
        for content in contents:
            with open("lines", "wb") as made:
                made.write(content)
            for limit in [-1, 0, 1, 2, 511, 512, 513, 100_000, None]:
                with millpond.open("lines") as ours, io.FileIO("lines") as theirs:
                    for _ in range(20):
                        self.assertEqual(ours.readline(limit), theirs.readline(limit))
                        self.assertEqual(ours.tell(), theirs.tell())
            for hint in [-1, 0, 1, 3, 100_000, None]:
                with millpond.open("lines") as ours, io.FileIO("lines") as theirs:
                    self.assertEqual(ours.readlines(hint), theirs.readlines(hint))


class RandomCallsTest(unittest.TestCase):
    """Random calls have the results of an unbuffered file of `io`."""

    def test_calls(self) -> None:
        import random

        seed = int(os.environ.get("SEED", random.randrange(1 << 32)))
        print("SEED", seed)
        chosen = random.Random(seed)
        for mode in ["w+b", "a+b", "x+b"]:
            for name in ["ours", "theirs"]:
                if os.path.exists(name):
                    os.unlink(name)
            with millpond.open("ours", mode) as ours, open("theirs", mode, buffering=0) as theirs:
                for _ in range(2000):
                    size, at = chosen.randrange(20_000), chosen.randrange(100_000)
                    data = chosen.randbytes(size)
                    call = chosen.choice([
                        lambda file: file.write(data), lambda file: file.read(size), lambda file: file.seek(at),
                        lambda file: file.seek(-size, 2), lambda file: file.seek(size - 10_000, 1),
                        lambda file: file.tell(), lambda file: file.readline(size), lambda file: file.truncate(at),
                        lambda file: file.readinto(bytearray(size)), lambda file: file.read(),
                    ])  # fmt: skip
                    results = []
                    for file in (ours, theirs):
                        try:
                            results.append(call(file))
                        except OSError as error:
                            results.append(error.errno)
                    self.assertEqual(results[0], results[1])
                    self.assertEqual(ours.tell(), theirs.tell())
            with open("ours", "rb") as one, open("theirs", "rb") as two:
                self.assertEqual(one.read(), two.read())


