"""A store that engines share in Mooncake Store: a value a block, in memory that its members give.

An engine gives memory of its own only where the environment says how much; else others have to (`mooncake_client`).
Values lie in members' memory until the master gives them up for newer ones. (Mooncake 0.3, `mooncake.store`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Final

from penstock.config.errors import ConfigError
from penstock.config.kv_store import MooncakeMember, StoreAddress
from penstock.transfer.pieces import Bytes
from penstock.transfer.remote import leading_rows
from penstock.transfer.store import StoreError

_BUFFER_BYTES: Final = 64 << 20  # through which values of this process go
_UNREACHABLE: Final = frozenset({-900, -901, -1000, -1})  # of the master, or of the member that has a value


class MooncakeStore:
    """Blocks as objects of a Mooncake master. Its calls cannot be interrupted: one to a master that is gone takes up to
    half a minute, for which the shared store's rest and requests' own deadlines are there."""

    def __init__(self, address: StoreAddress, member: MooncakeMember) -> None:
        """Joins with the first command.

        Raises:
            ConfigError: the package for it is missing, or does not load.
        """
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"--kv-store {address} needs a package that is not there ({error}): pip install "
                "'penstock-llm[mooncake]'; Debian has what it is linked with in libibverbs1, librdmacm1 and libnuma1."
            ) from None
        self._made: Any = MooncakeDistributedStore
        self._told = {
            "local_hostname": member.host,
            "metadata_server": member.metadata,
            "global_segment_size": str(member.bytes),
            "local_buffer_size": str(_BUFFER_BYTES),
            "protocol": member.protocol,
            "rdma_devices": member.devices,
            "master_server_addr": f"{address.host}:{address.port}",
        }
        self._lock = Lock()
        self._member: Any = None

    @property
    def _store(self) -> Any:
        with self._lock:
            if self._member is None:
                member = self._made()
                if code := member.setup(self._told):
                    raise OSError(f"no Mooncake master answers, or it does not take this member (error {code})")
                self._member = member
            return self._member

    def check(self) -> None:
        self.held(["nothing"])

    def get(self, name: str) -> Bytes:
        value = self._store.get(name)
        if not value:
            raise StoreError("it is not there any more")
        return bytes(value)

    def put(self, name: str, value: Bytes) -> None:
        code = self._store.put(name, bytes(value))
        if code in _UNREACHABLE:
            raise OSError(f"the store does not answer (error {code})")
        if code:
            raise StoreError(f"the store has no room for it, or does not take it (error {code})")

    def leading(self, rows: Sequence[Sequence[str]]) -> int:
        return leading_rows(rows, self.held)

    def held(self, names: Sequence[str]) -> Sequence[bool]:
        found = self._store.batch_is_exist(list(names))
        if len(found) != len(names) or any(one < 0 for one in found):
            raise OSError("the store does not answer")
        return [one == 1 for one in found]

    def remove(self, name: str) -> None:
        self._store.remove(name)  # refused for some seconds after somebody has read it: it is left to its age then

    def interrupt(self) -> None:
        """Nothing can."""

    def close(self) -> None:
        with self._lock:
            if self._member is not None:
                self._member.close()
