"""A store that engines share in Redis or Valkey: a value a block, which the server forgets after so many seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from penstock.config.errors import ConfigError
from penstock.config.kv_store import StoreAddress
from penstock.transfer.pieces import Bytes
from penstock.transfer.remote import ANSWER_S, CONNECT_S, leading_rows
from penstock.transfer.store import StoreError

_READ_BYTES: Final = 4 << 20  # at once: with the client's own 64 KiB a block of 1.8 MB takes three times as long
_ROWS: Final = 512  # of which one command asks
_T = TypeVar("_T")


class RedisStore:
    """Blocks as values of a Redis database."""

    def __init__(self, address: StoreAddress, seconds: int) -> None:
        """Connects with the first command. `seconds` after which a value that nobody has read is gone; 0 for never.

        Raises:
            ConfigError: the package for it is missing, or it does not take the address.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ConfigError(
                f"--kv-store {address} needs a package that is not installed: pip install 'penstock-llm[redis]'."
            ) from None
        self._errors: Any = redis.exceptions
        self._seconds = seconds
        try:
            self._redis: Any = redis.Redis.from_url(
                address.url,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=CONNECT_S,
                socket_keepalive=True,
                socket_read_size=_READ_BYTES,
                health_check_interval=30,
                retry=Retry(NoBackoff(), 1),  # for a connection that was closed while nothing was asked for
            )
        except ValueError as error:
            raise ConfigError(f"--kv-store is {address}, which is no address of a Redis server: {error}.") from None

    def check(self) -> None:
        """Raises OSError if the server does not answer, StoreError if it refuses this client."""
        self._asked(self._redis.ping)

    def get(self, name: str) -> Bytes:
        if self._seconds:
            value = self._asked(lambda: self._redis.getex(name, ex=self._seconds))
        else:
            value = self._asked(lambda: self._redis.get(name))
        if not isinstance(value, bytes):
            raise StoreError("it is not there any more")
        return value

    def put(self, name: str, value: Bytes) -> None:
        self._asked(lambda: self._redis.set(name, value, ex=self._seconds or None))

    def leading(self, rows: Sequence[Sequence[str]]) -> int:
        parts = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
        pipeline = self._redis.pipeline(transaction=False)
        for part in parts:
            pipeline.exists(*(name for row in part for name in row))
        counts = self._asked(pipeline.execute)
        count = 0
        for part, there in zip(parts, counts, strict=True):
            if there != sum(map(len, part)):
                return count + leading_rows(part, self.held)
            count += len(part)
        return count

    def held(self, names: Sequence[str]) -> Sequence[bool]:
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.exists(name)
        return [bool(one) for one in self._asked(pipeline.execute)]

    def remove(self, name: str) -> None:
        self._asked(lambda: self._redis.unlink(name))

    def interrupt(self) -> None:
        self._redis.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        self._redis.close()

    def _asked(self, call: Callable[[], _T]) -> _T:
        """Raises OSError or StoreError instead of the client's own errors."""
        try:
            return call()
        except (self._errors.AuthenticationError, self._errors.AuthorizationError) as error:
            raise StoreError(f"the server refuses the name or password ({error})") from None
        except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
            raise OSError(f"the server does not answer ({error})") from None
        except (ValueError, AttributeError):  # of a connection that `interrupt` has closed under the client
            raise OSError("the server takes too long for an answer") from None
        except self._errors.RedisError as error:  # full, or not what this client may do
            raise StoreError(f"the server refuses ({error})") from None
