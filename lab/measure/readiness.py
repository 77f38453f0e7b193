"""What a drafter costs while it drafts nothing, and a round of it by what it drafted.

``python lab/measure/readiness.py METHOD [TURNS]``, on the bundled target. Prints the seconds of texts
that ask for no drafts, and of texts with "auto", over those of an engine without a drafter, all
in turns; then the median milliseconds of rounds with "auto" by drafted tokens.
"""

import statistics
import sys
from collections import defaultdict
from time import perf_counter

from usage import usage

from outpace import LLM, SamplingParams
from outpace.arguments import bundled_drafter
from outpace.bench.builtin import BUILT_IN
from outpace.bench.statistics import interval_of
from outpace.llm import BUNDLED

usage(__doc__)

method, turns = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
brought = bundled_drafter("draft_model" if method == "auto" else method, BUNDLED)
config = {"method": method} | ({"model": str(brought)} if brought else {})
plain, drafting = LLM(speculative_config={"method": "none"}), LLM(speculative_config=config)
texts = [text for *_, text in BUILT_IN][:6]
rounds = defaultdict(list)


def note(trace):
    """Keeps what a round took, by drafted tokens."""
    rounds[max(one.drafted for one in trace.outcomes)].append(trace.seconds)


def seconds(llm, text, speculative):
    """Writes a text and returns what that took."""
    llm.forget_texts()
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, speculative=speculative)
    begin = perf_counter()
    llm.generate([text], params)
    return perf_counter() - begin


ratios = {"off": [], "auto": []}
for turn in range(turns + 1):
    for text in texts:
        ways = [(plain, None), (drafting, "off"), (drafting, "auto")]
        took = {}
        for llm, speculative in ways[:: 1 if turn % 2 else -1]:
            with llm.engine.observing(
                note if speculative == "auto" and turn else lambda trace: None
            ):
                took[speculative] = seconds(llm, text, speculative)
        for name, found in ratios.items():
            if turn:  # the first turn warms up
                found.append(took[name] / took[None])
for name, found in ratios.items():
    print(f"{name}: {interval_of(found)} times the seconds without a drafter")
for width, found in sorted(rounds.items()):
    draft, score = (
        statistics.median(getattr(one, part) for one in found) for part in ("draft", "score")
    )
    print(
        f"{width} drafted, {len(found)} rounds: draft {draft * 1e3:.2f} ms, score {score * 1e3:.2f} ms"
    )
