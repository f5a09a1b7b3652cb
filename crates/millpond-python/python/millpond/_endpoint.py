"""`millpond.s3_endpoint`: finds the S3 endpoint of the machine, or starts one, and writes its settings for other libraries."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from millpond._millpond import Store, _start_endpoint
from millpond._objects import store as open_store

_VERSION = 1
# The endpoints of this process, by the names and stores of their buckets. A child of fork uses its parent's.
_started: "dict[tuple[Any, ...], S3Endpoint]" = {}


@dataclass(frozen=True)
class S3Endpoint:
    """An S3 endpoint on this machine, and its settings for other libraries: `millpond.s3_endpoint` returns it.

    Whoever has the key can read and write the stores. The secret is not part of the `repr`.

    >>> import millpond
    >>> endpoint = millpond.s3_endpoint("memory://lakes")
    >>> endpoint.buckets
    ('lakes',)
    >>> endpoint.polars()["aws_endpoint_url"] == endpoint.url
    True
    """

    url: str
    """`http://ADDRESS:PORT`; URLs of objects are in path style."""
    access_key_id: str
    secret_access_key: str = field(repr=False)
    region: str
    buckets: "tuple[str, ...]"
    """The names of the buckets."""
    of_server: bool
    """Whether it is that of `millpond serve`, and not of this process."""

    def polars(self) -> "dict[str, str]":
        """`storage_options` of Polars, and of other libraries over `object_store`."""
        return {
            "aws_endpoint_url": self.url,
            "aws_access_key_id": self.access_key_id,
            "aws_secret_access_key": self.secret_access_key,
            "aws_region": self.region,
            "aws_allow_http": "true",
            "aws_virtual_hosted_style_request": "false",
        }

    def deltalake(self) -> "dict[str, str]":
        """`storage_options` of deltalake: commits are conditional writes, without a lock table."""
        return {**self.polars(), "aws_conditional_put": "etag"}

    def lance(self) -> "dict[str, str]":
        """`storage_options` of Lance and LanceDB."""
        return self.polars()

    def obstore(self) -> "dict[str, Any]":
        """Keyword arguments of `obstore.store.S3Store`, beside the bucket."""
        return {
            "endpoint": self.url,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "region": self.region,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    def boto3(self) -> "dict[str, str]":
        """Keyword arguments of `boto3.client("s3", ...)`."""
        return {
            "endpoint_url": self.url,
            "aws_access_key_id": self.access_key_id,
            "aws_secret_access_key": self.secret_access_key,
            "region_name": self.region,
        }

    def s3fs(self) -> "dict[str, str]":
        """Keyword arguments of `s3fs.S3FileSystem`, and `storage_options` for `s3://` URLs of fsspec."""
        return {"endpoint_url": self.url, "key": self.access_key_id, "secret": self.secret_access_key}

    def pyarrow(self) -> "dict[str, str]":
        """Keyword arguments of `pyarrow.fs.S3FileSystem`."""
        return {
            "endpoint_override": self.url,
            "access_key": self.access_key_id,
            "secret_key": self.secret_access_key,
            "region": self.region,
        }

    def duckdb_sql(self, name: str = "millpond") -> str:
        """A statement of DuckDB that makes the secret `name` with these settings. It needs the extension httpfs."""

        def quoted(text: str) -> str:
            return "'" + text.replace("'", "''") + "'"

        quoted_name = '"' + name.replace('"', '""') + '"'
        return (
            f"CREATE OR REPLACE SECRET {quoted_name} (TYPE s3, KEY_ID {quoted(self.access_key_id)}, "
            f"SECRET {quoted(self.secret_access_key)}, ENDPOINT {quoted(self._host)}, "
            f"REGION {quoted(self.region)}, URL_STYLE 'path', USE_SSL false)"
        )

    def gdal_env(self) -> "dict[str, str]":
        """Options of GDAL for `/vsis3/`: environment variables, or those of `gdal.SetConfigOption`. For rasterio: `rasterio()`."""
        return {
            "AWS_S3_ENDPOINT": self._host,
            "AWS_HTTPS": "NO",
            "AWS_VIRTUAL_HOSTING": "FALSE",
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
        }

    def rasterio(self) -> "dict[str, Any]":
        """The arguments of `rasterio.Env`, which takes a key only by its own session, and that only with boto3."""
        from rasterio.session import AWSSession

        session = AWSSession(
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
            region_name=self.region,
            endpoint_url=self._host,
        )
        return {"session": session, "AWS_HTTPS": "NO", "AWS_VIRTUAL_HOSTING": "FALSE"}

    def tensorstore(self, bucket: str, path: str = "") -> "dict[str, Any]":
        """The `kvstore` of a spec of tensorstore. tensorstore takes the key from the environment: set `environment()`."""
        return {
            "driver": "s3",
            "bucket": bucket,
            "path": path,
            "endpoint": self.url,
            "aws_region": self.region,
            "aws_credentials": {"type": "environment"},
        }

    def environment(self) -> "dict[str, str]":
        """Environment variables for programs that take these settings from there, such as the AWS command."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def _host(self) -> str:
        return self.url.removeprefix("http://")


def s3_endpoint(
    stores: "str | Store | Mapping[str, str | Store] | None" = None,
    *,
    socket: "str | os.PathLike[str] | Literal[False] | None" = None,
    **settings: Any,
) -> S3Endpoint:
    """The S3 endpoint of this machine, for libraries that read S3 by themselves: an `S3Endpoint` with their settings.

    Without `stores` it is that of the running `millpond serve --endpoint`; `ProcessLookupError` if there is none.

    With `stores` it is that of the server, if it serves them. Otherwise this process serves them, on a free loopback port,
    until it ends; another call with the same stores returns the same endpoint. `stores` is a URL as for `millpond.store`, a
    `Store`, or a dict of such by the names of their buckets. The bucket of `s3://BUCKET` is `BUCKET`, that of
    `memory://NAME` is `NAME`, and that of `file:///DIRECTORY` the last part of the path. The whole bucket is served, also for a URL with a prefix.

    `socket` is the server's socket, as for `millpond.store`; with `False` no server is looked for. Other arguments are those
    of `millpond.store`, for the URLs.

    >>> import millpond
    >>> endpoint = millpond.s3_endpoint({"lakes": "memory://doc"})
    >>> endpoint.duckdb_sql().startswith('CREATE OR REPLACE SECRET "millpond" (TYPE s3, KEY_ID ')
    True
    """
    given = _by_name(stores)
    found = None if socket is False else _of_server(_socket_path(socket))
    if found is not None:
        endpoint, urls = found
        if all(isinstance(store, str) and urls.get(name) == _trimmed(store) for name, store in given.items()):
            return endpoint
    if stores is None:
        where = "" if socket is False else f" at {_socket_path(socket) or 'XDG_RUNTIME_DIR, which is not set'}"
        what = "name stores to serve them in this process, as s3_endpoint('s3://BUCKET')"
        raise ProcessLookupError(f"no `millpond serve --endpoint` runs{where}; {what}")
    return _of_process(given, socket, settings)


def _trimmed(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if scheme == "s3":
        # The server has the whole bucket.
        rest = rest.partition("/")[0]
    return f"{scheme}://{rest.rstrip('/')}"


def _by_name(stores: "str | Store | Mapping[str, str | Store] | None") -> "dict[str, str | Store]":
    if stores is None:
        return {}
    if isinstance(stores, Mapping):
        return dict(stores)
    url = stores.url if isinstance(stores, Store) else stores
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError(f"store {url!r}: not a URL: SCHEME://...")
    if scheme == "file":
        return {_bucket_of(rest): stores}
    return {rest.partition("/")[0]: stores}


def _bucket_of(path: str) -> str:
    """The last part of a path, with the characters of a bucket's name, as `millpond serve` makes it."""
    last = path.rstrip("/").rpartition("/")[2].lower()
    name = "".join(one if one.isascii() and one.isalnum() else "-" for one in last[:63]).strip("-")
    return name if len(name) >= 3 else "files"


def _socket_path(socket: "str | os.PathLike[str] | Literal[False] | None") -> "str | None":
    if socket is not None and socket is not False:
        return os.path.abspath(os.fspath(socket))
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    # The rule of `millpond_serve::default_socket`.
    if not os.path.isabs(folder):
        if os.geteuid() != 0:
            return None
        folder = "/run"
    return os.path.join(folder, "millpond", "serve.sock")


def _of_server(socket: "str | None") -> "tuple[S3Endpoint, dict[str, str]] | None":
    """The endpoint of the server with this socket, and the URLs of its buckets; `None` if no such server runs."""
    if socket is None:
        return None
    import fcntl
    import json

    path = f"{socket}.endpoint.json"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(1, "the settings of an endpoint belong to this user, with mode 600", path)
        # The server locks the file as long as it lives.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            pass
        text = file.read(1 << 20)
    try:
        described = json.loads(text)
        if described["version"] != _VERSION:
            raise ValueError(f"version {described['version']!r}, and this is millpond for version {_VERSION}")
        if described["url"] is None:
            # It listens on a Unix socket alone, which these libraries can't use.
            return None
        urls = {one["name"]: _trimmed(one["store"]) for one in described["buckets"]}
        endpoint = S3Endpoint(
            url=described["url"],
            access_key_id=described["access_key_id"],
            secret_access_key=described["secret_access_key"],
            region=described["region"],
            buckets=tuple(urls),
            of_server=True,
        )
        return endpoint, urls
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the settings of an endpoint: {error}") from error


def _of_process(
    given: "dict[str, str | Store]",
    socket: "str | os.PathLike[str] | Literal[False] | None",
    settings: "dict[str, Any]",
) -> S3Endpoint:
    if not given:
        raise ValueError("s3_endpoint of no stores: name one")
    key = (tuple((name, given[name]) for name in sorted(given)), repr(socket), repr(sorted(settings.items())))
    endpoint = _started.get(key)
    if endpoint is None:
        stores = {
            name: open_store(store, socket=None if store.startswith("memory:") else socket, **settings)
            if isinstance(store, str)
            else store
            for name, store in given.items()
        }
        url, key_path = _start_endpoint(list(stores.items()), _key_file())
        access_key_id, secret = _read_key(key_path)
        endpoint = S3Endpoint(url, access_key_id, secret, "us-east-1", tuple(stores), False)
        _started[key] = endpoint
    return endpoint


def _key_file() -> "str | None":
    """`None`: at the usual place."""
    if os.path.isabs(os.environ.get("XDG_RUNTIME_DIR", "")):
        return None
    import atexit
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="millpond-")
    own = os.getpid()

    def remove() -> None:
        if os.getpid() == own:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return os.path.join(folder, "credentials")


def _read_key(path: "str | os.PathLike[str]") -> "tuple[str, str]":
    import configparser

    parser = configparser.RawConfigParser()
    with open(path) as file:
        parser.read_file(file)
    section = parser[parser.sections()[0]]
    return section["aws_access_key_id"], section["aws_secret_access_key"]
