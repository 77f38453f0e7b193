"""us of drafting per round, by method and text length: ``python lab/measure/lookups.py``.

Texts are made of phrases that come again, as in code. Each round drafts up to ten tokens for one
row after a text that has grown by two. What a round's distributions cost the target is not in it.
"""

import random
import statistics
import time

import torch
from usage import usage

from outpace.core.logits_pipeline import History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import Verdict
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.round import Outcome, Round, Rows
from outpace.methods.lookup.datastore import Datastore
from outpace.methods.lookup.ngram import NgramDrafter, NgramOptions
from outpace.methods.lookup.recycling import RecyclingDrafter
from outpace.methods.lookup.retrieval import RetrievalDrafter, RetrievalOptions
from outpace.methods.lookup.suffix import SuffixDrafter, SuffixOptions
from outpace.methods.self_speculation.lookahead import LookaheadDrafter, LookaheadOptions

usage(__doc__)

VOCABULARY, BUDGET, ROUNDS = 32_000, 10, 300
torch.set_num_threads(1)
choose = random.Random(1)
PHRASES = [
    [min(VOCABULARY - 1, int(choose.paretovariate(0.6))) for _ in range(choose.randrange(2, 12))]
    for _ in range(3000)
]


def text(length: int) -> list[int]:
    """Returns phrases, some of them much more frequent than others."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += PHRASES[min(len(PHRASES) - 1, int(choose.paretovariate(0.5)))]
    return tokens[:length]


def drafters():
    """Yields fresh drafters, those that know other texts with 100,000 tokens of them."""
    yield "ngram", NgramDrafter(NgramOptions())
    for tree in (False, True):
        suffix = SuffixDrafter(SuffixOptions(tree=tree))
        for _ in range(100):
            suffix.past.add(text(1000))
        yield f"suffix, {'trees' if tree else 'chains'}", suffix
    yield (
        "recycling",
        RecyclingDrafter(
            VOCABULARY, torch.device("cpu"), TreeShape.branching([4, 1, 1]).first(BUDGET)
        ),
    )
    corpus = Datastore.of([text(1000) for _ in range(100)], VOCABULARY)
    yield "retrieval", RetrievalDrafter(corpus, RetrievalOptions(datastore=corpus))
    yield "lookahead", LookaheadDrafter(LookaheadOptions(), VOCABULARY)


def measure(drafter, length: int) -> tuple[float, float, float]:
    """Returns us to take a prompt in, and of a round: median and 95th percentile."""
    whole = text(length + 2 * ROUNDS)
    prompt, output = whole[:length], []
    options = RowOptions(SamplingParams(temperature=0).resolve({}), ())
    request = Request(prompt, options, 0, 2 * ROUNDS, output_ids=output)
    drafter.begin([request])
    pipeline, seeds = LogitsPipeline([options], VOCABULARY), torch.zeros(1, dtype=torch.long)
    took = []
    for number in range(ROUNDS):
        rows = Rows(History([prompt], [output]), pipeline, seeds, requests=[request])
        begin = time.perf_counter()
        proposal = drafter.propose(rows, [BUDGET])
        took.append(time.perf_counter() - begin)
        nodes = torch.zeros(1, dtype=torch.long)
        probs = aux_logits = None
        if drafter.needs.softmax_probs:
            probs = torch.rand(1, 1 + proposal.tree.size, VOCABULARY)
        if proposal.aux_tokens is not None:
            aux_logits = torch.rand(1, proposal.aux_tokens.parents.shape[1], VOCABULARY)
        said = whole[length + 2 * number]
        outcomes = [Outcome(int(proposal.counts[0]), 0, 0, 1, tokens=[said])]
        verdict, nothing = Verdict(nodes, nodes), Seconds(0, 0, 0)
        played = Round(rows, [BUDGET], proposal, verdict, outcomes, nothing, probs, aux_logits)
        begin = time.perf_counter()
        drafter.observe(played)
        took[-1] += time.perf_counter() - begin
        output += whole[length + 2 * number : length + 2 * number + 2]
    drafter.end([request])
    first, rest = took[0], sorted(took[1:])
    return first * 1e6, statistics.median(rest) * 1e6, rest[int(len(rest) * 0.95)] * 1e6


print("| method | tokens | first round, us | further rounds, us | 95th percentile |")
print("|---|---|---|---|---|")
with torch.inference_mode():
    for length in (1000, 10_000):
        for name, drafter in drafters():
            first, median, late = measure(drafter, length)
            print(f"| {name} | {length} | {first:.0f} | {median:.0f} | {late:.0f} |")
