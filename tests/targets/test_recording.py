"""Recorded steps: what is repeated without Python is what would have been done with it.

A CUDA graph repeats the kernels of one step on its own buffers, whatever the host would have
decided meanwhile. Here a trace of the same operations does, on a CPU, and nothing that a recording
could not hold is let through while it is made: no question to the host, no tensor of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from outpace import LLM, SamplingParams
from outpace.core import categorical, rng
from outpace.targets.hf.fixed import Fixed, Recorder, Recording, Step
from outpace.verify.registry import OWN

from .families import CONTEXT, drafter, target
from .generating import greedy, ids

PROMPTS = [[5, 9, 2, 41], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]

ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "item")


class OnTheDevice(TorchDispatchMode):
    """Fails where the host is asked, or sends something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        booleans = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if booleans or any(name.startswith(asking) for asking in ASKING):
            raise AssertionError(f"{name} inside a recorded step")
        return func(*args, **(kwargs or {}))


class Traced(Recorder):
    """Records traces instead of CUDA graphs."""

    def _record(self, step: Step, buffers: list[Tensor]) -> Recording:
        with OnTheDevice():
            step(*buffers)
        graph = make_fx(step)(*buffers)
        outputs = tuple(output.clone() for output in graph(*buffers))

        def replay() -> None:
            for output, new in zip(outputs, graph(*buffers), strict=True):
                output.copy_(new)

        return Recording(replay, buffers, outputs)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws as there, where plain integers and whole sums are no shortcut."""
    monkeypatch.setattr(rng, "FEW", 0)
    monkeypatch.setattr(categorical, "SMALL", 0)


def recorded(llm: LLM) -> Iterator[Traced]:
    """Lets an engine play as with ``compile=True`` on a GPU; yields its recorders."""
    engine: Any = llm.engine
    runners = [engine.target, getattr(engine.drafter, "runner", None)]
    for runner in filter(None, runners):
        player = Traced()
        runner.fixed = Fixed(runner.model, player, pads=True)
        yield player
    engine._verdicts = Traced()
    yield engine._verdicts


def kinds(player: Traced) -> set[Any]:
    return {key[0] for key in player._recordings}  # type: ignore[index]


PARAMS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "logit_bias": {3: 2.0}},
]


def params(options: dict[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=10, ignore_eos=True, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [*(("llama", options) for options in PARAMS), ("gpt2", PARAMS[1]), ("gemma2", PARAMS[1])],
)
def test_recorded_texts_are_the_same(family: str, options: dict[str, Any]) -> None:
    config = {"method": "draft_model", "model": drafter(family), "num_speculative_tokens": 3}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT}
    plain, found = (LLM(target(family), speculative_config=config, **limits) for _ in range(2))
    players = list(recorded(found))
    for seed in (1, 2):  # the second time all is repeated, for other numbers
        asked = [params(options, seed + 10 * row) for row in range(len(PROMPTS))]
        assert ids(found.generate(PROMPTS, asked)) == ids(plain.generate(PROMPTS, asked))
        alone = params(options, seed)
        assert ids(found.generate(PROMPTS[:1], alone)) == ids(plain.generate(PROMPTS[:1], alone))
    assert [kinds(player) for player in players] == [{"pass"}, {"chain"}, {"verdict"}]


def test_recordings_find_rows_wherever_they_lie() -> None:
    config = {"model": drafter("llama"), "num_speculative_tokens": 1}
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    plain, found = (LLM(target("llama"), speculative_config=config, **limits) for _ in range(2))
    target_player, drafter_player, _ = recorded(found)
    found.engine._verdicts = None  # only passes look at the cache
    for ended in (0, 1):  # whichever row ends first, the others stay where they are
        asked = [greedy(1 if row == ended else 5) for row in range(4)]
        prompts = [*PROMPTS, [3, 1]]
        assert ids(found.generate(prompts, asked)) == ids(plain.generate(prompts, asked))
    for player in (target_player, drafter_player):
        spacings = {key[3].spacing for key in player._recordings}  # type: ignore[index]
        assert None in spacings, "rows at other distances are looked up on the device"
        assert len(spacings) > 2, "and equal distances are a part of the key"


def test_rows_of_other_requests_are_played_by_the_same_recording() -> None:
    config = {"model": drafter("llama"), "num_speculative_tokens": 2}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=1, max_model_len=CONTEXT)
    *_, verdicts = recorded(llm)
    for temperature in (0.5, 0.9, 1.3):
        llm.generate(PROMPTS[:1], params({"temperature": temperature}, 1))
    assert len({key for key in verdicts._recordings if key[-2] == 3}) == 1  # type: ignore[index]


@pytest.mark.parametrize("method", ["draft_tree", "ngram"])
def test_other_drafters_are_recorded_as_far_as_they_can_be(method: str) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 6}
    if method == "draft_tree":
        config |= {"model": drafter("llama"), "branching": [2, 2]}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT}
    plain, found = (LLM(target("llama"), speculative_config=config, **limits) for _ in range(2))
    players = list(recorded(found))
    asked = params({"temperature": 1.0}, 1)
    assert ids(found.generate(PROMPTS, asked)) == ids(plain.generate(PROMPTS, asked))
    assert "pass" in kinds(players[0])


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, {"min_tokens": 5}, {"bad_words_ids": [[3]]}],
)
def test_what_looks_back_is_played_as_it_comes(options: dict[str, Any]) -> None:
    config = {"model": drafter("llama"), "num_speculative_tokens": 3}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT}
    plain, found = (LLM(target("llama"), speculative_config=config, **limits) for _ in range(2))
    players = list(recorded(found))
    asked = params({"temperature": 1.0, **options}, 1)
    assert ids(found.generate(PROMPTS, asked)) == ids(plain.generate(PROMPTS, asked))
    assert [kinds(player) for player in players] == [{"pass"}, {"pass"}, set()]


ON_DEVICE = [rule.name for rule in OWN if rule.on_device]


def test_the_usual_rules_can_be_recorded() -> None:
    assert {"token", "match", "coupled", "block"} <= set(ON_DEVICE)


@pytest.mark.parametrize("rule", ON_DEVICE)
def test_a_rule_that_says_so_asks_nothing_on_a_chain(rule: str) -> None:
    config = {"model": drafter("llama"), "num_speculative_tokens": 3, "verify": rule}
    plain, found = (LLM(target("llama"), speculative_config=config) for _ in range(2))
    verdicts = found.engine._verdicts = Traced()
    for temperature in (0.0, 1.0):
        asked = params({"temperature": temperature}, 3)
        assert ids(found.generate(PROMPTS[:1], asked)) == ids(plain.generate(PROMPTS[:1], asked))
    assert kinds(verdicts) == {"verdict"}


def test_a_question_to_the_host_is_noticed() -> None:
    with pytest.raises(AssertionError, match="inside a recorded step"):
        Traced().play("k", lambda x: (x * int(x.sum()),), [torch.ones(2)])
    with pytest.raises(AssertionError, match="inside a recorded step"):
        Traced().play("k", lambda x: (x + torch.tensor([1, 2]),), [torch.ones(2)])
