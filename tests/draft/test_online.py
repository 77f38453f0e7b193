"""Drafters that learn while they draft: the text stays, acceptance rises."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.draft.base import Drafter
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError
from outpace.heads.checkpoint import load_head
from outpace.heads.registry import head_names
from outpace.methods.online.online import Online
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.learners import LEARNERS
from representatives import representatives
from targets.families import CONTEXT, drafter, target
from targets.generating import greedy, ids

QUICK = {"every": 2, "window": 32, "share": 1.0, "positions": "all"}
RATE = 0.01
DOMAINS = [[[5, 9, 2], [5, 9, 3]], [[40, 33, 21], [40, 33, 22]]]
"""Prompts of two kinds of text."""


def learner(method: str, verify: str | None = None, **more: Any) -> LLM:
    options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    if method == "draft_model":
        options, more = {"model": drafter("llama", 0.3)}, {"learning_rate": 0.003, **more}
    online = {**QUICK, "learning_rate": RATE, **more}
    config = {"method": method, "num_speculative_tokens": 3, **options, "online": online}
    config |= {} if verify is None else {"verify": verify}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=2, max_model_len=CONTEXT)


@cache
def texts() -> list[list[list[int]]]:
    """What the target writes without a drafter, for each kind of text."""
    llm = LLM(target("llama"), max_model_len=CONTEXT)
    return [ids(llm.generate(prompts, greedy(60))) for prompts in DOMAINS]


def acceptance(outputs: Any) -> float:
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    return float(accepted / sum(output.metrics.num_target_passes for output in outputs))


@pytest.mark.parametrize("method", representatives(["draft_model", "eagle3"], ["draft_model"]))
def test_acceptance_rises_after_the_text_changes_and_no_text_does(method: str) -> None:
    llm = learner(method)
    for prompts, expected in zip(DOMAINS, texts(), strict=True):
        rates = []
        for _ in range(5):
            outputs = llm.generate(prompts, greedy(60))
            assert ids(outputs) == expected
            rates.append(acceptance(outputs))
        assert sum(rates[-2:]) / 2 > rates[0] + 0.05, rates


@pytest.mark.parametrize(
    ("name", "positions"), [*((name, "all") for name in LEARNERS), ("osd", "corrected")]
)
def test_every_learner_learns(name: str, positions: str) -> None:
    llm = learner("medusa", learner=name, positions=positions, learning_rate=0.005)
    before = acceptance(llm.generate(DOMAINS[0], greedy(60)))
    for _ in range(4):
        outputs = llm.generate(DOMAINS[0], greedy(60))
    assert acceptance(outputs) > before + 0.05
    drafted: Any = llm.engine.drafter
    assert drafted.losses[-1] < drafted.losses[0]


NOT_ONLINE = {"ctc", "diffusion", "hidden_transfer", "pass"}


@pytest.mark.parametrize("method", sorted(NOT_ONLINE))
def test_or_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="leave 'online' out"):
        learner(method)


@pytest.mark.parametrize("method", sorted({*head_names()} - NOT_ONLINE))
def test_every_head_can_learn_and_no_text_changes(method: str, tmp_path: Path) -> None:
    llm = learner(method)
    outputs = llm.generate(DOMAINS[0], greedy(48))
    assert ids(outputs) == [text[:48] for text in texts()[0]]
    drafting: Any = llm.engine.drafter
    assert drafting.updates > 0
    untaught = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))[
        "model"
    ]
    llm.save_drafter(tmp_path)
    learned = load_head(tmp_path).state_dict()
    assert not all(
        torch.equal(value.to(learned[name]), learned[name])
        for name, value in untaught.state_dict().items()
    )


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_seeded_texts_repeat_themselves_whatever_was_learned(method: str) -> None:
    llm = learner(method)
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    first = llm.generate(DOMAINS[0], seeded)
    llm.generate(DOMAINS[0], greedy(60))
    other: Any = llm.engine.drafter
    assert other.updates > 0
    again = llm.generate([DOMAINS[0][0], DOMAINS[1][0]], [seeded, greedy(20)])
    assert ids(again)[0] == ids(first)[0]
    assert first[0].metrics.num_draft_tokens == 0


def test_what_was_handed_over_stays_as_it_is() -> None:
    model = drafter("llama", 0.3)
    before = [weight.clone() for weight in model.parameters()]
    llm = learner("draft_model")
    llm.generate(DOMAINS[0], greedy(60))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_what_was_learned_is_saved_and_drafts_as_well(method: str, tmp_path: Path) -> None:
    llm = learner(method)
    before = acceptance(llm.generate(DOMAINS[0], greedy(60)))
    for _ in range(2):
        llm.generate(DOMAINS[0], greedy(60))
    llm.save_drafter(tmp_path)
    config: dict[str, Any] = {"method": method, "model": str(tmp_path)}
    config |= {"num_speculative_tokens": 3, **({} if method == "draft_model" else {"check": False})}
    saved = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    outputs = saved.generate(DOMAINS[0], greedy(60))
    assert ids(outputs) == texts()[0]
    assert acceptance(outputs) > before


LEARNING = {"method": "draft_model", "model": drafter("llama", 0.3), "online": QUICK}
NGRAM = {"method": "ngram"}


@pytest.mark.parametrize(
    "config",
    [
        {"method": "auto", "drafter": LEARNING},
        {"method": "ensemble", "drafters": [NGRAM, LEARNING]},
        {"method": "tagged", "routes": {"a": {"method": "ucb", "drafters": [NGRAM, LEARNING]}}},
    ],
    ids=["auto", "ensemble", "nested"],
)
def test_the_one_of_several_drafters_that_learns_is_saved(config: Any, tmp_path: Path) -> None:
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    llm.save_drafter(tmp_path)
    saved = LLM(target("llama"), speculative_config={"model": str(tmp_path)}, max_model_len=CONTEXT)
    assert saved.engine.drafter.loaded is not None


def test_where_several_learn_the_error_names_them() -> None:
    config = {"method": "ensemble", "drafters": [LEARNING, NGRAM, LEARNING]}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    with pytest.raises(ConfigError, match=r"learn \(draft_model 1, draft_model 2\), and a"):
        llm.save_drafter("nowhere")
    config = {"method": "ensemble", "drafters": [NGRAM, {**NGRAM, "prompt_lookup_max": 2}]}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    with pytest.raises(ConfigError, match="'ensemble' learns nothing that could be saved"):
        llm.save_drafter("nowhere")


def test_windows_overlap_and_each_distribution_is_learned_once() -> None:
    from outpace.methods.online.traces import Trace

    trace, distribution = Trace(8), (torch.tensor([1]), torch.tensor([1.0]))
    trace.read(list(range(100, 120)), None)  # a prompt: its end is kept
    assert len(trace) == 4
    found = []
    for token in range(10):
        trace.read([token], None)
        trace.note(1, *distribution)
        found += trace.cut(ended=False)
    found += trace.cut(ended=True)
    learned = [window.tokens[at] for window in found for at in window.top_tokens]
    assert learned == list(range(10))
    assert found[1].tokens[:4] == found[0].tokens[4:]


def test_nothing_is_learned_of_tokens_that_are_not_kept() -> None:
    """A first draft that is longer than half a window, all of it accepted."""
    from outpace.methods.online.traces import Trace

    trace, distribution = Trace(16), (torch.tensor([1]), torch.tensor([1.0]))
    trace.read(list(range(33)), None)  # the prompt and the draft: its last eight are kept
    for back in range(13, 0, -1):
        trace.note(back, *distribution)
    (window,) = trace.cut(ended=True)
    assert sorted(window.top_tokens) == list(range(8))


@pytest.mark.parametrize(
    ("online", "sentence"),
    [
        ({"learner": "ods"}, "unknown learner 'ods'.*did you mean 'osd'"),
        ({"evry": 2}, "unknown key 'evry' in 'online'.*did you mean 'every'"),
        ({"every": 0}, "every in 'online' must be at least 1, not 0"),
        ({"share": 2}, "share in 'online' must be a number in"),
        ({"positions": "some"}, "positions in 'online' must be"),
        (3, "online must be a dict"),
    ],
)
def test_mistakes_are_named(online: Any, sentence: str) -> None:
    config = {"model": drafter("llama"), "online": online}
    with pytest.raises(ConfigError, match=sentence):
        LLM(target("llama"), speculative_config=config)


def test_what_cannot_learn_is_refused() -> None:
    rounded = {"model": drafter("llama"), "online": {}, "quantization": "int8"}
    with pytest.raises(ConfigError, match="online and quantization exclude each other"):
        LLM(target("llama"), speculative_config=rounded)
    with pytest.raises(ConfigError, match="learns nothing that could be saved"):
        LLM(target("llama"), speculative_config={"method": "ngram"}).save_drafter("nowhere")
    head = find_drafter("medusa").dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": "medusa", **head, "online": {"window": 16}}
    LLM(target("llama"), speculative_config=config)


ITS_OWN = {
    "configure": "it is built around a drafter, whose class is configured",
    "default_rule_for": "the class of the drafter inside is asked",
    "dummy_options": "the class of the drafter inside is asked",
    "model_signature": "no classifier knows states that learning changes",
    "drafters_to_verify": "it is verified itself, as its `capabilities` say",
    "default_rule": "the class of the drafter inside is asked",
    "Options": "the class of the drafter inside is asked",
    "file": "it is what one that stands for several drafters keeps, which none of these is",
    "look_up": "one that stands for several drafters is asked, which none of these is",
    "target_module": "modules that a target brings do not learn",
    "for_target": "the class of the drafter inside is asked",
}
"""What it does not hand on to the drafter inside, and why."""


def test_every_call_and_answer_of_a_drafter_is_handed_on_or_known_not_to_be() -> None:
    drafting = learner("draft_model").engine.drafter
    assert isinstance(drafting, Online)
    asked = {name for name in vars(Drafter) if not name.startswith("_")}
    asked |= {name for name in Drafter.__annotations__ if not name.startswith("_")}
    answered = vars(Online).keys() | vars(drafting).keys()
    assert asked - answered == ITS_OWN.keys()


def test_a_text_that_is_about_to_join_is_shown_to_what_drafts_inside() -> None:
    routed = {"method": "task", "routes": {"any": {"method": "ngram"}}}
    routed |= {"router": lambda prompt: ("any", 1.0), "default": {"method": "ngram"}}
    config = {"method": "staged", "model": drafter("llama", 0.3), "lookup": routed, "online": QUICK}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    assert ids(llm.generate(DOMAINS[0], greedy(60))) == texts()[0]


def test_a_coupled_text_is_the_same_with_a_drafter_that_learns() -> None:
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    config = {"method": "none", "verify": "coupled"}
    expected = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    llm = learner("medusa", verify="coupled")
    for _ in range(2):
        outputs = llm.generate(DOMAINS[0], drawn)
        assert ids(outputs) == ids(expected.generate(DOMAINS[0], drawn))
    assert outputs[0].metrics.num_draft_tokens > 0
