"""What a target over many devices takes, and what a million requests a day need: computed.

    python lab/scale.py

Nothing here is measured. Each constant says where it comes from: MEASURED (a page of docs/results),
PUBLISHED, or ASSUMED. The queue is played round by round, without a model, from a fixed seed.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.bench.theory import Times, best_k_from_times, expected_tokens, speedup_from_times

# -- a pass over many devices ----------------------------------------------------------------------

PUBLISHED = {(70, 80): 14.1, (7, 32): 5.0, (4, 8): 1.8}
"""Chen et al. 2023, 16 TPU v4: by billions of parameters and layers, milliseconds for a token. The
first is Chinchilla, the last its draft model, the second what they did without (32 layers are
ASSUMED of it)."""

BANDWIDTH = 3.35 * 0.8
"""Terabytes per second that an H100 reads: its sheet's figure, of which .8 is ASSUMED."""
OWN = 9.8 / 32 - 16 / BANDWIDTH / 32
"""Milliseconds of a layer besides reading its weights: MEASURED on an H100 (102 tokens/s of an 8B
model in bfloat16 with 32 layers, passes recorded; docs/results/gpu-h100.md)."""
LAUNCHED = 1000 / (122 * 0.41) / 32
"""Milliseconds of a layer whose pass is not recorded, as those of a split model are not: MEASURED
on an H200 (.41 times the 122 tokens/s; docs/gpu.md). The host takes them; the GPU waits for it."""
SUMS = 2 * 0.025
"""Milliseconds of a layer's two sums over eight GPUs: ASSUMED."""
CALL = 0.2
"""Milliseconds of the broadcast that begins a pass: ASSUMED."""


def fitted() -> np.ndarray:
    """Returns milliseconds for a billion parameters, for a layer, and for a pass, such that the
    three published figures come out."""
    sizes = [(billions, layers, 1.0) for billions, layers in PUBLISHED]
    return np.linalg.solve(np.array(sizes), np.array(list(PUBLISHED.values())))


def on_gpus(billions: float, layers: int, gpus: int, recorded: bool) -> float:
    """Returns milliseconds of a pass in bfloat16 over one token."""
    reading = 2 * billions / gpus / BANDWIDTH
    computing = reading + layers * (OWN + SUMS * (gpus > 1))
    call = CALL * (gpus > 1)
    return call + (computing if recorded else max(computing, layers * LAUNCHED))


def drafting(target: float, draft: float, alpha: float, longest: int = 8) -> tuple[int, float]:
    """Returns the best length of a draft and its speed-up, where scoring it takes as long as one
    token (one text, few tokens: reading weights and waiting take the time)."""
    times = Times(
        draft={k: k * draft for k in range(1, longest + 1)},
        verify={n: target for n in range(1, longest + 2)},
    )
    k = best_k_from_times(alpha, times)
    return k, speedup_from_times(alpha, k, times)


def passes() -> None:
    """Prints what passes take, and what drafts bring."""
    billion, layer, alone = fitted()
    print("Chinchilla's set-up, 16 TPU v4, from the three published figures:")
    print(
        f"  {billion:.3f} ms for a billion parameters, {layer:.3f} ms a layer, {alone:.2f} ms a pass"
    )
    print(
        f"  of Chinchilla's 14.1 ms its 80 layers take {80 * layer:.1f}, its weights {70 * billion:.1f}"
    )
    for name, speedup in (("XSum", 1.92), ("HumanEval", 2.46)):
        tokens = speedup * (4 * 1.8 + 14.1) / 14.1
        alpha = next(a / 1000 for a in range(1001) if expected_tokens(a / 1000, 4) >= tokens)
        print(f"  {name}: {speedup} at 4 drafted tokens needs an acceptance of {alpha:.2f}")
    print("\ndraft model          ms/token   speed-up at acceptance .65 and .8 (best length)")
    for billions, layers in ((4, 8), (4, 16), (4, 32), (7, 32), (1, 16), (1, 4)):
        took = billions * billion + layers * layer + alone
        found = [drafting(14.1, took, alpha) for alpha in (0.65, 0.8)]
        words = "   ".join(f"{speedup:.2f} ({k})" for k, speedup in found)
        print(f"{billions}B, {layers:2} layers       {took:6.1f}     {words}")

    print("\n70B, 80 layers, bfloat16, over 8 H100; the draft model whole on one of them:")
    for recorded in (False, True):
        target = on_gpus(70, 80, 8, recorded)
        print(f"  passes {'recorded' if recorded else 'as they are now'}: {target:.1f} ms a token")
        for name, billions, layers in (
            ("1B, 16 layers", 1.2, 16),
            ("4B, 8 layers", 4, 8),
            ("8B, 32 layers", 8, 32),
        ):
            took = on_gpus(billions, layers, 1, True)
            k, speedup = drafting(target, took, 0.8)
            print(
                f"    {name:14} {took:5.1f} ms a token: {speedup:.2f} with {k} tokens at acceptance .8"
            )


# -- a million requests a day ----------------------------------------------------------------------

REQUESTS = 1_000_000
PEAK = 2.0
"""The busiest minutes over the mean of the day: ASSUMED."""
PROMPT, OUTPUT = (400, 1.0), (150, 0.8)
"""Median of the tokens, and spread of their logarithm: ASSUMED. Means of 660 and 207."""
LONGEST = 4096
AGAIN, KNOWN = 0.6, 0.75
"""The share of requests that go on from an earlier one, and of their prompt that it had: ASSUMED."""

ROWS = 16
"""`--max-num-seqs`, as by default."""
BUDGET = 2048
"""Prompt tokens between two rounds (`max_num_batched_tokens`)."""
ROUND, ROW = 9.8e-3, (13.0e-3 - 9.8e-3) / 7
"""Seconds of a plain round over one text, and of each further one: MEASURED at 1 and 8 texts of an
8B model on an H100 (102 and 615 tokens/s), straight beyond."""
GAIN = {1: 2.21, 8: 1.66}
"""What drafts of five tokens bring, by texts at once: MEASURED there, on a random pair whose
agreement is .81 (docs/results/gpu-h100.md), straight in the logarithm between them and beyond."""
READING = 20_000.0
"""Prompt tokens per second: ASSUMED."""
STARTING = 60.0
"""Seconds until a replica that was killed takes requests again: ASSUMED."""


def round_seconds(rows: int) -> float:
    return ROUND + ROW * (rows - 1)


def gain(rows: int) -> float:
    """Returns the tokens that a text gets while a plain round would last, with drafts where they
    pay."""
    slope = (GAIN[8] - GAIN[1]) / 3
    return max(1.0, GAIN[1] + slope * math.log2(rows))


@dataclass
class Asked:
    """A request, and what became of it."""

    at: float
    prompt: int
    tokens: int
    session: int
    first: float = 0.0
    ended: float = 0.0

    @property
    def per_token(self) -> float:
        return (self.ended - self.first) / max(1, self.tokens - 1)


@dataclass
class Engine:
    """One replica."""

    speculates: bool
    waiting: deque[Asked] = field(default_factory=deque)
    running: list[tuple[float, int, Asked]] = field(
        default_factory=list
    )  # by the token that ends it
    written: float = 0.0
    now: float = 0.0
    rows: float = 0.0
    """Seconds of all texts together."""
    away: float = 0.0
    """Until when it takes nothing."""
    sessions: set[int] = field(default_factory=set)

    @property
    def open(self) -> int:
        return len(self.waiting) + len(self.running)

    def until(self, end: float) -> None:
        """Plays rounds up to a time."""
        while self.now < end and self.open:
            self._round()
        self.now = max(self.now, end) if not self.open else self.now

    def _round(self) -> None:
        read, new = 0, []
        while self.waiting and len(self.running) + len(new) < ROWS and read < BUDGET:
            one = self.waiting.popleft()
            known = KNOWN if one.session in self.sessions else 0.0
            read += int(one.prompt * (1 - known))
            self.sessions.add(one.session)
            new.append(one)
        rows = len(self.running) + len(new)
        took = read / READING + round_seconds(rows)
        self.now, self.rows = self.now + took, self.rows + took * rows
        for one in new:
            one.first = self.now
            heapq.heappush(self.running, (self.written + one.tokens, id(one), one))
        self.written += gain(rows) if self.speculates else 1.0
        while self.running and self.running[0][0] <= self.written:
            heapq.heappop(self.running)[2].ended = self.now


def arrivals(rate: float, seconds: float, seed: int = 0) -> Iterator[Asked]:
    """Yields requests that come at random."""
    draws, at, sessions = random.Random(seed), 0.0, 0
    recent: deque[int] = deque(maxlen=int(60 * rate))  # whoever goes on does so within a minute
    while (at := at + draws.expovariate(rate)) < seconds:
        if recent and draws.random() < AGAIN:
            session = recent[draws.randrange(len(recent))]
        else:
            sessions += 1
            session = sessions
        recent.append(session)
        prompt, tokens = (
            min(LONGEST, max(1, int(median * draws.lognormvariate(0, spread))))
            for median, spread in (PROMPT, OUTPUT)
        )
        yield Asked(at, prompt, tokens, session)


def served(
    rate: float,
    replicas: int,
    speculates: bool,
    by_session: bool = False,
    lost_at: float | None = None,
    seconds: float = 600.0,
) -> tuple[list[Asked], float]:
    """Returns requests with their times, and how many texts a replica wrote at once.

    by_session: a session's requests go to one replica; else each goes to the less busy one of two
    that are drawn, as Ray's router has it. lost_at: when one of the replicas is killed, whose open
    requests are sent again.
    """
    engines = [Engine(speculates) for _ in range(replicas)]
    draws, found = random.Random(1), []

    def send(one: Asked, now: float) -> None:
        there = [engine for engine in engines if engine.away <= now]
        if by_session:
            chosen = there[one.session % len(there)]
        else:
            chosen = min(draws.sample(there, min(2, len(there))), key=lambda engine: engine.open)
        chosen.now = max(chosen.now, now)
        chosen.waiting.append(one)

    for one in arrivals(rate, seconds):
        for engine in engines:
            engine.until(one.at)
        if lost_at is not None and one.at >= lost_at:
            gone = engines[0]
            again = [*gone.waiting, *(each for _, _, each in gone.running)]
            engines[0] = Engine(speculates, now=lost_at, away=lost_at + STARTING)
            for each in again:
                send(each, one.at)
            lost_at = None
        send(one, one.at)
        found.append(one)
    for engine in engines:
        engine.until(math.inf)
    return found, sum(engine.rows for engine in engines) / replicas / seconds


def figures(found: Sequence[Asked], rows: float) -> str:
    """Returns a row of the table: of the requests after the first minute."""
    steady = [one for one in found if one.at > 60]
    first = np.array([one.first - one.at for one in steady])
    token = np.array([one.per_token for one in steady if one.tokens > 1])
    half, most = np.percentile(first, [50, 99])
    return f"{min(rows, ROWS):5.1f}  {half:8.2f} {most:8.2f}  {1000 * token.mean():8.1f}"


def requests() -> None:
    """Prints what replicas make of the requests."""
    rate = REQUESTS / 86400 * PEAK
    print(f"\n{REQUESTS:,} requests a day are {rate:.1f} a second at the peak")
    print("replicas  drafts  router       texts  first token, s      ms a token")
    print("                                       half   99 %")
    for replicas in (5, 6, 7, 8, 10):
        for speculates in (False, True):
            row = figures(*served(rate, replicas, speculates))
            print(f"{replicas:8}  {'yes' if speculates else 'no':6}  any        {row}")
    print(f"{6:8}  yes     session    {figures(*served(rate, 6, True, by_session=True))}")
    for replicas in (5, 6, 7):
        row = figures(*served(rate, replicas, True, lost_at=240))
        print(f"{replicas:8}  yes     any, one lost {row}")
    print("\nload of 6 replicas at which the first token takes more than two seconds for 1 of 100:")
    for speculates in (False, True):
        for share in range(50, 400, 5):
            found, rows = served(rate * share / 100, 6, speculates, seconds=300)
            first = [one.first - one.at for one in found if one.at > 60]
            if np.percentile(first, 99) > 2:
                words = "with" if speculates else "without"
                print(f"  {words} drafts: {share / 100:.2f} of the peak, {rows:.1f} texts each")
                break


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    passes()
    requests()


if __name__ == "__main__":
    main()
