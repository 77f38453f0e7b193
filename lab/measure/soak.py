"""Many short requests against one server: nothing is lost, mixed up, stuck, or grows.

    python lab/measure/soak.py --requests 10000 --at-once 16

Each text is compared with the one that its prompt gets alone. One in ten clients leaves in the
middle, one in ten sends rubbish. The server is a process of its own, of which the memory is read. In
the end it is told to stop (SIGTERM) in the middle of streams, which all have to come to their end, and
a second server is stopped by Ctrl-C while it is idle.
"""

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

PROMPTS = [
    f"{name} {verb} the"
    for name in ("Tom", "Lily", "The dog", "Mum")
    for verb in ("saw", "took", "ate", "lost")
]


def request(port, body, leave=False):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if leave:
            answer.readline()
            return None
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def started():
    """Starts a server; returns the process and its port."""
    words = [sys.executable, "-c", "from outpace.cli.main import run; run()"]
    words += ["serve", "--port", "0", "--verify", "coupled"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    port = int(next(line for line in server.stderr if "serves" in line).rpartition(":")[2])
    threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
    return server, port


def stopped_under_load(server, port, count):
    """Sends SIGTERM in the middle of streams; returns how many of them came to their end."""
    streams = []
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = json.dumps(body_of("One day", stream=True, max_tokens=60, ignore_eos=True))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        streams.append(connection.getresponse())
    for stream in streams:
        stream.readline()
    server.send_signal(signal.SIGTERM)
    ended = sum(stream.read().rstrip().endswith(b"data: [DONE]") for stream in streams)
    return ended, server.wait(120)


def body_of(prompt, **more):
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin nothing after these")
    given = parser.parse_args()
    server, port = started()
    last = time.monotonic() + 60 * given.minutes
    process = psutil.Process(server.pid)
    alone = {prompt: request(port, body_of(prompt))[1]["choices"][0]["text"] for prompt in PROMPTS}
    counts = {"same": 0, "left": 0, "refused": 0}
    wrong, memory, lock = [], [], threading.Lock()

    def one(number):
        if time.monotonic() > last:
            return
        draws = random.Random(number)
        prompt, kind = draws.choice(PROMPTS), draws.random()
        if kind < 0.1:
            request(port, body_of(prompt, stream=True, max_tokens=300, ignore_eos=True), leave=True)
            found = "left"
        elif kind < 0.2:
            found = (
                "refused" if request(port, body_of(prompt, temperature="hot"))[0] == 400 else None
            )
        else:
            status, answer = request(
                port, body_of(prompt, speculative=draws.choice(["off", "auto", 3]))
            )
            found = (
                "same" if status == 200 and answer["choices"][0]["text"] == alone[prompt] else None
            )
        with lock:
            if found is None:
                wrong.append(number)
            else:
                counts[found] += 1
            if number % 100 == 0:
                memory.append((number, process.memory_info().rss / 1e6))

    try:
        with ThreadPoolExecutor(given.at_once) as pool:
            list(pool.map(one, range(given.requests)))
        state = json.loads(_get(port, "/ready"))
        ended, code = stopped_under_load(server, port, given.at_once)
        other, port = started()
        while b"ready" not in _get(port, "/ready"):
            time.sleep(0.1)
        other.send_signal(signal.SIGINT)
        codes = code, other.wait(60)
    finally:
        server.kill()
    half = memory[len(memory) // 2 :]
    slope = np.polyfit(*zip(*half, strict=True), 1)[0] * 1000 if len(half) > 2 else float("nan")
    print(f"{counts}, wrong: {len(wrong)}, left over: {state}")
    print(
        f"memory: {memory[0][1]:.0f} MB at first, {memory[-1][1]:.0f} MB at last, {slope:+.2f} MB per 1000 requests in the second half"
    )
    print(f"SIGTERM under load: {ended} of {given.at_once} streams ended; exit codes {codes}")
    lost = ended < given.at_once or code not in (0, -signal.SIGTERM) or codes[1]
    sys.exit(bool(wrong or state["running"] or state["waiting"] or lost))


def _get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return connection.getresponse().read()


if __name__ == "__main__":
    main()
