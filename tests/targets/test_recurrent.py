"""Models with a recurrent state: drafts are taken out of it again, and texts are its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError, UnsupportedModel
from outpace.targets.hf import runner as runner_module
from outpace.targets.hf import support, trials
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.partial.layers import decoder_layers
from outpace.targets.hf.recurrent.history import StateHistory
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.recurrent.steps import ColumnStepper
from outpace.targets.hf.runner import Runner
from outpace.train.teacher import Teacher
from representatives import representatives

from .families import CONTEXT, PROMPTS, RECURRENT, build, drafter, plain, target
from .generating import decoder, greedy, ids

LENGTH = 10
KINDS = ("mamba", "falcon_h1", "lfm2", "qwen3_5", "rwkv", "xlstm")
"""A model that begins anew when it reads several tokens at once, one whose layers also attend, one
with convolutions only, one with a delta rule, and two that are handed their states: those of all
layers, and those of one."""
BEGINS_ANEW = frozenset({"mamba", "falcon_mamba", "jamba", "zamba", "zaya", "recurrent_gemma"})


def reference(family: str, length: int = LENGTH) -> list[list[int]]:
    return plain(family, length, tuple(map(tuple, PROMPTS)))


@pytest.mark.parametrize("family", representatives(RECURRENT, {*KINDS, "jamba", "nemotron_h"}))
def test_ragged_batches_and_single_rows_equal_generate(family: str) -> None:
    llm = decoder(family, "draft_model", 3)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == reference(family)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    assert ids(llm.generate(PROMPTS[2:3], greedy(LENGTH))) == reference(family)[2:3]


@pytest.mark.parametrize("family", RECURRENT)
def test_each_is_found_to_go_on_from_its_state_or_not(family: str) -> None:
    steps = Runner(target(family), 1, CONTEXT).steps
    assert steps is not None
    assert steps.continues == (family not in BEGINS_ANEW)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("family", RECURRENT)
def test_all_of_it(family: str, method: str, k: int) -> None:
    for rows in (1, 4):
        outputs = decoder(family, method, k, rows).generate(PROMPTS, greedy(40))
        assert ids(outputs) == reference(family, 40)


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("family", KINDS)
def test_without_a_model_that_drafts(family: str, method: str) -> None:
    assert ids(decoder(family, method).generate(PROMPTS, greedy(LENGTH))) == reference(family)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("chunk", [1, 4])
def test_prompts_longer_than_a_prefill_chunk(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", chunk)
    speculation = {"method": "draft_model", "model": drafter(family), "num_speculative_tokens": 3}
    settings = {"max_num_seqs": 4, "max_model_len": CONTEXT, "max_num_batched_tokens": 3}
    llm = LLM(target(family), speculative_config=speculation, **settings)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == reference(family)


# -- one pass after the other ----------------------------------------------------------------------


class Texts:
    """Rows of a model whose drafts are accepted at random."""

    def __init__(self, family: str, lengths: list[int]) -> None:
        self.model, self.dice = target(family), random.Random(5)
        self.texts = [self.tokens(length) for length in lengths]
        self.runner = Runner(self.model, len(lengths), CONTEXT)
        self.runner.admit(len(lengths))
        self.runner.prefill(0, [text[:-1] for text in self.texts])

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(64) for _ in range(count)]

    def round(self, size: int, accepted: list[int]) -> float:
        """Scores a chain; returns how far its logits are off those of plain passes."""
        drafts = [self.tokens(size) for _ in self.texts]
        fed = torch.tensor(
            [[text[-1], *draft] for text, draft in zip(self.texts, drafts, strict=True)]
        )
        logits = self.runner.forward(fed, keep=size + 1).logits
        worst = max(
            float((scored - self.plainly([*text, *draft])[-size - 1 :]).abs().max())
            for scored, text, draft in zip(logits, self.texts, drafts, strict=True)
        )
        self.runner.advance([1 + count for count in accepted])
        self.runner.drop_checkpoints()
        for text, draft, count in zip(self.texts, drafts, accepted, strict=True):
            text += [*draft[:count], *self.tokens(1)]
        return worst

    def plainly(self, text: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=on_device([text]), use_cache=False).logits
        return logits[0]


@pytest.mark.parametrize("family", KINDS)
def test_drafts_that_are_rejected_at_any_depth_leave_nothing_behind(family: str) -> None:
    rows = Texts(family, [9, 1, 4])
    for accepted in ([0, 3, 1], [3, 0, 2], [2, 2, 0], [1, 3, 3]):
        assert rows.round(3, accepted) < 1e-4


def test_states_are_dropped_once_a_draft_is_decided() -> None:
    rows = Texts("mamba2", [9, 1, 4])
    rows.round(3, [0, 3, 1])
    cache = rows.runner.cache
    assert isinstance(cache, StateCache)
    held = cache.state_bytes
    for accepted in ([3, 0, 2], [2, 2, 0], [1, 3, 3]):
        rows.round(3, accepted)
    assert cache.state_bytes == held
    rows.runner.retain([1])
    rows.runner.retain([])
    assert cache.state_bytes == 0


def test_what_the_input_of_a_module_passes_is_computed_once_for_all_columns() -> None:
    runner = Runner(target("falcon_h1"), 1, CONTEXT)
    calls: list[int] = []
    module = target("falcon_h1").model.layers[0].mamba
    hooks = [
        part.register_forward_hook(lambda part, given, made: calls.append(made.shape[1]))
        for part in (module.in_proj, module.out_proj)
    ]
    runner.admit(1)
    runner.forward(on_device([[3, 5, 7, 11]]), keep=4)
    for hook in hooks:
        hook.remove()
    assert calls.count(4) == 2


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "zamba2", "rwkv", "xlstm"])
def test_states_are_numbered_as_in_all_models(family: str) -> None:
    given: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: given.append(args[0]))
        for layer in decoder_layers(target(family))
    ]
    runner = Runner(target(family), 1, CONTEXT)
    given.clear()
    runner.admit(1)
    states = runner.forward(on_device([[3, 5, 7]]), keep=3, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(states) == len(given) + 1
    for state, expected in zip(states, given, strict=False):
        assert torch.equal(state, expected)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "zamba2"])
def test_heads_learn_from_the_states_that_they_draft_from(family: str) -> None:
    layers = (0, 1, -1)
    runner = Runner(target(family), 1, CONTEXT)
    runner.admit(1)
    text = on_device([[3, 5, 7]])
    states = runner.forward(text, keep=3, output_hidden_states=True).hidden_states
    learned = Teacher(load(target(family)), layers, top=0).read(text).hidden_states
    expected = torch.cat([states[layer] for layer in layers], -1)
    torch.testing.assert_close(learned, expected, rtol=0, atol=5e-3)  # scans in float32


# -- what goes with it -----------------------------------------------------------------------------

METHODS = ("draft_tree", "lookahead", "layer_skip", "early_exit", "staged")


@pytest.mark.parametrize("family", ["lfm2", "mamba2", "rwkv", "xlstm"])
@pytest.mark.parametrize("method", METHODS)
def test_trees_riders_and_parts_of_the_target_draft_too(family: str, method: str) -> None:
    if method == "layer_skip" and family == "mamba2":
        options: dict[str, Any] = {"layers": [1]}
    else:
        options = dict(find_drafter(method).dummy_options(load(target(family))))
    options |= {"method": method, "num_speculative_tokens": 4}
    llm = LLM(target(family), speculative_config=options, max_num_seqs=4, max_model_len=CONTEXT)
    assert ids(llm.generate(PROMPTS[:3], greedy(LENGTH))) == reference(family)[:3]


@pytest.mark.parametrize("families", [("llama", "mamba2"), ("mamba2", "llama")])
def test_target_and_drafter_may_be_of_different_kinds(families: tuple[str, str]) -> None:
    own, other = families
    llm = decoder(own, "draft_model", 3, model=target(other))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == reference(own)


@pytest.mark.parametrize("family", ["qwen3_5", "rwkv", "xlstm"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_samples_of_one_prompt_share_what_was_read(family: str, method: str) -> None:
    llm = decoder(family, method, 3, rows=2)
    (output,) = llm.generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=LENGTH, n=3))
    assert [one.token_ids for one in output.outputs] == reference(family)[2:3] * 3


@pytest.mark.parametrize("family", ["rwkv", "xlstm"])
def test_texts_that_are_put_aside_are_read_again(family: str) -> None:
    speculation = {"method": "draft_model", "model": drafter(family), "num_speculative_tokens": 3}
    llm = LLM(
        target(family),
        speculative_config=speculation,
        max_num_seqs=2,
        max_model_len=CONTEXT,
        max_batch_total_tokens=137,  # both may join, and have no room when they are 32 longer
    )
    requests = [llm.requests(prompt, greedy(60))[0] for prompt in PROMPTS[:2]]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert [request.output_ids for request in requests] == reference(family, 60)[:2]
    assert sum(request.preemptions for request in requests) > 0


def test_a_seed_gives_one_text_whatever_is_drafted() -> None:
    asked = SamplingParams(temperature=1.0, seed=3, max_tokens=LENGTH, ignore_eos=True)
    texts = [
        ids(decoder("bamba", method, 3, verify="coupled").generate(PROMPTS, asked))
        for method in ("none", "ngram", "draft_model")
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("family", ["mamba2", "rwkv", "xlstm"])
def test_the_next_turn_of_a_chat_goes_on_from_the_state(family: str) -> None:
    llm = LLM(
        target(family),
        speculative_config={"method": "ngram"},
        max_num_seqs=2,
        max_model_len=CONTEXT,
        enable_prefix_caching=True,
    )
    first = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
    prompts, said = [first], []
    for expected in (0, len(first) - 1, len(first) + LENGTH - 1):
        (request,) = llm.requests(prompts[-1], greedy(LENGTH))
        llm.engine.add(request)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        assert request.cached_tokens == expected
        with torch.inference_mode():
            for at, token in enumerate(request.output_ids):
                text = [*prompts[-1], *request.output_ids[:at]]
                logits = target(family)(on_device([text]), use_cache=False).logits
                assert int(logits[0, -1].argmax()) == token
        said = said or request.output_ids
        # One leaves the first text after its prompt, and another goes on where it ended.
        prompts.append([*first, 60, 61] if len(prompts) == 1 else [*first, *said, 7])


def test_a_text_behind_a_single_token_is_kept_too() -> None:
    """After no token there is no state to go on from."""
    llm = LLM(target("mamba2"), max_model_len=CONTEXT, enable_prefix_caching=True)
    (text,) = ids(llm.generate([[3]], greedy(24)))
    plain = decoder("mamba2")
    for prompt in ([3], [3, *text, 7]):
        assert ids(llm.generate([prompt], greedy(4))) == ids(plain.generate([prompt], greedy(4)))


def test_an_interrupted_pass_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference("recurrent_gemma")
    llm = decoder("recurrent_gemma", "draft_model", 3)
    block = target("recurrent_gemma").model.layers[0].temporal_block
    assert block.conv1d_state is None
    keep, calls = StateHistory.keep, iter(range(1000))

    def interrupted(self: StateHistory, reading: Any) -> None:
        if next(calls) == 7:
            raise KeyboardInterrupt
        keep(self, reading)

    monkeypatch.setattr(StateHistory, "keep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
    assert block.conv1d_state is None, "the model object stays as it was handed over"


def test_rounded_weights_keep_their_states_too(tmp_path: Path) -> None:
    build("mamba").float().save_pretrained(tmp_path)
    texts = [
        ids(
            LLM(
                str(tmp_path),
                speculative_config={"method": method},
                quantization="int8",
                max_num_seqs=4,
                max_model_len=CONTEXT,
            ).generate(PROMPTS, greedy(LENGTH))
        )
        for method in ("none", "suffix")
    ]
    assert texts[0] == texts[1]


LARGE: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 256},
    "rwkv": {"hidden_size": 256, "attention_hidden_size": 256, "intermediate_size": 512},
    "xlstm": {"hidden_size": 256},
}
"""Layers that are large enough for faster ones to take their place."""


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", LARGE)
def test_faster_layers_compute_what_the_plain_ones_do(
    family: str, quantization: Any, tmp_path: Path
) -> None:
    """RWKV divides weights of its own in its first pass; Mamba and xLSTM convert what their heads
    are given to the dtype of the heads' weights, which are held in 16 or 8 bits."""
    build(family, vocab_size=1024, **LARGE[family]).bfloat16().save_pretrained(tmp_path)
    fast = load(str(tmp_path), quantization=quantization).model
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    text = on_device([[3, 5, 7, 9, 11]])
    with torch.inference_mode():
        made, expected = (each(text, use_cache=False).logits for each in (fast, plain))
    most = 1e-4 if quantization is None else 0.2
    assert float((made - expected).std()) <= most * float(expected.std())


# -- what is refused -------------------------------------------------------------------------------


def test_states_that_do_not_come_back_are_found_when_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials.probe(target("lfm2"))
    monkeypatch.setattr(StateHistory, "keep", lambda self, reading: None)
    with pytest.raises(UnsupportedModel):
        trials.probe(target("lfm2"))
    monkeypatch.undo()
    monkeypatch.setattr(StateCache, "move_path", lambda self, row, start, nodes: None)
    with pytest.raises(UnsupportedModel, match="cannot be decoded speculatively"):
        trials.probe(target("mamba2"))


def test_a_model_that_ignores_its_state_when_it_reads_several_tokens_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(ColumnStepper, "continues", True)
    assert ids(decoder("mamba").generate(PROMPTS, greedy(LENGTH))) != reference("mamba")


def test_recorded_passes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"goes on from a state.*leave compile out"):
        LLM(target("mamba2"), compile=True)


def test_an_xlstm_that_takes_its_passes_to_pieces_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"max_inference_chunksize.*set it to 512"):
        support.check_config(transformers.xLSTMConfig(max_inference_chunksize=100))


def test_positions_that_are_counted_in_slots_are_refused() -> None:
    """Inkling's relative positions are those of a batch whose rows are equally long."""
    config = transformers.InklingTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.InklingForCausalLM(config).eval()
    with pytest.raises(UnsupportedModel, match="cannot be decoded speculatively"):
        load(model)
