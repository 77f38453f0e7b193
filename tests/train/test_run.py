"""Training runs on a tiny target that writes its own training text."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.base import Round
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.checkpoint import load_head
from outpace.heads.folder import WEIGHTS
from outpace.heads.registry import head_names
from outpace.policy.lengths.adaptive import Constant
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.source import ADAPTER
from outpace.train.checkpoint import LOG, STATE
from outpace.train.metrics import AcceptanceLength
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings
from representatives import representatives
from targets.families import CONTEXT, VOCABULARY, target
from targets.generating import greedy, ids

KINDS = ["medusa", "eagle3", "ctc", "pass", "dflash", "dspark"]
"""Heads that learn in different ways: each stands for those like it."""
BLOCK, DEPTHS = 24, 3
SMALL = {"mlp_speculator": {"inner_size": 64}, "dflash": {"layers": 2},
         "dspark": {"layers": 2, "markov_rank": 16},
         "diffusion": {"width": 64, "context": 8},
         "s2d": {"width": 32, "layers": 3, "first": 1, "every": 1}}  # fmt: skip
"""Sizes of heads that would take long to train otherwise."""
PROMPTS = [[first, second] for first, second in itertools.product(range(4), range(4))]

EFFORT = {
    "pass": (80, 1.3),
    "medusa": (100, 1.5),
    "ctc": (120, 1.5),
    "hidden_transfer": (60, 1.5),
    **dict.fromkeys(["clover", "lyanna", "diffusion"], (120, 1.5)),
}
"""Steps that a head learns, and the acceptance length that it must reach, where these are not as of
all others. Columns in the target's pass take long to train, and PaSS has few weights."""


@cache
def loaded() -> LoadedModel:
    return LoadedModel(target("llama"), None, "llama")


@cache
def text() -> Tensor:
    """What the target writes greedily after each prompt: text that can be learned by heart."""
    found = LLM(target("llama"), max_num_seqs=16).generate(PROMPTS, greedy(BLOCK - 2))
    whole = [[*prompt, *out] for prompt, out in zip(PROMPTS, ids(found), strict=True)]
    return torch.tensor(whole)


def settings(method: str, steps: int = 250, **more: object) -> TrainSettings:
    head = {"depths": DEPTHS, **SMALL.get(method, {})}
    given = {"block": BLOCK, "batch": 8, "warmup": 5, "learning_rate": 0.01, "held_out": 0.05}
    given |= {"method": method, "steps": steps, "head": head}
    return TrainSettings(**{**given, **more})  # type: ignore[arg-type]


def full_disk(*_: object) -> None:
    """Writes as torch does where there is no room."""
    raise RuntimeError("No space left on device")


def run(out: Path, asked: TrainSettings, tokens: Tensor | None = None) -> TrainingRun:
    return TrainingRun(loaded(), text() if tokens is None else tokens, asked, out)


def read_log(out: Path) -> list[dict[str, Any]]:
    """Returns the reports of a run, in order."""
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def measured_length(llm: LLM, last: int) -> float:
    """Has the text written once more, and returns the mean acceptance length of the rounds that are
    simulated, too: those with a draft whose root is token ``last`` at the latest, so that the text
    that was read goes on far enough after it."""
    rounds: list[int] = []

    def see(trace: Round) -> None:
        for row, decision in enumerate(trace.outcomes):
            if decision.drafted and trace.rows.lengths[row] - 1 <= last:
                rounds.append(1 + len(decision.path))

    with llm.engine.observing(see):
        drafted = llm.generate(PROMPTS, greedy(BLOCK - 2 + DEPTHS))
    assert [found[: BLOCK - 2] for found in ids(drafted)] == text()[:, 2:].tolist()
    return sum(rounds) / len(rounds)


@pytest.mark.parametrize("method", representatives(head_names(), KINDS))
def test_a_head_learns_and_its_simulated_acceptance_comes_true(method: str, tmp_path: Path) -> None:
    check_comes_true(settings(method, EFFORT.get(method, (100, 1.7))[0], held_out=0.5), tmp_path)


@pytest.mark.parametrize("method", ["hydra", "ctc"])
def test_what_a_prefix_layer_makes_of_a_text_is_the_same_as_it_grows(
    method: str, tmp_path: Path
) -> None:
    sizes = {"depths": DEPTHS, "prefix": True}
    steps = EFFORT.get(method, (100, 1.7))[0]
    check_comes_true(settings(method, steps, held_out=0.5, head=sizes), tmp_path)


def check_comes_true(asked: TrainSettings, tmp_path: Path) -> None:
    # The held-out text is learned from as well: only the simulation is looked at here.
    method, repeated = asked.method, torch.cat([text(), text()])
    trainer = run(tmp_path, asked, repeated)
    reached = trainer.play(lambda progress: None, every=125)
    assert reached.score > EFFORT.get(method, (100, 1.7))[1]
    # It knows the texts that it was trained on, and is not tried on others.
    config = {"model": str(tmp_path), "num_speculative_tokens": DEPTHS, "check": False}
    llm = LLM(target("llama"), speculative_config={"method": method, **config}, max_num_seqs=4)
    llm.engine.controller = Constant(DEPTHS, shape=TreeShape.chain(DEPTHS))
    # The loss of CTC looks at the text's own tokens, of which there is one less than places.
    measured = measured_length(llm, BLOCK - DEPTHS - (method == "ctc"))
    # The same rounds, one by one: only rounding (float32 while it learns) may tell them apart.
    assert measured == pytest.approx(reached.score, rel=0.01)


def check_precisions(trainer_of: Callable[[str], TrainingRun], own: bool = True) -> None:
    """Checks that a few steps with bfloat16 products teach about what others do. own: whether the
    network makes any: the tests' target is in float64, in which it stays."""
    losses: dict[str, list[float]] = {
        precision: [] for precision in ("auto", "float32", "bfloat16")
    }
    for precision, found in losses.items():
        trainer = trainer_of(precision)
        trainer.play(lambda progress, found=found: found.append(progress.loss), every=1)
        assert {weight.dtype for weight in trainer.network.parameters()} == {torch.float32}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
    assert (losses["bfloat16"] != losses["float32"]) == own
    assert losses["auto"] == losses["float32"], "there is no GPU in a test"


@pytest.mark.parametrize("method", representatives(head_names(), KINDS))
def test_products_in_bfloat16_teach_the_same(method: str, tmp_path: Path) -> None:
    asked = settings(method, 3)
    check_precisions(
        lambda one: run(tmp_path / one, replace(asked, precision=one)), own=method != "pass"
    )


@pytest.mark.parametrize("method", ["medusa", "eagle", "dflash", "pass", "diffusion"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(method: str, tmp_path: Path) -> None:
    """Also where a recipe draws: noise, or the places of blocks."""
    whole = run(tmp_path / "whole", settings(method, 6))
    whole.play(lambda progress: None, every=2)
    calls = itertools.count()
    run(tmp_path / "cut", settings(method, 6)).play(
        lambda progress: None, every=2, stop=lambda: next(calls) == 2
    )
    again = run(tmp_path / "cut", settings(method, 6))
    assert again.step == 3
    again.play(lambda progress: None, every=2)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name
    assert [entry["step"] for entry in read_log(tmp_path / "cut")] == [2, 3, 4, 6]


def test_a_run_goes_on_with_the_same_adapter_only(tmp_path: Path) -> None:
    """Folders of adapters have the same names, and an adapter may change little."""
    folders = [tmp_path / one / "checkpoint-500" for one in ("a", "b")]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / ADAPTER).write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"weights" * number)
    first, second = (LoadedModel(target("llama"), None, "llama", lora=each) for each in folders)
    out, asked = tmp_path / "out", settings("medusa", 2)
    TrainingRun(first, text(), asked, out).play(lambda progress: None, every=1)
    assert TrainingRun(first, text(), settings("medusa", 5), out).step == 2
    with pytest.raises(ConfigError, match=r"another adapter \(--lora\)"):
        TrainingRun(second, text(), settings("medusa", 5), out)
    with pytest.raises(ConfigError, match=r"another adapter \(--lora\)"):
        run(out, settings("medusa", 5))


def test_a_run_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    run(tmp_path, settings("medusa", 2)).play(lambda progress: None, every=1)
    assert run(tmp_path, settings("medusa", 5)).step == 2
    with pytest.raises(ConfigError, match="another learning_rate"):
        run(tmp_path, settings("medusa", 2, learning_rate=0.02))
    for other_text in (text().flip(0), text()[:-1]):
        with pytest.raises(ConfigError, match="another text"):
            run(tmp_path, settings("medusa", 5), other_text)
    for other in ("qwen2", "gpt2"):  # of another kind, of the same shape and of another one
        with pytest.raises(ConfigError, match="another target"):
            TrainingRun(
                LoadedModel(target(other), None, other), text(), settings("medusa", 5), tmp_path
            )
    state = torch.load(tmp_path / STATE, weights_only=True)
    for missing in ("step", "network", "optimizer"):
        torch.save({**state, missing: {}}, tmp_path / STATE)
        with pytest.raises(ModelLoadError, match="delete this one to begin anew"):
            run(tmp_path, settings("medusa", 2))
    (tmp_path / STATE).write_bytes(b"cut")
    with pytest.raises(ModelLoadError, match="delete this one to begin anew"):
        run(tmp_path, settings("medusa", 2))


def test_a_text_may_grow_and_what_was_learned_from_is_not_held_out(tmp_path: Path) -> None:
    first = run(tmp_path, settings("medusa", 2, held_out=0.25))
    first.play(lambda progress: None)
    grown = torch.cat([text(), text().flip(0)])
    again = run(tmp_path, settings("medusa", 4, held_out=0.25), grown)
    assert again.step == 2
    assert torch.equal(again._held, first._held)
    assert len(again._tokens) == len(grown) - len(first._held)
    again.play(lambda progress: None)
    assert run(tmp_path, settings("medusa", 5, held_out=0.25), grown).step == 4


@pytest.mark.parametrize("method", ["ctc", "medusa"])
def test_few_tokens_stay_those_of_the_first_text(method: str, tmp_path: Path) -> None:
    asked = settings(method, 2, head={"depths": DEPTHS, "draft_vocab_size": 9})
    first = run(tmp_path, asked)
    first.play(lambda progress: None)
    other = torch.randint(VOCABULARY - 12, VOCABULARY, (200, BLOCK))
    again = run(tmp_path, asked, torch.cat([text(), other]))
    assert torch.equal(again.network.d2t, first.network.d2t)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(again._loss(text()).loss, first._loss(text()).loss)


@pytest.mark.parametrize("method", ["ctc", "medusa", "s2d"])
def test_the_shortest_blocks_have_one_place(method: str, tmp_path: Path) -> None:
    least = DEPTHS + (2 if method == "ctc" else 1)
    with pytest.raises(ConfigError, match=f"--block must be more than {least - 1} tokens"):
        run(tmp_path, settings(method, 1, block=least - 1), text()[:, : least - 1])
    trainer = run(tmp_path, settings(method, 1, block=least), text()[:, :least])
    reached = trainer.play(lambda progress: None)
    assert 1 <= reached.score <= 1 + DEPTHS


def test_the_best_head_is_kept(tmp_path: Path) -> None:
    trainer = run(tmp_path, settings("medusa", 6))
    trainer.play(lambda progress: None, every=2)
    lengths = [entry["acceptance_length"] for entry in read_log(tmp_path)]
    assert trainer.best == max(lengths)
    load_head(tmp_path)


def test_the_figure_of_the_kept_head_survives_a_worse_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([1.5, 2.5, 1.25, 1.0])
    monkeypatch.setattr(AcceptanceLength, "score", lambda *_: next(scores))
    trainer = run(tmp_path, settings("medusa", 3))
    assert trainer.play(lambda progress: None, every=1).score == 1.25
    head = (tmp_path / WEIGHTS).read_bytes()
    again = run(tmp_path, settings("medusa", 4))
    for resumed in (trainer, again):
        assert resumed.kept is not None
        assert (resumed.kept.step, resumed.kept.score, resumed.best) == (2, 2.5, 2.5)
        assert resumed.kept.sentence.startswith("simulated acceptance length 2.50, by depth")
    again.play(lambda progress: None)
    assert again.kept == trainer.kept
    assert (tmp_path / WEIGHTS).read_bytes() == head


def test_patience_ends_a_run_at_the_report_itself_and_counts_over_sittings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([2.0, 2.5, 2.5, 1.5, 1.0, 2.75, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(AcceptanceLength, "score", lambda *_: next(scores))
    begun = run(tmp_path, settings("medusa", 99))
    ended = begun.play(lambda progress: None, every=2, patience=2)
    assert (ended.step, begun.step, begun.stale) == (8, 8, 2), "no step after that report"
    assert [entry["step"] for entry in read_log(tmp_path)] == [2, 4, 6, 8]
    again = run(tmp_path, settings("medusa", 99))
    monkeypatch.setattr(again, "learn", lambda step: pytest.fail("a step was made"))
    with monkeypatch.context() as patch:
        patch.setattr(AcceptanceLength, "score", lambda *_: 1.5)
        assert again.play(lambda progress: None, patience=2).step == 8
    more = run(tmp_path, settings("medusa", 99))
    assert more.play(lambda progress: None, every=2, patience=3).step == 10, "one report was left"
    last = run(tmp_path, settings("medusa", 99))
    assert last.play(lambda progress: None, every=1, patience=4).step == 15
    assert (last.kept and last.kept.step, last.stale) == (11, 4)


@pytest.mark.parametrize(
    "writer", ["outpace.heads.folder.save_file", "outpace.train.run.torch.save"]
)
def test_a_full_disk_is_said_with_the_file(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, full_disk)
    with pytest.raises(OSError, match=r"a file cannot be written \(No space left") as found:
        run(tmp_path, settings("medusa", 2)).play(lambda progress: None)
    assert Path(found.value.filename).parent == tmp_path


def test_a_run_that_goes_astray_is_stopped_before_its_weights_are_lost(tmp_path: Path) -> None:
    trainer = run(tmp_path, settings("eagle", 40, learning_rate=1.0))
    steps = itertools.count(1)
    weight = next(iter(trainer.network.parameters()))
    weight.register_hook(lambda gradient: gradient * (math.inf if next(steps) > 5 else 1))
    with pytest.raises(ConfigError, match="not finite: begin anew with a lower --lr than 1"):
        trainer.play(lambda progress: None, every=1)
    for weight in (*trainer.network.parameters(), *load_head(tmp_path).parameters()):
        assert torch.isfinite(weight).all()


def test_few_tokens_are_the_frequent_ones(tmp_path: Path) -> None:
    asked = settings("hydra", 2, head={"depths": 3, "draft_vocab_size": 9})
    trainer = run(tmp_path, asked)
    trainer.play(lambda progress: None)
    known = load_head(tmp_path).d2t
    uses = torch.bincount(text().flatten(), minlength=VOCABULARY)
    assert len(known) == 9
    assert int(uses[known].min()) >= int(uses.sort(descending=True).values[9])
    config = {"method": "hydra", "model": str(tmp_path), "num_speculative_tokens": 2}
    drafted = LLM(target("llama"), speculative_config=config).generate(PROMPTS[:2], greedy(8))
    plain = LLM(target("llama")).generate(PROMPTS[:2], greedy(8))
    assert ids(drafted) == ids(plain)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": -1.0}, r"learning_rate must be a number in \(0, 1\]"),
        ({"block": CONTEXT + 1}, "--block must be at most 128 tokens, the context of llama"),
        ({"seed": 10**17}, "seed must be at most"),
        ({"method": "eagle3", "head": {"reads": 3}}, "reads is 3"),
        ({"method": "hydra", "head": {"blocks": 0}}, "blocks is 0"),
        ({"head": {"depth": 3}}, "no size .depth. .did you mean .depths."),
        ({"head": {"depths": "3"}}, "depths is '3'"),
        ({"head": {"depths": 0}}, "depths must be at least 1, not 0"),
        ({"head": {"depths": BLOCK}}, "must be more than 24 tokens"),
        ({"head": {"draft_vocab_size": 65}}, "more than the 64 tokens"),
        (
            {"method": "eagle3", "head": {"heads": 3, "groups": 2}},
            "3 heads of width 10 in 2 groups",
        ),
        ({"method": "ctc", "head": {"depths": 3, "frames": 2}}, "2 frames do not spell 3 tokens"),
        ({"method": "hidden_transfer", "head": {"layer": 2}}, "columns join after the first of 2"),
        ({"method": "diffusion", "head": {"passes": 9}}, "passes is 9 and context 32"),
        ({"method": "clover", "head": {"heads": 3}}, "3 attention heads do not share a width"),
        ({"precision": "int8"}, "precision must be .auto., .float32. or .bfloat16., not .int8."),
        ({"method": "meduza"}, "unknown head 'meduza'"),
    ],
)
def test_wrong_settings_are_refused(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    asked = {"method": "medusa", "steps": 2, **change}
    with pytest.raises(ConfigError, match=sentence):
        run(tmp_path, settings(**asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "dflash", "ctc", "pass", "s2d"])
def test_a_head_learns_from_what_the_target_has_written_only(method: str, tmp_path: Path) -> None:
    """What stands where nothing is learned makes no difference to the loss, nor to the report."""
    own = torch.zeros_like(text(), dtype=torch.bool)
    own[:, 9:19] = True
    trainer = TrainingRun(loaded(), text(), settings(method, 2), tmp_path, own=own)
    batches = [trainer._student.read(trainer._teacher, text()) for _ in range(2)]
    foreign = batches[0].top_tokens.clone()
    foreign[:, :8] = foreign[:, 18:] = 3
    states = batches[0].hidden_states.clone()
    states[:, 18:] *= -1  # after all that is learned
    batches[1] = replace(batches[1], top_tokens=foreign, hidden_states=states)
    losses = []
    for batch in batches:
        torch.manual_seed(0)
        losses.append(trainer._recipe.compute_loss(batch.of(own)).loss.detach())
    assert torch.equal(*losses)
    assert trainer.play(lambda progress: None).score >= 1


def test_rounds_are_simulated_in_the_answers_only(tmp_path: Path) -> None:
    """After its two prompt tokens, the target's greedy text is what is measured."""
    repeated = torch.cat([text(), text()])
    own = torch.ones_like(repeated, dtype=torch.bool)
    own[:, :2] = False
    asked = settings("medusa", 100, held_out=0.5)
    trainer = TrainingRun(loaded(), repeated, asked, tmp_path, own=own)
    reached = trainer.play(lambda progress: None, every=125)
    config = {"model": str(tmp_path), "num_speculative_tokens": DEPTHS, "check": False}
    llm = LLM(target("llama"), speculative_config={"method": "medusa", **config}, max_num_seqs=4)
    llm.engine.controller = Constant(DEPTHS, shape=TreeShape.chain(DEPTHS))
    assert measured_length(llm, BLOCK - DEPTHS) == pytest.approx(reached.score, rel=0.01)


def test_text_is_held_out_up_to_some_that_is_to_be_foreseen(tmp_path: Path) -> None:
    own = torch.zeros_like(text(), dtype=torch.bool)
    own[2:] = True
    asked = settings("medusa", 1, held_out=0.05)
    made = TrainingRun(loaded(), text(), asked, tmp_path / "some", own=own)
    assert made.play(lambda progress: None).score >= 1
    own[4:] = False
    own[2] = False
    with pytest.raises(ConfigError, match="1 have enough of the target's own answers"):
        TrainingRun(loaded(), text(), asked, tmp_path / "few", own=own)


def test_few_tokens_are_those_that_the_target_says(tmp_path: Path) -> None:
    own = torch.zeros_like(text(), dtype=torch.bool)
    own[:, 2:] = True
    asked = settings("medusa", 1, head={"depths": DEPTHS, "draft_vocab_size": 3})
    trainer = TrainingRun(loaded(), text(), asked, tmp_path, own=own)
    counts = torch.bincount(text()[own], minlength=VOCABULARY)
    known = trainer.network.get_buffer("d2t")
    assert counts[known].min() >= counts.topk(3).values.min()
