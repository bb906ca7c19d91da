"""The bank behind the host: what a call does, that it is done once, and that no kill changes what comes out."""

import asyncio
import dataclasses
import os
import signal
import sqlite3
import threading

import pytest

from sesa_jax import records
from sesa_jax.host.client import Hit, HostClient, HostConflict, HostFailure, HostProcess, HostRefusal
from sesa_jax.host.schema import ENDPOINTS, BadRequest
from sesa_jax.host.service import Service
from sesa_jax.records import Document, Failure, Target
from sesa_jax.skills import card as cards
from sesa_jax.skills import distill
from sesa_jax.skills.card import DraftCard

SEEDS = [
    DraftCard(
        description=f'Look up the {noun}.', trigger=f'a question asks for the {noun}', queries=(f'{{entity}} {noun}',)
    )
    for noun in ('birthplace', 'director', 'mouth')
]


def failure(step: int, noun: str = 'founder', name: str = 'Velmar', keys: str = 'charter roll') -> Failure:
    """A failure with a pointer in its evidence, so that the offline distiller makes a card of it."""
    return Failure(
        rollout_id=f'solver:s{step}-{noun}:0',
        step=step,
        question=f'Who is the {noun} of {name}?',
        target=Target('Orin'),
        prediction='Bram',
        evidence=(Document('d1', name, f'{name} is a company. Its {noun} is kept in the {keys}.'),),
        queries=(f'{name} {noun}',),
        card_ids=(),
        bank_version=step,
    )


def play(host: HostClient, steps: int, first: int = 1) -> None:
    """Steps of a run that consolidates at every second step, each card entering one boundary later."""
    for step in range(first, steps + 1):
        host.commit_step(step, {'c00001': 1}, {'c00001': 2}, {'c00002': 1}, [failure(step)])
        if host.state().consolidating is not None:
            host.finish_consolidation(step)
        host.start_consolidation(step)


@pytest.fixture(scope='module')
def process(tmp_path_factory, memory_data):
    """One process for all tests; those that kill it leave a new one."""
    with HostProcess.start(tmp_path_factory.mktemp('run'), memory_data, most_restarts=99) as process:
        yield process


@pytest.fixture(scope='module')
def client(process):
    with HostClient(process) as client:
        yield client


@pytest.fixture
def host(client):
    """A client whose bank was just created."""
    client.create_bank(SEEDS)
    client.take_calls()
    return client


@pytest.fixture(scope='module')
def uninterrupted(client):
    """The state after four steps without a kill."""
    client.create_bank(SEEDS)
    play(client, 4)
    return client.state(), client.cards()


def test_cards_are_retrieved_from_the_frozen_snapshot_with_their_similarity(host):
    assert host.state().counts['seeds'] == 3
    info = host.snapshot(0)
    assert (info.version, info.size) == (0, 3)
    question = 'Who is the director of the film Velmar?'
    hits, none = host.retrieve([question, ''], 2)
    assert (hits[0].id, hits[0].text) == ('c00002', 'when a question asks for the director: search {entity} director')
    assert 1 > hits[0].similarity > hits[1].similarity > 0
    assert len(none) == 2
    assert host.retrieve([question], 5) == [(*hits, Hit(**dataclasses.asdict(host.retrieve([question], 3)[0][2])))]
    assert host.retrieve([question], 0) == [()]
    assert host.take_calls() == {'retrieval': 5}
    host.commit_step(1, {}, {}, {}, [failure(1)])
    host.commit_step(2, {}, {}, {}, [failure(2)])
    assert host.start_consolidation(2) == 2
    done = host.finish_consolidation(2)
    assert (done.started, done.failures, done.admitted, done.error) == (2, 2, ('c00004',), None)
    learned = 'Who is the founder of Orsk?'
    assert 'c00004' not in [hit.id for hit in host.retrieve([learned], 5)[0]]  # the snapshot is the step's
    host.snapshot(2)
    assert host.retrieve([learned], 1)[0][0].id == 'c00004'
    assert 'c00004' not in [hit.id for hit in host.retrieve([failure(1).question], 5)[0]]  # its own source
    assert [card.id for card in host.cards()] == ['c00001', 'c00002', 'c00003', 'c00004']
    assert host.take_calls()['distilling'] == 1
    with pytest.raises(HostConflict, match=r'no snapshot 3, the last committed step is 2'):
        host.snapshot(3)


def test_a_step_is_committed_once_however_often_it_is_sent(process, host):
    restarts = process.restarts
    first = host.commit_step(1, {'c00001': 1}, {'c00001': 3}, {}, [failure(1)])
    assert (first.queued, first.dropped, first.evicted) == (1, 0, {})
    assert (first.state.step, first.state.counts['queue']) == (1, 1)
    assert host.commit_step(1, {'c00001': 1}, {'c00001': 3}, {}, [failure(1)]) == first
    with HostClient(process) as other:  # another key
        other._opening = 'elsewhere'
        assert other.commit_step(1, {'c00001': 1}, {'c00001': 3}, {}, [failure(1)]).state == first.state
    os.kill(process.pid, signal.SIGKILL)  # another process, which has no replies to repeat
    assert host.commit_step(1, {'c00001': 1}, {'c00001': 3}, {}, [failure(1)]) == first
    assert process.restarts == restarts + 1
    assert (host.cards()[0].retrieved, host.cards()[0].helpful) == (1, 3)
    with pytest.raises(HostConflict, match='used before for another call'):
        host.commit_step(1, {'c00001': 2}, {}, {}, [])


@pytest.mark.parametrize('moment', ['before', 'started', 'finished'])
def test_a_host_killed_around_a_consolidation_gives_the_same_bank(process, uninterrupted, host, moment):
    restarts = process.restarts
    play(host, 2)  # ends with a consolidation under way
    info = host.snapshot(2)
    host.commit_step(3, {'c00001': 1}, {'c00001': 2}, {'c00002': 1}, [failure(3)])
    if moment == 'finished':
        done = host.finish_consolidation(3)
    os.kill(process.pid, signal.SIGKILL)
    if moment == 'started':
        assert host.start_consolidation(2) == 2  # sent again: under way, and not begun twice
    elif moment == 'finished':
        assert host.finish_consolidation(3) == done
    if moment != 'finished':
        host.finish_consolidation(3)
    assert host.retrieve(['Who is the director of Velmar?'], 1)[0][0].id == 'c00002'
    assert host.snapshot(2) == info
    host.start_consolidation(3)
    play(host, 4, first=4)
    assert (host.state(), host.cards()) == uninterrupted
    assert process.restarts == restarts + 1


def test_a_resumed_run_goes_on_from_its_record_with_the_consolidation_under_way_and_refuses_a_damaged_bank(
    tmp_path, memory_data, uninterrupted
):
    with HostProcess.start(tmp_path, memory_data) as process, HostClient(process) as host:
        host.create_bank(SEEDS)
        play(host, 2)
        recorded = host.state()
        host.commit_step(3, {'c00002': 5}, {}, {'c00002': 9}, [])  # a step that was never recorded
    with HostProcess.start(tmp_path, memory_data) as process, HostClient(process) as host:
        assert host.open_bank(recorded.seq, recorded.chain_hash) == recorded
        assert recorded.consolidating == 2
        play(host, 3, first=3)
        os.kill(process.pid, signal.SIGKILL)  # what came after the record is not undone once more
        play(host, 4, first=4)
        assert (host.state(), host.cards()) == uninterrupted
        with pytest.raises(HostFailure, match=r'CorruptBank: .* not abcdef'):
            host.open_bank(recorded.seq, 'abcdef')
        with pytest.raises(HostConflict, match='state: no bank is open'):
            host.state()
        with sqlite3.connect(tmp_path / 'bank.db') as db:
            db.execute("UPDATE events SET body = CAST(replace(body, 'director', 'directer') AS BLOB) WHERE seq = 1")
        db.close()
        with pytest.raises(HostFailure, match=r'open_bank: .*bank.db: the hash chain breaks at event 1') as caught:
            host.open_bank()
        assert caught.value.kind == 'CorruptBank'


def test_a_snapshot_that_cannot_be_taken_again_is_not_replaced_by_another(process, host):
    play(host, 2)
    host.snapshot(2)
    assert len(host.retrieve(['Who is the founder of Orsk?'], 9)[0]) == 3
    host.finish_consolidation(2)  # behind the same step, after the snapshot
    assert len(host.retrieve(['Who is the founder of Orsk?'], 9)[0]) == 3
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(HostConflict, match='is not the one that is held'):
        host.retrieve(['Who is the founder of Orsk?'], 9)


def test_a_bank_that_is_only_read_stays_as_it_is_also_when_the_host_is_replaced(process, host):
    play(host, 2)
    path = process._run_dir / 'bank.db'
    middle = host.state().seq - 2
    host.open_bank(readonly=True)  # closes the one for writing
    files = {file.name: file.read_bytes() for file in path.parent.glob('bank.db*')}
    read = host.open_bank(middle, readonly=True)
    assert (read.seq, read.step) == (middle, 1)
    os.kill(process.pid, signal.SIGKILL)
    assert host.state() == read
    with pytest.raises(HostConflict, match='was opened for reading'):
        host.commit_step(2, {}, {}, {}, [])
    assert {file.name: file.read_bytes() for file in path.parent.glob('bank.db*')} == files


def test_a_run_that_starts_over_gets_its_bank_as_it_was_created(host):
    created = host.state()
    play(host, 1)
    with pytest.raises(HostConflict, match='created with other seed cards'):
        host.create_bank(SEEDS[:2])
    assert host.create_bank(SEEDS) == created


def test_a_malformed_ledger_is_refused_and_changes_nothing(host):
    before = host.state()
    with pytest.raises(HostRefusal, match=r'commit_step: hurt.c00001 must be a whole number from 0'):
        host.commit_step(1, {}, {}, {'c00001': -1}, [])
    with pytest.raises(HostConflict, match=r'step 2 cannot follow step 0'):
        host.commit_step(2, {}, {}, {}, [])
    with pytest.raises(HostConflict, match=r"names card 'c9', which this bank never had"):
        host.commit_step(1, {'c9': 1}, {}, {}, [])
    assert host.state() == before


@pytest.mark.parametrize('broken', [{'colour': 'red'}, {'target': None}, {'evidence': [{}]}, {'queries': 'a'}])
def test_a_malformed_failure_or_card_is_refused_with_its_place(broken):
    body = {'step': 1, 'retrieved': {}, 'helpful': {}, 'hurt': {}}
    good = records.to_json(failure(1))
    endpoint = ENDPOINTS['commit_step']
    with pytest.raises(BadRequest, match=r'failures\[1\] is not a failure'):
        asyncio.run(endpoint.call(None, {**body, 'failures': [good, {**good, **broken}]}))
    with pytest.raises(BadRequest, match=r'seeds\[0\] is not a card'):
        asyncio.run(ENDPOINTS['create_bank'].call(None, {'seeds': [{'title': 'x'}]}))


# In this process, so that the distiller can be made slow or broken.


def served(tmp_path, memory_data, steps) -> None:
    async def work():
        service = Service(memory_data, tmp_path)
        try:
            await ENDPOINTS['create_bank'].call(service, {'seeds': [cards.to_json(seed) for seed in SEEDS]})
            for step in (1, 2):
                await commit(service, step)
            await steps(service)
        finally:
            await service.close()

    asyncio.run(work())


async def commit(service, step):
    ledger = {'step': step, 'retrieved': {}, 'helpful': {}, 'hurt': {}, 'failures': [records.to_json(failure(step))]}
    return await ENDPOINTS['commit_step'].call(service, ledger)


def test_a_repeated_seed_is_left_out_and_does_not_make_it_another_bank(tmp_path, memory_data):
    async def twice():
        service = Service(memory_data, tmp_path)
        try:
            create, body = ENDPOINTS['create_bank'], {'seeds': [cards.to_json(seed) for seed in [*SEEDS, SEEDS[0]]]}
            first = await create.call(service, body)
            assert first['state']['counts']['active'] == 3
            assert await create.call(service, body) == first
        finally:
            await service.close()

    asyncio.run(twice())


def test_a_bank_that_knows_only_the_first_source_question_of_a_card_is_still_the_same_bank(tmp_path, memory_data):
    new = dataclasses.replace(SEEDS[0], source_question_hash='q', source_question_hashes=('q', 'r'))
    old = dataclasses.replace(new, source_question_hashes=('q',))  # as older versions wrote it

    async def again():
        service = Service(memory_data, tmp_path)
        try:
            create = ENDPOINTS['create_bank']
            first = await create.call(service, {'seeds': [cards.to_json(old)]})
            assert await create.call(service, {'seeds': [cards.to_json(new)]}) == first
        finally:
            await service.close()

    asyncio.run(again())


def test_steps_go_on_while_a_consolidation_runs_and_its_boundary_waits(tmp_path, memory_data, monkeypatch):
    go_on = threading.Event()
    real, begun = distill.distill, []

    def slow(failures):
        begun.append(len(failures))
        go_on.wait(30)
        return real(failures)

    monkeypatch.setattr(distill, 'distill', slow)

    async def steps(service):
        started = await ENDPOINTS['start_consolidation'].call(service, {'step': 2})
        assert (started['failures'], started['state']['consolidating']) == (2, 2)
        assert await ENDPOINTS['start_consolidation'].call(service, {'step': 2}) == started
        await commit(service, 3)
        assert (await ENDPOINTS['search'].call(service, {'queries': ['zyx'], 'k': 1}))['results'][0][
            'outcome'
        ] == 'empty'
        finish = asyncio.ensure_future(ENDPOINTS['finish_consolidation'].call(service, {'step': 3}))
        await asyncio.sleep(0.1)
        assert not finish.done()
        go_on.set()
        done = await finish
        assert (done['admitted'], done['state']['consolidating']) == (['c00004'], None)
        assert begun == [2]
        assert done['state']['counts']['queue'] == 1  # the failure of step 3, which came meanwhile, is kept

    served(tmp_path, memory_data, steps)


def test_a_distiller_that_fails_gives_its_failures_back(tmp_path, memory_data, monkeypatch):
    def broken(failures):
        raise LookupError('at 0x7f00 after 3.2 s')

    async def steps(service):
        monkeypatch.setattr(distill, 'distill', broken)
        await ENDPOINTS['start_consolidation'].call(service, {'step': 2})
        done = await ENDPOINTS['finish_consolidation'].call(service, {'step': 2})
        assert (done['error'], done['admitted'], done['failures']) == ('LookupError', [], 2)
        assert done['state']['counts']['queue'] == 2
        monkeypatch.undo()
        await commit(service, 3)
        await commit(service, 4)
        assert (await ENDPOINTS['start_consolidation'].call(service, {'step': 4}))['failures'] == 4
        assert (await ENDPOINTS['finish_consolidation'].call(service, {'step': 4}))['admitted'] == ['c00004']

    served(tmp_path, memory_data, steps)


def test_nothing_is_distilled_where_nothing_is_due(host):
    host.commit_step(1, {}, {}, {}, [failure(1)])
    assert host.start_consolidation(1) == 0
    with pytest.raises(HostConflict, match='no consolidation is under way at step 1'):
        host.finish_consolidation(1)
