"""What a draft model takes to read a prompt that begins as an earlier text did, and one that does not.

    python lab/measure/beginnings.py TARGET DRAFTER PROMPTS [TURNS]

PROMPTS: JSON lines, as `short_prompts.py` writes them. First each prompt is a chat of its own, so that
nothing but the template is the same; then they are the turns of one chat. Before every other text of
each kind all earlier texts are forgotten. Printed are the tokens of the prompts, and the medians, with
quartiles, of the milliseconds that the first draft of a text takes: what is read, and one token.
"""

import json
import statistics
import sys
from pathlib import Path

from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__, needed=3)
target, drafter, prompts, *rest = sys.argv[1:]
turns = int(rest[0]) if rest else 4
asked = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 1}
llm = LLM(target, speculative_config=config, max_num_seqs=1, max_model_len=4096)


def written(messages: list[dict[str, str]], tokens: int) -> tuple[float, int, str]:
    """Returns the milliseconds of a text's first draft, the tokens of its prompt, and the text."""
    took: list[float] = []
    params = SamplingParams(temperature=0, max_tokens=tokens)
    with llm.engine.observing(lambda trace: took.append(1000 * trace.seconds.draft)):
        output = llm.chat(messages, params)
    return took[0], len(output.prompt_token_ids), output.outputs[0].text


def shown(name: str, lengths: list[int], took: dict[bool, list[float]]) -> None:
    print(f"{name}: {statistics.median(lengths):.0f} tokens")
    for forgotten, each in took.items():
        low, middle, high = statistics.quantiles(each, n=4)
        what = "forgotten" if forgotten else "kept"
        print(f"  earlier texts {what}: {middle:.0f} [{low:.0f}, {high:.0f}] ms")


lengths, took = [], {False: [], True: []}
for prompt in asked:
    for forgotten in (False, True):
        if forgotten:
            llm.forget_texts()
        ms, length, _ = written([{"role": "user", "content": prompt}], 3)
        took[forgotten].append(ms)
        lengths.append(length)
shown("texts of their own", lengths, took)

lengths, took = [], {False: [], True: []}
for begin in range(0, len(asked) - turns + 1, turns):
    messages: list[dict[str, str]] = []
    for number, prompt in enumerate(asked[begin : begin + turns]):
        messages.append({"role": "user", "content": prompt})
        for forgotten in (False, True):
            if forgotten:
                llm.forget_texts()
            ms, length, text = written(messages, 32)
            if number:
                took[forgotten].append(ms)
                lengths.append(length)
        messages.append({"role": "assistant", "content": text})
shown(f"turns 2 to {turns} of chats", lengths, took)
