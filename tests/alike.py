"""A model that lies elsewhere (on several devices, in several processes) next to the same model in
one piece: what both are asked, and how their texts are compared."""

from __future__ import annotations

from typing import Any

from outpace import LLM, SamplingParams
from targets.families import CONTEXT, PROMPTS
from targets.generating import greedy

LENGTH = 10
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=11)
PENALISED = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.3, max_tokens=LENGTH, ignore_eos=True, seed=12
)
MIXED = [SAMPLED, greedy(LENGTH), PENALISED, SAMPLED]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "gemma3": {},
    "qwen3_moe": {},
    "mixtral": {},
}
"""By family: windows in the fourth and fifth, experts in the last two."""

METHODS = (
    "none",
    "ngram",
    "suffix",
    "recycling",
    "lookahead",
    "auto",
    "draft_model",
    "draft_tree",
    "eagle",
    "medusa",
    "ensemble",
)


def llms(one: Any, other: Any, **options: Any) -> tuple[LLM, LLM]:
    """The engine of a whole model, and that of the other one."""
    given = {"max_num_seqs": 4, "max_model_len": CONTEXT, **options}
    return LLM(one, **given), LLM(other, **given)


def same(pair: tuple[LLM, LLM], params: Any = MIXED, prompts: Any = PROMPTS) -> None:
    """Asserts that both write the same texts."""
    one, other = (llm.generate(prompts, params) for llm in pair)
    assert [[text.token_ids for text in each.outputs] for each in one] == [
        [text.token_ids for text in each.outputs] for each in other
    ]


def written(llm: LLM, prompt: Any, **options: Any) -> Any:
    """A request with its text."""
    (request,) = llm.requests(prompt, {"max_tokens": 24, "temperature": 0, **options})
    llm.engine.add(request)
    while not request.finished:
        llm.engine.step()
    return request
