"""Untorn blocks, on an XFS of the test's own. The cuts of power are tests of the engine (`untorn_power`)."""

import errno
import os
import pickle
import subprocess
from pathlib import Path
from typing import Iterator

import millpond
import pytest

BLOCK = 16 << 10


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """An XFS with reflink on a loop device."""
    image, at = tmp_path / "image", tmp_path / "xfs"
    at.mkdir()
    with open(image, "wb") as file:
        file.truncate(400 << 20)
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    for command in [["mkfs.xfs", "-q", "-m", "reflink=1", image], ["mount", "-o", "loop", image, at]]:
        try:
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PATH": path})
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no XFS here: {error}")
    yield at
    subprocess.run(["umount", "--lazy", at], check=True, env={**os.environ, "PATH": path})


def test_blocks_of_a_file(xfs: Path) -> None:
    try:
        file = millpond.open(xfs / "table", "w+b", untorn=BLOCK)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            pytest.skip(str(error))
        raise
    with file:
        assert file.pwrite(b"a" * (4 * BLOCK), 0) == 4 * BLOCK
        assert file.pwrite(b"b" * 100, BLOCK + 7) == 100
        assert file.pread(102, BLOCK + 6) == b"a" + b"b" * 100 + b"a"
        with pytest.raises(OSError):
            file.truncate(BLOCK + 1)
        file.sync()
        with pickle.loads(pickle.dumps(file)) as again:
            assert again.pread(3, 0) == b"aaa"
            with pytest.raises(OSError):
                again.truncate(5)
        child = os.fork()
        if child == 0:
            try:
                file.pwrite(b"c" * BLOCK, 0)
                file.truncate(BLOCK + 1)
            except OSError:
                os._exit(0 if file.pread(1, 0) == b"c" else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    # The block size belongs to the open: a plain open of the closed file is as any other.
    with millpond.open(xfs / "table", "r+b") as plain:
        assert plain.truncate(5) == 5


def test_a_file_system_without_them_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        millpond.open(tmp_path / "table", "w+b", untorn=BLOCK)
    assert caught.value.errno in (errno.EOPNOTSUPP, errno.EINVAL) and "untorn" in str(caught.value)


@pytest.mark.parametrize("size", [0, 1000, 2048, 3 << 12, 1 << 20])
def test_other_block_sizes_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises((OSError, ValueError)):
        millpond.open(tmp_path / "table", "w+b", untorn=size)
    with pytest.raises((OverflowError, TypeError)):
        millpond.open(tmp_path / "table", "w+b", untorn=-1)
