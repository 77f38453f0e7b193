"""``outpace generate``: text, JSON, options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.core.stats import Metrics

Run = Callable[..., Any]
Records = Callable[..., list[dict[str, Any]]]

SHORT = ("--max-tokens", 12, "--ignore-eos")


@pytest.fixture(scope="module")
def plain(target: Path) -> LLM:
    return LLM(target)


def expected(llm: LLM, prompt: str, **options: Any) -> str:
    options = {"max_tokens": 12, "ignore_eos": True, **options}
    return llm.generate(prompt, SamplingParams(**options))[0].text


def test_only_the_text_is_on_stdout(generate: Run, plain: LLM, drafter: Path) -> None:
    result = generate("w1 w2", "--draft", drafter, *SHORT)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected(plain, "w1 w2") + "\n"
    assert "12 tokens in" in result.stderr
    assert "acceptance rate" in result.stderr
    assert "target passes" in result.stderr
    assert re.search(
        "^drafting: draft model: .*; look-up \\(suffix\\)", result.stderr, re.MULTILINE
    )
    assert "Loading" not in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--method", "none"),
        ("--method", "ngram", "-k", 3),
        ("--speculative-config", '{"method": "ngram", "prompt_lookup_max": 3}'),
        ("--no-stream",),
        ("--dtype", "float64", "--device", "cpu"),
    ],
)
def test_every_way_to_draft_writes_the_same_greedy_text(
    generate: Run, plain: LLM, flags: tuple[Any, ...]
) -> None:
    result = generate("w1 w2", *SHORT, *flags)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected(plain, "w1 w2") + "\n"


def test_the_prompt_may_be_piped_or_in_a_file(generate: Run, plain: LLM, tmp_path: Path) -> None:
    wanted = expected(plain, "w1 w2") + "\n"
    assert generate("-", *SHORT, stdin=b"w1 w2\n").stdout == wanted
    (tmp_path / "prompt.txt").write_text("w1 w2\n")
    assert generate("--prompt-file", tmp_path / "prompt.txt", *SHORT).stdout == wanted


def test_the_same_seed_writes_the_same_text(generate: Run) -> None:
    flags = ("w1", *SHORT, "--temperature", 1.0)
    first = generate(*flags, "--seed", 5)
    assert first.stdout == generate(*flags, "--seed", 5, "--no-stream").stdout
    assert first.stdout != generate(*flags, "--seed", 6).stdout
    assert "seed 5" in first.stderr


def test_the_seed_that_was_drawn_is_told(generate: Run) -> None:
    flags = ("w1", *SHORT, "--temperature", 1.0)
    first = generate(*flags)
    (seed,) = re.findall(r"seed (\d+)", first.stderr)
    assert generate(*flags, "--seed", seed).stdout == first.stdout


def test_coupled_text_does_not_depend_on_the_drafter(generate: Run, drafter: Path) -> None:
    flags = ("w1", *SHORT, "--temperature", 1.0, "--seed", 3, "--verify", "coupled")
    assert generate(*flags).stdout == generate(*flags, "--draft", drafter).stdout


def test_json_has_the_published_keys(records: Records, plain: LLM, drafter: Path) -> None:
    [record] = records("w1 w2", "--draft", drafter, *SHORT)
    assert list(record) == ["prompt", "text", "token_ids", "finish_reason", "seed", "metrics"]
    assert record["text"] == expected(plain, "w1 w2")
    assert (record["prompt"], record["finish_reason"]) == ("w1 w2", "length")
    assert len(record["token_ids"]) == 12
    metrics = record["metrics"]
    assert [one["name"] for one in metrics["account"]["drafters"]] == ["draft_model", "suffix"]
    assert metrics["account"]["sentence"].startswith("draft model: ")
    assert set(metrics) == set(Metrics().as_dict())
    assert metrics["num_target_passes"] > 0
    assert metrics["num_draft_tokens"] >= metrics["num_accepted_tokens"]
    assert metrics["total_seconds"] > 0


def test_json_lines_keep_order_and_ids(records: Records, plain: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt": f"w{i} w{i + 1}"} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = records("--prompt-file", file, *SHORT)
    assert [record["id"] for record in found] == [line["id"] for line in lines]
    assert found[17]["text"] == expected(plain, "w17 w18")


def test_several_texts_are_printed_in_order(generate: Run, plain: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1"}\n{"prompt": "w2"}\n')
    result = generate("--prompt-file", file, *SHORT)
    assert result.stdout == f"{expected(plain, 'w1')}\n\n{expected(plain, 'w2')}\n"
    assert "24 tokens in" in result.stderr


def test_n_texts_have_an_index_and_seeds_that_reproduce_them(records: Records) -> None:
    flags = ("w1", *SHORT, "--temperature", 1.0)
    found = records(*flags, "--n", 3, "--seed", 1)
    assert [record["index"] for record in found] == [0, 1, 2]
    assert len({record["text"] for record in found}) == 3
    [again] = records(*flags, "--seed", found[2]["seed"])
    assert again["token_ids"] == found[2]["token_ids"]


def test_logprobs_are_valid_json_even_for_impossible_tokens(records: Records) -> None:
    flags = ("--logprobs", 3, "--top-k", 2, "--temperature", 1.0, "--seed", 1)
    [record] = records("w1", *SHORT, *flags)
    assert len(record["logprobs"]) == 12
    for token, entry in zip(record["token_ids"], record["logprobs"], strict=True):
        assert entry["token_id"] == token
        assert entry["logprob"] <= 0
        assert [top["rank"] for top in entry["top"]] == sorted(top["rank"] for top in entry["top"])
        assert len(entry["top"]) == 2


def test_every_sampling_flag_arrives(
    run: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def load(
        model: str, engine: dict[str, Any], sampling: dict[str, Any], texts: int, *more: Any
    ) -> None:
        seen.update(engine=engine, params=SamplingParams(**sampling), texts=texts)
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.cli.generate.load_llm", load)
    flags = shlex.split("""
        --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --typical-p 0.8 --seed -3 --n 2
        --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --max-tokens 9
        --min-tokens 2 --stop a --stop b --stop-token-id 4 --stop-token-id 5 --ignore-eos
        --logprobs 1 --json --dtype float64 --device cpu --max-model-len 99 --compile
        --method ngram -k 4 --verify match --quantization int8
        --generation-config none --trust-remote-code --threads 3 --batch-invariant
    """)
    flags += ["--logit-bias", '{"3": -1.5, "4": 2}']
    result = run("generate", "w1", "-m", target, *flags)
    assert result.exit_code == 130
    assert seen["params"] == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        typical_p=0.8,
        seed=-3,
        n=2,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        logprobs=1,
        logit_bias={3: -1.5, 4: 2},
    )
    assert seen["engine"] == {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "verify": "match",
        },
        "dtype": "float64",
        "device": "cpu",
        "device_map": None,
        "quantization": "int8",
        "kv_cache_dtype": "auto",
        "lora": None,
        "tensor_parallel_size": 1,
        "max_model_len": 99,
        "generation_config": "none",
        "trust_remote_code": True,
        "compile": True,
        "batch_invariant": True,
        "threads": 3,
    }
    assert seen["texts"] == 2


def test_a_stop_text_is_not_printed(generate: Run, plain: LLM) -> None:
    text = expected(plain, "w1 w2")
    stop = text.split()[4]
    result = generate("w1 w2", *SHORT, "--stop", stop)
    assert result.stdout == text[: text.index(stop)] + "\n"


def test_chat_goes_through_the_template(records: Records, plain: LLM) -> None:
    [record] = records("--chat", "--system", "w5", "w1 w2", *SHORT)
    assert record["prompt"] == "w1 w2"
    assert record["text"] == expected(plain, "system w5 user w1 w2")


def test_the_prompt_is_shown_on_a_terminal_only(
    generate: Run, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.cli.generate.sys.stdout.isatty", lambda: True, raising=False)
    result = generate("w1 w2", *SHORT)
    assert result.stdout.endswith(expected(plain, "w1 w2") + "\n")


def test_a_text_has_the_form_that_is_asked_for(run: Callable[..., Any], tmp_path: Path) -> None:
    form = {"choice": ["yes, it is", "no"]}
    (tmp_path / "form.json").write_text(json.dumps(form))
    for given in (json.dumps(form), str(tmp_path / "form.json")):
        result = run("generate", "Is it?", "--structured-outputs", given, "--max-tokens", "9")
        assert result.exit_code == 0, result.output
        assert any(text in result.output for text in form["choice"])
    result = run("generate", "Is it?", "--compare", "--structured-outputs", given)
    assert result.exit_code == 0, result.output
    assert "Both wrote the same text" in result.output
