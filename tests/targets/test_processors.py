"""The processors of a ``generate`` call, taken apart by row and by what they say of the
distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from outpace import LLM, SamplingParams
from outpace.errors import ConfigError
from outpace.targets.hf.generating.processors import check, of_row, split
from outpace.targets.hf.kinds import older_than

from .families import target
from .generating import decoder, greedy, ids

VOCABULARY = 12
IDS = torch.tensor([[0, 0, 3, 4, 3], [1, 2, 3, 4, 5], [0, 6, 6, 7, 6]])
BUILT_FOR_A_BATCH: dict[str, Any] = {
    "repetition": hf.RepetitionPenaltyLogitsProcessor(
        2.0, prompt_ignore_length=1 if older_than("5.23") else torch.tensor([2, 0, 1])
    ),
    "encoder repetition": hf.EncoderRepetitionPenaltyLogitsProcessor(2.0, IDS),
    "encoder n-grams": hf.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
    "allowed prefixes": hf.PrefixConstrainedLogitsProcessor(
        lambda row, ids: [row, int(ids[-1]), 8], num_beams=1
    ),
    "no repeats": hf.NoRepeatNGramLogitsProcessor(2),
    "minimum": hf.MinLengthLogitsProcessor(9, [3, 4]),
}


@pytest.mark.parametrize("name", BUILT_FOR_A_BATCH)
def test_a_row_alone_gets_what_it_gets_in_the_batch(name: str) -> None:
    processor = BUILT_FOR_A_BATCH[name]
    scores = torch.randn(3, VOCABULARY)
    together = processor(IDS, scores.clone())
    assert not torch.equal(together, scores)
    for row in range(3):
        alone = of_row(processor, row, 3)(IDS[row : row + 1], scores[row : row + 1].clone())
        assert torch.equal(alone[0], together[row])


def test_trying_a_function_out_leaves_its_default_values_alone() -> None:
    def noting(ids: Tensor, scores: Tensor, seen: list[int] = [], **_: Any) -> Tensor:  # noqa: B006
        seen.append(ids.shape[1])
        return scores

    def naming(ids: Tensor, scores: Tensor, *, seen: list[int] = []) -> Tensor:  # noqa: B006
        return noting(ids, scores, seen)

    check([noting, naming], IDS, VOCABULARY)
    assert noting.__defaults__ == ([],)
    assert naming.__kwdefaults__ == {"seen": []}


REPEATED: dict[str, Any] = {
    "encoder repetition": lambda ids: hf.EncoderRepetitionPenaltyLogitsProcessor(2.0, ids),
    "encoder n-grams": lambda ids: hf.EncoderNoRepeatNGramLogitsProcessor(2, ids),
}


@pytest.mark.parametrize("name", REPEATED)
def test_each_text_of_a_prompt_gets_that_prompts_own_processor(name: str) -> None:
    """``generate`` builds these for the prompts, and has num_return_sequences rows of each."""
    scores, each = torch.randn(1, VOCABULARY), 4
    whole = REPEATED[name](IDS)
    for prompt in range(len(IDS)):
        own = IDS[prompt : prompt + 1]
        history = own[:, :-1]  # ends where a pair of the prompt begins
        expected = REPEATED[name](own)(history, scores.clone())
        assert not torch.equal(expected, scores)
        for text in range(each):
            row = of_row(whole, each * prompt + text, each * len(IDS))
            assert torch.equal(row(history, scores.clone()), expected)


def test_only_the_ordinary_end_of_the_list_becomes_options() -> None:
    bias = hf.SequenceBiasLogitsProcessor({(1,): 2.0})
    heat, top_k = hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(7)
    top_p, odd = hf.TopPLogitsWarper(0.9), hf.TopPLogitsWarper(0.9, min_tokens_to_keep=2)
    assert split([bias, heat, top_k, top_p, hf.LogitNormalization()]) == (
        [bias],
        {"temperature": 0.5, "top_k": 7, "top_p": 0.9},
    )
    assert split([heat, top_k, bias]) == ([heat, top_k, bias], {})
    assert split([top_k, heat]) == ([top_k], {"temperature": 0.5})
    assert split([heat, odd]) == ([heat, odd], {})
    assert split([heat, hf.TopPLogitsWarper(0.5, filter_value=-1e4)])[1] == {}


# -- processors of SamplingParams ------------------------------------------------------------------


class Countdown:
    """Counts its calls, and judges by the count."""

    def __init__(self) -> None:
        self.left = 100

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        return scores + self.left * torch.arange(scores.shape[1])


def countdown() -> Any:
    left = 100

    def biased(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal left
        left -= 1
        return scores + left * torch.arange(scores.shape[1])

    return biased


@pytest.mark.parametrize("processor", [Countdown(), countdown()], ids=["object", "function"])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_processor_with_a_memory_is_refused(processor: Any, call: str) -> None:
    params = SamplingParams(logits_processors=[processor])
    with pytest.raises(ConfigError, match=r"(Countdown|biased) gives other scores"):
        list(getattr(decoder("llama", "ngram"), call)([5, 6, 7], params))


def test_trying_a_processor_leaves_it_as_it_was_and_happens_once_a_call() -> None:
    seen: list[int] = []
    tried: list[int] = []

    class Watched:
        def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
            seen.append(history.shape[1])
            return scores

        def __deepcopy__(self, memo: Any) -> Any:
            tried.append(1)
            return lambda history, scores: scores

    llm = LLM(target("llama"), max_num_seqs=4)
    found = llm.generate([[5, 6, 7]] * 4, greedy(3, logits_processors=[Watched()]))
    assert ids(found) == ids(llm.generate([[5, 6, 7]] * 4, greedy(3)))
    assert seen == [3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5]
    assert tried == [1]
