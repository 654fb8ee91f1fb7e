"""A store that engines share in a bucket of an S3-compatible object store: an object a block.

How long objects stay is the bucket's own: its lifecycle rules remove them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from penstock.config.errors import ConfigError
from penstock.config.kv_store import StoreAccess, StoreAddress
from penstock.transfer.pieces import Bytes
from penstock.transfer.remote import ANSWER_S, CONNECT_S, whole_rows
from penstock.transfer.store import StoreError

_PROBES: Final = 16  # objects that are asked for side by side
_ABSENT: Final = ("NoSuchKey", "NoSuchObject")
_T = TypeVar("_T")


class ObjectStore:
    """Blocks as objects of a bucket, under a prefix."""

    def __init__(self, address: StoreAddress, access: StoreAccess) -> None:
        """Raises ConfigError: the package for it is missing, or the endpoint or the credentials are not usable."""
        try:
            import minio
            import urllib3
        except ImportError:
            raise ConfigError(
                f"--kv-store {address} needs a package that is not installed: pip install 'penstock-llm[s3]'."
            ) from None
        if not (access.key and access.secret):
            raise ConfigError(
                f"--kv-store {address} needs credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        endpoint = urlsplit(access.endpoint)
        self._refused: Any = minio.error.S3Error
        self._broken: Any = (urllib3.exceptions.HTTPError, minio.error.ServerError, minio.error.InvalidResponseError)
        self._address = address
        self._bucket, self._prefix = address.bucket, address.prefix
        self._pool = ThreadPoolExecutor(_PROBES, "kv-probe")
        self._http = urllib3.PoolManager(
            maxsize=2 * _PROBES, timeout=urllib3.Timeout(connect=CONNECT_S, read=ANSWER_S), retries=False
        )
        try:
            self._client = minio.Minio(
                endpoint.netloc,
                access_key=access.key,
                secret_key=access.secret,
                session_token=access.token,
                secure=endpoint.scheme == "https",
                region=access.region,
                http_client=self._http,
            )
        except ValueError as error:
            raise ConfigError(f"AWS_ENDPOINT_URL is {access.endpoint}, which cannot be used: {error}.") from None

    def check(self) -> None:
        """Raises OSError if the store does not answer, StoreError if it refuses this client or has no such bucket."""
        if not self._asked(lambda: self._client.bucket_exists(self._bucket)):
            raise StoreError(f"there is no bucket {self._bucket}; make it first")

    def get(self, name: str) -> Bytes:
        def whole() -> bytes:
            response = self._client.get_object(self._bucket, self._key(name))
            try:
                return bytes(response.data)
            finally:
                response.release_conn()

        return self._asked(whole)

    def put(self, name: str, value: Bytes) -> None:
        kind = "application/octet-stream"
        self._asked(
            lambda: self._client.put_object(
                self._bucket, self._key(name), BytesIO(value), len(value), content_type=kind
            )
        )

    def leading(self, rows: Sequence[Sequence[str]]) -> int:
        """As though none were missing among those that are there, which a few probes at a time tell."""
        first, end = 0, len(rows)  # all before the first are there, the one at the end is not
        while first < end:
            step = -(-(end - first) // _PROBES)
            places = range(min(first + step, end) - 1, end, step)
            there = self._held_rows([rows[place] for place in places])
            known = there.index(False) if False in there else len(there)
            if known < len(there):
                end = places[known]
            first = places[known - 1] + 1 if known else first
        return first

    def _held_rows(self, rows: Sequence[Sequence[str]]) -> list[bool]:
        return whole_rows(rows, self.held([name for row in rows for name in row]))

    def held(self, names: Sequence[str]) -> Sequence[bool]:
        return list(self._pool.map(self._has, names))

    def _has(self, name: str) -> bool:
        try:
            self._asked(lambda: self._client.stat_object(self._bucket, self._key(name)))
        except _NotThere:
            return False
        return True

    def remove(self, name: str) -> None:
        self._asked(lambda: self._client.remove_object(self._bucket, self._key(name)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name.replace(':', '/')}"

    def _asked(self, call: Callable[[], _T]) -> _T:
        """Raises OSError or StoreError instead of the client's own errors."""
        try:
            return call()
        except self._refused as error:
            if error.code in _ABSENT:
                raise _NotThere("it is not there any more") from None
            raise StoreError(f"the store refuses ({error.code}: {error.message})") from None
        except self._broken as error:
            raise OSError(f"the store does not answer ({error})") from None


class _NotThere(StoreError):
    """There is no such object."""
