"""Servers (`millpond serve`) for tests, and a count of the requests to a store of local files."""

import ctypes
import os
import signal
import struct
import subprocess
from pathlib import Path

import pytest

IN_OPEN = 0x20


def millpond_command() -> str:
    """The command: that of `../test`, or the newest build."""
    given = os.environ.get("MILLPOND_COMMAND")
    if given:
        return given
    target = Path(os.environ.get("CARGO_TARGET_DIR") or Path(__file__).parents[3] / "target")
    built = sorted(target.glob("*/millpond"), key=lambda path: path.stat().st_mtime)
    if not built:
        pytest.skip("there is no command millpond: cargo build -p millpond-cli")
    return str(built[-1])


class Server:
    """A server of the files in a folder. It ends with the test."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.folder = folder
        self.socket = socket
        self.process: "subprocess.Popen[str] | None" = None

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def start(self, *arguments: str, freshness: str = "immutable", store: "str | None" = None) -> None:
        words = [millpond_command(), "serve", "--socket", str(self.socket), "--store", store or self.url]
        words += ["--memory", "64M", "--freshness", freshness, *arguments]
        environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true"}
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert self.process.stdout is not None
        printed = []
        for line in self.process.stdout:
            printed.append(line)
            if line == "serving\n":
                return
        raise AssertionError("".join(printed))

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


class Opens:
    """Counts the times that files in a folder are opened, by any process: each is a request to the store."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert libc.inotify_add_watch(self.descriptor, os.fsencode(folder), IN_OPEN) >= 0

    def names(self) -> "list[str]":
        """The names that were opened since the last call, in order."""
        try:
            events = os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            return []
        names = []
        while events:
            _, mask, _, length = struct.unpack_from("iIII", events)
            if mask & IN_OPEN and length:
                names.append(events[16 : 16 + length].rstrip(b"\0").decode())
            events = events[16 + length :]
        return names

    def close(self) -> None:
        os.close(self.descriptor)
