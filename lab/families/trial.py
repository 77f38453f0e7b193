"""One family put to the test: plain greedy generate of transformers against outpace's texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationMixin

from lab.families.listing import Family, Finding, Verdict
from lab.families.models import noised, tiny_model
from lab.families.prompts import (
    Prompt,
    is_encoder_decoder,
    leaves_out,
    placeholders,
    prompts_for,
)
from lab.families.sizes import CONTEXT
from outpace.core.params import SamplingParams
from outpace.errors import OutpaceError, PromptError, UnsupportedModel, reason_of
from outpace.llm import LLM
from outpace.targets.hf.support import check_type

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


def findings(family: Family, device: str = "cpu") -> Iterator[Finding]:
    """Yields what is known about a family, better each time; the last one is the finding."""
    reason = "no model was made in the time and memory allowed"
    found = Finding(family.family, family.model, "not built", reason, kind=family.kind)
    yield found
    try:
        check_type(family.family)
    except UnsupportedModel as error:
        yield replace(found, verdict="refused", reason=str(error))
        return
    try:
        plain = _lively(family, device)
    except Exception as error:  # whatever stops a family in its own making
        yield replace(found, reason=reason_of(error, named=True))
        return
    dtype = str(plain.model.dtype).removeprefix("torch.")
    found = replace(found, dtype=dtype, verdict="not finished", reason="decoding came to no end")
    yield found
    begun = replace(found, verdict="DIFFERENT", reason="")
    judged = _judged(begun, plain.model, plain.texts)
    if judged.verdict == "DIFFERENT" and not plain.alike:
        judged = _judged_without_cache(begun, family, plain.model) or judged
    yield judged


# -- plain texts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plain:
    """A model, and what transformers' own generate makes of the prompts."""

    model: Any
    texts: list[list[int]] | Exception
    alike: bool = False
    """Whether one plain pass of each text says the same."""


def _lively(family: Family, device: str) -> _Plain:
    """Returns a model and its plain texts; or the error that transformers' own generate raises.

    Weights are scaled until no text is the same token again and again, and until generate, which
    reads token by token, says what a single plain pass of the text says. Where weights are large,
    experts or indexed tokens may tie in float32, and the order of a sum decides.
    """
    found: _Plain | None = None
    for scale in SCALES:
        model = tiny_model(family, scale=scale, device=device)
        try:
            model.generation_config.eos_token_id = None
            prompts = prompts_for(model, family.kind)
            texts = plain_texts(model, prompts, LENGTH)
            varied = all(len(set(text)) >= VARIED for text in texts)
            if varied and _reads_alike(model, prompts, texts):
                return _Plain(model, texts, alike=True)
        except Exception as error:  # as above
            return found or _Plain(model, error)
        found = found or _Plain(model, texts)
    assert found is not None
    return found


@torch.inference_mode()
def _reads_alike(model: Any, prompts: Sequence[Prompt], texts: Sequence[Sequence[int]]) -> bool:
    """Whether one plain pass of each text chooses the tokens that generate has chosen. It cannot
    read a text in which the model has written a token that stands for an image: there is none."""
    marks = placeholders(model.config)
    for prompt, text in zip(prompts, texts, strict=True):
        if prompt.more and marks.intersection(text):
            return False
        logits = model(**prompt.arguments(model.device, text), use_cache=False).logits[0]
        if logits[len(prompt.token_ids) - 1 : -1].argmax(-1).tolist() != list(text):
            return False
    return True


@torch.inference_mode()
def plain_texts(
    model: Any, prompts: Sequence[Prompt], length: int, use_cache: bool = True
) -> list[list[int]]:
    """Returns what transformers' own greedy generate makes of each prompt alone."""
    # Whisper's own generate prepares and cuts texts around that which all models have.
    generate = GenerationMixin.generate if is_encoder_decoder(model) else type(model).generate
    texts = []
    for prompt in prompts:
        arguments = prompt.arguments(model.device)
        if prompt.name == "input_ids":
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        made = generate(
            model,
            **arguments,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=use_cache,
        )
        texts.append(made[0, len(prompt.token_ids) :].tolist())
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
        return _failed(found, "the check at load fails", error)
    if isinstance(expected, Exception):
        reason = f"transformers' own code raises {reason_of(expected, named=True)}"
        return replace(found, verdict="not built", reason=reason)
    drafter, prompts = noised(model, NOISE), prompts_for(model, found.kind)
    for ways in (CHAINS, TREES):
        try:
            wrong = next(_differences(model, drafter, prompts, ways, expected, drafts), None)
        except PromptError as error:
            wrong = f"a prompt that transformers reads is refused: {error}"
        except OutpaceError as error:
            # A model may be decoded with chains only.
            verdict: Verdict = "identical" if ways is TREES else "refused"
            return replace(found, verdict=verdict, reason=str(error), **vars(drafts))
        except Exception as error:
            return _failed(found, "decoding fails", error)
        if wrong is not None:
            return replace(found, reason=wrong)
    return replace(
        found,
        verdict="identical",
        trees=True,
        reason=leaves_out(model, found.kind, prompts),
        **vars(drafts),
    )


def _failed(found: Finding, what: str, error: Exception) -> Finding:
    """Returns the finding on a model with which our own code raises an error: a defect, unless
    there was not enough memory."""
    found = replace(found, reason=f"{what}: {reason_of(error, named=True)}")
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return replace(found, verdict="not finished")
    return found


def _judged_without_cache(found: Finding, family: Family, model: Any) -> Finding | None:
    """Returns the finding beside generate without a cache, for a model whose own cache makes
    another text than its plain passes do; None where that does not explain the difference."""
    prompts = prompts_for(model, family.kind)
    try:
        texts = plain_texts(model, prompts, LENGTH, use_cache=False)
        if not _reads_alike(model, prompts, texts):
            return None
    except Exception:  # whatever a model does where it is asked for no cache
        return None
    judged = _judged(found, model, texts)
    note = "as without a cache, with which transformers' own generate contradicts its plain pass"
    if judged.verdict != "identical":
        return judged
    return replace(judged, reason="; ".join(filter(None, [judged.reason, note])))


def _differences(
    model: Any,
    drafter: Any,
    prompts: Sequence[Prompt],
    ways: Mapping[str, Mapping[str, Any]],
    expected: Sequence[Sequence[int]],
    drafts: _Drafts,
) -> Iterator[str]:
    """Yields in words where texts with speculation are other ones; counts what was drafted."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row].token_ids))
    for method, options in ways.items():
        config: dict[str, Any] = {"method": method, **options}
        if method.startswith("draft"):
            config["model"] = drafter
        llm = LLM(
            model, speculative_config=config, max_num_seqs=len(prompts), max_model_len=CONTEXT
        )
        for rows in (range(len(prompts)), [longest]):
            made = llm.generate([prompts[row].given for row in rows], params)
            for row, output in zip(rows, made, strict=True):
                if config.get("model") is not None:
                    drafts.drafted += output.metrics.num_draft_tokens
                    drafts.accepted += output.metrics.num_accepted_tokens
                if output.outputs[0].error is not None:
                    raise UnsupportedModel(output.outputs[0].error)
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
