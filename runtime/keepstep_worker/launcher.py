"""mpirun without sshd: what it has run on another host is asked for there over mutual TLS.

    PYTHON -m keepstep_worker --reach HOST COMMAND...    what mpirun takes for ssh (`plm_rsh_agent`)

Each host but the first waits for one command of its own generation, from somebody with a certificate of this job, and
runs it as the worker that its agent supervises. The line stays open for as long as that runs, and ends with its exit
code, so that mpirun learns at once of a daemon that is gone.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

VERSION = 1
_CA, _CERTIFICATE, _KEY = "ca.pem", "node.pem", "node.key"
_ANSWER_S = 10.0
_AGAIN_S = 0.05
_REACH_S = 300.0
_LOST = 255
"""What ssh ends with where the line or the other host is the trouble."""


class Request(NamedTuple):
    """What was asked for, and the line on which its end is told."""

    command: str
    line: asyncio.StreamWriter

    async def tell(self, exit_code: int) -> None:
        """Tell the asker how it ended; nothing happens where that one is gone."""
        try:
            self.line.write(_line({"exit_code": exit_code}))
            await asyncio.wait_for(self.line.drain(), _ANSWER_S)
        except (OSError, asyncio.TimeoutError):
            pass
        self.line.close()


async def wait_for_request(environ: Mapping[str, str] = os.environ) -> Request:
    """Listen where this generation's worker does, until somebody of this job asks for a command to be run here.

    Raises:
        OSError: the address or the certificate is not to be had.
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: None)  # of strangers, who can not prove themselves
    asked: asyncio.Future[Request] = loop.create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = json.loads(await asyncio.wait_for(reader.readline(), _ANSWER_S))
            wrong = _objection(said, environ) or ("another command runs already" if asked.done() else "")
            if wrong:
                writer.write(_line({"error": wrong}))
                await writer.drain()
                writer.close()
                return
        except (OSError, ValueError, asyncio.TimeoutError):
            writer.close()
            return
        asked.set_result(Request(said["command"], writer))

    host, _, port = environ["KEEPSTEP_LISTEN"].rpartition(":")
    context = _context(ssl.PROTOCOL_TLS_SERVER, environ)
    server = await asyncio.start_server(answer, _own(host), int(port), ssl=context, ssl_handshake_timeout=_ANSWER_S)
    try:
        return await asked
    finally:
        server.close()
        loop.set_exception_handler(None)


def session(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What makes orted keep its session's files in this host's own folder, emptied of those of one that was killed.

    By default two of one job on one machine, as `keepstep local` has them, share a folder. Where they start at once,
    both write the same `hwloc.sm`, one finds an address of the other's stack in it, and crashes.
    Source: measured, Open MPI 4.1.4 with hwloc 2.9.0; made to write at the same moment, 48 of 50 crashed.
    """
    folder = environ["KEEPSTEP_SESSIONS"]
    shutil.rmtree(folder, ignore_errors=True)
    return {"OMPI_MCA_orte_tmpdir_base": folder}


def reach(words: list[str], environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Have a host run a command, and end as it does; on this very host it is run here."""
    host, command = words[0], " ".join(words[1:])
    if host == environ["KEEPSTEP_HOST"]:
        os.execve("/bin/sh", ["/bin/sh", "-c", command], {**environ, **session(environ)})
    places = dict(place.split("=", 1) for place in environ["KEEPSTEP_PLACES"].split())
    if host not in places:
        _give_up(f"{host} is none of {', '.join(places)}")
    name, _, port = places[host].rpartition(":")
    try:
        with _connect((name.strip("[]"), int(port)), environ) as line:
            generation = int(environ["KEEPSTEP_GENERATION"])
            line.sendall(_line({"version": VERSION, "generation": generation, "host": host, "command": command}))
            with line.makefile("rb") as answers:
                answer = answers.readline()
    except (OSError, ValueError) as error:
        _give_up(f"{host} at {places[host]}: {error}")
    said = json.loads(answer) if answer.endswith(b"\n") else {"error": "the line broke"}
    if "error" in said:
        _give_up(f"{host}: {said['error']}")
    sys.exit(int(said["exit_code"]))


def _connect(place: tuple[str, int], environ: Mapping[str, str]) -> ssl.SSLSocket:
    """A line to the other host, which may not listen yet.

    Raises:
        OSError: there is none in time.
    """
    give_up = time.monotonic() + float(environ.get("KEEPSTEP_REGISTER_S", _REACH_S))
    while True:
        try:
            plain = socket.create_connection(place, _ANSWER_S)
            try:
                line = _context(ssl.PROTOCOL_TLS_CLIENT, environ).wrap_socket(plain)
            except BaseException:
                plain.close()
                raise
            line.settimeout(None)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return line
        except OSError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(_AGAIN_S)


def _objection(said: Any, environ: Mapping[str, str]) -> str:
    """What is wrong with a request; empty where it is for this host's worker of this generation."""
    if not isinstance(said, dict) or not isinstance(said.get("command"), str):
        return "that is no request"
    wanted = {
        "version": VERSION,
        "generation": int(environ["KEEPSTEP_GENERATION"]),
        "host": environ["KEEPSTEP_HOST"],
    }
    wrong = [
        f"{name} is {said.get(name)!r}, here {value!r}" for name, value in wanted.items() if said.get(name) != value
    ]
    return "; ".join(wrong)


def _context(protocol: ssl._SSLMethod, environ: Mapping[str, str]) -> ssl.SSLContext:
    """Both sides show a certificate of this job's authority; which host it names, the request says and both know."""
    folder = environ["KEEPSTEP_TLS"]
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(os.path.join(folder, _CA))
    context.load_cert_chain(os.path.join(folder, _CERTIFICATE), os.path.join(folder, _KEY))
    return context


def _own(host: str) -> str | None:
    """The address to listen on: a name may stand for several, so then all there are."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return None


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _give_up(why: str) -> NoReturn:
    print(f"keepstep: no command can be run on {why}", file=sys.stderr, flush=True)
    sys.exit(_LOST)
