"""Goal: fsspec's own tests of file systems pass: `fsspec.tests.abstract`, on local files and on objects in memory.

Left out: the cases of empty directories for objects in memory, as an object store has none."""

from pathlib import Path
from typing import Any, Iterator

import pytest

fsspec = pytest.importorskip("fsspec", reason="there is no fsspec")
abstract = pytest.importorskip("fsspec.tests.abstract", reason="this fsspec has no tests")


class Fixtures(abstract.AbstractFixtures):  # type: ignore[name-defined, misc]
    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(str(part) for part in parts)


class OnFiles(Fixtures):
    @pytest.fixture
    def fs(self) -> Any:
        return fsspec.filesystem("millpond+file")

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> Iterator[str]:
        path = tmp_path / "objects"
        path.mkdir()
        yield str(path)


class OnMemory(Fixtures):
    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False

    @pytest.fixture
    def fs(self) -> Any:
        fs = fsspec.filesystem("millpond+memory")
        yield fs
        if fs.find(""):
            fs.rm(fs.find(""))

    @pytest.fixture
    def fs_path(self) -> str:
        return "suite"


for place in (OnFiles, OnMemory):
    for suite in ("Copy", "Get", "Put", "Pipe", "Open"):
        tests = getattr(abstract, f"Abstract{suite}Tests")
        name = f"Test{suite}{place.__name__}"
        globals()[name] = type(name, (tests, place), {})
