"""Processes that begin with the library imported: ``python forks.py SOCKET`` imports it once, and
forks for each script that `processes.python` is asked for.

An import takes as long as a short text, and a fork next to nothing. What the process is asked for,
its streams, its environment and its folder are those of the process that asks, which ends as the
forked one ends, and hands SIGINT and SIGTERM on to it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

HANDED_ON = (signal.SIGINT, signal.SIGTERM)
EACH = 0.01
"""Seconds between two looks at a process."""


def ask(path: str, script: str, words: list[str]) -> int:
    """Has a script run, and returns its exit code, negative for the signal that ended it."""
    asked = {"script": script, "words": words, "environ": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(content).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(content)

        def hand_on(number: int, frame: object) -> None:
            with suppress(OSError):  # the other one has just ended
                server.sendall(bytes([number]))

        for number in HANDED_ON:
            signal.signal(number, hand_on)
        return int.from_bytes(server.recv(4) or b"\x01", "big", signed=True)


def asked_for(asking: socket.socket) -> dict[str, Any]:
    """Returns what is asked for, and takes over the streams of the process that asks."""
    size, streams, *_ = socket.recv_fds(asking, 4, 3)
    content = b""
    while len(content) < int.from_bytes(size, "big"):
        content += asking.recv(1 << 16)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    found: dict[str, Any] = json.loads(content)
    return found


def watch(child: int, asking: socket.socket) -> None:
    """Waits for a process, hands signals on to it, and says how it ended. It does not outlive the
    one that asks."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            asking.send(code.to_bytes(4, "big", signed=True))
            return
        if select.select([asking], [], [], EACH)[0]:
            for number in asking.recv(64) or [signal.SIGKILL]:
                os.kill(child, number)


def next_script(listening: socket.socket) -> str:
    """Returns a script in a process that is forked for it; ends when standard input does."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    while True:
        ready = select.select([listening, 0], [], [])[0]
        if 0 in ready:
            os._exit(0)
        asking, _ = listening.accept()
        if os.fork():
            asking.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked = asked_for(asking)
        listening.close()
        child = os.fork()
        if child:
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):  # whoever reads its streams sees their end when it ends
                os.dup2(null, number)
            watch(child, asking)
            os._exit(0)
        asking.close()
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environ"])
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [place for place in own if place and place not in sys.path]
        sys.argv = ["-c", *asked["words"]]
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  # as those of a new process
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
        return str(asked["script"])


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "ask":
        code = ask(sys.argv[2], sys.argv[3], sys.argv[4:])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)

    SCRIPT = next_script(socket.socket(fileno=int(sys.argv[1])))
    exec(SCRIPT, {"__name__": "__main__"})
