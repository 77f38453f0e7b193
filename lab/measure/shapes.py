"""What rounds with drafts of some shapes cost: ``python lab/measure/shapes.py [PAIR]``.

Milliseconds of drafting, scoring and the rest, and the round over a plain one; in turns, medians.
Without a pair the bundled one.
"""

import statistics
import sys

from usage import usage

from outpace import LLM, SamplingParams
from outpace.core.trees.tree_shape import TreeShape
from outpace.policy.lengths.adaptive import Constant

usage(__doc__)

TURNS, TOKENS = 7, 48
SHAPES = {
    "plain": TreeShape(()),
    **{f"chain of {length}": TreeShape.chain(length) for length in (1, 2, 4, 6, 10)},
    **{
        f"tree {list(b)}": TreeShape.branching(b)
        for b in ((2,), (2, 1), (2, 2), (4, 1, 1), (3, 2, 1))
    },
}

pair = sys.argv[1] if len(sys.argv) > 1 else None
target = None if pair is None else f"{pair}/target"
config = {} if pair is None else {"model": f"{pair}/drafter"}
chains, trees = (
    LLM(target, speculative_config={"method": method, **config})
    for method in ("draft_model", "draft_tree")
)
prompt = list(range(20, 40))
for temperature in (0, 0.8):
    took = {name: [] for name in SHAPES}
    for turn in range(TURNS):
        for name, shape in SHAPES.items():
            llm = chains if shape.is_chain else trees
            llm.engine.controller = Constant(shape.size, shape=shape)
            params = SamplingParams(
                temperature=temperature, max_tokens=TOKENS, seed=turn, ignore_eos=True
            )
            found = llm.generate(prompt, params)[0].metrics
            parts = found.draft_seconds, found.verify_seconds, found.sample_seconds
            took[name].append([1e3 * part / found.num_target_passes for part in parts])
    plain = None
    for name, rounds in took.items():
        parts = [statistics.median(part) for part in zip(*rounds[1:], strict=True)]
        plain = plain or sum(parts)
        shown = " ".join(f"{part:6.2f}" for part in parts)
        print(f"temperature {temperature}  {name:16} {shown}  {sum(parts) / plain:.2f}")
