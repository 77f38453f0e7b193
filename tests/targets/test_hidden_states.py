"""What a target shows of its layers: what each puts out, and what the norm makes of the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM
from outpace.core.trees.tree import Tree
from outpace.engine.capture import EagerRunner
from outpace.errors import ConfigError, UnsupportedModel
from outpace.heads.base import TargetShape
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.targets.base import PromptInputs, ScoreInputs
from outpace.targets.hf import nextn
from outpace.targets.hf.fixed import FixedShapeConfig
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.nextn import last_norm
from outpace.targets.hf.partial.layers import decoder_layers
from outpace.targets.hf.target import HFTarget
from outpace.train.teacher import Teacher
from targets.families import CONTEXT, target

FAMILIES = ["llama", "gemma3", "gpt_oss", "cohere", "olmo2"]
TEXT = [3, 1, 4, 1, 5, 9, 2]


@torch.inference_mode()
def outputs(model: Any, text: list[int]) -> list[Tensor]:
    """Returns what each layer puts out for a text that is read at once, ``[T, H]``."""
    found: list[Tensor] = []

    def note(module: Any, given: Any, output: Any) -> None:
        found.append((output if isinstance(output, Tensor) else output[0])[0])

    handles = [layer.register_forward_hook(note) for layer in decoder_layers(model)]
    model(torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("fixed", [False, True], ids=["plain", "fixed shapes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_shows_what_it_puts_out_and_what_the_norm_makes_of_it(
    family: str, fixed: bool
) -> None:
    """In a prompt that is read in pieces, and in a round."""
    model = target(family)
    count = len(decoder_layers(model))
    layers, wanted = frozenset({1, count, -1}), outputs(model, TEXT)
    steps = FixedShapeConfig(model, EagerRunner(), pads=True, required=False) if fixed else None
    ours = HFTarget(model, rows=1, max_length=CONTEXT, fixed=steps)
    ours.admit(PromptInputs(TEXT[:5]))
    read = [part for _ in range(2) for part in ours.prefill(2, layers)]
    tree = Tree.chain(1, 2, "cpu")
    scores = ours.score(ScoreInputs([TEXT[4:5]], torch.tensor([TEXT[5:]]), tree, layers=layers))
    for layer in layers:
        pieces = [part.hidden_states[layer][0] for part in read] + [scores.hidden_states[layer][0]]
        found = torch.cat(pieces)
        expected = wanted[layer - 1 if layer > 0 else -1]
        if layer < 0:
            expected = model.get_decoder().norm(expected)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_learns_from_the_states_that_it_is_shown(family: str) -> None:
    model = target(family)
    count = len(decoder_layers(model))
    teacher = Teacher(LoadedModel(model, None, family), (1, count, -1))
    found = teacher.read(torch.tensor([TEXT])).hidden_states[0]
    wanted = outputs(model, TEXT)
    expected = torch.cat([wanted[0], wanted[-1], model.get_decoder().norm(wanted[-1])], -1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "lfm2", "mamba"])
def test_last_norms_by_other_names(family: str) -> None:
    assert isinstance(last_norm(target(family).get_decoder()), torch.nn.Module)


def reading_the_last(model: Any) -> Any:
    """Returns an EAGLE-3 head that reads the last layer."""
    shape = TargetShape.of(model.config, "a dummy")
    head = Eagle3(shape, Eagle3Config(depths=3, reads=(1, shape.layers)))
    return head.to(model.dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("option", ["batch_invariant", "compile"])
def test_what_does_not_go_with_passes_that_show_it_is_refused(option: str) -> None:
    model = target("llama")
    config = {"method": "eagle3", "model": reading_the_last(model)}
    with pytest.raises(ConfigError, match=f"use another head, or leave {option} out"):
        LLM(model, speculative_config=config, **{option: True})


def test_a_model_that_hides_its_last_norm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nextn, "NORMS", ())
    model = target("llama")
    config = {"method": "eagle3", "model": reading_the_last(model)}
    with pytest.raises(UnsupportedModel, match="the norm after the last layer of LlamaModel is"):
        LLM(model, speculative_config=config)
    with pytest.raises(UnsupportedModel, match="the norm after the last layer of LlamaModel is"):
        Teacher(LoadedModel(model, None, "llama"), (model.config.num_hidden_layers,))
