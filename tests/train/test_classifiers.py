"""Classifiers of drafted tokens: trained on a tiny pair, kept, used, refused for other models."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.classifiers import load_classifier
from outpace.heads.registry import CLASSIFIERS
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.classifiers import ClassifierRecipe, Examples
from outpace.train.metrics import BalancedAccuracy
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings
from outpace.train.students import check_sizes, student_for
from outpace.train.teacher import Teacher
from targets.families import CONTEXT, target
from targets.generating import greedy, ids

from .test_run import check_precisions, read_log

BLOCK = 24
PROMPTS = [[first, second] for first, second in itertools.product(range(4), range(4))]
SIZES = {
    "judge": {"window": 1},
    "stop_head": {"every": 3, "blocks": 1, "greedy": True, "rejection_weight": 1},
}


@cache
def loaded() -> LoadedModel:
    return LoadedModel(target("llama"), None, "llama")


@cache
def text() -> Tensor:
    found = LLM(target("llama"), max_num_seqs=16).generate(PROMPTS, greedy(BLOCK - 2))
    whole = [[*prompt, *out] for prompt, out in zip(PROMPTS, ids(found), strict=True)]
    return torch.tensor(whole)


def student_of(asked: TrainSettings) -> Any:
    return student_for(loaded(), text(), asked, Path("unused"), lambda step, done: None)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("draft"))
    model: Any = noisy_copy(target("llama"), 0.5)
    model.save_pretrained(folder)
    return folder


def settings(method: str, draft: str, steps: int = 60, **more: Any) -> TrainSettings:
    given = {"block": BLOCK, "batch": 8, "warmup": 5, "learning_rate": 0.02, "held_out": 0.5}
    given |= {"method": method, "steps": steps, "head": SIZES[method], "draft": draft}
    return TrainSettings(**{**given, **more})


def trained(out: Path, asked: TrainSettings, every: int = 20) -> Any:
    # The held-out text is learned from as well.
    return TrainingRun(loaded(), torch.cat([text(), text()]), asked, out).play(
        lambda progress: None, every
    )


@pytest.fixture(scope="module")
def learned(draft: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A classifier of each kind that has learned: its folder, and how far it came."""
    folder = tmp_path_factory.mktemp("learned")
    return {
        method: (folder / method, trained(folder / method, settings(method, draft)))
        for method in CLASSIFIERS
    }


@pytest.mark.parametrize("method", CLASSIFIERS)
def test_it_learns_and_is_kept(method: str, learned: dict[str, tuple[Path, Any]]) -> None:
    folder, reached = learned[method]
    assert reached.score > 0.6
    log = read_log(folder)
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[-1]["balanced_accuracy"] == reached.score == pytest.approx(sum(reached.shares) / 2)
    network = load_classifier(folder, method)
    assert asdict(network.config).items() >= SIZES[method].items()
    other = next(name for name in CLASSIFIERS if name != method)
    with pytest.raises(ConfigError, match=f"holds a classifier '{method}'"):
        load_classifier(folder, other)


@pytest.mark.parametrize("method", CLASSIFIERS)
def test_products_in_bfloat16_teach_the_same(method: str, draft: str, tmp_path: Path) -> None:
    def run(precision: str) -> TrainingRun:
        asked = settings(method, draft, 3, precision=precision)
        return TrainingRun(loaded(), text(), asked, tmp_path / precision)

    check_precisions(run)


@pytest.mark.parametrize("method", CLASSIFIERS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    method: str, draft: str, tmp_path: Path
) -> None:
    asked, calls = settings(method, draft, 6), itertools.count()
    whole = TrainingRun(loaded(), text(), asked, tmp_path / "whole")
    whole.play(lambda progress: None, every=2)
    TrainingRun(loaded(), text(), asked, tmp_path / "cut").play(
        lambda progress: None, every=2, stop=lambda: next(calls) == 2
    )
    again = TrainingRun(loaded(), text(), asked, tmp_path / "cut")
    assert again.step == 3
    again.play(lambda progress: None, every=2)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


@pytest.mark.parametrize("likeliest", [False, True])
def test_a_draft_model_that_is_the_target_is_always_right(likeliest: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "same")
    model: Any = target("llama")
    model.save_pretrained(folder)
    sizes = {**SIZES, "judge": {"window": 2}}  # its first token is then none of the prompt's
    for method in CLASSIFIERS:
        head = {**sizes[method], "greedy": likeliest}
        student = student_of(settings(method, folder, head=head))
        teacher = Teacher(loaded(), student.hidden_layers, student.top)
        examples = student.read(teacher, text()[:4])
        if method == "stop_head":  # whatever it draws, its distribution is the target's
            assert examples.right.min() > 0.99
        elif likeliest:  # the text is what it says itself
            assert examples.right.min() == 1
            student.network.linear.weight.data.zero_()  # it calls nothing right
            student.network.linear.bias.data.zero_()
            assert ClassifierRecipe(student.network).compute_loss(examples).hits[:, 0].sum() == 0


def test_a_judge_calls_a_token_right_where_the_target_goes_on_as_before(draft: str) -> None:
    student = student_of(settings("judge", draft, head={"window": 2}))
    teacher, tokens = Teacher(loaded(), student.hidden_layers, student.top), text()[:6]
    torch.manual_seed(3)
    examples = student.read(teacher, tokens)
    places = torch.arange(2, BLOCK - 2, 4)
    torch.manual_seed(3)
    changed = student._drafted.insert_into(tokens, places)
    model: Any = target("llama")
    said, says = (model(input_ids=ids).logits.argmax(-1) for ids in (tokens, changed))
    expected = [
        bool(changed[row, place] == tokens[row, place])
        or said[row, place : place + 2].equal(says[row, place : place + 2])
        for row, place in itertools.product(range(6), places.tolist())
    ]
    assert examples.right.bool().tolist() == expected
    assert 0 < sum(expected) < len(expected)
    assert examples.hidden_states.shape == (len(expected), loaded().config.hidden_size)


def test_a_stop_head_learns_the_chance_of_acceptance(draft: str) -> None:
    student = student_of(settings("stop_head", draft, head={"every": 3}))
    teacher, tokens = Teacher(loaded(), student.hidden_layers, student.top), text()[:6]
    torch.manual_seed(3)
    examples = student.read(teacher, tokens)
    places = torch.arange(3, BLOCK, 3)
    torch.manual_seed(3)
    changed = student._drafted.insert_into(tokens, places)
    small: Any = student._drafted.model._model  # type: ignore[attr-defined]
    token = changed[:, places, None]
    p, q = (
        model(input_ids=changed).logits.float().softmax(-1)[:, places - 1].gather(-1, token)
        for model in (loaded().model, small)
    )
    assert torch.allclose(examples.right, (p / q).clamp_max(1).flatten().float(), atol=1e-4)


@pytest.mark.parametrize("kind", [0.0, 1.0])
def test_tokens_of_one_kind_are_recognised_by_themselves(kind: float, draft: str) -> None:
    student = student_of(settings("stop_head", draft))
    states, right = (
        torch.randn(9, student.network.model_signature.shape.hidden_size),
        torch.full((9,), kind),
    )
    recipe = ClassifierRecipe(student.network)
    student.network.linear.bias.data.fill_(20.0 * (2 * kind - 1))  # it is sure, and right
    found = recipe.compute_loss(Examples(states, right, 1 / 9, 6 / 9))
    assert found.hits.nansum() == 9


def test_tokens_that_the_draft_model_lacks_are_named(draft: str) -> None:
    student = student_of(settings("judge", draft))
    student._drafted.model.vocabulary = 40  # type: ignore[attr-defined]
    tokens = torch.full((1, BLOCK), 7)
    tokens[0, 5] = 41
    with pytest.raises(ConfigError, match="the text has token 41, and the draft model only 40"):
        student.read(Teacher(loaded(), student.hidden_layers, student.top), tokens)


def test_a_trained_judge_judges(draft: str, learned: dict[str, tuple[Path, Any]]) -> None:
    config = {"model": draft, "num_speculative_tokens": 3, "quantization": None}
    accepted = []
    for threshold in (0.0, 1.0):
        verify = {"name": "judge", "head": str(learned["judge"][0]), "threshold": threshold}
        llm = LLM(target("llama"), speculative_config={**config, "verify": verify})
        outputs = llm.generate(PROMPTS[:4], greedy(12))
        accepted.append(sum(output.metrics.num_accepted_tokens for output in outputs))
    plain = LLM(target("llama")).generate(PROMPTS[:4], greedy(12))
    assert ids(outputs) == ids(plain)  # with threshold 1 it accepts nothing by itself
    assert accepted[0] > accepted[1]


def test_a_trained_stop_head_shortens_drafts(
    draft: str, learned: dict[str, tuple[Path, Any]]
) -> None:
    head = str(learned["stop_head"][0])
    config: dict[str, Any] = {"model": draft, "num_speculative_tokens": 8}
    rates = {}
    for threshold in (1.0, 0.7):
        length = {"name": "stop_head", "head": head, "threshold": threshold}
        llm = LLM(
            target("llama"),
            speculative_config={**config, "length": length},
            max_num_seqs=4,
            max_model_len=CONTEXT,
        )
        outputs = llm.generate(PROMPTS, greedy(16))
        drafted = sum(output.metrics.num_draft_tokens for output in outputs)
        rates[threshold] = sum(o.metrics.num_accepted_tokens for o in outputs) / drafted
    assert ids(outputs) == ids(LLM(target("llama")).generate(PROMPTS, greedy(16)))
    assert rates[0.7] > rates[1.0] + 0.05


@pytest.fixture
def heads(learned: dict[str, tuple[Path, Any]], tmp_path: Path) -> dict[str, str]:
    """Folders that a test may write into."""
    return {
        method: str(shutil.copytree(folder, tmp_path / method))
        for method, (folder, _) in learned.items()
    }


def asked(method: str, head: str, model: Any) -> dict[str, Any]:
    key = {"judge": "verify", "stop_head": "length"}[method]
    return {"model": model, key: {"name": method, "head": head}}


def test_another_model_is_refused(heads: dict[str, str], draft: str) -> None:
    stranger: Any = type(target("llama"))(target("llama").config).double().eval()  # type: ignore[call-arg]
    for model in (stranger, target("qwen2-window")):
        with pytest.raises(ConfigError, match="the judge was trained for another model"):
            LLM(model, speculative_config=asked("judge", heads["judge"], draft))
    config = asked("stop_head", heads["stop_head"], stranger)
    with pytest.raises(ConfigError, match="the stop head was trained for another model"):
        LLM(target("llama"), speculative_config=config)


def test_a_rounded_model_is_the_same(heads: dict[str, str], draft: str) -> None:
    rounded: Any = target("llama").__class__.from_pretrained(draft, dtype=torch.bfloat16)
    LLM(target("llama"), speculative_config=asked("stop_head", heads["stop_head"], rounded))


def test_mistakes_are_named(heads: dict[str, str], draft: str, tmp_path: Path) -> None:
    stop = heads["stop_head"]
    for config, sentence in (
        (
            {**asked("stop_head", stop, draft), "method": "draft_tree"},
            "no chains with distributions",
        ),
        ({**asked("stop_head", stop, draft), "online": {}}, "does not learn online"),
        (asked("stop_head", heads["judge"], draft), "holds a classifier 'judge'"),
        ({"model": draft, "length": "stop_head"}, "needs 'head'"),
        ({"model": draft, "verify": "judge"}, "needs 'head'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            LLM(target("llama"), speculative_config=config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_classifier(tmp_path / "empty", "judge")
    about = json.loads((Path(stop) / "config.json").read_text())
    (Path(stop) / "config.json").write_text(json.dumps({**about, "blocks": "many"}))
    with pytest.raises(ModelLoadError, match="does not describe"):
        load_classifier(stop, "stop_head")
    (Path(stop) / "config.json").write_text(json.dumps({**about, "blocks": 2}))
    with pytest.raises(ModelLoadError, match="damaged"):
        load_classifier(stop, "stop_head")
    (Path(stop) / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="holds no classifier"):
        load_classifier(stop, "stop_head")


def test_mistakes_in_training_are_named(draft: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name it with --draft"):
        check_sizes(settings("judge", ""))
    with pytest.raises(ConfigError, match="no size 'windows'"):
        check_sizes(settings("judge", draft, head={"windows": 2}))
    with pytest.raises(ConfigError, match="window must be at least 1, not 0"):
        trained(tmp_path, settings("judge", draft, head={"window": 0}))
    with pytest.raises(ConfigError, match="--block must be more than 40 tokens"):
        trained(tmp_path, settings("judge", draft, head={"window": 20}))
    with pytest.raises(ConfigError, match=r"none of the 2 drafted tokens .* is wrong"):
        BalancedAccuracy(("right", "wrong")).score(torch.tensor([[1.0, torch.nan]] * 2))


def test_ending_by_states_keeps_the_distribution() -> None:
    from outpace.audit.letters import LetterTokenizer, letter_model
    from outpace.audit.model import AuditPlan, audit_model
    from outpace.heads.classifiers import AcceptancePredictionConfig, AcceptancePredictionHead
    from outpace.train.teacher import signature_of

    model = letter_model()
    small = noisy_copy(model, 1.0)
    torch.manual_seed(0)
    head = AcceptancePredictionHead(
        signature_of(LoadedModel(small, None, "small")), AcceptancePredictionConfig()
    )
    torch.nn.init.normal_(head.linear.weight, std=1.0)
    config = {
        "model": small,
        "num_speculative_tokens": 4,
        "length": {"name": "stop_head", "head": head.eval().requires_grad_(False)},
        "verify": "block",
    }
    llm = LLM(
        model,
        tokenizer=LetterTokenizer(),
        speculative_config=config,
        max_num_seqs=40,
        generation_config="none",
    )
    plan = AuditPlan([[1, 2, 3], [4]], samples=300, tokens=6, power=False)
    report = audit_model(llm, plan, SamplingParams(temperature=1.0))
    assert report.ok, report
