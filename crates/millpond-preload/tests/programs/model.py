"""Random operations on a file, each mirrored on a bytearray; then threads, mmap, subprocesses."""
import mmap
import os
import random
import sys
import threading

seed = int(sys.argv[1])
rng = random.Random(seed)
print("seed", seed)


def operations(path, count):
    model = bytearray()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    at = 0
    for step in range(count):
        kind = rng.randrange(16)
        where = rng.randrange(0, 300_000)
        size = rng.choice([0, 1, 100, 4096, 5000, 70_000])
        data = rng.randbytes(size)

        def put(offset):
            if not data:
                return
            if offset > len(model):
                model.extend(bytes(offset - len(model)))
            model[offset : offset + size] = data

        if kind < 3:
            assert os.pwrite(fd, data, where) == size
            put(where)
        elif kind < 6:
            assert os.pread(fd, size, where) == model[where : where + size], (step, where, size)
        elif kind == 6:
            at = os.lseek(fd, where, os.SEEK_SET)
        elif kind == 7:
            assert os.write(fd, data) == size
            put(at)
            at += size
        elif kind == 8:
            got = os.read(fd, size)
            assert got == model[at : at + size], step
            at += len(got)
        elif kind == 9:
            os.ftruncate(fd, where)
            if where < len(model):
                del model[where:]
            else:
                model.extend(bytes(where - len(model)))
        elif kind == 10:
            half = size // 2
            assert os.pwritev(fd, [data[:half], data[half:]], where) == size
            put(where)
        elif kind == 11:
            parts = [bytearray(size // 3), bytearray(size - size // 3)]
            got = os.preadv(fd, parts, where)
            assert b"".join(parts)[:got] == model[where : where + size], step
        elif kind == 12:
            at = os.lseek(fd, 0, os.SEEK_END)
            assert at == len(model) == os.fstat(fd).st_size, step
        elif kind == 13:
            with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) if model else open(os.devnull) as view:
                if model:
                    assert view[:] == model, step
        elif kind == 14:
            os.close(fd)
            fd = os.open(path, os.O_RDWR)
            at = 0
        else:
            os.fsync(fd)
    os.close(fd)
    with open(path, "rb") as file:
        assert file.read() == model
    return model


def threads(path):
    pages = 64
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    for page in range(pages):
        os.pwrite(fd, bytes([page]) * 4096, page * 4096)
    failed = []

    def work(number):
        own = random.Random(seed * 100 + number)
        for _ in range(1500):
            page = own.randrange(pages)
            if page % 4 == number:
                os.pwrite(fd, bytes([own.randrange(256)]) * 4096, page * 4096)
            got = os.pread(fd, 4096, page * 4096)
            if got != got[:1] * 4096:
                failed.append(page)

    all_threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    assert not failed, failed
    os.close(fd)


def mapped(path):
    with open(path, "wb+") as file:
        file.write(b"a" * 100_000)
        file.flush()
        with mmap.mmap(file.fileno(), 0) as view:
            view[5000:5005] = b"hello"
            file.seek(5000)
            assert file.read(5) == b"hello"
            os.pwrite(file.fileno(), b"there", 9000)
            assert view[9000:9005] == b"there"


def objects(path):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"line {n} ü\n" for n in range(20_000))
    with open(path, "r+", encoding="utf-8") as file:
        assert sum(1 for _ in file) == 20_000
        file.write("more\n")
    with open(path, "a", encoding="utf-8") as one, open(path, "rb") as two:
        one.write("appended\n")
        one.flush()
        assert two.read().endswith(b"more\nappended\n")


def children(path):
    with open(path, "wb+", buffering=0) as file:
        file.write(b"0123456789" * 1000)
        file.seek(10)
        pid = os.fork()
        if pid == 0:
            os.write(file.fileno(), b"child")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert file.tell() == 15
        assert os.pread(file.fileno(), 5, 10) == b"child"


model = operations("data", 3000)
with open("expected", "wb") as out:
    out.write(model)
threads("threads")
mapped("mapped")
objects("objects")
children("children")
