"""One of two processes, run by test_distributed.py: what process 0 does for both, and what both agree on.

Arguments: coordinator, process. Each prints what it saw as one JSON line. At the end process 1 fails alone, while
process 0 waits for it.
"""

import json
import sys

from sesa_jax.command import Cluster
from sesa_jax.config import ConfigError
from sesa_jax.host.client import HostClient, HostFailure
from sesa_jax.run import distributed


class Foreign(Exception):
    """Neither Python's nor ours."""


def fail(error):
    raise error


def seen(work, *arguments):
    try:
        return repr(work(*arguments))
    except Exception as error:
        return f'{type(error).__name__}: {error} {getattr(error, "kind", "")}'


def main(coordinator, process):
    with distributed.joined(Cluster(True, coordinator, process, 2)):
        said = {
            'result': seen(distributed.shared, lambda: {'of': process}),
            'first': seen(distributed.first, lambda: process),
            'bytes': len(distributed.broadcast(bytes(100_000 if process == 0 else 5))),
            'empty': seen(distributed.broadcast, b''),
            'config': seen(distributed.shared, fail, ConfigError('no room')),
            'host': seen(distributed.shared, fail, HostFailure('CorruptBank', 'a hole')),
            'python': seen(distributed.shared, fail, FileNotFoundError(2, 'no such file', 'bank.db')),
            'foreign': seen(distributed.shared, fail, Foreign('what')),
            'signal': distributed.agree(15 * process, {'loss': 0.25}),
            'differ': seen(distributed.agree, 0, {'loss': 0.25 + 1e-12 * process}),
        }
        client = HostClient(Answering() if process == 0 else None, share=distributed.shared)
        asked = [client.submit_search([query], 1) for query in ('a', 'b')]
        said['searches'] = [pending.result()[0].query for pending in asked] + [client.take_calls()]
        print(json.dumps(said), flush=True)
        if process == 1:
            raise ValueError('I alone')
        distributed.broadcast(b'')


class Answering:
    """Takes the place of the host process; the client is closed with the process."""

    restarts, socket, run = 0, '/nowhere', 'run'


async def _request(self, name, body):
    found = [{'documents': [], 'outcome': 'empty'} for _ in body['queries']]
    return {'results': found, 'calls': {'search': len(found)}}


HostClient._request = _request

if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]))
