"""What controllers say of what was drafted, and why not more, against simulated rounds."""

from __future__ import annotations

import pytest

from outpace.core.account import Account, DrafterAccount, Mode, Reason
from outpace.draft.round import Outcome
from outpace.engine.request import EngineRequest
from outpace.policy.base import Controller
from outpace.policy.lengths.adaptive import Constant

from . import test_routing as routes
from .test_controller import Simulation, alone, flat, request


def played(controller: Controller, row: EngineRequest, draft: float, chance: float) -> Account:
    """The account of a text of 300 rounds. draft: what a drafted token costs; chance: of each."""
    Simulation(controller, flat(draft), lambda *_: chance).play([row], 300)
    return controller.account(row)


def only(account: Account) -> DrafterAccount:
    (drafter,) = account.drafters
    return drafter


def test_a_drafter_that_brings_nothing_is_told_with_its_cost_and_its_chance() -> None:
    auto = alone(name="draft_model")
    played(auto, request(), draft=0.6, chance=0.3)
    late = request()
    account = played(auto, late, draft=0.6, chance=0.3)
    drafter = only(account)
    assert (account.mode, account.rounds, drafter.reason) == (Mode.MEASURED, 300, Reason.NO_GAIN)
    assert drafter.cost == pytest.approx(0.62, abs=0.1)  # drafting and scoring of a token
    assert drafter.chance == pytest.approx(0.3, abs=0.15)
    assert drafter.rounds <= 15, "trials only"


def test_a_drafter_that_pays_is_told_with_what_it_drafted() -> None:
    row = request()
    drafter = only(played(alone(name="draft_model"), row, draft=0.05, chance=0.8))
    assert drafter.drafted > 300
    assert drafter.accepted / drafter.drafted == pytest.approx(0.6, abs=0.2)
    assert drafter.cost == pytest.approx(0.07, abs=0.02)
    written = drafter.accepted + 300
    assert written == len(row.output_ids), "what was accepted, and one token of each round"
    assert f"{drafter.drafted:,} tokens in" in drafter.sentence(300)


def test_what_was_found_is_counted_by_text() -> None:
    auto = alone(name="suffix", look_up=True)
    row = request()
    simulated = Simulation(auto, flat(0.0), lambda *_: 0.9)
    simulated.play([row], 200, found=lambda: 0)
    account = auto.account(row)
    drafter = only(account)
    assert (drafter.found, drafter.drafted) == (0, 0)
    assert 0 < drafter.asked <= 200
    assert str(account) == "look-up (suffix) found nothing"
    other = request()
    simulated.play([other], 50)
    assert only(auto.account(other)).found > 0
    assert only(auto.account(row)).found == 0


def test_a_text_of_one_token_has_no_reason() -> None:
    auto = alone(name="draft_model")
    row = request(tokens=1)
    auto.record([row], [Outcome(0, 0, 0, row.extend([2]))], None)
    assert only(auto.account(row)).reason is None


def test_seeded_texts_go_by_nominal_costs_and_their_own_history() -> None:
    auto = alone(name="draft_model")
    played(auto, request(), draft=0.6, chance=0.3)
    row = request(temperature=1.0, seed=1)
    assert only(auto.account(row)).chance is None, "nothing was tried in this text yet"
    account = played(auto, row, draft=0.6, chance=0.9)
    assert account.mode is Mode.NOMINAL
    assert only(account).chance == pytest.approx(0.9, abs=0.05)
    assert only(account).cost == pytest.approx(0.1), "the nominal cost of a node on a CPU"
    assert str(account).endswith("(seeded: by nominal costs)")


@pytest.mark.parametrize(("asked", "mode"), [("off", Mode.OFF), (0, Mode.OFF), (3, Mode.FIXED)])
def test_a_request_may_say_how_much(asked: object, mode: Mode) -> None:
    for controller in (alone(), Constant(5)):
        row = request(speculative=asked)
        account = played(controller, row, draft=0.1, chance=0.5)
        assert account.mode is mode
        assert bool(account.drafted) is (mode is Mode.FIXED)
    assert str(Account(Mode.OFF, 10)) == "drafting was switched off"


def test_without_a_drafter_that_is_said() -> None:
    account = played(Constant.without_drafter(), request(), draft=0.1, chance=0.5)
    assert (account.mode, account.drafted, str(account)) == (Mode.NONE, 0, "there is no drafter")


def test_each_of_several_drafters_is_accounted_for() -> None:
    of = routes.routing()
    row = request()
    simulated = routes.Simulation()
    simulated.play(300, [row], routes.COPYING, routes.automatic(of), of.record)
    account = of.account(row)
    model, look_up = account.drafters
    assert (model.name, look_up.name, look_up.look_up) == ("model", "look-up", True)
    assert look_up.asked == 300
    assert look_up.found == pytest.approx(0.9 * 300, rel=0.1)
    assert 0 < look_up.rounds <= look_up.found
    assert model.rounds + look_up.rounds <= account.rounds == 300
    assert account.drafted == model.drafted + look_up.drafted


def test_the_sentence_that_a_user_reads() -> None:
    """The one of the issue: a model that does not pay, and look-ups without a find."""
    account = Account(
        Mode.MEASURED,
        120,
        (
            DrafterAccount("draft_model", reason=Reason.NO_GAIN, cost=0.4, chance=0.55),
            DrafterAccount("suffix", look_up=True, asked=119),
        ),
    )
    assert str(account) == (
        "draft model: a token costs 0.40 of a pass, 55% accepted: no gain; "
        "look-up (suffix) found nothing"
    )


@pytest.mark.parametrize(
    ("drafter", "sentence"),
    [
        (
            DrafterAccount("eagle3", False, 50, 9, 9, 40, 10, reason=Reason.NO_GAIN, cost=0.3),
            "eagle3: 40 tokens in 9 of 50 rounds, 25% accepted, a token costs 0.30 of a pass, "
            "no gain expected in most others",
        ),
        (
            DrafterAccount("draft_model", reason=Reason.READING, cost=0.2, reading=31.24),
            "draft model: reading the text would cost 31.2 passes, which the rest of it would not "
            "repay",
        ),
        (
            DrafterAccount("draft_model", reason=Reason.UNMEASURED),
            "draft model: not tried before plain rounds were measured",
        ),
        (
            DrafterAccount("draft_model", reason=Reason.GAIN, cost=0.1, chance=0.9),
            "draft model: others promised more",
        ),
        (DrafterAccount("ngram", look_up=True), "look-up (ngram) was not asked"),
    ],
)  # fmt: skip
def test_every_reason_has_words(drafter: DrafterAccount, sentence: str) -> None:
    assert drafter.sentence(50) == sentence


def test_accounts_of_several_texts_add_up() -> None:
    first = DrafterAccount("suffix", True, asked=9, found=3, rounds=2, drafted=8, accepted=4)
    second = DrafterAccount("suffix", True, asked=5, reason=Reason.NO_GAIN, cost=0.1)
    model = DrafterAccount("draft_model", rounds=1, drafted=2, accepted=2)
    merged = Account.merged(
        [Account(Mode.MEASURED, 9, (first,)), None, Account(Mode.MEASURED, 6, (model, second))]
    )
    assert merged is not None
    assert merged.rounds == 15
    assert merged.drafters == (
        DrafterAccount("suffix", True, 14, 3, 2, 8, 4, reason=Reason.NO_GAIN, cost=0.1),
        model,
    )
    assert Account.merged([None]) is None
