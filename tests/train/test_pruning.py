"""Which layers a small model begins with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GPTNeoConfig

from outpace.errors import ConfigError
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.partial.layers import with_layers
from outpace.train.distill import KEPT_LAYERS_FILE, closest_layers
from outpace.train.draft_model import (
    DraftModelSizes,
    check_prunable,
    load_start_model,
    prune_layers,
)
from outpace.train.run import TrainingRun
from targets.families import build

from .test_draft_model import quiet, settings
from .test_run import text

IDLE = (1, 2)
"""Layers of `with_idle_layers` that add nothing."""


def with_idle_layers() -> LoadedModel:
    model: Any = build("llama", num_hidden_layers=5)
    with torch.no_grad():
        for number in IDLE:
            layer = model.model.layers[number]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return LoadedModel(model.float(), None, "idle")


def never(step: str, done: float) -> None:
    pytest.fail("layers were chosen once more")


def pruned(**more: Any) -> Any:
    given = {"start": "pruned", "head": {"depths": 3, "layers": 3}}
    return settings(2, **{**given, **more})


FAMILIES = {
    "llama": True, "gpt_neo": True, "falcon_h1": True, "lfm2_moe": True, "deepseek_v3": True,
    "jamba": False, "bamba": False,
}  # fmt: skip
"""Whether the last layer alone is a model; in some families a layer's kind follows from its
number."""


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_any_kind_are_a_model_of_their_own_or_refused(
    family: str, tmp_path: Path
) -> None:
    """Refused before it is measured which of them should be kept."""
    model = build(family)
    kept = [int(model.config.num_hidden_layers) - 1]
    if not FAMILIES[family]:
        with pytest.raises(ConfigError, match=r"of their own|no \w+ model of"):
            check_prunable(model, kept)
        return
    check_prunable(model, kept)
    made: Any = prune_layers(model, kept)
    made.save_pretrained(tmp_path)
    assert made.config.num_hidden_layers == 1
    read, ids = type(model).from_pretrained(tmp_path).float(), torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(read(ids).logits, made.float()(ids).logits)


@pytest.mark.parametrize("family", ["jamba", "bamba", "gpt_neo"])
def test_a_random_model_of_any_kind_is_made(family: str) -> None:
    whole = LoadedModel(build(family), None, family)
    made: Any = load_start_model(whole, "random", DraftModelSizes(layers=2))
    assert made.model.config.num_hidden_layers == 2


def test_local_and_global_layers_of_gpt_neo_stay_what_they_are() -> None:
    whole = GPTNeoConfig(num_layers=4, attention_types=[[["global", "local"], 2]])
    found = with_layers(whole, 4, [0, 2, 3])
    found.validate()
    assert found.attention_layers == ["global", "global", "local"]


def test_the_first_layer_with_experts_stays_the_first() -> None:
    whole = DeepseekV3Config(num_hidden_layers=8, first_k_dense_replace=3)
    assert with_layers(whole, 8, [0, 2, 5, 7]).first_k_dense_replace == 2


def test_layers_that_add_nothing_are_left_out(tmp_path: Path) -> None:
    whole, reported = with_idle_layers(), []
    run = TrainingRun(
        whole, text(), pruned(), tmp_path, preparing=lambda step, done: reported.append(done)
    )
    assert reported == sorted(reported)
    assert reported[-1] == 1
    assert len(reported) == 1 + 5 + 4  # the beginning; each layer, then each of those that are left
    network: Any = run.network
    torch.testing.assert_close(network(text()[:2]).logits, whole.model(text()[:2]).logits)
    run.play(quiet)
    assert json.loads((tmp_path / KEPT_LAYERS_FILE).read_text())["kept"] == [0, 3, 4]


def test_what_is_left_is_the_closest_to_the_target_and_not_only_short() -> None:
    model = with_idle_layers().model
    model.config.num_hidden_layers = 5
    costs = {1: 0.1, 3: 0.2, 4: 0.3}
    taken: list[set[int]] = []

    def distance() -> float:
        """Tells a layer that is left out by its changed forward."""
        out = {n for n, layer in enumerate(model.model.layers) if "forward" in layer.__dict__}
        taken.append(out)
        # Without 1, layer 4 is needed more than 0 or 2 are.
        return sum(9 if {1, 4} <= out else costs.get(number, 1.0) for number in out)

    assert closest_layers(model, 2, "it", distance, never_mind) == [2, 4]
    assert all(len(out) <= 3 for out in taken)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    assert closest_layers(model, 5, "it", distance, never_mind) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="layers is 6, and it has 5: ask for fewer"):
        closest_layers(model, 6, "it", distance, never_mind)


def never_mind(step: str, done: float) -> None:
    """Hears a report."""


def test_a_run_that_goes_on_has_the_layers_that_it_began_with(tmp_path: Path) -> None:
    whole = with_idle_layers()
    TrainingRun(whole, text(), pruned(), tmp_path).play(quiet, every=1, stop=lambda: True)
    again = TrainingRun(whole, text(), pruned(), tmp_path, preparing=never)
    assert again.step == 1
    again.play(quiet)


def test_a_run_of_other_settings_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    whole = with_idle_layers()
    TrainingRun(whole, text(), pruned(), tmp_path).play(quiet)
    before = (tmp_path / KEPT_LAYERS_FILE).read_bytes()
    with pytest.raises(ConfigError, match="holds a run with another size"):
        TrainingRun(whole, text(), pruned(head={"depths": 3, "layers": 2}), tmp_path)
    assert (tmp_path / KEPT_LAYERS_FILE).read_bytes() == before


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"start": "pruned", "kept": 3}'])
def test_a_damaged_note_is_made_anew(damaged: str, tmp_path: Path) -> None:
    (tmp_path / KEPT_LAYERS_FILE).write_text(damaged)
    TrainingRun(with_idle_layers(), text(), pruned(), tmp_path).play(quiet)
    assert json.loads((tmp_path / KEPT_LAYERS_FILE).read_text())["kept"] == [0, 3, 4]


def test_a_given_model_is_begun_with_some_of_its_layers(tmp_path: Path) -> None:
    whole = with_idle_layers()
    model: Any = whole.model
    model.save_pretrained(tmp_path / "given")
    asked = pruned(start=str(tmp_path / "given"))
    run = TrainingRun(whole, text(), asked, tmp_path / "out")
    network: Any = run.network
    assert network.config.num_hidden_layers == 3
    torch.testing.assert_close(network(text()[:2]).logits, model(text()[:2]).logits)
    with pytest.raises(ConfigError, match=r"layers is 9, and .*given has 5: ask for fewer"):
        TrainingRun(whole, text(), pruned(start=asked.start, head={"layers": 9}), tmp_path / "no")
