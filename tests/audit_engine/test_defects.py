"""The gate catches every seeded defect, by the audits that the documentation says, and is quiet
about what is merely slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lab.options.reference import Reference
from lab.options.trial import Trial
from lab.options.walk import cases
from tests.audit_engine.defects import DEFECTS, Defect
from tests.audit_engine.pairs import pair_llm

from outpace import LLM, SamplingParams
from outpace.audit.diff import Mode, audit_diff
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.audit.model import AuditPlan, ModelReport, audit_model
from outpace.errors import OutpaceError

AUDITS = ("text", "drafts", "contract", "diff", "options")
NAMES = [defect.name for defect in DEFECTS]
SOME = (
    "rejected tokens stay in the cache",
    "accepted path of a tree not moved",
    "sliding window counted in slots",
    "one stream for all rows",
    "bonus from the unwarped distribution",
    "draft stream keyed by place",
    "siblings told as independent draws",
    "stop strings looked for per block",
    "drafter beyond its context",
    "min_p ignored",
)
"""At least one for each audit, and of chains, trees and windows; the whole table is gone through
by the slow test, with all audits."""


def modelled(defect: Defect, samples: int) -> ModelReport:
    llm = pair_llm(**defect.setup)
    params = SamplingParams(**{"temperature": 0.8, **defect.params})
    with defect.into(llm):
        return audit_model(llm, AuditPlan(defect.prompts, samples=samples, power=False), params)


def differs(defect: Defect) -> bool:
    engines: dict[Mode, LLM] = {"greedy": pair_llm(**defect.setup)}
    if defect.setup.get("verify", "token") in ("token", "coupled"):
        engines["coupled"] = pair_llm(**{**defect.setup, "verify": "coupled"})
    given = {name: value for name, value in defect.params.items() if name != "temperature"}
    params = SamplingParams(max_tokens=24, ignore_eos=True, **given)
    with defect.into(*engines.values()):
        try:
            return not audit_diff(engines, defect.prompts, params).ok
        except RuntimeError:  # the engine fell over: the audit cannot pass
            return True


def breaks_options(defect: Defect) -> bool:
    family = defect.setup.get("family", "llama")
    reference = Reference(letter_model(family), LetterTokenizer(), cases(), 7)
    llm = pair_llm(**{**defect.setup, "rows": 40})
    with defect.into(llm):
        try:
            failures, _ = Trial(reference, llm).run()
        except RuntimeError:  # the engine fell over: the audit cannot pass
            return True
        return bool(failures) or bool(list(reference.without_effect()))


OBJECTS: dict[str, Callable[[Defect], bool]] = {
    "text": lambda defect: modelled(defect, defect.samples).text.alarm,
    "drafts": lambda defect: modelled(defect, 64).drafts.alarm,
    "contract": lambda defect: bool(modelled(defect, 64).breaches),
    "diff": differs,
    "options": breaks_options,
}


def test_some_defect_is_left_to_each_audit() -> None:
    assert {d.caught_by[0] for d in DEFECTS if d.name in SOME} == set(AUDITS)


@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.name in SOME], ids=lambda d: d.name)
def test_a_defect_is_caught(defect: Defect) -> None:
    assert OBJECTS[defect.caught_by[0]](defect)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_by_the_audits_that_the_table_names(defect: Defect) -> None:
    """Those named must object; others may."""
    objecting = {name for name in defect.caught_by if OBJECTS[name](defect)}
    assert objecting == set(defect.caught_by)


@pytest.mark.parametrize("defect", [d for d in DEFECTS if not d.caught_by], ids=lambda d: d.name)
def test_a_bad_drafter_is_not_a_wrong_one(defect: Defect) -> None:
    report = modelled(defect, 100)
    assert report.ok, report
    assert not differs(defect)


def test_masks_and_positions_do_not_survive_the_probe_at_load() -> None:
    for defect in DEFECTS:
        if defect.name in ("siblings see each other", "positions by slot, not depth"):
            with defect.into(pair_llm()), pytest.raises(OutpaceError, match="otherwise than"):
                pair_llm()


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    assert len(DEFECTS) >= 15
    assert len(set(NAMES)) == len(NAMES)
