"""Passes of a model with two versions of outpace, in turns:
``versions.py MODEL OLD NEW [TURNS [TOKENS]]``.

OLD, NEW: the ``src`` folders of two checkouts. A process for each takes its turn, in random order;
the ratio (above 1: the new one is faster) is the median of neighbours, with a 95 % interval.
TOKENS: of the passes, as in "1,8".
"""

import random
import statistics
import subprocess
import sys

from usage import usage

usage(__doc__, needed=3)

COLUMNS = "1,2,4,8,16,64"
SAMPLES = 2000
PLAYER = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
from outpace import LLM
llm = LLM(sys.argv[1], max_num_seqs=1, speculative_config={"method": "none"})
runner = llm.engine.target.runner
def once(count):
    runner.admit(1)
    runner.lengths = [128]
    begin = time.perf_counter()
    runner.forward(torch.full((1, count), 7), keep=count)
    taken = time.perf_counter() - begin
    runner.retain([])
    return 1e3 * taken
once(8)
for line in sys.stdin:
    print(min(once(int(line)) for _ in range(2)), flush=True)
"""


class Player:
    """A process that times passes with one version."""

    def __init__(self, model, source):
        self._process = subprocess.Popen(
            [sys.executable, "-c", PLAYER, model, source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def milliseconds(self, columns):
        self._process.stdin.write(f"{columns}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("one of the two versions ended: try its model alone.")
        return float(answer)


def interval(ratios):
    """Returns the 95 % interval of their median."""
    drawn = [statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(SAMPLES)]
    low, *_, high = statistics.quantiles(drawn, n=40)
    return low, high


def main():
    model, *sources = sys.argv[1:4]
    turns = int(sys.argv[4]) if len(sys.argv) > 4 else 15
    wanted = sys.argv[5] if len(sys.argv) > 5 else COLUMNS
    players = [Player(model, source) for source in sources]
    print("| tokens | old, ms | new, ms | ratio |\n|---|---|---|---|")
    for columns in map(int, wanted.split(",")):
        pairs = []
        for _ in range(turns):
            found = {}
            for which in random.sample(range(2), 2):
                found[which] = players[which].milliseconds(columns)
            pairs.append((found[0], found[1]))
        old, new = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = [before / after for before, after in pairs]
        low, high = interval(ratios)
        middle = statistics.median(ratios)
        print(
            f"| {columns} | {old:.1f} | {new:.1f} | {middle:.2f} [{low:.2f}, {high:.2f}] |",
            flush=True,
        )


main()
