"""Heads that begin as a head that has learned before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from devices import DEVICE
from draft.mtp_checkpoints import Reference, whole, write
from draft.mtp_checkpoints import loaded as loaded_checkpoint
from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError
from outpace.heads.checkpoint import load_head, save_head
from outpace.heads.registry import head_names
from outpace.methods.heads.mtp import load_mtp_module
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.prefixes import WORTHWHILE
from outpace.train.checkpoint import LOG, STATE
from outpace.train.metrics import Progress
from outpace.train.recipe import DepthLosses
from outpace.train.run import TrainingRun
from outpace.train.teacher import Teacher
from representatives import representatives
from targets.families import CONTEXT, VOCABULARY
from targets.families import target as target_of_families
from train.test_run import BLOCK, KINDS, run, settings


def learned(out: Path, method: str, steps: int = 6, **more: object) -> TrainingRun:
    made = run(out, settings(method, steps, **more))
    made.play(lambda progress: None, every=steps)
    return made


@pytest.mark.parametrize("method", representatives(head_names(), KINDS))
def test_a_head_goes_on_from_what_another_has_learned(method: str, tmp_path: Path) -> None:
    first = learned(tmp_path / "first", method)
    assert first.kept is not None
    again = run(tmp_path / "again", settings(method, 2, start=str(tmp_path / "first"), head={}))
    reports: list[Progress] = []
    again.play(reports.append, every=1)
    assert [one.step for one in reports] == [0, 1, 2]
    # The same text is held out, so that it begins with the figure that the other ended with.
    assert reports[0].score == pytest.approx(first.kept.score, abs=1e-6)
    log = [json.loads(line) for line in (tmp_path / "again" / LOG).read_text().splitlines()]
    assert [entry["loss"] is None for entry in log] == [True, False, False]
    before, after = (dict(load_head(tmp_path / name).named_parameters())
                     for name in ("first", "again"))  # fmt: skip
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], weight_of(again, name))]
    assert changed


def test_a_copy_of_the_targets_rows_does_not_learn(tmp_path: Path) -> None:
    sizes = {"depths": 3, "draft_vocab_size": 12}
    first = learned(tmp_path / "first", "eagle", 3, head=sizes)
    again = run(tmp_path / "again", settings("eagle", 3, start=str(tmp_path / "first"), head={}))
    again.play(lambda progress: None)
    before = first.network.get_parameter("lm_head.weight")
    assert torch.equal(weight_of(again, "lm_head.weight"), before)
    assert not torch.equal(weight_of(again, "fc.weight"), first.network.get_parameter("fc.weight"))


def weight_of(trainer: TrainingRun, name: str) -> torch.Tensor:
    """Returns a weight as the run has it now."""
    return trainer.network.get_parameter(name).detach()


def test_a_worse_end_keeps_what_it_began_as(tmp_path: Path) -> None:
    first = learned(tmp_path / "first", "medusa", 40)
    ruined = settings("medusa", 2, start=str(tmp_path / "first"), head={}, learning_rate=1.0)
    again = run(tmp_path / "again", ruined)
    again.play(lambda progress: None, every=2)
    assert again.kept is not None
    assert first.kept is not None
    assert (again.kept.step, again.best) == (0, pytest.approx(first.best, abs=1e-6))
    kept, was = load_head(tmp_path / "again"), load_head(tmp_path / "first")
    for name, weight in was.named_parameters():
        assert torch.equal(kept.get_parameter(name), weight)


def test_a_run_that_was_stopped_at_its_first_report_does_not_report_twice(tmp_path: Path) -> None:
    learned(tmp_path / "first", "medusa")
    asked = settings("medusa", 2, start=str(tmp_path / "first"), head={})
    begun = run(tmp_path / "again", asked)

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun.play(stop)
    assert (tmp_path / "again" / STATE).exists()
    reports: list[Progress] = []
    run(tmp_path / "again", asked).play(reports.append)
    assert [one.step for one in reports] == [2]


def test_a_run_goes_on_without_what_it_began_as(tmp_path: Path) -> None:
    learned(tmp_path / "first", "medusa")
    start = str(tmp_path / "first")
    run(tmp_path / "again", settings("medusa", 1, start=start, head={})).play(lambda progress: None)
    elsewhere = f"{tmp_path}/again/../first/"
    assert run(tmp_path / "again", settings("medusa", 2, start=elsewhere, head={})).step == 1
    shutil.rmtree(tmp_path / "first")
    again = run(tmp_path / "again", settings("medusa", 2, start=start, head={}))
    again.play(lambda progress: None)
    assert again.step == 2


def test_what_cannot_be_gone_on_from_is_refused(tmp_path: Path) -> None:
    learned(tmp_path / "first", "medusa", 1)
    start = str(tmp_path / "first")
    with pytest.raises(ConfigError, match="depths cannot be set for a head that begins as another"):
        run(tmp_path / "again", settings("medusa", 2, start=start))
    with pytest.raises(ConfigError, match="is of the kind 'medusa': train that kind"):
        run(tmp_path / "again", settings("hydra", 2, start=start, head={}))
    other = load_head(start)
    other.target = type(other.target)(other.target.hidden_size, other.target.vocab_size, 77, "big")
    save_head(other, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"trained for another model \(big\): its layers is 77"):
        run(tmp_path / "again", settings("medusa", 2, start=str(tmp_path / "other"), head={}))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "deepseek_v3-2", "mimo_v2_flash"])
def test_a_module_that_a_target_brings_learns_on(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "target", family, whole(family))
    model = loaded_checkpoint(folder)
    target = LoadedModel(model, None, "a target")
    tokens = torch.randint(VOCABULARY, (16, BLOCK), generator=torch.Generator().manual_seed(0))
    asked = settings("mtp", 3, start=str(folder), head={})
    trainer = TrainingRun(target, tokens, asked, tmp_path / "out")
    before = load_mtp_module(target).float()
    begun = dict(before.named_parameters())
    assert all(torch.equal(weight_of(trainer, name), begun[name]) for name in begun)
    trainer.play(lambda progress: None, every=1)
    assert any(not torch.equal(weight_of(trainer, name), begun[name]) for name in begun)
    config = {"method": "mtp", "model": str(tmp_path / "out"), "check": False}
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    llm = LLM(model, speculative_config={**config, "num_speculative_tokens": 3}, **limits)
    plain = LLM(model, speculative_config={"method": "none"}, **limits)
    greedily = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = [each.generate([[1, 2, 3], [4, 5]], greedily) for each in (llm, plain)]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]


def test_modules_learn_what_they_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of several modules is asked while they learn is what it drafts at that place."""
    larger = whole("deepseek_v3-2")
    model = loaded_checkpoint(write(tmp_path / "target", "deepseek_v3-2", larger))
    target = LoadedModel(model, None, "a target")
    head = load_mtp_module(target)
    teacher, reference = (
        Teacher(target, head.hidden_layers),
        Reference("deepseek_v3-2", larger, model),
    )
    asked: list[torch.Tensor] = []
    add = DepthLosses.add

    def watched(losses: DepthLosses, logits: torch.Tensor) -> None:
        asked.append(logits)
        add(losses, logits)

    monkeypatch.setattr(DepthLosses, "add", watched)
    text = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    batch = teacher.read(text.to(DEVICE))
    output = head.recipe()(head.float(), teacher).compute_loss(batch)
    assert output.hits.shape == (1, 7, 2)
    tokens = text[0].tolist()
    for depth, logits in enumerate(asked):
        for place in range(7):
            root, states = place + 2, batch.hidden_states[0, : place + 1].to(torch.float64)
            drafted = tokens[root : root + depth]
            wanted = reference.logits(tokens[:root], states, drafted)
            assert torch.allclose(logits[0, place].double(), wanted, atol=1e-4)


def unchained(model: Any) -> Any:
    """Returns a module alone, with random weights."""
    return find_drafter("mtp").dummy_options(LoadedModel(model, None, "llama"))["model"]


def test_a_module_for_each_depth_is_trained_and_drafts(tmp_path: Path) -> None:
    sizes = {"depths": 2, "chained": True}
    first = learned(tmp_path / "first", "mtp", 20, head=sizes)
    assert first.kept is not None
    head = load_head(tmp_path / "first")
    assert any(name.startswith("later.0.") for name in head.state_dict())
    again = run(tmp_path / "again", settings("mtp", 2, start=str(tmp_path / "first"), head={}))
    again.play(lambda progress: None, every=1)
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    config = {"method": "mtp", "model": str(tmp_path / "first"), "check": False}
    model = target_of_families("llama")
    llm = LLM(model, speculative_config={**config, "num_speculative_tokens": 3}, **limits)
    plain = LLM(model, speculative_config={"method": "none"}, **limits)
    greedily = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [each.generate([[1, 2, 3], [4, 5]], greedily) for each in (llm, plain)]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]
    assert sum(each.metrics.num_draft_tokens for each in texts[0]) > 0
    long = [token % 20 for token in range(WORTHWHILE + 4)]
    for given, cached in ((config, False), ({**config, "online": {"every": 8}}, False),
                          ({**config, "model": unchained(model)}, True)):  # fmt: skip
        one = LLM(model, speculative_config=given, enable_prefix_caching=True, **limits)
        one.generate([long], greedily)
        (request,) = one.requests([*long, 5], greedily)
        assert bool(one.engine.drafter.cached_prefix(request)) == cached
    with pytest.raises(ConfigError, match="chained modules know all tokens"):
        run(tmp_path / "few", settings("mtp", 2, head={**sizes, "draft_vocab_size": 12}))


def test_a_domino_head_is_trained_and_drafts(tmp_path: Path) -> None:
    sizes = {
        "depths": 3, "markov_head_type": "gru", "markov_rank": 8, "gru_hidden_dim": 12,
        "pure_draft_prefix_len": 1, "enable_confidence_head": False, "own_mask": False,
        "mask_token": 1, "layers": 1, "reads": [2],
    }  # fmt: skip
    first = learned(tmp_path / "first", "dspark", 12, head=sizes)
    gates = first.network.get_parameter("markov_head.prefix_gru.weight_hh_l0")
    assert gates.requires_grad
    save_head(load_head(tmp_path / "first"), tmp_path / "public", "dspark")
    about = json.loads((tmp_path / "public" / "config.json").read_text())
    assert about["architectures"] == ["DominoDraftModel"]
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    config = {"model": str(tmp_path / "public"), "check": False, "num_speculative_tokens": 3}
    model = target_of_families("llama")
    llm = LLM(model, speculative_config={"method": "dspark", **config}, **limits)
    plain = LLM(model, speculative_config={"method": "none"}, **limits)
    greedily = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [each.generate([[1, 2, 3], [4, 5]], greedily) for each in (llm, plain)]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]
    assert sum(each.metrics.num_draft_tokens for each in texts[0]) > 0
