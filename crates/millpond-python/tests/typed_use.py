"""Programs that mypy accepts: files are passed to functions for files of `io` and `typing`. `../test` checks it."""

import asyncio
import io
import pickle
import zipfile
from typing import IO, BinaryIO

import millpond


def takes_any_file(file: IO[bytes], other: BinaryIO, buffered: io.BufferedIOBase) -> bytes:
    return file.read(1) + other.read(1) + buffered.read1(1)


def uses(path: str) -> tuple[bytes, int, millpond.LockedRange]:
    with millpond.open(path, cache=millpond.Engine(cache_bytes=1 << 20)) as file:
        takes_any_file(file, file, file)
        zipfile.ZipFile(file).close()
        pickle.load(file)
        lines: list[str] = io.TextIOWrapper(file).readlines()
        count: int = file.preadv([bytearray(1), memoryview(bytearray(len(lines)))], 0)
        return file.pread(1, 0), count, file.lock_range(0, 1)


async def uses_asyncio(file: millpond.File) -> int:
    read = await asyncio.gather(file.apread(1, 0), file.apread(2, 0))
    return len(read[0]) + await file.apreadinto(bytearray(1), 0) + file.engine.stats()["hits"]
