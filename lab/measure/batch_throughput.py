"""Tokens per second of ``outpace batch`` over those of ``outpace serve`` with 16 clients.

``python lab/measure/batch_throughput.py TURNS [MODEL]``: both write the same seeded texts, in turns,
each in a process of its own, without the time to load the model. Prints the ratio of each turn, and
their mean with its interval; the first turn is not counted.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

from usage import usage

from outpace.bench.builtin import BUILT_IN
from outpace.bench.statistics import interval_of

usage(__doc__, 1)

turns, model = int(sys.argv[1]), sys.argv[2:3]
PORT, CLIENTS, EACH = 8765, 16, 4
FLAGS = ["--served-model-name", "it", *(["-m", *model] if model else [])]
bodies = [
    {"prompt": text, "max_tokens": 64, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    for seed in range(EACH)
    for *_, text in BUILT_IN
]


def ask(body):
    """Returns how many tokens the server writes for a body."""
    kind = {"Content-Type": "application/json"}
    sent = Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), kind)
    return json.load(urlopen(sent))["usage"]["completion_tokens"]


def served():
    """Returns the tokens per second of 16 clients that each wait for their answer."""
    command = [sys.executable, "-m", "outpace", "serve", "--port", str(PORT), *FLAGS]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                try:
                    urlopen(f"http://127.0.0.1:{PORT}/ready")
                    break
                except OSError:
                    assert server.poll() is None, "the server has ended"
                    time.sleep(0.2)
            begin = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as clients:
                tokens = sum(clients.map(ask, bodies))
            return tokens / (time.perf_counter() - begin)
        finally:
            server.terminate()


def batched():
    """Returns the tokens per second that the command says."""
    with tempfile.TemporaryDirectory() as folder:
        requests, answers = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        lines = [
            {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body}
            for at, body in enumerate(bodies)
        ]
        requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "outpace", "batch", str(requests), str(answers), *FLAGS]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return float(re.search(r"tokens in .* \(([0-9.]+) tokens/s\)", said)[1])


ratios = []
for turn in range(turns + 1):
    ways = [served, batched]
    speeds = {way: way() for way in ways[:: 1 if turn % 2 else -1]}
    print(f"serve {speeds[served]:.1f}, batch {speeds[batched]:.1f} tokens/s", flush=True)
    if turn:
        ratios.append(speeds[batched] / speeds[served])
print(f"batch over serve: {interval_of(ratios)}")
