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


def uses_a_store() -> tuple[bytes, int, list[str]]:
    store = millpond.store("memory://typed", memory=1 << 20, freshness=1.5, options={})
    put = store.put("pond", bytearray(1), attributes={"Content-Type": "text/plain"})
    store.put("pond", b"", mode=put)
    result = store.get("pond", options={"range": (0, 1), "if_match": put["e_tag"]})
    names = [meta["path"] for chunk in store.list() for meta in chunk]
    with store.open_writer("lake") as writer:
        writer.write(memoryview(b"lake"))
    return result.bytes(), store.head("pond")["size"], names + store.list_with_delimiter()["common_prefixes"]


def uses_an_endpoint() -> tuple[str, dict[str, str], bytes]:
    store = millpond.store("s3://lakes", socket="/run/serve.sock", freshness=None)
    endpoint: millpond.S3Endpoint = millpond.s3_endpoint({"lakes": store, "mills": "memory://mills"})
    buffer = bytearray(store.get_range_into("pond", bytearray(5), start=0) + store.stats()["fallbacks"])
    return endpoint.duckdb_sql(), endpoint.polars() | endpoint.gdal_env(), bytes(buffer)


async def uses_a_store_async(store: millpond.Store) -> list[bytes]:
    async for chunk in store.list("pond"):
        await store.delete_async([meta["path"] for meta in chunk])
    return await store.get_ranges_async("pond", starts=[0], lengths=[1])
