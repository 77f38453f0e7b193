"""Drafters that are a part of the target: the same texts, no layer twice, nothing left behind."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audit_engine.pairs import PROMPTS as LETTERS_IN
from outpace import LLM, SamplingParams
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.audit.model import AuditPlan, audit_model
from outpace.draft.exits import FIRST, PAPER, ExitThreshold
from outpace.draft.fingerprint import Fingerprint, digest_of
from outpace.errors import ConfigError, UnsupportedModel
from outpace.methods.self_speculation.partial import ExitSetting, parse_draft_exit
from outpace.methods.self_speculation.skipped_layers import SkippedLayers, default_skipped_layers
from outpace.targets.base import SubLayers
from outpace.targets.hf.partial.layers import decoder_layers
from representatives import representatives
from targets.families import CONTEXT, PROMPTS, build, plain, target
from targets.generating import greedy, ids

LENGTH = 12
SKIP: dict[str, Any] = {"method": "layer_skip", "layers": {"attention": [1]}}
EXIT: dict[str, Any] = {"method": "early_exit", "exit_layer": 1}
KINDS = {"layer_skip": SKIP, "early_exit": EXIT}


def decoder(config: dict[str, Any], model: Any = None, **options: Any) -> LLM:
    config = {"num_speculative_tokens": 3, **config}
    options = {"max_num_seqs": 4, "max_model_len": CONTEXT, **options}
    return LLM(model or target("llama"), speculative_config=config, **options)


def letters(config: dict[str, Any], **options: Any) -> LLM:
    return decoder(
        config,
        letter_model(),
        tokenizer=LetterTokenizer(),
        generation_config="none",
        max_num_seqs=40,
        **options,
    )


# -- exact -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "config"),
    representatives(
        itertools.product(
            ["gpt2", "qwen2-window", "gemma3", "falcon", "deepseek_v3"],
            [SKIP, {**SKIP, "layers": [1]}, EXIT],
        ),
        lambda family, config: (
            family == "gpt2"
            or (
                config in (SKIP, EXIT)
                and ((family in ("gemma3", "deepseek_v3")) == (config == EXIT))
            )
        ),
    ),
    ids=str,
)
def test_any_family_writes_its_own_text(family: str, config: dict[str, Any]) -> None:
    expected = plain(family, LENGTH, tuple(map(tuple, PROMPTS)))
    outputs = decoder(config, target(family)).generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == expected
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize(
    "config",
    representatives(
        [SKIP, {**SKIP, "draft_exit": 0.7}, {**EXIT, "draft_exit": "adaptive"}],
        lambda config: "draft_exit" in config,
    ),
    ids=str,
)
def test_the_distribution_is_the_targets(config: dict[str, Any]) -> None:
    plan = AuditPlan(LETTERS_IN, samples=160, power=False)
    report = audit_model(letters(config), plan, SamplingParams(temperature=0.7))
    assert report.ok, report
    assert 0 < report.acceptance < 1


def test_a_prompt_of_any_length_is_read_in_any_batch() -> None:
    long = [1 + number % 60 for number in range(40)]
    for config in (SKIP, EXIT):
        llm = decoder(config)
        sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
        alone = ids(llm.generate([long], sampled))[0]
        for others in ([[7] * 40], [[5, 6], [1]], [long[:-1]]):
            assert ids(llm.generate([long, *others], sampled))[0] == alone


def test_the_target_never_reads_what_a_view_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = decoder(SKIP)
    drafter, runner = llm.engine.drafter, llm.engine.target.runner
    propose, scribbled = drafter.propose, []

    def scribble(rows: Any, budgets: Any) -> Any:
        proposal = propose(rows, budgets)
        for row, length in enumerate(runner.lengths):
            for slots in runner.cache.row(row):
                slots[:, length:] = 1e3
                scribbled.append(row)
        return proposal

    monkeypatch.setattr(drafter, "propose", scribble)
    expected = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
    assert scribbled


# -- early exit: no layer twice --------------------------------------------------------------------


def columns_by_layer(model: Any, columns: Counter[int]) -> list[Any]:
    """Counts the columns that the attention of each layer computes; returns the hooks."""

    def counting(number: int) -> Any:
        def count(module: Any, args: Any, options: Any) -> None:
            states: Tensor = args[0] if args else options["hidden_states"]
            columns[number] += states.shape[0] * states.shape[1]

        return count

    return [
        layer.self_attn.register_forward_pre_hook(counting(number), with_kwargs=True)
        for number, layer in enumerate(decoder_layers(model))
    ]


def test_lower_layers_compute_each_column_once() -> None:
    model = build("llama", num_hidden_layers=3)
    llm = decoder({**EXIT, "exit_layer": 2}, model)
    columns: Counter[int] = Counter()
    hooks = columns_by_layer(model, columns)
    try:
        outputs = llm.generate(PROMPTS, greedy(LENGTH))
    finally:
        for hook in hooks:
            hook.remove()
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    assert columns[0] == columns[1] == columns[2] > 0


def test_a_rule_that_looks_at_states_has_all_layers_computed() -> None:
    head = {"name": "reflective", "prompt": "abc"}
    llm = letters({**EXIT, "verify": head})
    params = SamplingParams(max_tokens=6, seed=1, temperature=1.0, ignore_eos=True)
    assert len(llm.generate([[1, 2, 3]], params)[0].token_ids) == 6


# -- when a chain ends -----------------------------------------------------------------------------


def test_a_threshold_of_zero_never_ends_a_chain_and_one_near_one_always_does() -> None:
    def drafted(threshold: Any) -> tuple[int, int]:
        llm = decoder({**SKIP, "draft_exit": threshold})
        outputs = llm.generate(PROMPTS, greedy(LENGTH))
        longest = max(len(output.metrics.accepted_per_position) for output in outputs)
        return sum(output.metrics.num_draft_tokens for output in outputs), longest

    assert drafted(0.0) == drafted(None)
    assert drafted(0.9999)[0] < drafted(0.0)[0]


def test_the_adaptive_threshold_goes_where_the_paper_sends_it() -> None:
    careless = timid = cut_short = ExitThreshold()
    for _ in range(100):
        careless = careless.after(PAPER, 4, 1)
        timid = timid.after(PAPER, 4, 4)
        cut_short = cut_short.after(PAPER, 4, 4, full_length=True)
    assert careless.threshold == pytest.approx(FIRST + 100 * 0.1 * PAPER.step)
    assert timid.threshold < FIRST - 50 * 0.1 * PAPER.step
    assert cut_short.threshold == FIRST  # the budget ended these drafts, not the threshold
    for _ in range(700):
        timid = timid.after(PAPER, 4, 4)
    assert timid.threshold == 0.0  # and not below: it rises again as soon as drafts fail


def test_a_threshold_that_is_given_stays() -> None:
    assert parse_draft_exit(0.3) == ExitSetting(0.3, rule=None)
    assert parse_draft_exit("adaptive") == ExitSetting(FIRST, PAPER)
    assert parse_draft_exit(None) is None


# -- seeded texts repeat ---------------------------------------------------------------------------

EARLY: dict[str, Any] = {"method": "layer_skip", "layers": {"attention": [0], "mlp": [1]}}


@pytest.mark.parametrize("draft_exit", ["adaptive", None])
@pytest.mark.parametrize("room", [{}, {"max_batch_total_tokens": CONTEXT + CONTEXT // 2}], ids=str)
def test_a_seeded_text_is_the_same_alone_in_company_and_put_aside(
    draft_exit: str | None, room: dict[str, Any]
) -> None:
    """What a part of the target writes is not what the target writes: whoever reads a prompt must
    not depend on the other rows."""
    config = {**EARLY, "draft_exit": draft_exit, "num_speculative_tokens": 6}
    prompts = [[n + 1 for n in range(length)] for length in (8, 5, 3, 17, 2, 11)]
    length = CONTEXT - max(map(len, prompts))
    params = [
        SamplingParams(temperature=1.0, seed=n, max_tokens=length, ignore_eos=True)
        for n in range(6)
    ]
    alone = [
        decoder(config).generate([prompt], one)[0].token_ids
        for prompt, one in zip(prompts, params, strict=True)
    ]
    llm = decoder(config, max_num_seqs=6, **room)
    assert ids(llm.generate(prompts, params)) == alone


# -- which layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "rwkv"])
def test_a_model_is_known_however_its_matrices_are_rounded(family: str) -> None:
    model = build(family)
    before = digest_of(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 if weight.dim() > 1 else 0.0)
        assert digest_of(model) == before
        norms = [each for name, each in model.named_parameters() if name.endswith("norm.weight")]
        norms += [each for name, each in model.named_parameters() if "ln_" in name or "ln1" in name]
        norms[0].add_(0.1)
    assert digest_of(model) != before


def test_the_file_is_for_one_model(tmp_path: Path) -> None:
    from outpace.targets.hf.loading.loaded import LoadedModel

    file = tmp_path / "layers.json"
    own = LoadedModel(target("llama"), None, "some/llama")
    skipped = SubLayers(frozenset({1}), frozenset())
    SkippedLayers(Fingerprint.of(own), skipped, {"trials": 3}).save(file)
    expected = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    llm = decoder({**SKIP, "layers": str(file)})
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
    with pytest.raises(ConfigError, match=r"found for llama .* tune layers"):
        decoder({**SKIP, "layers": file}, build("llama", seed=5, rms_norm_eps=1e-5, hidden_size=64))
    other = build("llama")
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    with pytest.raises(ConfigError, match="tune layers"):
        decoder({**SKIP, "layers": file}, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": "nowhere.json"}, "cannot read .*nowhere.json"),
        ({"layers": [0, 7]}, "layer 7, and the target has layers 0 to 1"),
        ({"layers": [0, 1]}, "leaves out all layers"),
        ({"layers": {"norm": [1]}}, "layers must be"),
        ({"layers": [-1]}, "layers must be"),
        ({"draft_exit": 1.5}, "draft_exit must be"),
        ({"method": "early_exit"}, "unknown key 'layers'"),
    ],
)
def test_what_cannot_be_left_out_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder({**SKIP, **given})


@pytest.mark.parametrize("exit_layer", [None, 0, 2, "all", True])
def test_an_exit_that_is_none_is_refused(exit_layer: Any) -> None:
    with pytest.raises(ConfigError, match="exit_layer"):
        decoder({**EXIT, "exit_layer": exit_layer})


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    for content in ("{", "[]", json.dumps({"format": "another"})):
        file.write_text(content)
        with pytest.raises(ConfigError, match="not a file of `outpace tune layers`"):
            decoder({**SKIP, "layers": str(file)})


@pytest.mark.parametrize("family", ["opt", "gpt_oss"])
def test_a_part_that_a_model_cannot_miss_is_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"OPT|GptOss"):
        decoder({**SKIP, "layers": {"mlp": [1]}}, target(family))


def test_the_guess_leaves_the_first_and_last_layers_alone() -> None:
    assert default_skipped_layers(1) == SubLayers()
    assert default_skipped_layers(2) == SubLayers(frozenset({1}))
    for count in (8, 12, 28, 80):
        guess = default_skipped_layers(count)
        numbers = guess.attention | guess.mlp
        assert min(numbers) >= count // 4
        assert max(numbers) < count - 1
        assert len(guess.attention) > len(guess.mlp)
