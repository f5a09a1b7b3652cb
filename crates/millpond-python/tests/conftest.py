import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Callable

import pytest

# A hung test ends with a trace of its threads.
import faulthandler

faulthandler.dump_traceback_later(300, exit=True)

# A server of the user must not serve the tests. Processes that they start have the same folder.
if "MILLPOND_TESTS_FOLDER" not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="millpond-tests-")
    os.environ["MILLPOND_TESTS_FOLDER"] = os.environ["XDG_RUNTIME_DIR"] = _folder.name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of 1 MiB, whose byte n is n modulo 251."""
    path = tmp_path / "data"
    path.write_bytes(content(0, 1 << 20))
    return path


def content(offset: int, length: int) -> bytes:
    pattern = bytes(range(251))
    start = offset % 251
    return (pattern * (length // 251 + 2))[start : start + length]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a program in a process of its own, in a folder of its own; it fails if the program does."""

    def run(program: str, *arguments: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", str(path), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def child_status(work: Callable[[], None]) -> int:
    """The exit status of a child of fork that does `work`; 1 after an exception, -14 if it hangs."""
    import signal
    import traceback

    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report_skip(report: "pytest.TestReport | pytest.CollectReport") -> None:
    """Reports a skip as the other tests of Millpond do: `./test` lists it, and MILLPOND_STRICT=1 forbids it."""
    if not report.skipped:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    path = os.environ.get("MILLPOND_SKIPPED_FILE")
    if path:
        with open(path, "a") as file:
            file.write(f"crates/millpond-python/{report.nodeid}: {reason}\n")
    if os.environ.get("MILLPOND_STRICT") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped, which MILLPOND_STRICT=1 forbids: {reason}"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    report_skip(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    report_skip(report)
