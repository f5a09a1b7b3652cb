"""Places for the tests of packages: local files, and with `MILLPOND_STORE_BUCKET` (scripts/store-server) a bucket of S3."""

import os
import uuid
from pathlib import Path
from typing import Any

import pytest


class Place:
    """A folder for one test: its URL, its path in the file system, and the options."""

    def __init__(self, protocol: str, path: str, options: "dict[str, Any]") -> None:
        import fsspec

        self.options = options
        self.protocol = protocol
        self.path = path
        self.url = f"millpond+{protocol}://{path}"
        self.fs = fsspec.filesystem(f"millpond+{protocol}", **options)

    def requests(self) -> int:
        return sum(store.stats()["requests"] for store in self.fs._stores.values())


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    options: "dict[str, Any]" = {"freshness": "immutable", "memory": 128 << 20}
    if request.param == "file":
        return Place("file", str(tmp_path), options)
    bucket = os.environ.get("MILLPOND_STORE_BUCKET")
    if not bucket:
        pytest.skip("no server: scripts/store-server starts one")
    options |= {"endpoint": os.environ["AWS_ENDPOINT"], "region": "us-east-1", "allow_http": True}
    options |= {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"]}
    return Place("s3", f"{bucket}/{uuid.uuid4()}", options)
