"""Blocks of a diffusion drafter: which tokens are given, and what the others are drawn from."""

from __future__ import annotations

import pytest
import torch

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.core.proposal import Deterministic, Sampled
from outpace.draft.base import Round
from outpace.heads.base import TargetShape
from outpace.methods.heads.diffusion import Diffusion, DiffusionConfig, DiffusionDrafter
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, target


def made(**sizes: int) -> Diffusion:
    torch.manual_seed(0)
    config = DiffusionConfig(**{"width": 16, "context": 6, **sizes})
    head = Diffusion(TargetShape(8, 20, 2), config).double().eval()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return head.requires_grad_(False)


def test_each_pass_settles_the_surest_tokens_and_keeps_those_of_before() -> None:
    head = made(depths=6, passes=3)
    blocks = head.denoise(torch.randint(20, (5, 6)))
    before = blocks[0]
    assert bool((before.settled == -1).all())
    for number, block in enumerate(blocks[1:], 1):
        settled = block.settled >= 0
        assert settled.sum(1).tolist() == [2 * number] * 5
        earlier = before.settled >= 0
        assert torch.equal(block.settled[earlier], before.settled[earlier])
        assert torch.equal(block.logits[settled], before.logits[settled])
        # What is settled now is surer than what stays masked.
        sure = before.logits.softmax(-1).amax(-1)
        for row in range(5):
            fresh = (settled & ~earlier)[row]
            assert sure[row, fresh].min() >= sure[row, ~settled[row]].max()
        assert not torch.allclose(block.logits[~settled], before.logits[~settled])
        before = block


def test_a_short_text_is_read_as_if_nothing_stood_before_it() -> None:
    head = made()
    text = torch.tensor([[3, 1, 4]])
    short = head.window(text)
    assert short.tolist() == [[20, 20, 20, 3, 1, 4]]
    head.embedding.weight[20] = 7.0  # the mask's; the block begins with it as well
    before = head.denoise(short)[0].logits
    head.places[:3] = -5.0
    assert torch.allclose(head.denoise(short)[0].logits, before)


@pytest.mark.parametrize(("temperature", "kind"), [(1.0, Sampled), (0.0, Deterministic)])
def test_settled_tokens_are_given_and_the_others_drawn(temperature: float, kind: type) -> None:
    options = DiffusionDrafter.dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": "diffusion", "num_speculative_tokens": 3, **options}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    head, seen = options["model"], 0
    params = SamplingParams(temperature=temperature, top_k=20, max_tokens=12, ignore_eos=True)

    def look(trace: Round) -> None:
        nonlocal seen
        proposal = trace.proposal
        if not proposal.tree.size:
            return
        assert isinstance(proposal.distribution, kind)
        for row in range(len(trace.rows)):
            text = on_device([trace.rows.since(row, 0)[: trace.rows.lengths[row]]])
            last = head.denoise(head.window(text))[-1]
            for place in range(int(proposal.counts[row])):
                chosen, token = int(last.settled[0, place]), int(proposal.tokens[row, place])
                if chosen >= 0:
                    assert token == chosen
                if isinstance(proposal.distribution, Sampled):
                    assert proposal.distribution.fixed is not None
                    assert bool(proposal.distribution.fixed[row, place]) == (chosen >= 0)
                    distribution = last.logits[0, place]
                    distribution = distribution.where(
                        distribution >= distribution.topk(20).values[-1], -torch.inf
                    ).softmax(-1)
                    if chosen >= 0:
                        distribution = torch.nn.functional.one_hot(
                            on_device(chosen), len(distribution)
                        ).double()
                    assert torch.allclose(
                        proposal.distribution.q[row, place], distribution, atol=1e-9
                    )
                seen += 1

    with llm.engine.observing(look):
        llm.generate(PROMPTS, params)
    assert seen > 30


def test_what_is_padding_is_not_settled() -> None:
    head = made(depths=4, passes=2)
    head.output.weight[12:] *= 9.0  # the likeliest ones
    windows = torch.randint(12, (8, 6))
    assert head.denoise(windows)[-1].settled.amax() >= 12
    assert head.denoise(windows, known=12)[-1].settled.amax() < 12


def test_more_passes_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="passes is 4 and context 6"):
        made(depths=3, passes=4)
