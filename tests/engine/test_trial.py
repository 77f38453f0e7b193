"""A head that was made for another model is refused when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM
from outpace.errors import ConfigError
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import save_head
from outpace.methods.heads.medusa import Medusa, MedusaConfig
from targets.families import CONTEXT, PROMPTS, build, target
from targets.generating import greedy, ids


@pytest.fixture
def constant() -> Any:
    """A target that says the same token whatever it has read."""
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[7] = 1.0
        model.model.embed_tokens.weight.abs_().add_(5.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def saved(model: Any, folder: Path) -> str:
    head = Medusa(TargetShape.of(model.config, "the other model"), MedusaConfig(depths=2))
    head.init_from_lm_head(model.lm_head.weight.float())
    save_head(head, folder)
    return str(folder)


def loaded(model: Any, head: str, **more: Any) -> LLM:
    config = {"method": "medusa", "model": head, **more}
    return LLM(model, speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def test_a_head_of_another_model_is_refused(constant: Any, tmp_path: Path) -> None:
    wrong = saved(constant, tmp_path)
    with pytest.raises(ConfigError, match=r"another model, or hardly at all.*accepted 0 of the 96"):
        loaded(target("llama"), wrong)


def test_it_is_tried_beside_look_ups_too(constant: Any, tmp_path: Path) -> None:
    """What look-ups find is no proof of the head."""
    wrong = saved(constant, tmp_path)
    with pytest.raises(ConfigError, match=r"another model, or hardly at all.*accepted 0 of the \d"):
        loaded(target("llama"), wrong, method="auto")
    assert loaded(constant, wrong, method="auto").engine.drafter.name == "auto"
    used = loaded(target("llama"), wrong, method="auto", check=False)
    assert used.engine.drafter.name == "auto"


@pytest.mark.parametrize("method", ["hedge", "ucb", "ensemble", "tagged"])
def test_it_is_tried_in_every_router(method: str, constant: Any, tmp_path: Path) -> None:
    """By itself: which drafter a router would let draft is another matter."""
    wrong = {"method": "medusa", "model": saved(constant, tmp_path)}
    others = {"drafters": [{"method": "ngram"}, wrong]}
    config = {"routes": {"a": wrong}} if method == "tagged" else others

    def made(model: Any) -> LLM:
        asked = {"method": method, **config}
        return LLM(model, speculative_config=asked, max_num_seqs=4, max_model_len=CONTEXT)

    with pytest.raises(ConfigError, match=r"another model, or hardly at all.*accepted 0 of the 96"):
        made(target("llama"))
    llm = made(constant)
    assert llm.engine.drafter.name == method
    assert (llm.engine.target.num_rows, llm.engine.has_unfinished_requests) == (0, False)
    wrong["check"] = False
    plain = LLM(target("llama"), max_model_len=CONTEXT).generate(PROMPTS, greedy(8))
    assert ids(made(target("llama")).generate(PROMPTS, greedy(8))) == ids(plain)


def test_it_is_used_all_the_same_on_request(constant: Any, tmp_path: Path) -> None:
    llm = loaded(target("llama"), saved(constant, tmp_path), check=False)
    plain = LLM(target("llama"), max_model_len=CONTEXT).generate(PROMPTS, greedy(8))
    assert ids(llm.generate(PROMPTS, greedy(8))) == ids(plain)
    with pytest.raises(ConfigError, match="check must be True or False"):
        loaded(target("llama"), str(tmp_path), check="no")


def test_a_head_of_this_model_leaves_no_trace_of_its_trial(constant: Any, tmp_path: Path) -> None:
    llm = loaded(constant, saved(constant, tmp_path))
    assert llm.engine.target.num_rows == 0
    assert not llm.engine.has_unfinished_requests
    assert llm.generate(PROMPTS, greedy(4))[0].request_id == "0"


def test_a_rule_that_accepts_little_says_nothing_about_the_head() -> None:
    llm = LLM(speculative_config={"method": "eagle3", "verify": "lud"})
    assert llm.engine.verifier.rule.name == "lud"
