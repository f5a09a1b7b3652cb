#!/usr/bin/env python3
"""Compares caches of objects for processes that read the same data again and again: docs/python.md, "Epochs".

    VGW_KEEP_ALIVE=true scripts/store-server versitygw \\
        PYTHON crates/millpond-python/bench_epochs.py --millpond COMMAND [OPTION...]

Each process reads all objects in pieces of 256 KiB, in an order of its own, twice. The second time is measured: requests
that reach the store, by its log; the time from the common start to the last end; the proportional set size of all
processes and of the server, less that of the same processes before their first read; and the bytes on the disk. Each piece
names its place at both ends, which is checked. The sides take turns. The directory caches of fsspec have a directory for
each process. A side whose processes fail is left out. The side "one mapping" is no cache: slices of an `mmap` of one file in
/dev/shm that has all objects, and so the least that a copy to a `bytes` object takes. PYTHON has the packages millpond (with
the feature s3) and s3fs; COMMAND is `millpond`, built with the feature s3.
"""

import argparse
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PIECE = 256 << 10
OBJECT = 16 << 20


def memory_for(total: int) -> int:
    """The limit of a cache for so many bytes: with a sixteenth more than the data, pages were evicted."""
    return total + total // 8 + (64 << 20)


def piece_of(number: int) -> bytes:
    mark = struct.pack("<Q", number)
    return mark + bytes(PIECE - 16) + mark


def s3_options() -> "dict[str, str]":
    return {
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": os.environ["AWS_ENDPOINT"],
    }


class MappedObjects:
    """The objects one after the other in a file, as one mapping."""

    def __init__(self, path: Path, names: "list[str]") -> None:
        with open(path, "rb") as file:
            self.mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.starts = {name: number * OBJECT for number, name in enumerate(names)}

    def open(self, name: str, mode: str) -> "MappedObject":
        return MappedObject(self.mapping, self.starts[name])


class MappedObject:
    def __init__(self, mapping: mmap.mmap, start: int) -> None:
        self.mapping, self.start, self.at = mapping, start, 0

    def seek(self, at: int) -> None:
        self.at = self.start + at

    def read(self, length: int) -> bytes:
        return self.mapping[self.at : self.at + length]


def write_objects(path: Path, count: int) -> None:
    with open(path, "wb") as file:
        for number in range(count * (OBJECT // PIECE)):
            file.write(piece_of(number))


def file_system(side: str, folder: Path, seed: int, total: int) -> "tuple[Any, dict[str, Any]]":
    """The file system of a side, and the arguments of its `open`."""
    import fsspec

    if side == "s3fs":
        return fsspec.filesystem("s3", **s3_options()), {"cache_type": "none"}
    if side in ("blockcache", "filecache"):
        options = {"target_protocol": "s3", "target_options": s3_options(), "cache_storage": str(folder / f"cache-{seed}")}
        if side == "blockcache":
            return fsspec.filesystem(side, **options), {"block_size": PIECE}
        return fsspec.filesystem(side, **options), {}
    options = {"freshness": "immutable", "endpoint": os.environ["AWS_ENDPOINT"], "allow_http": True}
    options["socket"] = str(folder / "serve.sock") if side == "millpond, server" else False
    return fsspec.filesystem("millpond+s3", memory=memory_for(total), region="us-east-1", **options), {}


def proportional_bytes(process: "int | str") -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ValueError("no Pss")


def read_or_abort(*arguments: Any) -> None:
    try:
        read_epochs(*arguments)
    except BaseException:
        arguments[4].abort()
        raise


def read_epochs(side: str, folder: str, names: "list[str]", seed: int, barrier: Any, outcomes: Any) -> None:
    fs: Any
    if side == "one mapping":
        fs, arguments = MappedObjects(Path(folder) / "objects", names), {}
    else:
        fs, arguments = file_system(side, Path(folder), seed, len(names) * OBJECT)
    order = [(index, at) for index in range(len(names)) for at in range(OBJECT // PIECE)]
    wrong = 0
    before = 0
    barrier.wait()
    before = proportional_bytes("self")
    barrier.wait()
    files: "dict[int, Any]" = {}
    times = []
    for epoch in range(2):
        random.Random(seed * 2 + epoch).shuffle(order)
        barrier.wait()
        started = time.monotonic()
        for index, at in order:
            file = files.get(index)
            if file is None:
                file = files[index] = fs.open(names[index], "rb", **arguments)
            file.seek(at * PIECE)
            data = file.read(PIECE)
            mark = struct.pack("<Q", index * (OBJECT // PIECE) + at)
            wrong += len(data) != PIECE or data[:8] != mark or data[-8:] != mark
        times.append((started, time.monotonic()))
        barrier.wait()
    # All at the same time, while all still have their memory.
    after = proportional_bytes("self")
    barrier.wait()
    outcomes.put((times, after - before, wrong))


def lines_of(log: Path) -> int:
    time.sleep(0.3)
    return log.read_bytes().count(b"\n")


def measure(side: str, arguments: argparse.Namespace, names: "list[str]") -> "dict[str, float]":
    is_mapped = side == "one mapping"
    folder = Path(tempfile.mkdtemp(prefix="epochs-", dir="/dev/shm" if is_mapped else arguments.folder))
    if is_mapped:
        write_objects(folder / "objects", len(names))
    total = len(names) * OBJECT
    server = None
    if side == "millpond, server":
        words = [arguments.millpond, "serve", "--store", f"s3://{os.environ['MILLPOND_STORE_BUCKET']}"]
        words += ["--socket", str(folder / "serve.sock"), "--freshness", "immutable"]
        words += ["--memory", str(memory_for(total))]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and any(line == "serving\n" for line in server.stdout)
    context = multiprocessing.get_context("spawn")
    barrier, outcomes = context.Barrier(arguments.processes + 1), context.SimpleQueue()
    server_before = proportional_bytes(server.pid) if server else 0
    processes = [
        context.Process(target=read_or_abort, args=(side, str(folder), names, seed, barrier, outcomes))
        for seed in range(arguments.processes)
    ]
    for process in processes:
        process.start()
    try:
        barrier.wait()  # all are ready
        barrier.wait()  # all have looked at their memory
        barrier.wait()  # the first epoch
        barrier.wait()
        requests = lines_of(arguments.log)
        barrier.wait()  # the second epoch
        barrier.wait()
        requests = lines_of(arguments.log) - requests
        server_bytes = proportional_bytes(server.pid) - server_before if server else 0
        barrier.wait()
        read = [outcomes.get() for _ in processes]
    except threading.BrokenBarrierError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        # Also after a failure: their ends must not meet the next side.
        for process in processes:
            process.join()
        if server:
            server.terminate()
            server.wait()
    on_disk = 0 if is_mapped else sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    spans = [(min(one[0][n][0] for one in read), max(one[0][n][1] for one in read)) for n in range(2)]
    return {
        "requests": requests,
        "first": spans[0][1] - spans[0][0],
        "second": spans[1][1] - spans[1][0],
        "memory": (sum(one[1] for one in read) + server_bytes) / (1 << 20),
        "disk": on_disk / (1 << 20),
        "wrong": sum(one[2] for one in read),
    }


SIDES = ["s3fs", "blockcache", "filecache", "millpond, process", "millpond, server", "one mapping"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millpond", required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="for the caches on a disk")
    parser.add_argument("--side", action="append", choices=SIDES)
    arguments = parser.parse_args()
    arguments.log = Path(os.environ["MILLPOND_STORE_LOG"])
    import fsspec

    bucket = os.environ["MILLPOND_STORE_BUCKET"]
    names = [f"{bucket}/epochs/{number}" for number in range(max(1, (arguments.mib << 20) // OBJECT))]
    fs = fsspec.filesystem("s3", **s3_options())
    for index, name in enumerate(names):
        pieces = OBJECT // PIECE
        fs.pipe_file(name, b"".join(piece_of(index * pieces + at) for at in range(pieces)))
    assert lines_of(arguments.log) > 0, "the log has no requests"
    sides = arguments.side or SIDES
    measured: "dict[str, list[dict[str, float]]]" = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            if side not in measured:
                continue
            try:
                measured[side].append(measure(side, arguments, names))
            except threading.BrokenBarrierError:
                print(f"{side}: left out, as its processes have failed", file=sys.stderr, flush=True)
                del measured[side]
                continue
            print(side, measured[side][-1], file=sys.stderr, flush=True)
    print(f"{len(names) * OBJECT >> 20} MiB, {arguments.processes} processes; medians of {arguments.rounds} rounds")
    print("| | requests | second epoch | memory | disk | first epoch | wrong pieces |")
    print("|---|---|---|---|---|---|---|")
    for side, rounds in measured.items():
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        times = sorted(one["second"] for one in rounds)
        print(
            f"| {side} | {middle['requests']:.0f} | {middle['second']:.2f} s ({times[0]:.2f} to {times[-1]:.2f}) "
            f"| {middle['memory']:.0f} MiB | {middle['disk']:.0f} MiB | {middle['first']:.1f} s "
            f"| {sum(one['wrong'] for one in rounds):.0f} |"
        )


if __name__ == "__main__":
    main()
