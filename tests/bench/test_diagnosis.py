"""A short measurement of a machine and its drafters: counts and structure, no seconds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from outpace.bench.diagnosis import Diagnosis, verdict, why
from outpace.bench.doctor import (
    COLUMNS,
    FOUND,
    Candidate,
    DoctorOptions,
    Measured,
    TextRound,
    measure,
    play,
)
from outpace.bench.findings import findings
from outpace.bench.machines import OTHERS
from outpace.bench.meter import Meter
from outpace.bench.prompts import EACH, KINDS, prompts_of_kinds
from outpace.bench.roofline import target_traffic
from outpace.bench.statistics import Interval
from outpace.bench.synthetic import Pair
from outpace.bench.theory import Payoff, PlayedDraft, Times, acceptance_by_depth
from outpace.core.stats import Seconds
from outpace.errors import ConfigError, PromptError
from outpace.llm import LLM
from outpace.targets.cpu.library.processor import Processor
from outpace.targets.cpu.prebuilt import LEVELS
from outpace.targets.hf.weights import pass_bytes

TOKENS = 12


def untold(what: str, share: float) -> None:
    """Is told what is done next, and says nothing."""


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(DoctorOptions(None, {}, length=3, max_tokens=TOKENS), untold)


@pytest.fixture(scope="module")
def found(measured: Measured) -> Diagnosis:
    return findings(measured)


@pytest.mark.parametrize("chat", [True, False])
def test_there_are_as_many_prompts_of_each_kind(chat: bool) -> None:
    kinds = prompts_of_kinds(chat)
    assert tuple(kinds) == KINDS
    assert [len({prompt.text for prompt in prompts}) for prompts in kinds.values()] == [EACH] * 3


def test_look_ups_and_the_bundled_drafter_write_all_prompts(found: Diagnosis) -> None:
    look_ups, drafter = found.drafters
    assert (look_ups.name, look_ups.model) == ("look-ups (suffix)", None)
    assert (drafter.name, drafter.method) == ("the bundled drafter", "draft_model")
    for each in found.drafters:
        assert {kind.kind for kind in each.kinds} == set(KINDS)
        assert all(kind.prompts <= EACH for kind in each.kinds)
        assert each.speedup.count == sum(kind.prompts for kind in each.kinds)
        assert {kind.verdict for kind in each.kinds} <= {"gain", "unclear", "no gain"}
    assert found.chat
    assert found.max_tokens == TOKENS


def test_rounds_are_those_of_the_texts(measured: Measured, found: Diagnosis) -> None:
    """All but the first round of each text, which reads the prompt and brings one token."""
    for candidate, result in zip(measured.others, found.drafters, strict=True):
        for kind in result.kinds:
            texts = candidate.texts[kind.kind]
            assert kind.rounds == sum(map(len, texts))
            for text in texts:
                assert sum(1 + each.draft.accepted for each in text) < TOKENS + candidate.longest
                assert max(each.draft.drafted for each in text) <= candidate.longest
    drafter = measured.others[1]
    assert all(sum(each.begins for each in text) == 1 for text in drafter.texts["code"])


def test_plain_decoding_writes_one_text_of_each_kind(measured: Measured) -> None:
    assert [len(texts) for texts in measured.plain.texts.values()] == [1, 1, 1]
    assert all(each.draft == PlayedDraft(0, 0) for each in measured.plain.rounds)


def test_passes_and_drafted_tokens_have_their_costs(found: Diagnosis) -> None:
    assert [each.columns for each in found.passes] == list(COLUMNS)
    first = found.passes[0]
    assert (first.over_one, first.roofline) == (1, 1)
    nbytes = target_traffic(LLM(None)).of_pass(1, found.context)
    assert first.of_memory_bound == pytest.approx(nbytes / found.machine.bandwidth / first.seconds)
    assert found.passes[-1].over_one == pytest.approx(found.passes[-1].seconds / first.seconds)
    look_ups, drafter = found.drafters
    assert look_ups.reading_seconds is None
    assert drafter.reading_seconds is not None
    assert [cost.tokens for cost in drafter.costs] == [1, 3]
    for cost in drafter.costs:
        assert cost.of_a_pass == pytest.approx(cost.seconds / first.seconds)
        assert cost.of_memory_bound is not None
    assert [cost.of_memory_bound for cost in look_ups.costs] == [None] * len(look_ups.costs)


def test_every_drafter_of_chains_has_its_roofline(found: Diagnosis) -> None:
    for drafter in found.drafters:
        assert all(kind.roofline is not None and kind.roofline >= 1 for kind in drafter.kinds)


def test_nothing_is_predicted_for_weights_that_are_not_in_blocks(found: Diagnosis) -> None:
    assert [each.elsewhere for each in found.drafters] == [{}, {}]


def test_what_blocks_would_bring_elsewhere_is_predicted(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in measured.others:
        monkeypatch.setattr(each.llm, "target", replace(each.llm.target, packed=True))
    look_ups, drafter = findings(measured).drafters
    assert list(look_ups.elsewhere) == list(drafter.elsewhere) == list(OTHERS)
    assert all(1 <= each < 1 + FOUND for each in look_ups.elsewhere.values())
    assert all(1 <= each < 4 for each in drafter.elsewhere.values())  # of three drafted tokens
    # A GPU's time goes to launching layers, of which the draft model has one in twenty.
    assert drafter.elsewhere["H100, bfloat16"] > 1.2


def test_each_part_of_the_model_has_its_kernels_and_bytes(found: Diagnosis) -> None:
    parts = {part.name: part for part in found.parts}
    assert list(parts) == ["embedding", "self_attn", "mlp", "output matrix"]
    assert (parts["embedding"].kernels, parts["embedding"].nbytes) == ("looked up", 0)
    assert (parts["mlp"].count, parts["output matrix"].count) == (20, 1)
    whole = pass_bytes(LLM(None).target.model)
    assert 0.99 * whole < sum(part.nbytes for part in found.parts) <= whole  # norms are left out
    assert all(part.held for part in found.parts)


def test_a_lowered_processor_is_what_is_found(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = frozenset({*LEVELS["x86-64-v4-vnni"][1], "amx_bf16"})
    processor = Processor("GenuineIntel", "a Xeon", flags)
    monkeypatch.setattr("outpace.bench.findings.this_processor", lambda: processor)
    machine = findings(measured).machine
    assert (machine.instructions, machine.level) == ("AVX-512", "x86-64-v4-vnni")
    assert machine.features == ("avx512_vnni",)
    lowered = processor.lowered("x86-64-v3")
    monkeypatch.setattr("outpace.bench.findings.this_processor", lambda: lowered)
    machine = findings(measured).machine
    assert (machine.level, machine.features) == ("x86-64-v3", ())
    assert machine.instructions.startswith("AVX2, lowered by OUTPACE_CPU_LEVEL")


def test_all_of_it_is_json(found: Diagnosis) -> None:
    shown = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert shown["schema"] == 1
    assert [each["columns"] for each in shown["passes"]] == list(COLUMNS)
    assert shown["drafters"][1]["kinds"][0]["speedup"].keys() == {"mean", "low", "high", "count"}


# -- what follows from rounds whose times are known ------------------------------------------------


def candidate(monkeypatch: pytest.MonkeyPatch, drafting: float, *texts: list[int]) -> Candidate:
    """A draft model whose drafts of one token take n seconds, with a text of code for each
    list of accepted tokens. A pass over one token takes a second, over two 1.14."""
    llm = LLM(None, speculative_config={"method": "draft_model", "num_speculative_tokens": 1})
    meter = Meter(llm, 1, 128)
    monkeypatch.setattr(Meter, "times", Times({1: drafting}, {1: 1.0, 2: 1.14, 4: 1.6, 8: 2.9}))
    seconds = Seconds(drafting, 1.14, 0.0)
    rounds = [
        [TextRound(PlayedDraft(1, accepted), seconds, True, False) for accepted in text]
        for text in texts
    ]
    return Candidate(llm, meter, 1, {"code": rounds})


def plain_of(one: Candidate) -> Candidate:
    plain = TextRound(PlayedDraft(0, 0), Seconds(0.0, 1.0, 0.0), True, False)
    return replace(one, texts={"code": [[plain]]})


@pytest.mark.parametrize(
    ("drafting", "means", "best", "words"),
    [
        # 1.6 tokens for 1.14 + .59 passes; for 1.14 + .1
        (
            0.59,
            "no gain",
            None,
            "a drafted token costs 0.59 of a pass, and 0.60 of the drafted tokens are accepted: "
            "this cannot pay, it needs a cost below 0.46, or an acceptance above 0.73",
        ),
        (
            0.1,
            "gain",
            "the bundled drafter",
            "a drafted token costs 0.10 of a pass, and 0.60 of the drafted tokens are accepted, "
            "which makes 1.60 tokens a pass",
        ),
    ],
)
def test_what_a_draft_token_may_cost_is_said(
    monkeypatch: pytest.MonkeyPatch,
    measured: Measured,
    drafting: float,
    means: str,
    best: str | None,
    words: str,
) -> None:
    alike = [[1, 1, 1, 0, 0]] * 4
    one = candidate(monkeypatch, drafting, *alike)
    nothing = replace(one, llm=measured.others[0].llm, texts={"code": [[nothing_found()]]})
    diagnosis = findings(replace(measured, plain=plain_of(one), others=[nothing, one]))
    (kind,) = diagnosis.drafters[1].kinds
    assert kind.verdict == means
    assert kind.speedup.mean == pytest.approx(1.6 / (1.14 + drafting))
    assert kind.affordable == pytest.approx(0.46)
    assert kind.why == words
    assert diagnosis.best == best
    assert diagnosis.drafters[1].speedup.mean == pytest.approx(max(1, kind.speedup.mean))
    (other,) = diagnosis.drafters[0].kinds
    assert (other.verdict, other.length, other.needed) == ("no gain", 0, None)
    assert other.why == "nothing was found to draft in 1 rounds"


def nothing_found() -> TextRound:
    return TextRound(PlayedDraft(0, 0), Seconds(0.0, 1.0, 0.0), True, False)


def test_drafters_with_the_same_file_name_are_told_apart(pair: Pair, tmp_path: Path) -> None:
    other = shutil.copytree(pair.drafter, tmp_path / Path(pair.drafter).name)
    models = [pair.drafter, str(other)]
    asked = DoctorOptions(pair.target, {}, drafts=tuple(models), length=1, max_tokens=5)
    named = findings(measure(asked, untold)).drafters
    assert [each.name for each in named] == ["look-ups (suffix)", *models]


def test_what_a_round_takes_besides_its_parts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = candidate(monkeypatch, 0.2, [1, 0, 1])
    slow = [replace(each, seconds=Seconds(0.2, 1.24, 0.3)) for each in one.texts["code"][0]]
    one.texts["code"] = [[replace(slow[0], seconds=Seconds(9.0, 1.0, 0.0), begins=True), *slow]]
    verify = {1: 1.0, 2: 1.14}
    assert one.besides(Times({1: 0.2}, verify)) == pytest.approx(0.4)
    assert one.times(verify).verify == pytest.approx({1: 1.4, 2: 1.54})
    assert one.reading_seconds == pytest.approx(8.8)


def test_a_tree_counts_whole_only(monkeypatch: pytest.MonkeyPatch) -> None:
    one = candidate(monkeypatch, 0.2, [1, 0])
    assert list(one.lengths) == [1]
    four = TextRound(PlayedDraft(4, 2), Seconds(0.2, 1.6, 0.0), True, False)
    one.texts["code"] = [[four]]
    assert list(one.lengths) == [1, 2, 3, 4]
    one.texts["code"] = [[replace(four, is_chain=False)]]
    assert list(one.lengths) == [4]


def payoff_of(tokens: float, drafted: float, drafting: float, scoring: float) -> Payoff:
    return Payoff(4, tokens, drafted, drafting, scoring)


@pytest.mark.parametrize(
    ("payoff", "counts", "has_model", "words"),
    [
        (payoff_of(1.3, 1, 0.1, 1.5), (9, 9), True, "since scoring them makes a pass 1.50 times"),
        (payoff_of(1.9, 1, 1.2, 1.1), (9, 9), True, "below 0.80; at this cost no acceptance"),
        (payoff_of(1.0, 0.1, 0, 1.02), (40, 3), False, "found in 3 of 40 rounds only"),
        (payoff_of(1.1, 0.5, 0, 1.2), (40, 20), False, "this cannot pay, since scoring them"),
        (payoff_of(1.2, 0.5, 0.01, 1.195), (40, 20), False, "it needs an acceptance above 0.41"),
    ],
)
def test_why_drafts_do_not_pay(
    payoff: Payoff, counts: tuple[int, int], has_model: bool, words: str
) -> None:
    assert payoff.speedup < 1
    assert words in why(payoff, *counts, has_model, "no gain")


def test_a_gain_is_sure_when_the_whole_interval_lies_above_one() -> None:
    assert verdict(1.2, Interval(1.2, 1.1, 1.3, 4)) == "gain"
    assert verdict(1.2, Interval(1.2, 0.9, 1.5, 4)) == "unclear"
    assert verdict(1.2, Interval(1.2, None, None, 1)) == "unclear"
    assert verdict(1.1, Interval(0.99, 0.9, 1.1, 4)) == "no gain"
    assert verdict(0.9, Interval(1.1, 1.05, 1.2, 4)) == "no gain"


# -- other models ----------------------------------------------------------------------------------


def test_a_text_is_played_with_the_engines_own_drafts() -> None:
    llm = LLM(None, speculative_config={"method": "draft_model", "num_speculative_tokens": 2})
    rounds = [each.draft for each in play(llm, llm.token_ids("Once upon a time"), 24)]
    assert sum(1 + each.accepted for each in rounds) in (22, 23)  # but for the end's last round
    assert {each.drafted for each in rounds[:-2]} == {2}
    assert len(acceptance_by_depth(rounds)) == 2


def test_columns_are_timed_over_one_reading_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, admitted = LLM(None, speculative_config={"method": "none"}), []
    target: Any = llm.engine.target
    admit = type(target).admit
    monkeypatch.setattr(
        type(target), "admit", lambda self, *given: (admitted.append(1), admit(self, *given))[1]
    )
    meter = Meter(llm, 1, 32)
    meter.sample(scored=(4, 1, 2), repeats=2)
    assert sorted(meter.times.verify) == [1, 2, 4]
    assert len(admitted) == 1


def test_a_mixture_of_experts_has_no_bound(pair: Pair, tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    tokens = json.loads((target / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=tokens, **sizes, **heads)
    MixtralForCausalLM(config).save_pretrained(target)
    found = findings(measure(DoctorOptions(str(target), {}, max_tokens=6), untold))
    assert found.machine.multiply_adds is None
    assert {(each.of_memory_bound, each.roofline) for each in found.passes} == {(None, None)}
    assert not found.chat
    assert [each.name for each in found.drafters] == ["look-ups (suffix)"]
    assert found.best is None


def test_a_context_without_room_is_refused(pair: Pair) -> None:
    asked = DoctorOptions(pair.target, {"max_model_len": 40}, max_tokens=30)
    with pytest.raises(PromptError, match=r"room for 30 tokens in a context of 40.*--max-tokens"):
        measure(asked, untold)


def test_a_model_without_a_tokenizer_is_refused(pair: Pair, tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    for file in target.glob("token*"):
        file.unlink()
    with pytest.raises(PromptError, match="came without a tokenizer, which prompts need"):
        measure(DoctorOptions(str(target), {}), untold)


def test_drafts_are_no_longer_than_drafts_may_be(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens must be"):
        measure(DoctorOptions(pair.target, {}, drafts=(pair.drafter,), length=1000), untold)
