"""One family put to the test: plain greedy generate of transformers against outpace's texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outpace.api import LLM
from outpace.audit.families.finding import Finding, Verdict
from outpace.audit.families.models import noised, tiny_model
from outpace.audit.families.sizes import CONTEXT
from outpace.core.params import SamplingParams
from outpace.errors import OutpaceError

PROMPTS = ([5, 6, 7, 8, 9], [1], [2, 3] * 6)
"""Ragged: shorter than every window, one token, longer than every window."""
LENGTH = 24
NOISE = 0.05
VARIED = 4
"""Different tokens that the texts of a model have at least, for it to tell anything."""
SCALES = (6.0, 12.0, 3.0, 1.5, 1.0)

CHAINS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "ngram": {"num_speculative_tokens": 4},
    "draft_model": {"num_speculative_tokens": 3},
}
TREES: Mapping[str, Mapping[str, Any]] = {
    "draft_tree": {"num_speculative_tokens": 6, "branching": [2, 2]},
}


def findings(family: str, name: str) -> Iterator[Finding]:
    """Yields what is known about a family, better each time; the last one is the finding.

    family: its ``model_type``; name: of its class.
    """
    found = Finding(family, name, "not built", "no model was made in the time and memory allowed")
    yield found
    try:
        model, expected = _lively(family, name)
    except Exception as error:  # whatever stops a family in its own making
        yield replace(found, reason=brief(error))
        return
    dtype = str(model.dtype).removeprefix("torch.")
    found = replace(found, dtype=dtype, verdict="not finished", reason="decoding came to no end")
    yield found
    yield _judged(replace(found, verdict="DIFFERENT", reason=""), model, expected)


def brief(error: BaseException) -> str:
    """Returns an error's class and the first line of what it says."""
    said = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


# -- plain texts -------------------------------------------------------------------------------


def _lively(family: str, name: str) -> tuple[Any, list[list[int]] | Exception]:
    """Returns a model and its plain texts; or the error that transformers' own generate raises.

    Weights are scaled until no text is the same token again and again, and until generate, which
    reads token by token, says what a single plain pass of the text says. Where weights are large,
    experts or indexed tokens may tie in float32, and the order of a sum decides.
    """
    found: tuple[Any, list[list[int]] | Exception] | None = None
    for scale in SCALES:
        model = tiny_model(family, name, scale=scale)
        model.generation_config.eos_token_id = None
        try:
            texts = plain_texts(model, PROMPTS, LENGTH)
            varied = all(len(set(text)) >= VARIED for text in texts)
            if varied and _reads_alike(model, texts):
                return model, texts
        except Exception as error:  # as above
            return found or (model, error)
        found = found or (model, texts)
    assert found is not None
    return found


@torch.inference_mode()
def _reads_alike(model: Any, texts: Sequence[Sequence[int]]) -> bool:
    """Whether one plain pass of each text chooses the tokens that generate has chosen."""
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([[*prompt, *text]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0]
        if logits[len(prompt) - 1 : -1].argmax(-1).tolist() != list(text):
            return False
    return True


@torch.inference_mode()
def plain_texts(model: Any, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Returns what transformers' own greedy generate makes of each prompt alone."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        texts.append(made[0, len(prompt) :].tolist())
    return texts


# -- texts with speculation --------------------------------------------------------------------


@dataclass
class _Drafts:
    """How many tokens were drafted and accepted in a trial."""

    drafted: int = 0
    accepted: int = 0


def _judged(found: Finding, model: Any, expected: list[list[int]] | Exception) -> Finding:
    """Returns the finding on a model whose plain texts are known."""
    drafts = _Drafts()
    try:
        LLM(model)
    except OutpaceError as error:
        return replace(found, verdict="refused", reason=str(error))
    except Exception as error:
        return replace(found, reason=f"the check at load fails: {brief(error)}")
    if isinstance(expected, Exception):
        reason = f"transformers' own generate raises {brief(expected)}"
        return replace(found, verdict="not built", reason=reason)
    drafter = noised(model, NOISE)
    for ways in (CHAINS, TREES):
        try:
            wrong = next(_differences(model, drafter, ways, expected, drafts), None)
        except OutpaceError as error:
            # A model may be decoded with chains only.
            verdict: Verdict = "identical" if ways is TREES else "refused"
            return replace(found, verdict=verdict, reason=str(error), **vars(drafts))
        except Exception as error:
            wrong = f"decoding fails: {brief(error)}"
        if wrong is not None:
            return replace(found, reason=wrong)
    return replace(found, verdict="identical", trees=True, **vars(drafts))


def _differences(
    model: Any,
    drafter: Any,
    ways: Mapping[str, Mapping[str, Any]],
    expected: Sequence[Sequence[int]],
    drafts: _Drafts,
) -> Iterator[str]:
    """Yields in words where texts with speculation are other ones; counts what was drafted."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    longest = max(range(len(PROMPTS)), key=lambda row: len(PROMPTS[row]))
    for method, options in ways.items():
        config: dict[str, Any] = {"method": method, **options}
        if method.startswith("draft"):
            config["model"] = drafter
        llm = LLM(
            model, speculative_config=config, max_num_seqs=len(PROMPTS), max_model_len=CONTEXT
        )
        for rows in (range(len(PROMPTS)), [longest]):
            made = llm.generate([PROMPTS[row] for row in rows], params)
            for row, output in zip(rows, made, strict=True):
                if config.get("model") is not None:
                    drafts.drafted += output.metrics.num_draft_tokens
                    drafts.accepted += output.metrics.num_accepted_tokens
                if output.token_ids != list(expected[row]):
                    yield _parted(method, len(rows), expected[row], output.token_ids)


def _parted(method: str, rows: int, plain: Sequence[int], made: Sequence[int]) -> str:
    """Says where two texts part."""
    pairs = zip(plain, made, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), len(made))
    return (
        f"with {method} and {rows} row(s) the text differs from plain generate at token {place} "
        f"of {len(plain)}"
    )
