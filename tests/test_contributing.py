"""The drafters that CONTRIBUTING shows really work, and docstrings are sentences."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.registering import register
from outpace import LLM
from outpace.core import lazy
from outpace.core.logits_pipeline import History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.draft.base import Drafter, Rows
from outpace.errors import ConfigError
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings
from targets.families import PROMPTS, plain, target
from targets.generating import greedy, ids

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
LENGTH = 40


def examples() -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "example"}
    for source in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(source, scope)
    return scope


def example(name: str) -> type[Drafter]:
    drafter = examples()[name]
    assert isinstance(drafter, type)
    assert issubclass(drafter, Drafter)
    # Under another name, since a reader may have put the example into the tree.
    return type(name, (drafter,), {"name": f"{drafter.name}_example"})


def test_the_example_drafter_repeats_the_last_token() -> None:
    options = [RowOptions(SamplingParams(temperature=0).resolve({}))] * 2
    rows = Rows(
        History([[1, 2], [3]], [[], [4]]),
        LogitsPipeline(options, vocabulary=8),
        seeds=torch.zeros(2, dtype=torch.long),
    )
    proposal = example("RepeatDrafter")().propose(rows, [3, 1])
    assert proposal.tokens.tolist() == [[2, 2, 2], [4, 0, 0]]
    assert proposal.counts.tolist() == [3, 1]


@pytest.mark.parametrize(
    "config", [{"method": "repeat_example"}, {"method": "recall_example", "reach": 30}]
)
def test_the_text_is_the_targets(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    register(monkeypatch, example("RepeatDrafter"), example("RecallDrafter"))
    speculation = {"num_speculative_tokens": 3, **config}
    llm = LLM(target("llama"), speculative_config=speculation, max_num_seqs=3)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"raech": 3}, r"unknown key 'raech'.*did you mean 'reach'"),
        ({"reach": "3"}, "reach must be a whole number, not '3'"),
        ({"reach": 0}, "reach must be at least 1, not 0"),
    ],
    ids=str,
)
def test_an_option_of_the_example_is_checked(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    register(monkeypatch, example("RecallDrafter"))
    with pytest.raises(ConfigError, match=message):
        LLM(target("llama"), speculative_config={"method": "recall_example", **given})


def test_the_example_head_is_trained_kept_and_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scope = examples()
    found = {"outpace.heads": scope["Linear"], "outpace.drafters": scope["LinearDrafter"]}

    def entries(group: str) -> tuple[EntryPoint, ...]:
        place = f"example:{found[group].__name__}" if group in found else ""
        return (EntryPoint("linear", place, group),) if place else ()

    monkeypatch.setitem(sys.modules, "example", SimpleNamespace(**scope))
    monkeypatch.setattr(lazy, "_entry_points", entries)
    model = target("llama")
    text = torch.tensor(plain("llama", LENGTH, tuple(map(tuple, PROMPTS))))[:, :24].repeat(2, 1)
    settings = TrainSettings(method="linear", block=24, batch=2, steps=4, warmup=1)
    run = TrainingRun(LoadedModel(model, None, "llama"), text, settings, tmp_path)
    run.play(lambda progress: None)
    config = {"method": "linear", "model": str(tmp_path), "check": False}
    llm = LLM(model, speculative_config={**config, "num_speculative_tokens": 3}, max_num_seqs=3)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


def described(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring, and of each string below a name that it describes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else ():
            match line:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield line.lineno, text


@pytest.mark.parametrize("folder", ["src", "tests", "bundle"])
def test_what_describes_something_says_its_noun(folder: str) -> None:
    """After "dtype" the words "Of its activations." are no sentence, and no help in a tooltip."""
    without = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in described(path.read_text(encoding="utf-8"))
        if text.split(maxsplit=1)[:1] == ["Of"]
    ]
    assert without == []


def test_a_string_without_a_noun_is_found() -> None:
    found = list(described('class A:\n    """It is."""\n    size: int\n    """Of it."""\n'))
    assert found == [(2, "It is."), (4, "Of it.")]
