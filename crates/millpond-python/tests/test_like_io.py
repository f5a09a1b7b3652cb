"""Goal: calls have the results of the same calls of an unbuffered file of `io`."""

import io
import os
import unittest

import millpond
import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)


class ReadlineTest(unittest.TestCase):
    """`readline` and iteration of both classes agree with io.FileIO, for each limit."""

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


class EmptyWriteTest(unittest.TestCase):
    """A write of no bytes leaves the position where it is, in each mode. Incident: an empty append moved it to the end."""

    def test_the_position_stays(self) -> None:
        for mode in ["w+b", "r+b", "a+b"]:
            for at in [0, 3, 20]:
                with open("some", "wb") as made:
                    made.write(b"0123456789")
                with millpond.open("some", mode) as ours:
                    ours.seek(at)
                    self.assertEqual(ours.write(b""), 0)
                    self.assertEqual(ours.tell(), at)
