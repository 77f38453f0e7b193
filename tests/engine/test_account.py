"""Every text ends with an account of its drafts that fits its counters."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from outpace import LLM
from outpace.core.account import Account, Mode
from outpace.core.stats import Metrics
from outpace.engine.request import EngineRequest
from outpace.llm import BUNDLED

DRAFTER = str(BUNDLED / "drafter")
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "draft_model": {"method": "draft_model", "model": DRAFTER},
    "fixed": {"method": "draft_model", "model": DRAFTER, "num_speculative_tokens": 3},
    "suffix": {"method": "suffix"},
    "auto": {"method": "auto", "model": DRAFTER},
    "batch": {"method": "draft_model", "model": DRAFTER, "length": "batch"},
    "hedge": {"method": "hedge", "drafters": [{"method": "ngram"}, {"model": DRAFTER}]},
}
PROMPT = "Once upon a time there was a cat. " * 3


def check(metrics: Metrics) -> None:
    account = metrics.account
    assert account is not None
    assert account.rounds == metrics.num_target_passes
    assert account.drafted == metrics.num_draft_tokens
    assert sum(one.accepted for one in account.drafters) == metrics.num_accepted_tokens
    for one in account.drafters:
        assert one.rounds <= account.rounds
        assert one.accepted <= one.drafted
    assert metrics.as_dict()["account"] == account.as_dict()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_the_account_fits_the_counters(name: str, options: dict[str, Any]) -> None:
    llm = LLM(speculative_config=CONFIGS[name], max_num_seqs=3)
    for output in llm.generate([PROMPT, "A dog", PROMPT], {"max_tokens": 40, **options}):
        check(output.metrics)
    *_, last = llm.stream(PROMPT, {"max_tokens": 12, **options})
    check(last.metrics)


def test_a_text_that_ends_while_it_is_removed_keeps_its_account(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(speculative_config=CONFIGS["fixed"], max_num_seqs=1)
    engine = llm.engine
    (request,) = llm.requests(PROMPT, {"max_tokens": 20})
    engine.add(request)
    engine.step()
    account = engine.controller.account

    def meanwhile(of: EngineRequest) -> Account:
        found = account(of)
        monkeypatch.undo()
        other = threading.Thread(target=lambda: [engine.step() for _ in range(20)])
        other.start()
        other.join()
        return found

    monkeypatch.setattr(engine.controller, "account", meanwhile)
    engine.remove(request)
    assert request.finish_reason == "length"
    check(request.metrics)


def test_the_mode_is_that_of_the_text() -> None:
    llm = LLM(speculative_config=CONFIGS["auto"], max_num_seqs=4)
    sampled = {"temperature": 1.0, "max_tokens": 12}
    params = [
        {**sampled, "seed": 1},
        sampled,
        {**sampled, "speculative": "off"},
        {"speculative": 2},
    ]
    found = [output.metrics.account for output in llm.generate([PROMPT] * 4, params)]
    modes = [account.mode for account in found if account is not None]
    assert modes == [Mode.NOMINAL, Mode.MEASURED, Mode.OFF, Mode.FIXED]
    assert [one.name for one in found[0].drafters] == ["draft_model", "suffix"]


def test_a_text_that_is_given_up_has_one_too() -> None:
    llm = LLM(speculative_config=CONFIGS["draft_model"])
    chunks = llm.stream(PROMPT, {"max_tokens": 200, "ignore_eos": True})
    metrics = next(chunks).metrics
    assert metrics.account is None, "it goes on"
    chunks.close()
    check(metrics)
