"""Tokens/s of writing after long prompts, by their length: ``long_texts.py MODEL PROMPTS [CONFIG ...]``.

PROMPTS: as `lab/prompts_long.py` prints them. CONFIG: a way to draft, as JSON of ``speculative_config``;
plain decoding takes part twice. Each way reads a prompt once and keeps its cache, so that writing alone
is timed. All ways take turns, and look-ups forget the text before each.
"""

import json
import sys
from collections import defaultdict
from statistics import median
from time import perf_counter

from usage import usage

from outpace import LLM, SamplingParams
from outpace.bench.statistics import geometric_mean, interval_of
from outpace.draft.base import Drafter
from outpace.methods.choosers.base import CompositeDrafter
from outpace.methods.lookup.suffix import SuffixDrafter

usage(__doc__, needed=3)

TURNS, TOKENS = 3, 128
PLAIN = {"method": "none"}


def forget_look_ups(drafter: Drafter) -> None:
    """Leaves what models and heads have cached of the prompt."""
    if isinstance(drafter, CompositeDrafter):
        for child in drafter.children:
            forget_look_ups(child)
    if isinstance(drafter, SuffixDrafter):
        drafter.forget_texts()


def seconds(llm: LLM, messages: list[dict[str, str]]) -> tuple[float, list[int]]:
    """Returns the seconds for a token after the prompt, and the text."""
    forget_look_ups(llm.engine.drafter)
    begin = perf_counter()
    (output,) = llm.chat([messages], SamplingParams(temperature=0, max_tokens=TOKENS))
    taken, ids = perf_counter() - begin, output.outputs[0].token_ids
    return taken / len(ids), ids


def main() -> None:
    model, prompts, *configs = sys.argv[1:]
    ways = {"plain": PLAIN, "plain again": PLAIN} | {each: json.loads(each) for each in configs}
    with open(prompts, encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    llms = {
        name: LLM(model, speculative_config=config, max_num_seqs=1, enable_prefix_caching=True)
        for name, config in ways.items()
    }
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        messages = [{"role": "user", "content": entry["prompt"]}]
        texts = {name: seconds(llm, messages)[1] for name, llm in llms.items()}
        same = sum(text == texts["plain"] for text in texts.values())
        found = defaultdict(list)
        for _ in range(TURNS):
            for name, llm in llms.items():
                found[name].append(seconds(llm, messages)[0])
        plain = median(found["plain"] + found["plain again"])
        print(
            f"{entry['id']}: plain {1 / plain:.1f} tokens/s, {same} of {len(texts)} texts the same"
        )
        for name in llms:
            ratio = plain / median(found[name])
            ratios[entry["task"]][name].append(ratio)
            print(f"  {ratio:.2f}  {name}", flush=True)
    for task, by_name in ratios.items():
        for name, each in by_name.items():
            print(f"{task}: {geometric_mean(each):.2f} {name}")
    for name in llms:
        every = [ratio for by_name in ratios.values() for ratio in by_name[name]]
        one = interval_of(every)
        print(f"all: {one.mean:.2f} [{one.low:.2f}, {one.high:.2f}] {name}")


main()
