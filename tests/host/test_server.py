"""Requests as they come over the socket: what is refused and why, and that a repeated call is not carried out twice."""

import asyncio
import http.client
import json
import socket

import aiohttp
import pytest
from aiohttp import web

from sesa_jax.host.client import HostProcess
from sesa_jax.host.schema import BadRequest, Conflict
from sesa_jax.host.server import Replies, _is_our_user, application


@pytest.fixture(scope='module')
def server(tmp_path_factory, run_data):
    with HostProcess.start(tmp_path_factory.mktemp('run'), run_data) as process:
        yield process


def post(server, path: str, body: bytes | dict, method: str = 'POST') -> tuple[int, dict]:
    connection = http.client.HTTPConnection('host')
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(server.socket)
    try:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        raw = response.read()
        return response.status, json.loads(raw) if raw.startswith(b'{') else {}
    finally:
        connection.close()


ITEM = {'question': 'Who?', 'golds': ['x'], 'materials': [], 'noise': [], 'seed': 0}


@pytest.mark.parametrize(
    ('path', 'body', 'reason'),
    [
        ('/search', b'', 'search: the request is not JSON'),
        ('/search', b'{"queries": ["a"], "k"', 'search: the request is not JSON'),
        ('/search', b'\xff\xfe', 'search: the request is not JSON'),
        ('/search', b'[' * 200_000, 'search: the request is not JSON'),
        ('/search', b'[]', 'search: the request is not a JSON object but list'),
        ('/search', {'k': 2}, 'search: queries is missing'),
        ('/search', {'queries': ['a'], 'k': 2, 'p': 1}, 'search: p is not a field here; the fields are queries, k'),
        ('/search', {'queries': 'a', 'k': 2}, 'search: queries must be a list, not str'),
        ('/search', {'queries': ['a', 3], 'k': 2}, 'search: queries[1] must be a text, not int'),
        ('/search', b'{"queries": ["\\ud800"], "k": 2}', 'search: the request holds half a surrogate pair'),
        ('/search', b'{"queries": ["\xed\xa0\x80"], "k": 2}', "the request is not JSON ('utf-8' codec can't decode"),
        ('/search', {'queries': ['a'], 'k': True}, 'search: k must be a whole number from 1 to 100, not True'),
        ('/search', {'queries': ['a'], 'k': 1e3}, 'search: k must be a whole number from 1 to 100, not 1000.0'),
        ('/search', b'{"queries": ["a"], "k": NaN}', 'search: k must be a whole number from 1 to 100, not nan'),
        ('/judge', {'items': [{'question': 'q', 'prediction': 'p', 'golds': []}]}, 'golds must hold at least 1'),
        ('/judge', {'items': [{'question': 'q', 'golds': ['x']}]}, 'judge: items[0].prediction is missing'),
        ('/judge', {'items': ['q']}, 'judge: items[0] must be an object, not str'),
        ('/verify', {'items': [ITEM, {**ITEM, 'noise': None}]}, 'verify: items[1].noise must be a list, not NoneType'),
        ('/verify', {'items': [{**ITEM, 'seed': -1}]}, 'verify: items[0].seed must be a whole number from 0'),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(server, path, body, reason):
    status, reply = post(server, path, body)
    assert (status, reply['error']) == (400, 'BadRequest')
    assert reason in reply['message']


def test_an_unknown_endpoint_and_another_method_are_refused(server):
    assert post(server, '/drop_bank', {})[0] == 404
    assert post(server, '/ping', b'', 'GET')[0] == 405
    assert post(server, '/ping', {}) == (200, {})


def test_no_step_is_too_large_for_a_request(server):
    body = b'{"queries": [], "k": 1' + b' ' * (65 << 20) + b'}'  # 64 MiB was a limit once
    assert post(server, '/search', body) == (200, {'results': [], 'calls': {'search': 0}})


def test_a_body_over_the_limit_is_refused_with_both_sizes(tmp_path):
    async def ask():
        runner = web.AppRunner(application(None, body_bytes=1000))
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / 's')).start()
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / 's'))) as session,
                session.post('http://host/search', data=b'a' * 1001) as response,
            ):
                return response.status, await response.json()
        finally:
            await runner.cleanup()

    status, reply = asyncio.run(ask())
    assert (status, reply['error']) == (413, 'BadRequest')
    assert reply['message'].startswith('search: the request is too large. Maximum request body size 1000 exceeded')


def test_a_peer_of_another_user_is_refused(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert _is_our_user(ours)
        monkeypatch.setattr('os.getuid', lambda: 12345)
        assert not _is_our_user(ours)


def once(*bodies: dict, call, capacity: int = 256) -> list:
    """Replies, or exceptions, to calls that are sent at the same time."""

    async def all_of_them():
        replies = Replies(capacity)
        return await asyncio.gather(*(replies.once('n', dict(b), call) for b in bodies), return_exceptions=True)

    return asyncio.run(all_of_them())


def counting(fail_first: bool = False):
    made = []

    async def call(body):
        made.append(body)
        await asyncio.sleep(0)
        if fail_first and len(made) == 1:
            raise RuntimeError('once')
        return {'call': len(made)}

    return made, call


def test_a_repeated_key_gets_the_first_reply_also_while_that_is_in_flight():
    made, call = counting()
    assert once({'key': 'a', 'x': 1}, {'x': 1, 'key': 'a'}, call=call) == [{'call': 1}] * 2
    assert made == [{'x': 1}]


def test_a_key_that_comes_back_with_another_call_is_a_conflict():
    made, call = counting()
    first, second = once({'key': 'a', 'x': 1}, {'key': 'a', 'x': 2}, call=call)
    assert first == {'call': 1}
    assert isinstance(second, Conflict)
    assert len(made) == 1


def test_no_body_is_kept_for_the_comparison():
    _, call = counting()

    async def sent() -> int:
        replies = Replies()
        await replies.once('n', {'key': 'a', 'x': 'long ' * 100_000}, call)
        return sum(len(content) for content, _ in replies._calls.values())

    assert asyncio.run(sent()) < 200


@pytest.mark.parametrize('body', [{}, {'key': ''}, {'key': 3}])
def test_a_change_without_a_key_is_refused(body):
    made, call = counting()
    assert isinstance(once(body, call=call)[0], BadRequest)
    assert made == []


def test_a_call_that_failed_is_carried_out_when_it_is_sent_again():
    _, call = counting(fail_first=True)

    async def twice():
        replies = Replies()
        with pytest.raises(RuntimeError, match='once'):
            await replies.once('n', {'key': 'a'}, call)
        return await replies.once('n', {'key': 'a'}, call)

    assert asyncio.run(twice()) == {'call': 2}


def test_the_oldest_replies_are_forgotten():
    made, call = counting()

    async def many():
        replies = Replies(capacity=2)
        for key in 'abcab':
            await replies.once('n', {'key': key}, call)

    asyncio.run(many())
    assert len(made) == 5


def test_a_caller_that_goes_away_does_not_stop_the_work():
    made, call = counting()

    async def impatient():
        replies = Replies()
        first = asyncio.ensure_future(replies.once('n', {'key': 'a'}, call))
        await asyncio.sleep(0)
        first.cancel()
        return await replies.once('n', {'key': 'a'}, call)

    assert asyncio.run(impatient()) == {'call': 1}
    assert len(made) == 1
