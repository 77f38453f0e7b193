"""Heads that draft with the target's output matrix have the scale and bound of its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.core.proposal import Sampled
from outpace.core.trees.tree import Tree
from outpace.draft.base import Round
from outpace.draft.registry import find_drafter
from outpace.heads.base import TargetShape
from outpace.heads.registry import find_head
from outpace.targets.base import PromptInputs, ScoreInputs
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.logits import LogitScaling
from outpace.targets.hf.target import HFTarget
from outpace.train.teacher import Teacher
from targets.families import CONTEXT, build

SHARP: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 0.7},
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "recurrent_gemma": {"logits_soft_cap": 0.7},
}


def products(model: Any, states: Tensor) -> Tensor:
    """What nobody has scaled or bounded."""
    found: Tensor = model.get_output_embeddings()(states.clone())
    return found


@pytest.mark.parametrize("family", SHARP)
@torch.inference_mode()
def test_last_states_lead_to_the_logits(family: str) -> None:
    model = build(family, **SHARP[family])
    target = HFTarget(model, rows=1, max_length=CONTEXT)
    target.admit(PromptInputs([5, 6, 7]))
    nothing = torch.zeros(1, 0, dtype=torch.long)
    last = frozenset({-1})
    target.prefill(9, last)
    scores = target.score(ScoreInputs([[7]], nothing, Tree.chain(1, 0, "cpu"), layers=last))
    found = target.compute_logits(scores.hidden_states[-1])
    torch.testing.assert_close(found, scores.logits, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(products(model, scores.hidden_states[-1]), scores.logits, rtol=0.1)


@pytest.mark.parametrize("family", ["granite", "gemma2", "cohere"])
def test_the_distribution_of_a_draft_is_that_of_scaled_and_bounded_logits(family: str) -> None:
    model, seen = build(family, **SHARP[family]), []
    options = find_drafter("eagle").dummy_options(LoadedModel(model, None, family))
    head, drafted = options["model"], []
    inner = head.logits

    def logits(outputs: Tensor, shared: Any) -> Tensor:
        seen.append(outputs)
        found: Tensor = inner(outputs, shared)
        return found

    def watch(trace: Round) -> None:
        if (
            isinstance(distribution := trace.proposal.distribution, Sampled)
            and trace.proposal.tree.size
        ):
            drafted.append((distribution.q[0, 0], seen[0][0].flatten(0, -2)[-1]))
        seen.clear()

    head.logits = logits
    config = {"method": "eagle", "num_speculative_tokens": 1, **options}
    llm = LLM(model, speculative_config=config, max_num_seqs=1, max_model_len=CONTEXT)
    llm.engine.observers.append(watch)
    llm.generate([5, 6, 7], SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True))
    assert len(drafted) > 2
    scale = {"granite": 1 / 3, "cohere": 0.25}.get(family, 1.0)
    for q, outputs in drafted:
        expected = products(model, outputs).detach() * scale
        if family == "gemma2":
            expected = 0.7 * torch.tanh(expected / 0.7)
        torch.testing.assert_close(q, expected.softmax(-1), rtol=0, atol=1e-12)


def test_the_teacher_of_heads_scales_too() -> None:
    model = build("granite", **SHARP["granite"])
    teacher = Teacher(LoadedModel(model, None, "granite"), ())
    states = torch.randn(2, 3, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    logits = teacher.compute_logits(states)
    torch.testing.assert_close(logits, products(model, states) / 3)
    logits.sum().backward()
    assert states.grad is not None
    assert all(each.grad is None for each in model.parameters())
    rows = teacher.head_rows(on_device([4, 9]))
    torch.testing.assert_close(rows, model.lm_head.weight[[4, 9]].detach().float() / 3)


@pytest.mark.parametrize("family", ["granite", "gemma2", "cohere"])
@pytest.mark.parametrize("kind", ["eagle", "mtp", "dflash"])
@torch.inference_mode()
def test_a_copy_of_output_rows_gives_the_logits_of_the_output_matrix(
    kind: str, family: str
) -> None:
    model: Any = build(family, **SHARP[family])
    with torch.no_grad():  # so that the bound shows
        model.get_output_embeddings().weight.mul_(8)
    loaded = LoadedModel(model, None, family)
    teacher, target = Teacher(loaded, ()), HFTarget(model, rows=1, max_length=CONTEXT)
    made = find_head(kind)
    tokens = on_device([4, 9, 30])
    head: Any = made(TargetShape.of(model.config), made.Config(depths=2, draft_vocab_size=3))
    head = head.to(teacher.device, torch.float64)
    head.d2t.copy_(tokens)
    head.init_from_lm_head(teacher.head_rows(head.d2t))
    states = torch.randn(2, 5, model.config.hidden_size, dtype=torch.float64).to(teacher.device)
    expected = target.compute_logits(states)[..., tokens]
    for shared in (teacher, target):
        torch.testing.assert_close(
            head.compute_logits(states, shared), expected, rtol=1e-5, atol=1e-5
        )
    unbounded = head.lm_head(states)
    assert torch.allclose(unbounded, expected, rtol=0.1) == (family != "gemma2")


def test_one_name_stands_for_a_factor_and_for_a_divisor() -> None:
    class Config:
        model_type = "granite"
        logits_scaling = 4.0

    assert LogitScaling.of(Config) == LogitScaling(0.25)
    Config.model_type = "hyperclovax"
    assert LogitScaling.of(Config) == LogitScaling(4.0)
