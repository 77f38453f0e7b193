"""The names in docs/migration exist, in outpace and in the transformers that is installed."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import transformers

from cli.flags import flags_of_generate
from outpace import (
    LLM,
    BeamSearchParams,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    hf,
)
from outpace.config import COMMON
from outpace.core.beam_params import REFUSED
from outpace.core.options import described
from outpace.draft.registry import drafters
from outpace.engine.request import Logprob
from outpace.errors import ParamsError

PAGES = Path(__file__).parents[2] / "docs" / "migration"


def rows_of(page: str, title: str = "") -> list[list[str]]:
    """Returns the cells of all table rows of a page, or of one section of it."""
    text = (PAGES / f"{page}.md").read_text()
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0] if title else text
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def arguments() -> set[str]:
    """Every name that a caller of outpace may write."""
    names = {
        option.name
        for params in (SamplingParams, BeamSearchParams)
        for option in dataclasses.fields(params)
    }
    for function in (LLM.__init__, LLM.generate, hf.speculative):
        names |= set(inspect.signature(function).parameters)
    options = {one.name for drafter in drafters().values() for one in described(drafter.Options)}
    return names | set(COMMON) | options


def test_the_names_for_those_who_come_from_vllm() -> None:
    classes = {
        "RequestOutput": RequestOutput,
        "CompletionOutput": CompletionOutput,
        "BeamSearchSequence": BeamSearchSequence,
    }
    known = {*arguments(), *classes, "Logprob", "chat()", "beam_search()"}
    rows = rows_of("vllm")
    named = [name.rstrip("=") for row in rows[2:] for name in code_in(row[1])]
    assert [name for name in named if name not in known] == []
    assert {"max_num_seqs", "use_tqdm", "logprobs"} <= set(named)
    for row in rows:
        kind = {**classes, "Logprob": Logprob}.get(row[0].strip("`"))
        for name in code_in(row[2]) if kind else []:
            assert name in dir(kind) or name in {f.name for f in dataclasses.fields(kind)}, name


def test_the_names_for_those_who_come_from_transformers() -> None:
    rows = rows_of("transformers", "Assisted generation")[2:]
    theirs = {name for row in rows for name in code_in(row[0])}
    config = set(vars(transformers.GenerationConfig()))
    of_call = {"assistant_model", "tokenizer", "assistant_tokenizer"}
    assert theirs <= config | of_call | {"model.generate(...)"}
    ours = {name.rstrip("=") for row in rows for name in code_in(row[1])}
    assert ours <= arguments()


def test_the_names_of_beam_search() -> None:
    rows = rows_of("transformers", "Beam search")[2:]
    ours = {name.rstrip("=") for row in rows for name in code_in(row[1])}
    assert ours <= {option.name for option in dataclasses.fields(BeamSearchParams)}
    for name in (name for row in rows for name in code_in(row[0])):
        assert name in vars(transformers.GenerationConfig()) or name in REFUSED, name
        if name not in ours:
            with pytest.raises(ParamsError, match=f"{name} does not go with a beam search"):
                BeamSearchParams(**{name: 2})


def test_the_flags_for_those_who_come_from_llama_cpp() -> None:
    rows = rows_of("llama_cpp")[2:]
    ours = {name for row in rows for name in code_in(row[1])}
    assert ours <= flags_of_generate()
    assert len(ours) > 10


def test_the_defaults_are_those_that_the_page_states() -> None:
    unset = SamplingParams().resolve({})
    assert (unset.temperature, unset.max_tokens, unset.top_k, unset.top_p) == (0, 256, 0, 1)
    assert SamplingParams(max_tokens=None).resolve({}).max_tokens == 256
    assert inspect.signature(LLM.__init__).parameters["max_num_seqs"].default == 16
    assert drafters()["ngram"].Options().prompt_lookup_max == 4


@pytest.mark.parametrize("name", ["prompt_logprobs", "detokenize", "best_of"])
def test_names_of_vllm_that_outpace_lacks_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"unknown sampling option '{name}'"):
        SamplingParams(**{name: 1})
