"""Goal: `millpond.store` uses a running `millpond serve` as docs/python.md says: processes share its cache, forks and deaths
are survived, other servers are not used, and each change is one log line."""

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import millpond
import pytest
from conftest import child_status, content
from servers import Opens, Server

Run = Callable[..., Any]
PART = 200_000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server at the usual socket that is not started, of a folder with the object `pond`."""
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "pond").write_bytes(content(0, 1 << 20))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    server = Server(tmp_path / "objects", tmp_path / "run" / "millpond" / "serve.sock")
    yield server
    server.end(signal.SIGKILL)


@pytest.fixture
def opens(server: Server) -> Iterator[Opens]:
    opens = Opens(server.folder)
    yield opens
    opens.close()


def read(store: millpond.Store, start: int = 5000) -> bytes:
    data = store.get_range("pond", start=start, length=PART)
    assert data == content(start, PART)
    return data


def read_until(store: millpond.Store, is_reached: Callable[[], bool], seconds: float = 1) -> None:
    end = time.monotonic() + seconds
    while not is_reached():
        read(store)
        assert time.monotonic() < end, store.stats()
        time.sleep(0.01)


@pytest.mark.parametrize("is_named", [False, True])
def test_attach(server: Server, opens: Opens, is_named: bool) -> None:
    server.start()
    opens.names()
    socket = server.socket if is_named else None
    store = millpond.store(server.url, socket=socket)
    other = millpond.store(server.url, socket=socket)
    for _ in range(3):
        for one in [store, other]:
            read(one)
            assert one.get("pond").bytes() == content(0, 1 << 20)
            assert one.get_ranges("pond", starts=[7, 900_000], lengths=[3, 9]) == [content(7, 3), content(900_000, 9)]
    assert set(opens.names()) == {"pond"}
    for one in [store, other]:
        stats = one.stats()
        assert stats["is_attached"] and stats["attaches"] == 1 and stats["fallbacks"] == 0
        assert stats["server_hits"] >= 6 and 1 <= stats["server_misses"] <= 4, stats
        # Nothing is cached in this process.
        assert (stats["requests"], stats["memory_bytes"]) == (0, 0)
    opens.names()
    fresh = millpond.store(server.url, socket=socket)
    read(fresh)
    assert fresh.get("pond").bytes() == content(0, 1 << 20)
    assert opens.names() == [], "all is in the server's cache"


def test_asyncio(server: Server) -> None:
    server.start()
    store = millpond.store(server.url)

    async def main() -> None:
        for _ in range(2):
            reads = [store.get_range_async("pond", start=n * 1000, length=1000) for n in range(300)]
            assert b"".join(await asyncio.gather(*reads)) == content(0, 300_000)
        assert store.stats()["server_hits"] >= 300

    asyncio.run(main())


def test_writes_are_seen_by_all(server: Server) -> None:
    """With objects that never change by others, a write by a client is the only reason to read again."""
    server.start()
    store, other = millpond.store(server.url), millpond.store(server.url)
    for round in range(5):
        store.put("lake", content(round, 50_000))
        for one in [store, other]:
            assert one.get_range("lake", start=0, end=50_000) == content(round, 50_000)
    with other.open_writer("lake") as writer:
        writer.write(b"written")
    assert store.get("lake").bytes() == b"written"
    store.rename("lake", "sea")
    assert other.get("sea").bytes() == b"written"
    store.delete("sea")
    with pytest.raises(FileNotFoundError):
        other.get("sea")
    (server.folder / "pond").write_bytes(b"changed by another program")
    store.forget("pond")
    assert other.get("pond").bytes() == b"changed by another program"


def test_a_forked_child(server: Server, opens: Opens) -> None:
    server.start()
    store = millpond.store(server.url)
    read(store)
    opens.names()

    def work() -> None:
        read(store)
        read(store)
        stats = store.stats()
        assert stats["is_attached"] and stats["attaches"] == 2, stats
        assert stats["fallbacks"] == 0 and stats["server_hits"] >= 1, stats
        assert child_status(lambda: read(store) and None) == 0

    assert child_status(work) == 0
    assert opens.names() == [], "children read the server's cache"
    read(store)
    assert store.stats()["attaches"] == 1


def test_forks_beside_busy_threads(server: Server) -> None:
    import threading

    server.start()
    store = millpond.store(server.url)
    stop = threading.Event()

    def busy(seed: int) -> None:
        while not stop.is_set():
            read(store, seed * 1000)
            store.forget("pond")
            assert len(millpond.store(server.url).get("pond").bytes()) == 1 << 20

    threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert child_status(lambda: read(store) and read(store) and None) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def read_in_pool(store: millpond.Store) -> "tuple[bool, int]":
    for start in range(0, 800_000, 100_000):
        read(store, start)
    return store.stats()["is_attached"], store.stats()["fallbacks"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools(server: Server, opens: Opens, method: str) -> None:
    server.start()
    store = millpond.store(server.url, socket=server.socket)
    assert store.get("pond").bytes() == content(0, 1 << 20)
    opens.names()
    with multiprocessing.get_context(method).Pool(3) as pool:
        assert set(pool.map(read_in_pool, [store] * 12, chunksize=1)) == {(True, 0)}
    assert opens.names() == []


def test_a_killed_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millpond")
    server.start()
    store = millpond.store(server.url, socket=server.socket, freshness="immutable")
    read(store)
    caplog.clear()
    for _ in range(2):
        server.end(signal.SIGKILL)
        fallbacks = store.stats()["fallbacks"]
        read_until(store, lambda: store.stats()["fallbacks"] > fallbacks)
        for _ in range(20):
            read(store)
        store.put("lake", b"lake")
        assert store.get("lake").bytes() == b"lake"
        stats = store.stats()
        assert not stats["is_attached"] and stats["requests"] <= 3, dict(stats)
        assert caplog.messages == [
            f"{server.url}: the server at {server.socket} is gone; cached in this process until one answers"
        ]
        assert caplog.records[0].levelname == "WARNING"
        caplog.clear()
        server.start()
        read_until(store, lambda: store.stats()["is_attached"])
        assert store.get("lake").bytes() == b"lake"
        read(store)
        assert caplog.messages == [f"{server.url}: cached by the server at {server.socket}"]
        caplog.clear()


def test_one_disk_after_a_killed_server(server: Server, tmp_path: Path) -> None:
    """Incident: of the stores whose server had ended, one got the directory, and the reads of all others failed."""
    server.start()
    disk = (str(tmp_path / "tier"), 64 << 20)
    stores = [millpond.store(server.url, socket=server.socket, disk=disk) for _ in range(3)]
    server.end(signal.SIGKILL)
    for store in stores:
        read(store)
        assert not store.stats()["is_attached"]


def test_a_server_that_starts_later(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millpond")
    store = millpond.store(server.url, freshness="immutable")
    read(store)
    read(store)
    assert store.stats()["requests"] == 1, "it has a cache without a server, too"
    assert not [line for line in caplog.messages if "server" in line]
    server.start()
    caplog.clear()
    read_until(store, lambda: store.stats()["is_attached"])
    hits = store.stats()["server_hits"]
    read(store)
    read(store)
    assert store.stats()["server_hits"] > hits
    assert caplog.messages == [f"{server.url}: cached by the server at {server.socket}"]


def test_a_child_whose_server_is_gone(server: Server) -> None:
    server.start()
    store = millpond.store(server.url)
    read(store)
    server.end(signal.SIGKILL)

    def work() -> None:
        read(store)
        assert store.stats()["fallbacks"] == 1

    assert child_status(work) == 0


def test_no_server_at_a_named_socket(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millpond")
    store = millpond.store(server.url, socket=server.socket)
    expected = f"{server.url}: no server at {server.socket}; cached in this process until one answers"
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("WARNING", expected) in lines
    caplog.clear()
    for _ in range(10):
        read(store)
    assert caplog.messages == []


def test_a_store_without_a_server(server: Server) -> None:
    server.start()
    store = millpond.store(server.url, socket=False)
    read(store)
    stats = store.stats()
    assert not stats["is_attached"] and stats["requests"] == 1 and stats["fallbacks"] == 0
    assert pickle.loads(pickle.dumps(store)) is store
    for wrong, error in [(True, TypeError), ("", ValueError), (7, TypeError)]:
        with pytest.raises(error):
            millpond.store(server.url, socket=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no server can read"):
        millpond.store("memory://", socket=server.socket)


@pytest.mark.parametrize("is_named", [False, True])
def test_another_store(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_named: bool
) -> None:
    caplog.set_level(logging.INFO, "millpond")
    (tmp_path / "other").mkdir()
    server.start(store=f"file://{tmp_path}/other")
    store = millpond.store(server.url, socket=server.socket if is_named else None)
    read(store)
    read(store)
    assert not store.stats()["is_attached"]
    lines = [record for record in caplog.records if "is not used" in record.getMessage()]
    assert len(lines) == 1 and "other" in lines[0].getMessage()
    assert lines[0].levelname == ("WARNING" if is_named else "INFO")


@pytest.mark.parametrize(
    ("of_server", "wanted", "is_used"),
    [
        ("immutable", "revalidate", False),
        ("immutable", 60, False),
        ("immutable", "immutable", True),
        ("immutable", None, True),
        ("30s", 60, True),
        ("60s", 30, False),
        ("revalidate", 0.5, True),
        ("30s", "revalidate", False),
    ],
)
def test_freshness(server: Server, of_server: str, wanted: Any, is_used: bool) -> None:
    """A server that asks the store less often than the program wants is not used."""
    server.start(freshness=of_server)
    store = millpond.store(server.url, freshness=wanted)
    read(store)
    assert store.stats()["is_attached"] == is_used
    (server.folder / "pond").write_bytes(content(1, 1 << 20))
    if wanted == "revalidate":
        assert store.get_range("pond", start=0, length=5) == content(1, 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_server_of_another_user(server: Server, tmp_path: Path) -> None:
    """Where the directories let another user connect, the server refuses it."""
    server.start()
    store = millpond.store(server.url, socket=False)
    read(store)
    # pytest's directories are for this user only.
    for folder in [server.socket.parent, *tmp_path.parents[:3], tmp_path, tmp_path / "run", server.folder]:
        if str(folder) not in ("/", "/tmp"):
            os.chmod(folder, 0o755)
    os.chmod(server.socket, 0o777)
    os.chmod(server.folder / "pond", 0o644)

    def work() -> None:
        lines = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("millpond").addHandler(handler)
        os.setuid(65534)
        store = millpond.store(server.url, socket=server.socket)
        read(store)
        read(store)
        assert not store.stats()["is_attached"]
        refused = [line for line in lines if "is not used" in line]
        assert len(refused) == 1 and "each user has an own server" in refused[0], lines

    assert child_status(work) == 0


def test_a_socket_that_is_no_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.socket.parent.mkdir()
    server.socket.write_text("")
    read(millpond.store(server.url, socket=server.socket))
    server.socket.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(server.socket))
        silent.listen()
        caplog.clear()
        begun = time.monotonic()
        store = millpond.store(server.url, socket=server.socket)
        for _ in range(10):
            read(store)
        assert time.monotonic() - begun < 2.5
        assert len([line for line in caplog.messages if "does not greet" in line]) == 1


@pytest.mark.parametrize("call", ["store.get('slow')", "asyncio.run(store.get_async('slow'))"])
def test_ctrl_c_ends_a_wait(server: Server, run: Run, call: str) -> None:
    """A FIFO without a writer is an object that never answers the server."""
    server.start()
    os.mkfifo(server.folder / "slow")
    program = f"""
        import asyncio, os, signal, sys, threading, time, millpond
        store = millpond.store(sys.argv[1], socket=sys.argv[2])
        store.get("pond")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        try:
            {call}
        except KeyboardInterrupt:
            assert time.monotonic() - begun < 5
            assert len(store.get("pond").bytes()) == 1 << 20
            assert store.stats()["is_attached"]
            print("interrupted", flush=True)
    """
    assert run(program, server.url, server.socket).stdout == "interrupted\n"


def test_the_interpreter_ends_with_reads_in_flight(server: Server, run: Run) -> None:
    server.start()
    program = """
        import sys, threading, millpond
        store = millpond.store(sys.argv[1], socket=sys.argv[2])
        def read():
            while True:
                store.get("pond").bytes()
                store.forget("pond")
        for _ in range(4):
            threading.Thread(target=read, daemon=True).start()
        store.get("pond")
        print("end", flush=True)
    """
    for _ in range(5):
        done = run(program, server.url, server.socket)
        assert done.stdout == "end\n", done.stderr


def test_no_thread_without_a_server(run: Run, tmp_path: Path) -> None:
    program = """
        import os, sys, millpond
        os.environ["XDG_RUNTIME_DIR"] = os.getcwd()
        store = millpond.store("file://" + os.getcwd())
        names = sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
        assert not [name for name in names if name in ("millpond-client", "millpond-store")], names
    """
    run(program)


def first_read(arguments: "tuple[str, str, Any]") -> "tuple[bool, int]":
    url, path, start = arguments
    store = millpond.store(url, socket=path)
    start.wait()
    data = store.get("big").bytes()
    assert data == content(0, 3_000_000)
    return store.stats()["is_attached"], store.stats()["fallbacks"]


def test_eighty_processes_read_an_uncached_object_at_once(server: Server, opens: Opens) -> None:
    """Goal: one request to the store, and no wrong byte."""
    (server.folder / "big").write_bytes(content(0, 3_000_000))
    server.start()
    opens.names()
    context = multiprocessing.get_context("fork")
    start, outcomes = context.Barrier(80), context.SimpleQueue()

    def work() -> None:
        outcomes.put(first_read((server.url, str(server.socket), start)))

    processes = [context.Process(target=work) for _ in range(80)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 80
    assert [outcomes.get() for _ in range(80)] == [(True, 0)] * 80
    assert opens.names() == ["big"]


def test_fsspec(server: Server, opens: Opens) -> None:
    fsspec = pytest.importorskip("fsspec", reason="there is no fsspec")
    # The file systems of local files have the store file:///.
    server.start(store="file:///")
    opens.names()
    path = f"{server.folder}/pond"
    for freshness, is_used in [(None, True), ("immutable", True), ("revalidate", False)]:
        fs = fsspec.filesystem("millpond+file", socket=str(server.socket), freshness=freshness, memory=16 << 20)
        for copy in [fs, pickle.loads(pickle.dumps(fs))]:
            assert copy.cat_file(path, start=5, end=50_000) == content(5, 49_995)
            with copy.open(path) as file:
                file.seek(700_000)
                assert file.read(1000) == content(700_000, 1000)
            [store] = copy._stores.values()
            assert store.stats()["is_attached"] == is_used
            assert is_used or store.stats()["requests"] > 0
    assert fsspec.filesystem("millpond+file", socket=False).cat_file(path) == content(0, 1 << 20)
