"""The model class for lm-evaluation-harness says what the harness's own class "hf" says."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.errors import ConfigError
from outpace.llm import BUNDLED
from processes import START_SECONDS

pytest.importorskip("lm_eval", reason="needs: pip install -e '.[eval]'")

STORIES = [
    {"text": "Once upon a time there was a little girl named", "choices": [" Lily", " a"]},
    {"text": "The cat sat on the", "choices": [" mat", " moon and sang", "."]},
    {"text": "Tom and Sam went to the park", "choices": [" to play", " to", " because they were"]},
]


def stories(**_: Any) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(STORIES)}


def task(name: str, **config: Any) -> dict[str, Any]:
    return {
        "task": name,
        "custom_dataset": stories,
        "test_split": "test",
        "doc_to_text": "{{text}}",
        **config,
    }


CHOICE = task(
    "tiny_choice",
    output_type="multiple_choice",
    doc_to_choice="{{choices}}",
    doc_to_target=0,
    target_delimiter="",
    metric_list=[{"metric": "acc"}],
)
WRITING = task(
    "tiny_writing",
    output_type="generate_until",
    doc_to_target="{{choices[0]}}",
    generation_kwargs={"until": ["\n", " she"], "max_gen_toks": 40, "do_sample": False},
    metric_list=[{"metric": "exact_match"}],
)
WHOLE = task(
    "tiny_whole",
    output_type="loglikelihood_rolling",
    doc_to_target="{{text}}{{choices[0]}}",
    metric_list=[{"metric": "word_perplexity"}],
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The harness and its packages warn of much that is none of ours."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def evaluated(model: str, **arguments: Any) -> dict[str, list[Any]]:
    """The answers to all requests of the three tasks, in order."""
    import lm_eval

    import outpace.lm_eval  # adds the model

    assert outpace.lm_eval
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[dict(CHOICE), dict(WRITING), dict(WHOLE)],
        batch_size=2,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = found["samples"]
    return {name: [one["resps"] for one in samples[name]] for name in sorted(samples)}


def numbers(answers: list[Any]) -> list[float]:
    flat: list[float] = []
    for answer in answers:
        flat += numbers(answer) if isinstance(answer, (list, tuple)) else [float(answer)]
    return flat


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-3)])
def test_the_answers_are_those_of_hf(dtype: str, tolerance: float) -> None:
    target, drafter = str(BUNDLED / "target"), str(BUNDLED / "drafter")
    theirs = evaluated("hf", pretrained=target, dtype=dtype)
    config = {"model": drafter, "num_speculative_tokens": 3}
    ours = evaluated("outpace", pretrained=target, dtype=dtype, speculative_config=config)
    assert ours["tiny_writing"] == theirs["tiny_writing"]
    assert any(len(text) > 10 for text in map(str, ours["tiny_writing"]))
    for name in ("tiny_choice", "tiny_whole"):
        assert numbers(ours[name]) == pytest.approx(numbers(theirs[name]), abs=tolerance)


def model(**arguments: Any) -> Any:
    from outpace.lm_eval import OutpaceLM

    return OutpaceLM(dtype="float64", device="cpu", **arguments)


def asked(*requests: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("generate_until", {}, each, index) for index, each in enumerate(requests)]


def test_texts_longer_than_the_context_are_scored_in_windows() -> None:
    whole, cut = model(), model(max_length=16)
    text = "Once upon a time there was a little girl named Lily. " * 3
    (long,) = whole.loglikelihood_rolling(asked((text,)), disable_tqdm=True)
    (short,) = cut.loglikelihood_rolling(asked((text,)), disable_tqdm=True)
    assert short < long < 0
    before, after = "a " * 40, " girl"
    (answer,) = cut.loglikelihood(asked((before, after)), disable_tqdm=True)
    assert answer[0] < 0


def test_texts_are_drafted_and_end_before_their_stop_string(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []
    each = LLM.generate_each

    def noted(*given: Any) -> Iterator[Any]:
        for output in each(*given):
            found.append(output)
            yield output

    monkeypatch.setattr(LLM, "generate_each", noted)
    given = {"until": [" girl"], "max_gen_toks": 24}
    (text,) = model().generate_until(asked(("Once upon a time", given)), disable_tqdm=True)
    assert text.startswith(" there was")
    assert " girl" not in text
    assert found[0].metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [{"temperature": 1.0}, {}])
def test_a_drawn_text_follows_the_seed_of_the_harness(temperature: dict[str, float]) -> None:
    import torch

    one, given = model(), {"do_sample": True, **temperature, "max_gen_toks": 12, "until": []}
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts += one.generate_until(asked(("Once upon a time", given)), disable_tqdm=True)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        ({"max_length": 32}, {"max_gen_toks": 32}, "max_gen_toks is 32.*has 32 tokens"),
        ({}, {"num_beams": 4}, "num_beams"),
        ({}, {"max_length": 40}, "max_length"),
        ({"draft": "a", "speculative_config": {}}, {}, "the drafter was given twice"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    arguments: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, TypeError), match=message):
        model(**arguments).generate_until(asked(("Once", given)), disable_tqdm=True)


def test_a_continuation_without_tokens_is_certain_and_one_beyond_the_context_is_refused() -> None:
    one = model(max_length=16)
    asks = asked(("Once upon", ""), ("Once upon", " a"))
    empty, whole = one.loglikelihood(asks, disable_tqdm=True)
    assert empty == (0.0, True)
    assert whole[0] < 0
    assert one.loglikelihood(asked(("a", " girl" * 16)), disable_tqdm=True)[0][0] < 0
    with pytest.raises(ConfigError, match=r"has 17 tokens, and the context of .* has 16"):
        one.loglikelihood(asked(("a", " girl" * 17)), disable_tqdm=True)


def test_a_tokenizer_without_beginning_and_end_reads_texts_all_the_same() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    tokenizer.bos_token = tokenizer.eos_token = None
    one, bare = model(), model(pretrained=str(BUNDLED / "target"), tokenizer=tokenizer)
    assert bare.tok_encode("Once upon") == one.tok_encode("Once upon")
    asks = asked(("Once upon", " a"))
    scores = [each.loglikelihood(asks, disable_tqdm=True) for each in (one, bare)]
    assert scores[0] == scores[1]
    with pytest.raises(ConfigError, match="name one as prefix_token_id"):
        bare.loglikelihood(asked(("", " a")), disable_tqdm=True)


TINY = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: " there was"
generation_kwargs: {{until: [" a"], max_gen_toks: 16, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def test_the_command_line_of_the_harness_knows_the_model(tmp_path: Path) -> None:
    data = tmp_path / "tiny.json"
    data.write_text('{"text": "Once upon a time"}\n')
    (tmp_path / "tiny.yaml").write_text(TINY.format(data=data))
    command = [sys.executable, "-W", "ignore", "-m", "outpace.lm_eval", "run"]
    model = ["--model", "outpace", "--model_args", f"pretrained={BUNDLED / 'target'}"]
    task = ["--include_path", str(tmp_path), "--tasks", "tiny"]
    done = subprocess.run(
        [*command, *model, f"draft={BUNDLED / 'drafter'}", *task],
        env={**os.environ, "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"exact_match\s*\|[^|]*\|\s*1", done.stdout), done.stdout
