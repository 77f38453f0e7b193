"""Drafters that learn with rounded weights."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outpace.errors import ConfigError
from outpace.targets.cpu.weights.blocks import to_four_bits
from outpace.targets.cpu.weights.quantize import QUANTIZATIONS, quantize
from outpace.train.losses import FORWARD_KL
from outpace.train.quantization import QuantizedWeights
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings

from .test_draft_model import quiet
from .test_draft_model import run as train_model
from .test_draft_model import settings as model_settings
from .test_run import run as train_head
from .test_run import settings as head_settings


class Network(nn.Module):
    """Two linear layers of both kinds, an embedding, and an output that is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 40)
        self.up, self.down = nn.Linear(40, 72), Conv1D(40, 72)
        self.out = nn.Linear(40, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.out(self.down(torch.tanh(self.up(self.embed(tokens)))))


def weights(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_network_has_the_weights_that_a_cpu_reads(quantization: Any) -> None:
    network = Network()
    before = weights(network)
    read: Any = copy.deepcopy(network)
    if quantization == "int8":
        quantize(read, "int8")
        up = (read.up(torch.eye(40)) - network.up.bias).T
        down = read.down(torch.eye(72)) - network.down.bias
    else:
        up = to_four_bits(network.up.weight).dense()[:, :40]
        down = to_four_bits(network.down.weight.T.contiguous()).dense()[:, :72].T
    rounded = QuantizedWeights(network, quantization)
    with rounded.quantized(anew=True):
        used = weights(network)
    assert torch.allclose(used["up.weight"], up, atol=1e-6)
    assert torch.allclose(used["down.weight"], down, atol=1e-6)
    assert not torch.equal(used["up.weight"], before["up.weight"])
    for name in ("embed.weight", "up.bias", "down.bias"):
        assert torch.equal(used[name], before[name])
    after = weights(network)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_its_own_weights_come_back_after_an_error() -> None:
    network = Network()
    before = weights(network)
    with pytest.raises(RuntimeError), QuantizedWeights(network, "int4").quantized(anew=True):
        raise RuntimeError
    assert all(torch.equal(weight, before[name]) for name, weight in weights(network).items())


def test_gradients_are_those_at_the_rounded_weights() -> None:
    network, tokens = Network(), torch.arange(50)
    with QuantizedWeights(network, "int4").quantized(anew=True):
        fixed = copy.deepcopy(network)
        network(tokens).square().sum().backward()
    fixed(tokens).square().sum().backward()
    found = dict(network.named_parameters())
    for name, weight in fixed.named_parameters():
        assert torch.equal(found[name].grad, weight.grad), name  # type: ignore[arg-type]


def test_what_was_rounded_off_is_kept_until_it_is_rounded_anew() -> None:
    network = Network()
    rounded = QuantizedWeights(network, "int4")
    with rounded.quantized(anew=True):
        first = network.up.weight.detach().clone()
    with torch.no_grad():
        network.up.weight.add_(0.01)
    with rounded.quantized(anew=False):
        assert torch.allclose(network.up.weight, first + 0.01, atol=1e-7)
    expected = to_four_bits(network.up.weight).dense()[:, :40]
    with rounded.quantized(anew=True):
        assert torch.allclose(network.up.weight, expected, atol=1e-7)


def distance_in_four_bits(trainer: TrainingRun) -> float:
    """Returns how far the model is from the target once it is rounded."""
    with QuantizedWeights(trainer.network, "int4").quantized(anew=True), torch.no_grad():
        batch = trainer._teacher.read(trainer._tokens)
        return float(trainer._recipe.compute_loss(batch).loss)


def test_a_model_that_learned_rounded_is_closer_to_the_target_when_it_is(tmp_path: Path) -> None:
    given: dict[str, Any] = {"start": "pruned", "learning_rate": 0.001, "loss": FORWARD_KL}
    given["head"] = {"depths": 3, "layers": 2}
    found = []
    for quantization in (None, "int4"):
        asked = model_settings(40, quantization=quantization, **given)
        trainer = train_model(tmp_path / str(quantization), asked)
        trainer.play(quiet, every=40)
        found.append(distance_in_four_bits(trainer))
    assert found[1] < 0.8 * found[0]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_stopped_run_goes_on_with_the_same_rounding(method: str, tmp_path: Path) -> None:
    if method == "draft_model":
        play, asked = train_model, model_settings(12, quantization="int4")
    else:
        play, asked = train_head, head_settings(method, 12, quantization="int4")
    whole = play(tmp_path / "whole", asked)
    whole.play(quiet, every=5)
    calls = itertools.count()
    play(tmp_path / "cut", asked).play(quiet, every=5, stop=lambda: next(calls) == 6)
    again = play(tmp_path / "cut", asked)
    assert again.step == 7, "between two reports, and between two roundings"
    again.play(quiet, every=50)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: TrainSettings(method="medusa", quantization="int3"),
            "must be .int8. or .int4.",
        ),  # type: ignore[arg-type]
        (lambda: QuantizedWeights(nn.Embedding(4, 4), "int4"), "has no linear layers to round"),
    ],
)
def test_what_cannot_be_rounded_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
