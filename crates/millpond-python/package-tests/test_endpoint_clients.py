"""Goal: libraries that speak S3 by themselves work with the settings that `millpond.s3_endpoint` writes for them, unchanged.

Run by `scripts/long python_objects`. With `place` on a real S3 server the endpoint is a cache before that."""

import os
import uuid
from typing import Any

import millpond
import pytest
from conftest import Place


class Served:
    """An endpoint over a place: its settings, its bucket, and a prefix for one test."""

    def __init__(self, place: Place) -> None:
        if place.protocol == "file":
            stores: Any = {"lakes": f"file://{place.path}"}
            self.endpoint = millpond.s3_endpoint(stores, freshness="immutable")
            self.bucket, self.prefix = "lakes", "own"
        else:
            self.bucket, _, self.prefix = place.path.partition("/")
            options = {name: place.options[name] for name in ("endpoint", "region", "allow_http", "key", "secret")}
            self.endpoint = millpond.s3_endpoint(f"s3://{self.bucket}", freshness="immutable", options=options)
        self.url = f"s3://{self.bucket}/{self.prefix}"


@pytest.fixture
def served(place: Place) -> Served:
    return Served(place)


def test_polars(served: Served) -> None:
    polars = pytest.importorskip("polars", reason="there is no polars")
    frame = polars.DataFrame({"n": range(100_000), "lake": [f"lake {n % 97}" for n in range(100_000)]})
    options = served.endpoint.polars()
    frame.write_parquet(f"{served.url}/frame.parquet", storage_options=options)
    scan = polars.scan_parquet(f"{served.url}/*.parquet", storage_options=options)
    assert scan.filter(polars.col("lake") == "lake 7").select(polars.col("n").sum()).collect().item() == sum(
        range(7, 100_000, 97)
    )
    assert polars.read_parquet(f"{served.url}/frame.parquet", storage_options=options).equals(frame)


def test_deltalake(served: Served) -> None:
    deltalake = pytest.importorskip("deltalake", reason="there is no deltalake")
    pyarrow = pytest.importorskip("pyarrow", reason="there is no pyarrow")
    options = served.endpoint.deltalake()
    url = f"{served.url}/table"
    for round in range(3):
        rows = pyarrow.table({"n": list(range(round * 1000, (round + 1) * 1000))})
        deltalake.write_deltalake(url, rows, mode="append", storage_options=options)
    table = deltalake.DeltaTable(url, storage_options=options)
    assert table.version() == 2
    found = pyarrow.table(table.to_pyarrow_table() if hasattr(table, "to_pyarrow_table") else table.to_table())
    assert sorted(found["n"].to_pylist()) == list(range(3000))


def test_boto3(served: Served) -> None:
    boto3 = pytest.importorskip("boto3", reason="there is no boto3")
    client = boto3.client("s3", **served.endpoint.boto3())
    data = os.urandom(300_000)
    client.put_object(Bucket=served.bucket, Key=f"{served.prefix}/pond", Body=data)
    for _ in range(2):
        read = client.get_object(Bucket=served.bucket, Key=f"{served.prefix}/pond", Range="bytes=1000-200999")
        assert read["Body"].read() == data[1000:201_000]
    listed = client.list_objects_v2(Bucket=served.bucket, Prefix=f"{served.prefix}/")
    assert [one["Key"] for one in listed["Contents"]] == [f"{served.prefix}/pond"]


def test_s3fs_obstore_and_pyarrow(served: Served) -> None:
    s3fs = pytest.importorskip("s3fs", reason="there is no s3fs")
    obstore = pytest.importorskip("obstore", reason="there is no obstore")
    pytest.importorskip("pyarrow", reason="there is no pyarrow")
    from obstore.store import S3Store
    from pyarrow.fs import S3FileSystem

    data = os.urandom(100_000)
    fs = s3fs.S3FileSystem(**served.endpoint.s3fs())
    fs.pipe_file(f"{served.bucket}/{served.prefix}/pond", data)
    assert fs.cat_file(f"{served.bucket}/{served.prefix}/pond", start=5, end=50_000) == data[5:50_000]
    store = S3Store(served.bucket, **served.endpoint.obstore())
    assert bytes(obstore.get_range(store, f"{served.prefix}/pond", start=5, end=50_000)) == data[5:50_000]
    arrow = S3FileSystem(**served.endpoint.pyarrow())
    with arrow.open_input_file(f"{served.bucket}/{served.prefix}/pond") as file:
        assert file.read_at(1000, 99_000) == data[99_000:]


def test_duckdb_with_a_secret(served: Served) -> None:
    duckdb = pytest.importorskip("duckdb", reason="there is no duckdb")
    with duckdb.connect() as connection:
        try:
            # A package of PyPI that has the extension; otherwise DuckDB downloads it.
            import duckdb_extension_httpfs as package

            folder = os.path.join(os.path.dirname(package.__file__), "extensions", f"v{duckdb.__version__}")
            extension = os.path.join(folder, "httpfs.duckdb_extension")
            connection.load_extension(extension if os.path.exists(extension) else "httpfs")
        except Exception as error:
            pytest.skip(f"the extension httpfs can't be had: {str(error).splitlines()[0]}")
        connection.execute(served.endpoint.duckdb_sql())
        connection.execute(f"COPY (SELECT range AS n FROM range(100000)) TO '{served.url}/n.parquet'")
        for _ in range(2):
            assert connection.execute(f"SELECT sum(n) FROM '{served.url}/*.parquet'").fetchall() == [
                (sum(range(100_000)),)
            ]


@pytest.mark.parametrize("way", ["session", "environment"])
def test_rasterio(served: Served, place: Place, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rasterio = pytest.importorskip("rasterio", reason="there is no rasterio")
    numpy = pytest.importorskip("numpy", reason="there is no numpy")
    from rasterio.io import MemoryFile
    from rasterio.transform import from_origin

    levels = numpy.arange(512 * 512, dtype="f4").reshape(1, 512, 512)
    profile = {"driver": "GTiff", "width": 512, "height": 512, "count": 1, "dtype": "float32", "tiled": True}
    profile |= {"transform": from_origin(0, 512, 1, 1), "crs": "EPSG:32633"}
    with MemoryFile() as memory:
        with memory.open(**profile) as made:
            made.write(levels)
        folder = place.path if place.protocol == "s3" else f"{place.path}/own"
        place.fs.pipe_file(f"{folder}/levels.tif", memory.read())
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {}
    if way == "session":
        pytest.importorskip("boto3", reason="there is no boto3")
        settings = served.endpoint.rasterio()
    else:
        for name, value in served.endpoint.gdal_env().items():
            monkeypatch.setenv(name, value)
    with rasterio.Env(**settings, GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR"):
        with rasterio.open(f"/vsis3/{served.bucket}/{served.prefix}/levels.tif") as opened:
            assert (opened.read(1, window=((100, 200), (300, 400))) == levels[0, 100:200, 300:400]).all()


def test_tensorstore(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason="there is no tensorstore")
    for name, value in served.endpoint.environment().items():
        monkeypatch.setenv(name, value)
    spec = {
        "driver": "zarr3",
        "kvstore": served.endpoint.tensorstore(served.bucket, f"{served.prefix}/levels/"),
        "metadata": {"shape": [100, 100], "data_type": "int32"},
    }
    made = tensorstore.open(spec, create=True).result()
    made[:].write([[row * 100 + column for column in range(100)] for row in range(100)]).result()
    assert made[7, 3].read().result() == 703


def test_lance(served: Served) -> None:
    lance = pytest.importorskip("lance", reason="there is no lance")
    pyarrow = pytest.importorskip("pyarrow", reason="there is no pyarrow")
    url = f"{served.url}/{uuid.uuid4()}.lance"
    options = served.endpoint.lance()
    lance.write_dataset(pyarrow.table({"n": list(range(10_000))}), url, storage_options=options)
    found = lance.dataset(url, storage_options=options).take([7, 9_999, 3])
    assert found["n"].to_pylist() == [7, 9_999, 3]
