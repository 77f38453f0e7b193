"""Acceptance of drafters that learn online, on a stream that switches from stories to code:
``python lab/measure/online.py PICTURE.png [--method eagle3] [--answers 60]``.

Prints the mean acceptance length of each tenth of the stream, and how many texts are other ones
than plain decoding writes.
"""

import argparse
import itertools

import matplotlib
import torch

from outpace import LLM, SamplingParams

matplotlib.use("Agg")
from matplotlib import pyplot

ANIMALS = ("fox", "bear", "mouse", "dog", "bird", "cat", "rabbit", "frog")
PLACES = ("forest", "village", "garden", "castle", "river", "mountains", "sea", "city")
VERBS = ("find", "count", "sort", "remove", "reverse", "sum", "merge", "check")
THINGS = ("numbers", "words", "elements", "strings", "tuples", "digits", "vowels", "lists")


def prompts(count):
    stories = (
        f"Once upon a time, a little {a} lived near the {p}."
        for a, p in itertools.product(ANIMALS, PLACES)
    )
    code = (
        f"<|user|>\nWrite a python function to {v} the {t} in a given list.\n"
        for v, t in itertools.product(VERBS, THINGS)
    )
    return [*itertools.islice(stories, count), *itertools.islice(code, count)]


def lengths(texts, config):
    """The mean acceptance length of each answer, and the answers."""
    llm = LLM(speculative_config=config, max_num_seqs=1)
    found, written = [], []
    for text in texts:
        output = llm.generate(
            [text], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        )[0]
        found.append(1 + output.metrics.num_accepted_tokens / output.metrics.num_target_passes)
        written.append(output.token_ids)
    return found, written


parser = argparse.ArgumentParser()
parser.add_argument("picture")
parser.add_argument("--method", default="eagle3")
parser.add_argument("--answers", type=int, default=60, help="of each kind, 64 at most")
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--learners", nargs="+", default=["frozen", "osd", "optimistic", "ensemble"])
options = parser.parse_args()
torch.set_num_threads(1)
texts = prompts(options.answers)
_, plain = lengths(texts, {"method": "none"})
base = {"method": options.method, "num_speculative_tokens": 4}
online = {"learning_rate": options.lr, "every": 2, "window": 64, "share": 1.0, "positions": "all"}
for learner in options.learners:
    config = base if learner == "frozen" else {**base, "online": {**online, "learner": learner}}
    found, written = lengths(texts, config)
    other = sum(a != b for a, b in zip(plain, written, strict=True))
    size = len(found) // 10
    tenths = [sum(found[at * size : (at + 1) * size]) / size for at in range(10)]
    print(
        f"{learner:10}",
        *(f"{value:.2f}" for value in tenths),
        f"; other texts: {other}",
        flush=True,
    )
    window = max(1, options.answers // 6)
    smooth = [
        sum(found[max(0, at - window) : at + 1]) / len(found[max(0, at - window) : at + 1])
        for at in range(len(found))
    ]
    pyplot.plot(smooth, label=learner)
pyplot.axvline(options.answers, color="grey", linestyle=":")
pyplot.xlabel("answers: stories, then code")
pyplot.ylabel("acceptance length, mean of the latest answers")
pyplot.legend()
pyplot.savefig(options.picture, dpi=100)
