"""Damage to the bank's files: an exact prefix or a clear refusal, never something else."""

import json
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from skills_toy import again, crashed, draft, failure, idle, new_bank

from sesa_jax.skills.bank import Bank, BankError, CorruptBank
from sesa_jax.skills.log import EventLog

SECTOR = 512


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A bank whose events are all still in the WAL, as (folder of its files, state behind each event)."""
    bank = new_bank(tmp_path_factory.mktemp('bank'), 'a b c')
    dumps = {bank.seq: bank.dump()}
    for step in range(1, 31):
        bank.commit_step(step, {'c00001': step}, {}, {}, [failure(step, row) for row in range(2)])
        dumps[bank.seq] = bank.dump()
        if taken := bank.start_consolidation(step):
            dumps[bank.seq] = bank.dump()
            bank.finish_consolidation(step, [draft(f'b{step}', taken[0])])
            dumps[bank.seq] = bank.dump()
    folder = tmp_path_factory.mktemp('killed')
    crashed(bank, folder / 'bank.db')
    bank.close()
    return folder, dumps


def image(written, tmp_path, wal: bytes | None):
    """A copy of the killed bank with another WAL."""
    path = tmp_path / 'bank.db'
    for suffix in ('', '-wal', '-shm'):
        Path(f'{path}{suffix}').unlink(missing_ok=True)
    shutil.copyfile(written[0] / 'bank.db', path)
    if wal is not None:
        Path(f'{path}-wal').write_bytes(wal)
    return path


def opened(path):
    bank = Bank.open(path)
    try:
        return bank.seq, bank.dump()
    finally:
        bank.close()


def test_a_killed_writer_leaves_everything_that_it_reported(written, tmp_path):
    _, dumps = written
    wal = (written[0] / 'bank.db-wal').read_bytes()
    assert opened(image(written, tmp_path, wal)) == (max(dumps), dumps[max(dumps)])


def torn(rng: random.Random, wal: bytes) -> bytes:
    at = rng.randrange(len(wal))
    sector = at - at % SECTOR
    match rng.randrange(4):
        case 0:
            return wal[:at]
        case 1:
            return wal[:sector] + bytes(SECTOR) + wal[sector + SECTOR :]
        case 2:
            return wal[:sector] + rng.randbytes(SECTOR) + wal[sector + SECTOR :]
        case _:
            other = rng.randrange(len(wal) // SECTOR) * SECTOR
            first, second = sorted((sector, other))
            middle = wal[first + SECTOR : second]
            if first == second:
                return wal
            return (
                wal[:first]
                + wal[second : second + SECTOR]
                + middle
                + wal[first : first + SECTOR]
                + wal[second + SECTOR :]
            )


def test_a_torn_wal_gives_an_exact_prefix(written, tmp_path):
    _, dumps = written
    wal = (written[0] / 'bank.db-wal').read_bytes()
    rng = random.Random(0)
    prefixes = set()
    for _ in range(150):
        seq, dump = opened(image(written, tmp_path, torn(rng, wal)))
        assert dump == dumps[seq]
        prefixes.add(seq)
    assert len(prefixes) > 20


def test_a_missing_wal_gives_what_the_main_file_holds(written, tmp_path):
    seq, dump = opened(image(written, tmp_path, None))
    assert (seq, dump) == (1, written[1][1])


def test_the_wal_of_another_bank_is_not_taken_for_this_one(written, tmp_path):
    """It may replace every page, so that the file alone looks whole: the commit record's hash tells."""
    (tmp_path / 'other').mkdir()
    other = new_bank(tmp_path / 'other', 'x y')
    idle(other, 50)
    path = image(written, tmp_path, Path(f'{other._log.path}-wal').read_bytes())
    other.close()
    with pytest.raises(CorruptBank):
        Bank.open(path, at_seq=1, chain_hash=json.loads(written[1][1])['chain_hash'])


@pytest.fixture(scope='module')
def closed(written, tmp_path_factory):
    """The bank's main file alone, after a clean close, and its state."""
    path = tmp_path_factory.mktemp('closed') / 'bank.db'
    for suffix in ('', '-wal'):
        shutil.copyfile(f'{written[0] / "bank.db"}{suffix}', f'{path}{suffix}')
    _, dump = opened(path)
    assert not Path(f'{path}-wal').exists()
    return path.read_bytes(), dump


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_is_refused_or_harmless(closed, tmp_path):
    data, dump = closed
    rng = random.Random(1)
    refused = 0
    for _ in range(250):
        path = tmp_path / 'bank.db'
        path.write_bytes(flip(data, rng.randrange(8 * len(data))))
        try:
            assert opened(path)[1] == dump
        except BankError:
            refused += 1
        for leftover in tmp_path.iterdir():
            leftover.unlink()
    assert refused > 125  # the rest hit free space


def test_a_flipped_bit_in_an_event_is_always_refused(closed, tmp_path):
    data, _ = closed
    rng = random.Random(2)
    places = [m.start() for m in re.finditer(rb'"rollout_id":"solver:s\d', data)]
    assert len(places) > 50
    for _ in range(40):
        path = tmp_path / 'bank.db'
        path.write_bytes(flip(data, 8 * (rng.choice(places) + rng.randrange(20)) + rng.randrange(8)))
        with pytest.raises(CorruptBank, match='the hash chain breaks at event'):
            opened(path)


@pytest.mark.parametrize(
    ('statement', 'message'),
    [
        ('DELETE FROM events WHERE seq = (SELECT MAX(seq) FROM events)', 'the hash chain ends at event'),
        ('DELETE FROM events WHERE seq = 5', 'the hash chain breaks at event 5'),
        ("UPDATE events SET body = CAST(replace(body, 'wrong', 'right') AS BLOB)", 'the hash chain breaks at event 2'),
        ("UPDATE events SET hash = x'00' WHERE seq = 3", 'the hash chain breaks at event 3'),
        ('UPDATE events SET body = CAST(body AS TEXT) WHERE seq = 3', 'the hash chain breaks at event 3'),
        ('UPDATE head SET seq = seq - 1', 'does not match the recorded end'),
        ('DELETE FROM head', 'not a skill bank'),
        ('DROP TABLE events', 'no such table'),
    ],
)
def test_a_meddled_log_is_refused(closed, tmp_path, statement, message):
    path = tmp_path / 'bank.db'
    path.write_bytes(closed[0])
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()
    with pytest.raises(CorruptBank, match=message):
        opened(path)


def test_damage_behind_the_event_that_is_asked_for_does_not_matter(closed, written, tmp_path):
    path = tmp_path / 'bank.db'
    path.write_bytes(closed[0])
    db = sqlite3.connect(path)
    db.execute("UPDATE events SET hash = x'00' WHERE seq = 20")
    db.commit()
    db.close()
    with pytest.raises(CorruptBank, match='event 20'):
        Bank.open(path, at_seq=20)
    bank = Bank.open(path, at_seq=19)
    assert bank.dump() == written[1][19]
    bank.close()
    assert opened(path) == (19, written[1][19])


@pytest.mark.parametrize('content', [b'', b'garbage', bytes(5000), b'SQLite format 3\0' + bytes(4080), None])
def test_what_is_no_bank_is_refused_with_its_path_and_what_to_do(tmp_path, content):
    path = tmp_path / 'some bank?#%20.db'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorruptBank, match=rf'{re.escape(str(path))}: .*Resume the run, .* or start a new run'):
        Bank.open(path)
    assert path.exists() == (content is not None) and (content is None or path.read_bytes() == content)


def test_a_path_may_hold_any_character(tmp_path):
    folder = tmp_path / 'a b?c#d%20é'
    folder.mkdir()
    bank = new_bank(folder, 'a')
    idle(bank, 1)
    assert again(bank, readonly=True).dump() == bank.dump()


def test_a_newer_format_is_refused_untouched(tmp_path):
    bank = new_bank(tmp_path, 'a')
    bank._log._db.execute('UPDATE head SET format = 2')
    bank.close()
    before = (tmp_path / 'bank.db').read_bytes()
    with pytest.raises(BankError, match='has format 2, this program reads format 1; left untouched'):
        opened(tmp_path / 'bank.db')
    assert (tmp_path / 'bank.db').read_bytes() == before


def test_equal_values_have_equal_bytes_and_odd_text_survives(tmp_path):
    EventLog.create(tmp_path / 'x', [{'b': 1, 'a': 'é\ud800\0'}])
    EventLog.create(tmp_path / 'y', [{'a': 'é\ud800\0', 'b': 1}])
    logs = [EventLog(tmp_path / name) for name in 'xy']
    assert [list(log.verified()) for log in logs] == [[(1, {'a': 'é\ud800\0', 'b': 1})]] * 2
    assert logs[0].hash == logs[1].hash


WRITER = """
import os, sys, pathlib
from sesa_jax.skills.log import EventLog
log = EventLog(pathlib.Path(sys.argv[1]))
for _ in log.verified(): pass
while True:
    log.append({'n': log.seq + 1, 'text': 'x' * 3000})
    os.write(1, b'%d\\n' % log.seq)
"""


def test_kill_9_loses_nothing_that_was_reported(tmp_path):
    path = tmp_path / 'log'
    EventLog.create(path, [{'n': 1}])
    rng = random.Random(3)
    reported = 1
    for _ in range(8):
        with subprocess.Popen([sys.executable, '-c', WRITER, path], stdout=subprocess.PIPE) as writer:
            for _ in range(rng.randrange(1, 30)):
                reported = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout.read().splitlines():
                reported = int(line)
        log = EventLog(path)
        events = [event['n'] for _, event in log.verified()]
        log.close()
        assert events == list(range(1, len(events) + 1))
        assert reported <= len(events) <= reported + 1
        reported = len(events)
