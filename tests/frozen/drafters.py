"""What each method is given beside its name: options as a user writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from outpace import LLM, SamplingParams

from . import heads
from .inside import bundled, command_line, dummy_options
from .models import CONTEXT, VOCABULARY, draft_model, model

LOOKUP = {"method": "ngram", "prompt_lookup_min": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {"tree": True, "suffix_decoding_max_spec_factor": 4.0},
    "consensus": {"min_token_span": 1},
    "draft_tree": {"branching": [2, 1, 1]},
    "lyanna": {"reuse": 2},
    "layer_skip": {"layers": {"attention": [], "mlp": [0]}, "draft_exit": 0.05},
    "early_exit": {"exit_layer": 1},
    "auto": {"lookups": [LOOKUP]},
    "staged": {"lookup": LOOKUP},
}
"""Options with which a method drafts something for a tiny model, besides models and heads."""
WITH_MODEL = ("draft_model", "draft_tree", "auto", "staged")
UNTRAINED = ("dflash2", "gemma4_assistant")
"""Heads that are published, and neither trained nor written here."""
SEVERAL = ("ensemble", "hedge", "ucb")
ON_BUNDLED: dict[str, dict[str, Any]] = {
    "suffix": {},
    "lookahead": {},
    "layer_skip": {"layers": {"attention": [], "mlp": [1]}},
    "eagle3": {"model": "heads/eagle3", "quantization": None},
    "draft_tree": {"branching": [2, 1]},
}
"""The same for the bundled target. Its head is named by the part of the bundle that holds it."""


def config_for(target: str, method: str, place: Path) -> dict[str, Any]:
    """Returns the ``speculative_config`` with which a method drafts for a model of ours.

    target: a family of `models`, or "bundled". place: a folder for what has to be a file.
    """
    child: Any = bundled("drafter") if target == "bundled" else draft_model(target)
    drafting = {"method": "draft_model", "model": child, "quantization": None}
    if not isinstance(child, str):
        del drafting["quantization"]  # a model that is handed over stays as it is
    own = dict(OPTIONS.get(method, {}))
    if target == "bundled":
        own = dict(ON_BUNDLED.get(method, own))
        if method == "eagle3":
            own["model"] = bundled(own["model"])
    elif method in heads.names():
        # Nobody has trained it, and a trial would find that.
        own |= {"model": heads.folder(method, place), "quantization": None, "check": False}
    elif method in UNTRAINED:
        own |= dummy_options(method, model(target))
    if method in WITH_MODEL:
        own |= {name: value for name, value in drafting.items() if name != "method"}
    if method in SEVERAL:
        own["drafters"] = [drafting, LOOKUP]
    if method == "tagged":
        own |= {"routes": {"copying": LOOKUP}, "default": drafting}
    if method == "task":
        own |= {"routes": {"copying": LOOKUP, "else": drafting}, "default": LOOKUP}
        own["router"] = by_repetition
    if method == "retrieval":
        own |= {"datastore": datastore(place), "min_token_span": 1}
    return {"method": method, **own}


def by_repetition(prompt: Sequence[int]) -> tuple[str, float]:
    """Tells the task of a prompt by whether one of its tokens comes again."""
    return ("copying" if len(set(prompt)) < len(prompt) else "else"), 1.0


def datastore(place: Path) -> str:
    """Has ``outpace datastore build`` make a datastore of what the tiny Llama writes itself."""
    folder, texts = place / "datastore", place / "texts.jsonl"
    words = [{"text": " ".join(f"w{token}" for token in text)} for text in _texts()]
    texts.write_text("".join(json.dumps(each) + "\n" for each in words), encoding="utf-8")
    tokenizer().save_pretrained(place / "tokenizer")
    arguments = ["datastore", "build", texts, "--tokenizer", place / "tokenizer", "--out", folder]
    done = CliRunner().invoke(command_line(), [str(each) for each in arguments])
    if done.exit_code:
        raise RuntimeError(f"outpace datastore build has failed: {done.output}")
    return str(folder)


@cache
def _texts() -> list[list[int]]:
    prompts = [[token, VOCABULARY - 1 - token] for token in range(VOCABULARY)]
    llm = LLM(model("llama"), speculative_config={"method": "none"}, max_model_len=CONTEXT)
    asked = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [each.token_ids for each in llm.generate(prompts, asked)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a word for each token of the tiny models."""
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
