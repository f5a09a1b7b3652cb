"""Goal: children of fork and spawned processes use files by the rule of docs/python.md; the import costs little; nothing
hangs when it is interrupted or at the end of the interpreter."""

import errno
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable

import millpond
import pytest
from conftest import child_status, content


def test_a_child_reads_by_the_parents_objects(data: Path) -> None:
    with millpond.open(data, "r+b") as file:
        file.seek(100)
        assert file.read(50) == content(100, 50)

        def work() -> None:
            assert file.tell() == 150
            assert file.read(10) == content(150, 10)
            assert file.pread(10, 5) == content(5, 10)
            file.pwrite(b"child", 0)
            file.sync()
            assert file.engine.stats()["memory_bytes"] <= file.engine.cache_bytes
            file.close()

        assert child_status(work) == 0
        assert file.tell() == 150, "the position is not shared"
        assert file.read(10) == content(150, 10)
    assert data.read_bytes()[:5] == b"child"


def test_forks_beside_busy_threads(data: Path) -> None:
    engine = millpond.Engine(cache_bytes=256 << 10)
    file = engine.open(data, "r+b")
    stop = threading.Event()

    def busy(seed: int) -> None:
        n = seed
        while not stop.is_set():
            n = (n * 77 + 13) % 900_000
            file.pread(9000, n)
            with file.lock_range(0, 10):
                file.pwrite(content(n, 100), n)
            millpond.open(data, cache=engine).close()

    threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):

            def work() -> None:
                assert file.pread(9000, 5000) == content(5000, 9000)
                with file.lock_range(0, 10, timeout=5):
                    pass
                assert millpond.open(data).read(3) == content(0, 3)
                file.close()

            assert child_status(work) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_grandchild_has_its_own_engine(data: Path) -> None:
    file = millpond.open(data)
    file.read(10)

    def work() -> None:
        file.read(10)
        assert child_status(lambda: assert_equal(file.read(5), content(20, 5))) == 0
        assert file.read(5) == content(20, 5)

    assert child_status(work) == 0


def assert_equal(left: object, right: object) -> None:
    assert left == right


def test_a_child_finds_renamed_and_removed_files_and_refuses_others(data: Path, tmp_path: Path) -> None:
    file = millpond.open(data)
    data.rename(tmp_path / "renamed")
    data.write_bytes(b"another file of the same name")
    assert child_status(lambda: assert_equal(file.pread(9, 0), content(0, 9))) == 0
    (tmp_path / "renamed").unlink()
    assert child_status(lambda: assert_equal(file.pread(9, 0), content(0, 9))) == 0

    def without_descriptors() -> None:
        os.closerange(3, 1000)
        with pytest.raises(OSError) as raised:
            file.pread(9, 0)
        assert raised.value.errno == errno.ESTALE

    assert child_status(without_descriptors) == 0


def test_a_mode_that_creates_does_so_once(tmp_path: Path) -> None:
    for mode in ["w+b", "x+b", "a+b"]:
        path = tmp_path / mode
        file = millpond.open(path, mode)
        file.write(b"from the parent")
        assert child_status(lambda: assert_equal(file.pread(99, 0), b"from the parent")) == 0
        copy = pickle.loads(pickle.dumps(file))
        assert copy.pread(99, 0) == b"from the parent" and copy.tell() == file.tell()
        assert path.read_bytes() == b"from the parent"


def test_pickles(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    one = millpond.open("data")
    engine = millpond.Engine(cache_bytes=1 << 20)
    two, three = engine.open("data"), engine.open("data")
    monkeypatch.chdir("/")
    copies = pickle.loads(pickle.dumps([one, two, three]))
    assert copies[0].engine is one.engine and copies[0].read(9) == content(0, 9)
    assert copies[1].engine is copies[2].engine is engine


def read_in_worker(file: "millpond.File") -> tuple[bytes, int]:
    return file.pread(9, 100), id(file.engine)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools(data: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    engine = millpond.Engine(cache_bytes=1 << 20)
    file = engine.open(data)
    file.pread(1, 0)
    with context.Pool(2) as pool:
        read = pool.map(read_in_worker, [file] * 8)
    assert {one[0] for one in read} == {content(100, 9)}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_has_the_configured_engine(run: "Run", data: Path, method: str) -> None:
    """Incident: a file of a configured default engine had a cache of 256 MiB in each spawned worker."""
    program = """
        import multiprocessing, sys
        import millpond
        def limit(file):
            return file.engine.cache_bytes, file.engine is millpond.open(sys.argv[1]).engine
        def configure():
            millpond.configure(cache_bytes=32 << 20)
        if __name__ == "__main__":
            millpond.configure(cache_bytes=16 << 20)
            with millpond.open(sys.argv[1]) as file:
                context = multiprocessing.get_context(sys.argv[2])
                with context.Pool(1) as pool:
                    assert pool.map(limit, [file]) == [(16 << 20, True)]
                if sys.argv[2] == "spawn":
                    # The worker's own choice stays.
                    with context.Pool(1, configure) as pool:
                        assert pool.map(limit, [file]) == [(32 << 20, True)]
    """
    run(program, data, method)


def test_the_module_needs_the_interpreters_lock() -> None:
    """Mutexes are never held over a wait for the interpreter's lock, which holds only if there is one. A free-threaded
    interpreter takes it into use for a module that asks for it."""
    source = (Path(__file__).parent.parent / "src" / "lib.rs").read_text()
    assert re.findall(r"#\[pymodule.*\]", source) == ["#[pymodule(gil_used = true)]"]


def test_a_child_may_configure_its_engine(data: Path) -> None:
    millpond.open(data).close()
    with pytest.raises(RuntimeError):
        millpond.configure(cache_bytes=1 << 20)

    def work() -> None:
        millpond.configure(cache_bytes=1 << 20)
        assert millpond.open(data).engine.cache_bytes == 1 << 20
        with pytest.raises(RuntimeError):
            millpond.configure(cache_bytes=2 << 20)

    assert child_status(work) == 0


Run = Callable[..., Any]


def test_the_import_starts_no_thread_and_is_fast(run: Run) -> None:
    program = """
        import io, os, sys, time
        # Of the processor: other load delays the import.
        begun = time.process_time()
        import millpond
        took = time.process_time() - begun
        assert len(os.listdir("/proc/self/task")) == 1
        assert "asyncio" not in sys.modules
        print(took)
    """
    assert min(float(run(program).stdout) for _ in range(5)) <= 0.030


def test_ctrl_c_ends_a_wait(run: Run) -> None:
    program = """
        import os, signal, threading, time, millpond
        file = millpond.open("file", "w+b")
        held = file.lock_range(0, 10)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        try:
            file.lock_range(0, 1)
        except KeyboardInterrupt:
            assert time.monotonic() - begun < 5
            print("interrupted")
    """
    assert run(program).stdout == "interrupted\n"


def test_the_interpreter_ends_with_files_open(run: Run) -> None:
    program = """
        import asyncio, threading, millpond
        file = millpond.open("file", "w+b")
        file.write(b"pond" * 100_000)
        engine = millpond.Engine(cache_bytes=1 << 20)
        other = engine.open("file")
        held = other.lock_range(0, 1)
        def read():
            while True:
                other.pread(200_000, 0)
        for _ in range(3):
            threading.Thread(target=read, daemon=True).start()
        loop = asyncio.new_event_loop()
        view = memoryview(bytearray(100_000))
        tasks = [loop.create_task(other.apreadinto(view, n)) for n in range(50)]
        loop.run_until_complete(asyncio.sleep(0))
        class Late:
            def __del__(self):
                file.pread(1, 0)
        late = Late()
        print("end")
    """
    for _ in range(5):
        assert run(program).stdout == "end\n"


def test_subinterpreters_are_refused(run: Run) -> None:
    program = """
        import sys, millpond
        if sys.version_info >= (3, 13):
            import _interpreters as interpreters
            print(interpreters.exec(interpreters.create(), "import millpond"))
        else:
            import _xxsubinterpreters as interpreters
            try:
                interpreters.run_string(interpreters.create(), "import millpond")
            except Exception as error:
                print(error)
    """
    assert "subinterpreters" in run(program).stdout


def test_signals_run_after_a_read(data: Path) -> None:
    """A read of a regular file is not interrupted; the handler runs when it returns."""
    file = millpond.open(data, cache=millpond.Engine(cache_bytes=256 << 10))
    seen: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert file.pread(100_000, 50) == content(50, 100_000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert len(seen) > 10
