"""What is kept (responses, conversations, chats): an SQLite database, in memory or a file, bounded in size and age."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.config import limits
from penstock.config.errors import ConfigError, ParameterError, RequestError, format_value
from penstock.server.errors import HttpError

_Result = TypeVar("_Result")
_log = logging.getLogger("penstock.server")
_APPLICATION = 0x50454E53  # marks a file as ours
_VERSION = 2
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, running INTEGER NOT NULL,
    size INTEGER NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL, events BLOB, about TEXT,
    PRIMARY KEY (owner, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, created);
CREATE TABLE IF NOT EXISTS held (owner TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS kept AFTER INSERT ON responses BEGIN
    INSERT INTO held VALUES (NEW.owner, NEW.size) ON CONFLICT (owner) DO UPDATE SET size = size + NEW.size;
END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON responses BEGIN
    UPDATE held SET size = size - OLD.size WHERE owner = OLD.owner;
END;
"""
_ROW_BYTES = 512  # what a record takes besides what it says: its id, its owner, their indexes
_UPGRADE = f"""
BEGIN IMMEDIATE;
ALTER TABLE responses RENAME TO older;
DROP INDEX by_age;
DROP INDEX by_owner;
{_TABLE}
INSERT INTO responses
    SELECT id, owner, created, running, size + {_ROW_BYTES}, response, input, events, NULL FROM older;
DROP TABLE older;
PRAGMA user_version = {_VERSION};
COMMIT;
"""
"""Of a file of version 1, in which ids were nobody's own and nothing could be listed."""
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Record:
    """A response, a conversation or a chat completion as it is kept.

    Attributes:
        object: what its client is told of it, with its id.
        items: all items or messages the model was shown, or those of a conversation.
        events: its events as they were sent, of a response that ran in the background.
        about: what it can be listed by: when it was created (s), its model, its metadata; None for what is not listed.
        size: bytes of the object and the items, of a record that was read.
    """

    object: dict[str, Any]
    items: list[dict[str, Any]]
    events: tuple[bytes, ...] = ()
    about: dict[str, Any] | None = None
    size: int = field(default=0, compare=False)


class ResponseStore:
    """A database of its own connection and thread. A record is seen by its owner alone."""

    def __init__(
        self,
        path: str = MEMORY,
        *,
        max_bytes: int = limits.MAX_STORED_RESPONSES_BYTES,
        max_age: float = limits.MAX_STORED_RESPONSE_AGE_S,
        shared: bool = False,
    ) -> None:
        """Opens the database, which is made if it is not there; what was running in it has failed, unless it is shared.

        Args:
            path: a file that no other server uses, or "memory": gone when the server ends.
            shared: other processes of this server use the file too, which was opened before they were started.
            max_bytes: of all that is kept; the oldest make room.
            max_age: seconds after which a response is gone.

        Raises:
            ConfigError: the file cannot be used, is damaged, or is another program's.
        """
        self._max_bytes, self._max_age = max_bytes, max_age
        self.is_shared = shared
        try:
            self._database = _opened(path, alone=not shared)
            self._bytes = self._held()
            if not shared:
                self._fail_running()
        except (sqlite3.Error, OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"The responses store {path!r} cannot be used: {error}. Move the file away, name another one with "
                "--responses-store, or use --responses-store memory."
            ) from None
        self._thread = ThreadPoolExecutor(1, "responses-store")

    async def put(self, owner: str, record: Record, *, running: bool = False) -> None:
        """Keeps a record, in place of what its owner kept under its id.

        Raises:
            HttpError: 507, the disk is full; 503, the file cannot be written.
        """
        response, items = msgspec.json.encode(record.object), msgspec.json.encode(record.items)
        await self._run(lambda: self._put(owner, record, response, items, running))

    async def change(self, owner: str, name: str, work: Callable[[Record], Record]) -> Record | None:
        """Keeps what `work` makes of a record, with no other change between; None where there is none of that owner.

        What `work` raises leaves the record as it was; raises as `put`.
        """

        def changed() -> Record | None:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                old = self._read(owner, name)
                if old is None:
                    return None
                record = work(old)
                response, items = msgspec.json.encode(record.object), msgspec.json.encode(record.items)
                held = self._write(owner, record, response, items, running=False)
            self._bytes = held
            return record

        return await self._run(changed)

    async def listed(self, owner: str, prefix: str, model: str | None, metadata: Mapping[str, str]) -> list[str]:
        """Ids that begin with `prefix`, the oldest first: those of that model (of any if None), with that metadata."""
        query = "SELECT id FROM responses WHERE owner = ? AND id > ? AND id < ? AND created > ? AND about IS NOT NULL"
        values: list[object] = [owner, prefix, prefix + chr(0x10FFFF), time.time() - self._max_age]
        if model is not None:
            query += " AND json_extract(about, '$.model') = ?"
            values.append(model)
        for pair in metadata.items():
            query += " AND EXISTS (SELECT 1 FROM json_each(about, '$.metadata') WHERE key = ? AND value = ?)"
            values += pair
        query += " ORDER BY json_extract(about, '$.created'), id"
        return await self._run(lambda: [name for (name,) in self._database.execute(query, values)])

    async def keep(self, owner: str, record: Record, *, running: bool = False) -> bool:
        """As `put`, and whether it could be done: that it could not is logged, and no reason to lose an answer."""
        try:
            await self.put(owner, record, running=running)
        except HttpError as error:
            _log.warning("%s is not kept: %s", record.object["id"], error)
            return False
        return True

    async def get(self, owner: str, name: str) -> Record | None:
        """A record that is kept, None where there is none of that owner; raises as `put`."""
        return await self._run(lambda: self._read(owner, name))

    async def found(self, owner: str, response_id: str) -> Record:
        """As `get`, of a response; raises HttpError 404 where there is none."""
        record = await self.get(owner, response_id)
        if record is None:
            raise HttpError(404, f"Response with id {format_value(response_id)} not found.", code="response_not_found")
        return record

    async def items(self, owner: str, ids: Sequence[str], field: str = "input") -> dict[str, dict[str, Any]]:
        """By id, the items of the responses that these items are of; an item's id holds that of its response.

        `field`: of the body, in which they are named.

        Raises:
            ParameterError: they are of too many.
        """
        found: dict[str, dict[str, Any]] = {}
        names = {item_id.split("_")[1] for item_id in ids if "_" in item_id}
        if len(names) > limits.MAX_REFERENCED_RESPONSES:
            told = f"at most {limits.MAX_REFERENCED_RESPONSES}; send the items themselves"
            raise ParameterError(field, f"items of {len(names)} responses", told)
        size = 0
        for name in names:
            record = await self.get(owner, f"resp_{name}")
            if record is None:
                continue
            size += record.size
            if size > limits.MAX_BODY_BYTES:
                told = f"at most {limits.MAX_BODY_BYTES} bytes of all items of their responses together"
                raise ParameterError(field, f"items of {len(names)} responses", f"{told}; send the items themselves")
            found |= {item["id"]: item for item in record.items + record.object["output"]}
        return found

    async def previous(self, owner: str, response_id: str) -> Record:
        """As `get`, of a response that another goes on from; raises RequestError unless it is there and has ended."""
        record = await self.get(owner, response_id) if response_id.startswith("resp_") else None
        status = record.object["status"] if record else "not found"
        if record is None or status not in ("completed", "incomplete"):
            message = f"Previous response with id {format_value(response_id)}: {status.replace('_', ' ')}."
            raise RequestError(message, param="previous_response_id", code="previous_response_not_found")
        return record

    async def delete(self, owner: str, name: str) -> bool:
        """Whether it was there; raises as `put`."""

        def work() -> bool:
            with self._database:
                freed = self._delete("id = ? AND owner = ?", (name, owner))
            self._bytes -= freed
            return freed > 0

        return await self._run(work)

    async def aclose(self) -> None:
        """Closes the database; safe to call twice."""
        await asyncio.to_thread(self._thread.shutdown)
        self._database.close()

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            _log.warning("the responses store cannot be used: %s", error)
            raise _refusal(error) from error

    def _read(self, owner: str, name: str) -> Record | None:
        query = "SELECT response, input, events, about FROM responses WHERE id = ? AND owner = ? AND created > ?"
        row = self._database.execute(query, (name, owner, time.time() - self._max_age)).fetchone()
        if row is None:
            return None
        decode = msgspec.json.decode
        kept, items = zlib.decompress(row[0]), zlib.decompress(row[1])
        about = None if row[3] is None else decode(row[3])
        return Record(decode(kept), decode(items), _unpacked(row[2]), about, len(kept) + len(items))

    def _put(self, owner: str, record: Record, response: bytes, items: bytes, running: bool) -> None:
        with self._database:  # what it holds is counted once that is written
            held = self._write(owner, record, response, items, running)
        self._bytes = held

    def _write(self, owner: str, record: Record, response: bytes, items: bytes, running: bool) -> int:
        """Within a transaction; returns the bytes held after it."""
        blobs = (zlib.compress(response, 1), zlib.compress(items, 1), _packed(record.events))
        about = None if record.about is None else msgspec.json.encode(record.about).decode()
        size = _ROW_BYTES + sum(len(blob) for blob in (*blobs, about) if blob is not None)
        known = self._held() if self.is_shared else self._bytes
        held = known + size - self._delete("id = ? AND owner = ?", (record.object["id"], owner))
        values = (record.object["id"], owner, time.time(), running, size, *blobs, about)
        self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        held -= self._delete("created <= ?", (time.time() - self._max_age,))
        # Of whoever has most, so that nobody is robbed of room by another's responses.
        most = "SELECT owner FROM held ORDER BY size DESC LIMIT 1"
        oldest = f"(owner, id) = (SELECT owner, id FROM responses WHERE owner = ({most}) ORDER BY created LIMIT 1)"
        while held > self._max_bytes and (freed := self._delete(oldest, ())):
            held -= freed
        return held

    def _delete(self, which: str, values: Sequence[object]) -> int:
        """Bytes that are gone with this transaction."""
        sizes = self._database.execute(f"DELETE FROM responses WHERE {which} RETURNING size", values).fetchall()
        return sum(size for (size,) in sizes)

    def _held(self) -> int:
        return int(self._database.execute("SELECT COALESCE(SUM(size), 0) FROM held").fetchone()[0])

    def _fail_running(self) -> None:
        """A server ended and left them behind."""
        error = {"code": "server_error", "message": "The server ended before the response was complete."}
        with self._database:
            for key, owner, blob in self._database.execute(
                "SELECT id, owner, response FROM responses WHERE running"
            ).fetchall():
                response = msgspec.json.decode(zlib.decompress(blob)) | {"status": "failed", "error": error}
                values = (zlib.compress(msgspec.json.encode(response), 1), key, owner)
                query = "UPDATE responses SET response = ?, running = 0 WHERE id = ? AND owner = ?"
                self._database.execute(query, values)


def _refusal(error: sqlite3.Error) -> HttpError:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        message = "The disk on which responses are kept is full; whoever runs this server has to make room."
        return HttpError(507, message, code="storage_full")
    message = "The store of responses cannot be used at the moment; retry later, or send store: false."
    return HttpError(503, message, code="storage_unavailable", headers={"Retry-After": "5"})


def _opened(path: str, *, alone: bool) -> sqlite3.Connection:
    if path != MEMORY:
        file = Path(path).expanduser()
        if alone:  # else the folder is the host's to make, and to be gone with it
            file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # prompts are nobody else's to read
        path = str(file)
    database = sqlite3.connect(
        ":memory:" if path == MEMORY else path, timeout=1.0 if alone else 10.0, check_same_thread=False
    )
    try:
        database.execute(f"PRAGMA locking_mode = {'EXCLUSIVE' if alone else 'NORMAL'}")
        marks = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        older = alone and marks == [_APPLICATION, 1]
        filled = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if filled and marks != [_APPLICATION, _VERSION] and not older:
            raise ValueError("it is a database of another program or version")
        if alone and database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise ValueError("it is damaged")
        for setting in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            database.execute(f"PRAGMA {setting}")
        if older:
            database.executescript(_UPGRADE)
        database.executescript(f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION}; {_TABLE}")
    except BaseException:
        database.close()
        raise
    return database


def _packed(events: Sequence[bytes]) -> bytes | None:
    return zlib.compress(msgspec.msgpack.encode(events), 1) if events else None


def _unpacked(blob: bytes | None) -> tuple[bytes, ...]:
    return msgspec.msgpack.decode(zlib.decompress(blob), type=tuple[bytes, ...]) if blob else ()
