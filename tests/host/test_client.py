"""The typed client against a real host process: what comes back, and what happens when the process does not answer."""

import os
import signal
import threading
import time

import pytest

from sesa_jax.host import client as client_module
from sesa_jax.host.client import (
    HostClient,
    HostConflict,
    HostError,
    HostProcess,
    HostRefusal,
    JudgeItem,
    Verification,
    VerifyItem,
)
from sesa_jax.records import Search, Target
from sesa_jax.run.clock import Clock
from sesa_jax.worlds import lab


@pytest.fixture(scope='module')
def process(tmp_path_factory, run_data):
    """One process for all tests; those that kill it leave a new one."""
    with HostProcess.start(tmp_path_factory.mktemp('run'), run_data, most_restarts=99) as process:
        yield process


@pytest.fixture(scope='module')
def host(process):
    with HostClient(process) as host:
        yield host


@pytest.fixture(scope='module')
def title(run_data) -> str:
    """An entity of the run's world."""
    # A decoy's: it names its entity twice and the relation, so that nothing else comes before it.
    return next(d.title for d in lab.build(run_data['seed']).documents if d.title[0].isupper() and ' ' in d.title)


def test_searches_come_back_in_query_order_with_their_outcome(host, title):
    found, empty = host.search([title, 'zyx'], 2)
    assert isinstance(found, Search)
    assert (found.query, found.outcome, found.documents[0].title) == (title, 'ok', title)
    assert (empty.query, empty.outcome, empty.documents) == ('zyx', 'empty', ())
    assert found.latency > 0
    assert host.search([], 2) == []


def test_a_submitted_search_does_not_wait(host, title):
    futures = [host.submit_search([title], 1) for _ in range(20)]
    assert {future.result(10)[0].documents[0].title for future in futures} == {title}


def test_answers_and_questions_are_judged_in_order(host):
    answers = [JudgeItem('q', 'the Orsk!', ('Vel', 'Orsk')), JudgeItem('q', 'Orsk town', ('Orsk',))]
    assert host.judge(answers) == ['correct', 'wrong']
    target = Target('Orin Vale', ('Orin',))
    own = ('Velmar: Velmar was founded by Orin.',)
    questions = [VerifyItem('Who founded Velmar?', target, materials, ('Tar: a river.',), 3) for materials in (own, ())]
    assert host.verify(questions) == [Verification('accept'), Verification('reject', 'target-not-in-materials')]


def test_a_step_of_whole_documents_is_verified_and_judged_in_slices_and_in_order(host, monkeypatch):
    sent = []
    post = HostClient._post

    async def watched(self, session, name, raw):
        sent.append((name, len(raw)))
        return await post(self, session, name, raw)

    monkeypatch.setattr(HostClient, '_post', watched)
    monkeypatch.setattr(client_module, 'SLICE_CHARACTERS', 3000)
    target, own = Target('Orin'), ('Velmar: Velmar was founded by Orin.',)
    items = [VerifyItem('Who founded Velmar?', target, own * (i % 3 > 0), ('\u00e9' * 1000,), i) for i in range(7)]
    items += [VerifyItem('Who founded Velmar?', target, own, ('\u00e9' * 9000,), 0)]  # more than a slice by itself
    host.take_calls()
    assert [v.outcome for v in host.verify(items)] == ['reject', 'accept', 'accept'] * 2 + ['reject', 'accept']
    assert host.take_calls() == {'verification': 8}
    assert [name for name, _ in sent] == ['verify'] * 5
    assert max(size for _, size in sent[:-1]) < 6000  # two bytes a character, not the six of an escape
    answers = [JudgeItem('q', f'{"x" * 1000} {i}', (f'{"x" * 1000} {i % 2}',)) for i in range(4)]
    assert host.judge(answers) == ['correct', 'correct', 'wrong', 'wrong']
    assert host.verify([]) == host.judge([]) == []


def test_half_a_surrogate_pair_is_refused(host):
    with pytest.raises(HostRefusal, match='search: the request is not JSON'):
        host.search(['\ud800'], 1)


def test_calls_are_counted_by_purpose_and_once(host, title):
    host.take_calls()
    host.search([title, 'b'], 2)
    host.search(['c'], 2, purpose='evaluation')
    host.judge([JudgeItem('q', 'a', ('a',))])
    with pytest.raises(HostRefusal):
        host.search(['d'], 0)
    assert host.take_calls() == {'search': 2, 'evaluation': 1, 'judging': 1}
    assert host.take_calls() == {}


def test_a_refusal_names_the_field_and_is_not_sent_again(host, process):
    restarts = process.restarts
    with pytest.raises(HostRefusal, match='search: k must be a whole number from 1 to 100, not 0'):
        host.search(['a'], 0)
    assert process.restarts == restarts


def test_a_killed_host_is_replaced_once_and_all_calls_in_flight_are_sent_again(host, process, title):
    before, restarts = host.search([title], 2)[0].documents, process.restarts
    os.kill(process.pid, signal.SIGKILL)
    futures = [host.submit_search([title], 2) for _ in range(10)]
    assert [future.result(30)[0].documents for future in futures] == [before] * 10
    assert process.restarts == restarts + 1


def test_a_host_that_hangs_or_whose_socket_is_gone_is_replaced(process, title, monkeypatch):
    restarts = process.restarts
    os.unlink(process.socket)
    with HostClient(process) as host:
        assert host.search([title], 1)[0].outcome == 'ok'
        assert process.restarts == restarts + 1
        monkeypatch.setattr(client_module, 'PING_AFTER', 0.2)
        monkeypatch.setattr(client_module, 'PING_SECONDS', 0.3)
        hung = process.pid
        os.kill(hung, signal.SIGSTOP)
        begin = time.monotonic()
        future = host.submit_search([title], 1)
        while process.pid == hung and time.monotonic() < begin + 10:
            time.sleep(0.01)
        assert time.monotonic() - begin < 5
        monkeypatch.setattr(client_module, 'PING_SECONDS', 30)
        assert future.result(30)[0].outcome == 'ok'
    assert not os.path.exists(f'/proc/{hung}')


def test_a_host_that_keeps_dying_is_given_up_with_the_reason(tmp_path, run_data, title):
    now = [0.0]
    clock = Clock(monotonic=lambda: now[0])
    with HostProcess.start(tmp_path, run_data, most_restarts=1, clock=clock) as process, HostClient(process) as host:
        os.kill(process.pid, signal.SIGKILL)
        assert host.search([title], 1)[0].outcome == 'ok'
        os.kill(process.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(HostError, match=r'failed 2 times within 10 minutes, last: search: .*host.log'):
                host.search([title], 1)
        now[0] = 601.0
        assert host.search([title], 1)[0].outcome == 'ok'
        os.kill(process.pid, signal.SIGKILL)
        process.stop()  # also removes what a killed host could not
        with pytest.raises(HostError, match='was stopped'):
            host.search([title], 1)


def test_calls_from_several_threads_and_clients_do_not_mix(process, title):
    wrong = []

    def ask(host, word):
        for _ in range(20):
            if host.search([word], 1)[0].query != word:
                wrong.append(word)

    with HostClient(process) as one, HostClient(process) as two:
        threads = [threading.Thread(target=ask, args=(host, f'w{i}')) for i, host in enumerate([one, two] * 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_closed_client_leaves_no_thread_and_says_so(process):
    before = threading.active_count()
    host = HostClient(process)
    assert threading.active_count() == before + 1
    host.close()
    host.close()
    assert threading.active_count() == before
    with pytest.raises(HostError, match='this client was closed'):
        host.search(['a'], 1)


def test_cards_cannot_be_retrieved_before_a_snapshot(host):
    with pytest.raises(HostConflict, match='take a snapshot first'):
        host.retrieve(['q'], 3)
