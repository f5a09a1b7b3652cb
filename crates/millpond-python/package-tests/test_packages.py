"""Goal: packages from PyPI work on the file systems without a change, and what they have read once is read without a request.

Run by `scripts/long python_objects`, on local files and on a real S3 server."""

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import fsspec
import millpond
import pytest
from conftest import Place

numpy = pytest.importorskip("numpy", reason="there is no numpy")


def test_arrays_as_buffers(tmp_path: Path) -> None:
    """numpy raises `ValueError` for a buffer that it can't export, and `memoryview.cast` takes no fields."""
    store = millpond.store(f"file://{tmp_path}")
    data = store.put("pond", bytes(range(96))) and bytes(range(96))
    read_only = numpy.zeros(8)
    read_only.flags.writeable = False
    with millpond.open(tmp_path / "pond", "r+b") as file:
        for unsuitable in [read_only, numpy.zeros(8)[::2]]:
            for call in [lambda: file.readinto(unsuitable), lambda: store.get_range_into("pond", unsuitable, start=0)]:
                with pytest.raises(TypeError, match="a writable contiguous buffer is needed"):
                    call()
        for write in [file.write, lambda gaps: file.pwrite(gaps, 0), lambda gaps: store.put("pond", gaps)]:
            with pytest.raises(TypeError, match="a contiguous buffer is needed"):
                write(numpy.zeros(8)[::2])
        fields = numpy.zeros(8, dtype=[("depth", ">f8"), ("fish", "<i4")])
        with fsspec.filesystem("millpond+file").open(f"{tmp_path}/pond") as object_file:
            assert object_file.readinto(fields) == 96 and fields.tobytes() == data
        assert asyncio.run(file.apwrite(fields, 7)) == 96
        assert file.pread(96, 7) == data


def test_pandas(place: Place) -> None:
    pandas = pytest.importorskip("pandas", reason="there is no pandas")
    pytest.importorskip("pyarrow", reason="there is no pyarrow")
    frame = pandas.DataFrame({"n": range(100_000), "text": [f"pond {n % 97}" for n in range(100_000)]})
    for kind, write, read in [
        ("parquet", frame.to_parquet, pandas.read_parquet),
        ("csv", lambda url, **options: frame.to_csv(url, index=False, **options), pandas.read_csv),
    ]:
        url = f"{place.url}/frame.{kind}"
        write(url, storage_options=place.options)
        pandas.testing.assert_frame_equal(read(url, storage_options=place.options), frame)
        requests = place.requests()
        pandas.testing.assert_frame_equal(read(url, storage_options=place.options), frame)
        assert place.requests() == requests, "the second read is from the cache"


def test_pyarrow_dataset(place: Place) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="there is no pyarrow")
    import pyarrow.compute
    import pyarrow.dataset
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    arrow_fs = PyFileSystem(FSSpecHandler(place.fs))
    table = pyarrow.table({"n": numpy.arange(300_000), "year": numpy.arange(300_000) % 3})
    pyarrow.dataset.write_dataset(
        table, f"{place.path}/data", format="parquet", filesystem=arrow_fs, partitioning=["year"]
    )
    dataset = pyarrow.dataset.dataset(f"{place.path}/data", filesystem=arrow_fs, partitioning=["year"])
    for _ in range(2):
        found = dataset.to_table(filter=pyarrow.compute.field("year") == 1)
        assert found.num_rows == 100_000
        assert pyarrow.compute.sum(found["n"]).as_py() == sum(range(1, 300_000, 3))
    requests = place.requests()
    assert dataset.to_table().num_rows == 300_000
    assert dataset.to_table().num_rows == 300_000
    assert place.requests() - requests <= 6


def scan(arguments: "tuple[Any, str]") -> int:
    import pyarrow.compute
    import pyarrow.parquet

    fs, path = arguments
    with fs.open(path) as file:
        return pyarrow.compute.sum(pyarrow.parquet.read_table(file)["n"]).as_py()  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pyarrow_in_eight_processes(place: Place, method: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="there is no pyarrow")
    import pyarrow.parquet

    with place.fs.open(f"{place.path}/table.parquet", "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table({"n": numpy.arange(200_000)}), file)
    with multiprocessing.get_context(method).Pool(8) as pool:
        sums = pool.map(scan, [(place.fs, f"{place.path}/table.parquet")] * 24)
    assert sums == [sum(range(200_000))] * 24


def test_zarr_and_xarray_with_dask(place: Place) -> None:
    zarr = pytest.importorskip("zarr", reason="there is no zarr")
    xarray = pytest.importorskip("xarray", reason="there is no xarray")
    pytest.importorskip("dask", reason="there is no dask")
    from zarr.storage import FsspecStore

    values = numpy.arange(40 * 100 * 100, dtype="f4").reshape(40, 100, 100)
    data = xarray.Dataset({"level": (("time", "y", "x"), values)}, {"time": numpy.arange(40)})
    store = FsspecStore.from_url(f"{place.url}/levels.zarr", storage_options=place.options)
    data.chunk(time=5).to_zarr(store, mode="w", zarr_format=3)
    group = zarr.open_group(store, mode="r")
    assert (group["level"][7] == values[7]).all()
    opened = xarray.open_zarr(store, chunks={})
    for _ in range(2):
        assert numpy.allclose(opened["level"].mean(("y", "x")).compute(), values.mean((1, 2)))


def test_duckdb(place: Place) -> None:
    duckdb = pytest.importorskip("duckdb", reason="there is no duckdb")
    pandas = pytest.importorskip("pandas", reason="there is no pandas")
    pytest.importorskip("pyarrow", reason="there is no pyarrow")
    for year in range(3):
        frame = pandas.DataFrame({"n": range(50_000), "year": year})
        frame.to_parquet(f"{place.url}/years/{year}.parquet", storage_options=place.options)
    with duckdb.connect() as connection:
        connection.register_filesystem(place.fs)
        query = f"SELECT year, sum(n) FROM read_parquet('{place.url}/years/*.parquet') GROUP BY year ORDER BY year"
        expected = [(year, sum(range(50_000))) for year in range(3)]
        assert connection.execute(query).fetchall() == expected
        requests = place.requests()
        assert connection.execute(query).fetchall() == expected
        assert place.requests() == requests, "the second query is from the cache"
        connection.execute(f"COPY (SELECT 7 AS seven) TO '{place.url}/copy.parquet'")
        assert connection.execute(f"FROM '{place.url}/copy.parquet'").fetchall() == [(7,)]


def test_random_access_training_set(place: Place) -> None:
    """A pool of processes reads records at random offsets, as the workers of a DataLoader do."""
    records, length = 4096, 4096
    rng = numpy.random.default_rng(7)
    data = rng.integers(0, 256, (records, length), dtype="u1")
    place.fs.pipe_file(f"{place.path}/records", data.tobytes())
    order = rng.permutation(records)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        for _ in range(2):
            work = [(place.fs, f"{place.path}/records", part.tolist(), length) for part in numpy.split(order, 16)]
            read = b"".join(pool.map(read_records, work, chunksize=1))
            assert read == data[order].tobytes()


def read_records(arguments: "tuple[Any, str, list[int], int]") -> bytes:
    fs, path, numbers, length = arguments
    return b"".join(fs.cat_ranges([path] * len(numbers), [n * length for n in numbers], [(n + 1) * length for n in numbers]))
