"""Times cached reads of 4 KiB by one thread: Millpond beside the kernel's calls, interleaved in one run.

    python bench.py [ROUNDS]

Each round times each case for the same random offsets of a file of 16 MiB, in turn. Printed are the median of the rounds
and their quartiles, in ns for a read, and the ratio of the medians to that of the peer: less is better.
"""

import io
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import millpond

FILE_BYTES = 16 << 20
BLOCK_BYTES = 4096
READS = 20_000


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 31
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        with open(path, "wb") as made:
            made.write(random.randbytes(FILE_BYTES))
        engine = millpond.Engine(cache_bytes=64 << 20, admission="always")
        with engine.open(path) as pond, open(path, "rb", buffering=0) as raw:
            pond.read()
            print_times(time_cases(pond, raw, rounds))


def time_cases(pond: millpond.File, raw: io.FileIO, rounds: int) -> "dict[str, list[float]]":
    buffer = bytearray(BLOCK_BYTES)
    buffers = [buffer]
    fd = raw.fileno()
    os_preadv, preadv = os.preadv, pond.preadv
    pond_seek, pond_readinto, raw_seek, raw_readinto = pond.seek, pond.readinto, raw.seek, raw.readinto

    def by_os_preadv(offsets: "list[int]") -> None:
        for offset in offsets:
            os_preadv(fd, buffers, offset)

    def by_preadv(offsets: "list[int]") -> None:
        for offset in offsets:
            preadv(buffers, offset)

    def by_file_io(offsets: "list[int]") -> None:
        for offset in offsets:
            raw_seek(offset)
            raw_readinto(buffer)

    def by_readinto(offsets: "list[int]") -> None:
        for offset in offsets:
            pond_seek(offset)
            pond_readinto(buffer)

    def by_os_pread(offsets: "list[int]") -> None:
        for offset in offsets:
            os.pread(fd, BLOCK_BYTES, offset)

    def by_pread(offsets: "list[int]") -> None:
        for offset in offsets:
            pond.pread(BLOCK_BYTES, offset)

    cases: "list[Callable[[list[int]], None]]"
    cases = [by_os_preadv, by_preadv, by_file_io, by_readinto, by_os_pread, by_pread]
    times: "dict[str, list[float]]" = {case.__name__[3:]: [] for case in cases}
    for _ in range(rounds):
        offsets = [random.randrange(FILE_BYTES // BLOCK_BYTES) * BLOCK_BYTES for _ in range(READS)]
        for case in cases:
            begun = time.perf_counter_ns()
            case(offsets)
            times[case.__name__[3:]].append((time.perf_counter_ns() - begun) / READS)
    return times


PEERS = {"preadv": "os_preadv", "readinto": "file_io", "pread": "os_pread"}
NAMES = {
    "os_preadv": "os.preadv",
    "preadv": "File.preadv",
    "file_io": "FileIO.seek, readinto",
    "readinto": "File.seek, readinto",
    "os_pread": "os.pread",
    "pread": "File.pread",
}


def print_times(times: "dict[str, list[float]]") -> None:
    print(f"{'':24}{'ns':>8}{'quartiles':>16}   ratio to its peer")
    for case, all_rounds in times.items():
        median = statistics.median(all_rounds)
        first, _, third = statistics.quantiles(all_rounds, n=4)
        peer = PEERS.get(case)
        ratio = f"{median / statistics.median(times[peer]):.2f}" if peer else ""
        print(f"{NAMES[case]:24}{median:8.0f}{first:8.0f}{third:8.0f}   {ratio}")


if __name__ == "__main__":
    main()
