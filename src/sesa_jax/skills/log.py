"""The bank's file: an append-only log of events in SQLite, chained by hashes. It knows nothing of cards.

An event is a JSON object; its canonical bytes are stored and hashed: hash n = sha256(hash n-1 + body n). So two logs
with the same last hash hold the same events, and a bit that flips in the file is noticed when it is read, which SQLite
alone would not do. WAL with `synchronous=FULL`: an event that `append` returned from survives a power cut; a torn WAL
gives an exact prefix. One process writes. Readers get a private copy and never lock or touch the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
GENESIS = bytes(32)

_SCHEMA = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, body BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), format INTEGER NOT NULL, seq INTEGER NOT NULL,
                   hash BLOB NOT NULL);
CREATE TABLE orphaned (id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, body BLOB NOT NULL, hash BLOB NOT NULL);
"""
# What SQLite reports when the bytes make no sense; everything else (disk full, no permission) is raised as it is.
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}


class BankError(ValueError):
    """A request that the bank cannot follow; nothing was changed."""


class CorruptBank(BankError):
    """The file is not the bank that was written: damaged, cut short or something else. Says which, and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f'{path}: {why}. Resume the run, which takes its newest commit whose parts are whole, put back a copy of '
            f'this file together with its -wal file, or start a new run.'
        )


def canonical(data: Any) -> bytes:
    """JSON with sorted keys and no spaces, ASCII only: the same value always gives the same bytes."""
    return json.dumps(data, sort_keys=True, separators=(',', ':'), allow_nan=False).encode()


def digest(data: Any) -> str:
    """Hex SHA-256 of the canonical bytes."""
    return hashlib.sha256(canonical(data)).hexdigest()


class EventLog:
    """An open log. `seq` and `hash` are those of its last event.

    A log that was just opened must be read once with `verified` before anything is appended.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.path = path
        self.readonly = readonly
        self.seq = 0
        self.hash = GENESIS
        self._folder = _private_copy(path) if readonly else None
        file = Path(self._folder.name, 'bank') if self._folder else path
        if not file.is_file():
            raise CorruptBank(path, 'there is no such file')
        with self._damage_is_corruption():
            self._db = sqlite3.connect(
                f'{file.absolute().as_uri()}?mode=rw', uri=True, isolation_level=None, check_same_thread=False
            )
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, events: Sequence[Mapping[str, Any]]) -> None:
        """Write a new log with its first events; the file appears whole or not at all."""
        if path.exists():
            raise BankError(f'{path} exists already; open it, or choose another run folder')
        unfinished = path.with_name(path.name + '.new')
        for leftover in (unfinished, Path(f'{unfinished}-wal'), Path(f'{unfinished}-shm')):
            leftover.unlink(missing_ok=True)
        db = sqlite3.connect(unfinished, isolation_level=None)
        try:
            db.execute('PRAGMA journal_mode=WAL')
            db.execute('PRAGMA synchronous=FULL')
            db.executescript(f'BEGIN;{_SCHEMA}')
            seq, last = 0, GENESIS
            for event in events:
                body = canonical(event)
                seq, last = seq + 1, _chain(last, body)
                db.execute('INSERT INTO events VALUES (?, ?, ?)', (seq, body, last))
            db.execute('INSERT INTO head VALUES (1, ?, ?, ?)', (FORMAT, seq, last))
            db.execute('COMMIT')
        finally:
            db.close()  # the last connection moves the WAL into the file and syncs it
        os.replace(unfinished, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _check(self) -> None:
        with self._damage_is_corruption():
            (verdict,) = self._db.execute('PRAGMA quick_check(1)').fetchone()
            if verdict != 'ok':
                raise CorruptBank(self.path, f'damaged ({verdict})')
            rows = self._db.execute('SELECT format, seq, hash FROM head').fetchall()
            if len(rows) != 1:
                raise CorruptBank(self.path, 'not a skill bank')
            version, self._head_seq, self._head_hash = rows[0]
            if version != FORMAT:
                raise BankError(f'{self.path} has format {version}, this program reads format {FORMAT}; left untouched')
            self._db.execute('PRAGMA journal_mode=WAL')
            self._db.execute('PRAGMA synchronous=FULL')

    def verified(self, upto: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """All events (seq, event) in order, each checked against the chain; ends at event `upto` if given.

        Afterwards `seq` and `hash` are those of the last event read.

        Raises:
          CorruptBank: The chain is broken, or the log ends before `upto` or before its own recorded end.
        """
        end = self._head_seq if upto is None else upto
        if end > self._head_seq:
            raise CorruptBank(self.path, f'event {end} was committed, but the file ends with event {self._head_seq}')
        seq, last = 0, GENESIS
        with self._damage_is_corruption():
            for number, body, link in self._db.execute('SELECT * FROM events WHERE seq <= ? ORDER BY seq', (end,)):
                if number != seq + 1 or not isinstance(body, bytes) or _chain(last, body) != link:
                    raise CorruptBank(self.path, f'the hash chain breaks at event {seq + 1}')
                seq, last = number, link
                yield seq, json.loads(body)
        if seq != end or (end == self._head_seq and last != self._head_hash):
            raise CorruptBank(self.path, f'the hash chain ends at event {seq} and does not match the recorded end')
        self.seq, self.hash = seq, last

    def events(self, upto: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """The events up to `upto` (default: all), without checking them again."""
        end = self.seq if upto is None else upto
        for seq, body in self._db.execute('SELECT seq, body FROM events WHERE seq <= ? ORDER BY seq', (end,)):
            yield seq, json.loads(body)

    def event(self, seq: int) -> dict[str, Any]:
        (body,) = self._db.execute('SELECT body FROM events WHERE seq = ?', (seq,)).fetchone()
        return json.loads(body)

    def append(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Make an event durable; returns it as it will be read back."""
        body = canonical(event)
        seq, last = self.seq + 1, _chain(self.hash, body)
        with self._transaction():
            self._db.execute('INSERT INTO events VALUES (?, ?, ?)', (seq, body, last))
            self._db.execute('UPDATE head SET seq = ?, hash = ?', (seq, last))
        self.seq, self.hash = seq, last
        self._head_seq, self._head_hash = seq, last
        return json.loads(body)

    def cut(self) -> int:
        """Move the events behind the last one that `verified` read to the table `orphaned`; returns how many."""
        behind = self._head_seq - self.seq
        if behind:
            with self._transaction():
                self._db.execute(
                    'INSERT INTO orphaned (seq, body, hash) SELECT seq, body, hash FROM events WHERE seq > ? '
                    'ORDER BY seq',
                    (self.seq,),
                )
                self._db.execute('DELETE FROM events WHERE seq > ?', (self.seq,))
                self._db.execute('UPDATE head SET seq = ?, hash = ?', (self.seq, self.hash))
            self._head_seq, self._head_hash = self.seq, self.hash
        return behind

    def orphaned(self) -> list[tuple[int, bytes]]:
        """(seq, body) of all events that were ever cut off, oldest cut first."""
        return self._db.execute('SELECT seq, body FROM orphaned ORDER BY id').fetchall()

    def close(self) -> None:
        self._db.close()
        if self._folder:
            self._folder.cleanup()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        if self.readonly:
            raise BankError(f'{self.path} was opened for reading')
        with self._damage_is_corruption():
            self._db.execute('BEGIN IMMEDIATE')
            try:
                head = self._db.execute('SELECT seq, hash FROM head').fetchone()
                if head != (self._head_seq, self._head_hash):
                    raise BankError(f'{self.path}: another process wrote to this bank; a bank has one writer')
                yield
                self._db.execute('COMMIT')
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute('ROLLBACK')
                raise

    @contextlib.contextmanager
    def _damage_is_corruption(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = (getattr(error, 'sqlite_errorcode', None) or sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise BankError(f'{self.path} is in use by another process; a bank has one writer') from error
            if code in _DAMAGE:
                raise CorruptBank(self.path, f'not a whole SQLite file ({error})') from error
            raise


def _chain(last: bytes, body: bytes) -> bytes:
    return hashlib.sha256(last + body).digest()


def _private_copy(path: Path) -> tempfile.TemporaryDirectory[str]:
    """The file and its WAL, copied while nobody wrote (a writer's checkpoint in between would tear the copy)."""
    wal = Path(f'{path}-wal')

    def stamps() -> list[tuple[int, int] | None]:
        return [(s.st_mtime_ns, s.st_size) if (s := _stat(file)) else None for file in (path, wal)]

    for _ in range(20):
        folder = tempfile.TemporaryDirectory(prefix='sesa-bank-')
        before = stamps()
        for source, name in ((path, 'bank'), (wal, 'bank-wal')):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(source, Path(folder.name, name))
        if stamps() == before:
            return folder
        folder.cleanup()
    raise BankError(f'{path} is being written all the time; try again')


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
