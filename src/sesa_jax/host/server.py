"""The host process: `python -m sesa_jax.host.server`, started by `process.py`, never by hand.

It serves `service.py` as JSON over HTTP on a Unix socket that nobody else can reach: a fresh folder with mode 0700, a
socket with mode 0600, and a check of the peer's user. It lives exactly as long as its parent wants it: it ends when its
standard input ends, which is how the parent asks and what happens when the parent dies, and on Linux also by the
parent-death signal, since a forked sibling may keep the pipe open. Interrupts and terminations are ignored: they are
meant for the trainer, which ends at a step boundary and needs this process until then.

Neither JAX nor transformers is imported, so it starts in about a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from sesa_jax.host.process import PREFIX, RECORD, SOCKET, remove_socket_folder
from sesa_jax.host.schema import ENDPOINTS, BadRequest, Conflict
from sesa_jax.host.service import Service
from sesa_jax.run.clock import SYSTEM

# Far above what a step can hold, which its trainer has in memory: a run that met a limit here would meet it again at
# each resume. Nobody but that trainer can call, so there is nothing to be guarded against but a fault of its own.
BODY_BYTES = 64 << 30
PATH_BYTES = 107  # what fits into sockaddr_un
DRAIN_SECONDS = 2.0  # for the calls in flight at the end
DEADLINE_SECONDS = 4  # after the request to end, the kernel ends the process
LOCK_SECONDS = 5.0  # for the host process of a killed trainer to notice and end
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the first line of standard input, serve, and end with it. Exit code 0, or 1 where it could not start."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    start = json.loads(_read_line(0))
    end = _Ending(start['parent'])
    answer = os.dup(1)
    os.dup2(2, 1)  # what is printed from here on goes to the log
    code, record = 0, None
    try:
        record = RunRecord(Path(start['run_dir']))
        service = Service(start['config'], Path(start['run_dir']))
        path = make_socket_folder() / SOCKET
        record.write(path)
        asyncio.run(serve(service, path, end, lambda: _say(answer, {'socket': str(path), 'pid': os.getpid()})))
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            _say(answer, {'error': f'{type(error).__name__}: {error}'})
        code = 1
    finally:
        if record is not None:
            record.remove()
    sys.stderr.flush()
    os._exit(code)  # without waiting for a job that is still running


async def serve(service: Service, path: Path, end: _Ending, ready: Callable[[], None]) -> None:
    """Serve until `end` comes; `ready` is called once the socket answers."""
    runner = web.AppRunner(application(service), access_log=None, shutdown_timeout=DRAIN_SECONDS)
    try:
        end.watch(asyncio.get_running_loop())
        await runner.setup()
        mask = os.umask(0o177)
        try:
            await web.UnixSite(runner, str(path)).start()
        finally:
            os.umask(mask)
        ready()
        await end.asked.wait()
    finally:
        remove_socket_folder(path)  # first of all: whatever goes wrong now, nothing is left behind
        await runner.cleanup()
        await service.close()


def application(service: Service, body_bytes: int = BODY_BYTES) -> web.Application:
    """POST /<endpoint> with a JSON object, answered by a JSON object; errors are {'error': kind, 'message': text}."""
    replies = Replies()

    async def answer(request: web.Request) -> web.Response:
        name = request.match_info['name']
        try:
            endpoint = ENDPOINTS.get(name)
            if endpoint is None:
                raise web.HTTPNotFound(text=f'there is no endpoint {name!r}')
            body = _parse(await request.read())
            if endpoint.is_mutating:
                return web.json_response(await replies.once(name, body, functools.partial(endpoint.call, service)))
            return web.json_response(await endpoint.call(service, body))
        except web.HTTPRequestEntityTooLarge as error:
            return _refusal(error.status, 'BadRequest', f'{name}: the request is too large. {error.text}')
        except web.HTTPException as error:
            return _refusal(error.status, 'BadRequest', error.text or error.reason)
        except BadRequest as error:
            return _refusal(400, 'BadRequest', f'{name}: {error}')
        except Conflict as error:
            return _refusal(409, 'Conflict', f'{name}: {error}')
        except Exception as error:
            traceback.print_exc()
            return _refusal(500, type(error).__name__, f'{name}: {error}')

    @web.middleware
    async def only_us(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if request.transport is not None and not _is_our_user(request.transport.get_extra_info('socket')):
            return _refusal(403, 'Forbidden', 'this socket belongs to another user')
        return await handler(request)

    app = web.Application(client_max_size=body_bytes, middlewares=[only_us])
    app.router.add_post('/{name}', answer)
    return app


class Replies:
    """First replies to calls that change something, by key: a call that is sent again is not carried out again.

    A call that failed is forgotten, since it changed nothing. What must not happen twice even if this process is
    replaced in between is refused by the bank, which knows the steps that it holds.
    """

    def __init__(self, capacity: int = 256):
        self._capacity = capacity
        self._calls: dict[str, tuple[str, asyncio.Task[dict[str, Any]]]] = {}

    async def once(self, name: str, body: dict[str, Any], call: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The reply to this call or, if its key was seen before, to the first call with that key."""
        key = body.pop('key', None)
        if not isinstance(key, str) or not key:
            raise BadRequest("a call that changes something needs a 'key', a text that names it once")
        # A digest, since a body may hold a whole step: it is only compared.
        content = hashlib.sha256(f'{name} {json.dumps(body, sort_keys=True)}'.encode()).hexdigest()
        if key not in self._calls:
            # A task of its own: the work goes on when the caller goes away, and the next one gets its result.
            self._calls[key] = (content, asyncio.ensure_future(call(body)))
        first, task = self._calls[key]
        if first != content:
            raise Conflict(f'the key {key!r} was used before for another call')
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._calls.pop(key, None)
            raise
        finally:
            while len(self._calls) > self._capacity:
                self._calls.pop(next(iter(self._calls)))


class RunRecord:
    """`host.json` of a run folder, locked for as long as this process lives: one run has one host process."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / RECORD
        deadline = SYSTEM.monotonic() + LOCK_SECONDS
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._path.exists() and os.fstat(handle).st_ino == self._path.stat().st_ino:
                    break  # else its holder removed it while we waited
            except BlockingIOError:
                if SYSTEM.monotonic() > deadline:
                    holder = os.pread(handle, 4096, 0).decode(errors='replace')
                    raise RuntimeError(
                        f'the socket of this run folder is in use: another host process serves {run_dir} ({holder}); '
                        'stop the run that it belongs to, or wait until it ends'
                    ) from None
                time.sleep(0.05)
            os.close(handle)
        self._handle = handle
        with contextlib.suppress(ValueError, KeyError, TypeError):  # what is not a record names no socket
            remove_socket_folder(Path(json.loads(os.pread(handle, 4096, 0))['socket']))

    def write(self, path: Path) -> None:
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({'pid': os.getpid(), 'socket': str(path)}).encode(), 0)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._handle)


class _Ending:
    """Notices that the parent wants this process to end, or has died."""

    def __init__(self, parent: int):
        self.asked = asyncio.Event()
        self._parent = parent
        signal.signal(signal.SIGHUP, self._on_hangup)
        if sys.platform == 'linux':
            # Sent when the thread that started us ends, which need not be the end of its process.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
        if os.getppid() != parent:  # it died before we could ask to be told
            os._exit(0)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """From here on `asked` is set in `loop` as soon as the parent asks or dies."""
        loop.add_reader(0, self._on_input)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        self._on_hangup()

    def _on_input(self) -> None:
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            self._end()

    def _on_hangup(self, *_: object) -> None:
        if os.getppid() != self._parent:
            self._end()

    def _end(self) -> None:
        signal.alarm(DEADLINE_SECONDS)
        self.asked.set()


def make_socket_folder() -> Path:
    """A fresh folder with mode 0700 whose path is short enough for a socket in it."""
    places = [os.environ.get('XDG_RUNTIME_DIR', ''), tempfile.gettempdir(), '/tmp']
    for place in places:
        is_ours = os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)
        if is_ours and len(os.fsencode(os.path.join(place, PREFIX + 'xxxxxxxx', SOCKET))) <= PATH_BYTES:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # 0700 whatever the umask is
    raise RuntimeError(f'no folder for the socket: none of {places} is writable and short enough; set TMPDIR to one')


def _is_our_user(peer: socket.socket | None) -> bool:
    """Whether the other end runs as our user; True where the system does not tell (the folder keeps others out)."""
    if peer is None or not hasattr(socket, 'SO_PEERCRED'):
        return True
    _, uid, _ = struct.unpack('3i', peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize('3i')))
    return uid == os.getuid()


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f'the request is not JSON ({error})') from error
    if not isinstance(body, dict):
        raise BadRequest(f'the request is not a JSON object but {type(body).__name__}')
    if b'\\ud' in raw:  # an escape that can be half a character, which no file and no hash takes
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BadRequest('the request holds half a surrogate pair, which is no character') from error
    return body


def _refusal(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({'error': kind, 'message': message}, status=status)


def _read_line(handle: int) -> bytes:
    line = b''
    while not line.endswith(b'\n'):
        chunk = os.read(handle, 1 << 16)
        if not chunk:
            raise SystemExit('the host process is started by the trainer, which tells it what to do')
        line += chunk
    return line


def _say(handle: int, answer: dict[str, Any]) -> None:
    os.write(handle, json.dumps(answer).encode() + b'\n')
    os.close(handle)


if __name__ == '__main__':
    main()
