"""One of two processes, run by test_distributed.py: the host process, which process 0 has, dies under them twice.

Arguments: coordinator, process, run folder, config of the run as JSON. The first time it is replaced, and both go on; the
second time it may not be, and both end.
"""

import json
import os
import signal
import sys

from sesa_jax.command import Cluster
from sesa_jax.host.client import HostClient, HostProcess
from sesa_jax.run import distributed


def main(coordinator, process, folder, config):
    with distributed.joined(Cluster(True, coordinator, process, 2)):
        child = distributed.is_first() and HostProcess.start(folder, config, most_restarts=1)
        try:
            host = HostClient(child or None, share=distributed.shared)
            found = []
            for _ in range(3):
                found.append([search.outcome for search in host.search(['Who founded it?'], 1)])
                print(json.dumps({'found': found}), flush=True)
                if child:
                    os.kill(child.pid, signal.SIGKILL)
        finally:
            if child:
                host.close()
                child.stop()


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
