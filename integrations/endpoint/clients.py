"""Runs standard clients of S3 against a running endpoint. Each reads what the others wrote.

    clients.py ENDPOINT BUCKET [NAME...]

The key comes from AWS_SHARED_CREDENTIALS_FILE. Prints a line for each client: PASSED, FAILED, or NOT RUN with the reason.
The status is 1 if one failed.
"""
import configparser, hashlib, os, random, shutil, subprocess, sys, tempfile, time, traceback

ENDPOINT, BUCKET, NAMES = sys.argv[1], sys.argv[2], sys.argv[3:]
keys = configparser.ConfigParser()
keys.read(os.environ["AWS_SHARED_CREDENTIALS_FILE"])
KEY, SECRET = keys["default"]["aws_access_key_id"], keys["default"]["aws_secret_access_key"]
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
# rclone 1.60 fails with any endpoint where this is set.
os.environ.pop("AWS_CA_BUNDLE", None)


class NotRun(Exception):
    """A client that this machine does not have."""


def content(size, seed):
    return random.Random(seed).randbytes(size)


def boto3():
    import boto3, botocore
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config
    from botocore.exceptions import ClientError

    # The key comes from the shared file.
    s3 = boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", config=Config(s3={"addressing_style": "path"}))
    assert BUCKET in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]
    small = content(100_000, 1)
    s3.put_object(Bucket=BUCKET, Key="boto/small", Body=small, ContentType="text/plain", Metadata={"one": "1"})
    found = s3.get_object(Bucket=BUCKET, Key="boto/small")
    assert found["Body"].read() == small
    part = s3.get_object(Bucket=BUCKET, Key="boto/small", Range="bytes=1000-1999")
    assert part["Body"].read() == small[1000:2000] and part["ContentRange"] == "bytes 1000-1999/100000"
    # Parts in threads, in any order, with checksums in trailers.
    large = content(45_000_000, 2)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "large")
        open(path, "wb").write(large)
        config = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20, max_concurrency=8)
        s3.upload_file(path, BUCKET, "boto/large", Config=config)
        s3.download_file(BUCKET, "boto/large", path + ".back", Config=config)
        assert open(path + ".back", "rb").read() == large
    s3.copy({"Bucket": BUCKET, "Key": "boto/large"}, BUCKET, "boto/copy", Config=config)
    assert s3.head_object(Bucket=BUCKET, Key="boto/copy")["ContentLength"] == len(large)
    for number in range(25):
        s3.put_object(Bucket=BUCKET, Key=f"boto/many/{number:03} é&+%", Body=b"x")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="boto/many/", PaginationConfig={"PageSize": 7})
    names = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert names == [f"boto/many/{number:03} é&+%" for number in range(25)], names
    deleted = s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": name} for name in names]})
    assert len(deleted["Deleted"]) == 25, deleted
    try:
        s3.put_object(Bucket=BUCKET, Key="boto/small", Body=b"", IfNoneMatch="*")
        raise AssertionError("a second create succeeded")
    except ClientError as error:
        assert error.response["Error"]["Code"] == "PreconditionFailed", error
    for code, call in [("NoSuchKey", lambda: s3.get_object(Bucket=BUCKET, Key="none")), ("NoSuchBucket", lambda: s3.list_objects_v2(Bucket="no-such-bucket"))]:
        try:
            call()
            raise AssertionError(code)
        except ClientError as error:
            assert error.response["Error"]["Code"] == code, error
    # Without this boto3 signs URLs, and only these, with version 2, which is refused.
    signer = boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", config=Config(signature_version="s3v4"))
    url = signer.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": "boto/small"}, ExpiresIn=60)
    import urllib.request

    assert urllib.request.urlopen(url).read() == small
    wrong = boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key="x")
    try:
        wrong.list_buckets()
        raise AssertionError("a wrong key was accepted")
    except ClientError as error:
        assert error.response["Error"]["Code"] == "SignatureDoesNotMatch", error
    return boto3.__version__


def s3fs():
    import s3fs

    fs = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=ENDPOINT)
    small = content(100_000, 1)
    fs.pipe(f"{BUCKET}/s3fs-small", small)
    assert fs.cat(f"{BUCKET}/s3fs-small") == small
    large = content(60_000_000, 3)
    with fs.open(f"{BUCKET}/s3fs/large", "wb") as file:
        file.write(large)
    with fs.open(f"{BUCKET}/s3fs/large", "rb") as file:
        file.seek(59_000_000)
        assert file.read() == large[59_000_000:]
    assert fs.ls(f"{BUCKET}/s3fs") == [f"{BUCKET}/s3fs/large"]
    fs.cp(f"{BUCKET}/s3fs/large", f"{BUCKET}/s3fs/sub/copy")
    assert fs.info(f"{BUCKET}/s3fs/sub/copy")["size"] == len(large)
    assert fs.isdir(f"{BUCKET}/s3fs/sub") and not fs.exists(f"{BUCKET}/s3fs/none")
    fs.rm(f"{BUCKET}/s3fs", recursive=True)
    assert not fs.exists(f"{BUCKET}/s3fs")
    return s3fs.__version__


def table():
    import pyarrow as pa

    rows = 300_000
    return pa.table({"id": range(rows), "group": [row % 7 for row in range(rows)], "text": [f"row {row}" for row in range(rows)]})


def pyarrow():
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq
    from pyarrow import fs

    s3 = fs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=ENDPOINT, region="us-east-1")
    pq.write_table(table(), f"{BUCKET}/arrow/one.parquet", filesystem=s3, row_group_size=50_000)
    found = pq.read_table(f"{BUCKET}/arrow/one.parquet", filesystem=s3, columns=["id"], filters=[("group", "=", 3)])
    assert found["id"].to_pylist() == list(range(3, 300_000, 7))
    # This creates directories and deletes earlier files in them.
    ds.write_dataset(table(), f"{BUCKET}/arrow/set", filesystem=s3, format="parquet", partitioning=["group"], existing_data_behavior="delete_matching")
    whole = ds.dataset(f"{BUCKET}/arrow/set", filesystem=s3, format="parquet", partitioning=["group"])
    assert whole.count_rows() == 300_000 and len(whole.files) == 7
    assert s3.get_file_info(f"{BUCKET}/arrow/set").type == fs.FileType.Directory
    assert s3.get_file_info(f"{BUCKET}/arrow/none").type == fs.FileType.NotFound
    s3.delete_dir(f"{BUCKET}/arrow/set")
    assert s3.get_file_info(f"{BUCKET}/arrow/one.parquet").type == fs.FileType.File
    return pa.__version__


OPTIONS = {
    "aws_endpoint_url": ENDPOINT,
    "aws_access_key_id": KEY,
    "aws_secret_access_key": SECRET,
    "aws_region": "us-east-1",
    "aws_allow_http": "true",
}


def polars():
    import polars as pl

    frame = pl.DataFrame({"id": range(1000), "group": [row % 7 for row in range(1000)]})
    frame.write_parquet(f"s3://{BUCKET}/polars/one.parquet", storage_options=OPTIONS)
    scan = pl.scan_parquet(f"s3://{BUCKET}/polars/*.parquet", storage_options=OPTIONS)
    assert scan.filter(pl.col("group") == 3).select(pl.len()).collect().item() == len(range(3, 1000, 7))
    scan = pl.scan_parquet(f"s3://{BUCKET}/arrow/one.parquet", storage_options=OPTIONS)
    assert scan.select(pl.col("id").sum()).collect().item() == sum(range(300_000))
    return pl.__version__


def deltalake():
    import deltalake, pyarrow

    # Commits are conditional writes: no lock is needed.
    options = dict(OPTIONS, aws_conditional_put="etag")
    url = f"s3://{BUCKET}/delta/table"
    for turn in range(5):
        rows = pyarrow.table({"id": range(turn * 100, turn * 100 + 100)})
        deltalake.write_deltalake(url, rows, mode="append", storage_options=options)
    found = deltalake.DeltaTable(url, storage_options=options)
    assert found.version() == 4 and found.to_pyarrow_table().num_rows == 500
    found.optimize.compact()
    found.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert deltalake.DeltaTable(url, storage_options=options).to_pyarrow_table().num_rows == 500
    return deltalake.__version__


def obstore():
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, endpoint=ENDPOINT, access_key_id=KEY, secret_access_key=SECRET, region="us-east-1", virtual_hosted_style_request=False, client_options={"allow_http": True})
    data = content(30_000_000, 4)
    obstore.put(store, "obstore/large", data)
    assert bytes(obstore.get(store, "obstore/large").bytes()) == data
    ranges = obstore.get_ranges(store, "obstore/large", starts=[0, 20_000_000], lengths=[100, 100])
    assert [bytes(part) for part in ranges] == [data[:100], data[20_000_000:20_000_100]]
    assert [entry["path"] for page in obstore.list(store, "obstore") for entry in page] == ["obstore/large"]
    return obstore.__version__


def duckdb():
    import duckdb

    connection = duckdb.connect()
    try:
        # A package of PyPI that has the extension; otherwise DuckDB downloads it.
        import duckdb_extension_httpfs as package

        folder = os.path.join(os.path.dirname(package.__file__), "extensions", "v" + duckdb.__version__)
        extension = os.path.join(folder, "httpfs.duckdb_extension")
        connection.load_extension(extension if os.path.exists(extension) else "httpfs")
    except Exception as error:
        raise NotRun(f"the extension httpfs can't be had: {str(error).splitlines()[0]}")
    host = ENDPOINT.removeprefix("http://")
    connection.execute(f"CREATE SECRET (TYPE s3, KEY_ID '{KEY}', SECRET '{SECRET}', ENDPOINT '{host}', REGION 'us-east-1', URL_STYLE 'path', USE_SSL false)")
    found = connection.execute(f"SELECT count(*), sum(id) FROM 's3://{BUCKET}/arrow/one.parquet' WHERE \"group\" = 3").fetchone()
    assert found == (len(range(3, 300_000, 7)), sum(range(3, 300_000, 7))), found
    connection.execute(f"COPY (SELECT range AS id FROM range(2000000)) TO 's3://{BUCKET}/duckdb/out.parquet'")
    assert connection.execute(f"SELECT sum(id) FROM 's3://{BUCKET}/duckdb/*.parquet'").fetchone()[0] == sum(range(2_000_000))
    return duckdb.__version__


def run(*words, **more):
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=120, **more).stdout


def tree(directory):
    """Files of several sizes, and the hash of each."""
    hashes = {}
    for name, size in [("a", 0), ("b c/d", 1), ("b c/é&+", 100_000), ("large", 20_000_000)]:
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "wb").write(content(size, size))
        hashes[name] = hashlib.sha256(content(size, size)).hexdigest()
    return hashes


def hashes_of(directory):
    found = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            found[os.path.relpath(path, directory)] = hashlib.sha256(open(path, "rb").read()).hexdigest()
    return found


def rclone():
    if not shutil.which("rclone"):
        raise NotRun("there is no rclone")
    remote = f":s3,provider=Other,access_key_id={KEY},secret_access_key={SECRET},endpoint='{ENDPOINT}':{BUCKET}"
    with tempfile.TemporaryDirectory() as directory:
        hashes = tree(directory + "/from")
        run("rclone", "copy", directory + "/from", remote + "/rclone", "--s3-chunk-size=5Mi", "--s3-upload-cutoff=5Mi")
        run("rclone", "check", "--download", directory + "/from", remote + "/rclone")
        run("rclone", "sync", remote + "/rclone", directory + "/to")
        assert hashes_of(directory + "/to") == hashes
        run("rclone", "copy", remote + "/rclone", remote + "/rclone2")
        listed = run("rclone", "lsf", "-R", "--files-only", remote + "/rclone2").splitlines()
        assert sorted(listed) == sorted(hashes), listed
        run("rclone", "purge", remote + "/rclone2")
        assert run("rclone", "lsf", remote + "/rclone2") == ""
    return run("rclone", "version").split()[1]


def awscli():
    aws = os.path.join(os.path.dirname(sys.executable), "aws")
    if not os.path.exists(aws):
        raise NotRun("there is no awscli beside this interpreter")

    def s3(*words):
        return run(aws, "--endpoint-url", ENDPOINT, "--region", "us-east-1", "s3", *words)

    with tempfile.TemporaryDirectory() as directory:
        hashes = tree(directory + "/from")
        s3("cp", "--recursive", "--only-show-errors", directory + "/from", f"s3://{BUCKET}/aws/")
        s3("sync", "--only-show-errors", f"s3://{BUCKET}/aws/", directory + "/to")
        assert hashes_of(directory + "/to") == hashes
        assert "PRE b c/" in s3("ls", f"s3://{BUCKET}/aws/")
        s3("mv", "--only-show-errors", f"s3://{BUCKET}/aws/large", f"s3://{BUCKET}/aws/moved")
        s3("rm", "--recursive", "--only-show-errors", f"s3://{BUCKET}/aws/")
        assert not subprocess.run([aws, "--endpoint-url", ENDPOINT, "--region", "us-east-1", "s3", "ls", f"s3://{BUCKET}/aws/"], stdout=subprocess.PIPE).stdout
    return run(aws, "--version").split()[0]


CLIENTS = [boto3, pyarrow, polars, deltalake, obstore, duckdb, rclone, awscli, s3fs]
failed = False
for client in CLIENTS:
    # s3fs is asked for by name: it has an environment of its own.
    if client.__name__ not in NAMES and (NAMES or client is s3fs):
        continue
    started = time.monotonic()
    try:
        result = f"PASSED, version {client()}"
    except (NotRun, ModuleNotFoundError) as reason:
        result = f"NOT RUN: {reason}"
    except Exception:
        traceback.print_exc()
        result, failed = "FAILED", True
    print(f"{client.__name__:10} {time.monotonic() - started:5.1f} s  {result}", flush=True)
sys.exit(failed)
