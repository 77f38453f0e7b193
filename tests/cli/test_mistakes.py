"""A user's mistakes: one sentence on stderr, exit code 2, nothing on stdout, no traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import outpace
from outpace import LLM, SamplingParams
from outpace.cli.printing import REMEDIES
from outpace.errors import (
    ConfigError,
    ModelLoadError,
    OutpaceError,
    ParamsError,
    PromptError,
    VocabularyMismatch,
)
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import save_head
from outpace.methods.heads.medusa import Medusa, MedusaConfig
from targets.gguf.files import tiny, write
from targets.test_lora import adapter

Run = Callable[..., Any]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 7516192768\n"


def rope_type(name: str) -> bytes:
    """A configuration whose positions are rotated in a way that nobody knows."""
    rope = {"rope_type": name, "rope_theta": 10000.0}
    return json.dumps({"model_type": "llama", "rope_parameters": rope}).encode()


def assert_one_sentence(result: Any, words: str) -> None:
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.startswith("outpace: ")
    assert result.stderr.count("\n") == 1


# -- found before anything is loaded ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--max-tokens", "-3"], "--max-tokens must be at least 1, not -3"),
        (["--temperature", "-0.1"], "--temperature must be a number in [0, inf), not -0.1"),
        (["--temperature", "nan"], "--temperature must be a number in [0, inf), not nan"),
        (["--temperature", "inf"], "--temperature must be a number in [0, inf), not inf"),
        (["--top-p", "0"], "--top-p must be a number in (0, 1], not 0.0"),
        (["--top-p", "1.5"], "--top-p must be a number in (0, 1], not 1.5"),
        (["--top-p", "nan"], "--top-p must be a number"),
        (["--min-p", "2"], "--min-p must be a number in [0, 1]"),
        (["--typical-p", "0"], "--typical-p must be a number in (0, 1]"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be a number in"),
        (["--presence-penalty", "nan"], "--presence-penalty must be a number"),
        (["--frequency-penalty", "9"], "--frequency-penalty must be a number in [-2, 2]"),
        (["--top-k", "-2"], "--top-k must be at least -1, not -2"),
        (["--n", "0"], "n must be at least 1"),
        (["--min-tokens", "-1"], "--min-tokens must be at least 0, not -1"),
        (["--seed", "9" * 30], "seed must be at most"),
        (["--stop", ""], "--stop must be"),
        (["--stop-token-id", "-1"], "--stop-token-id must hold token ids"),
        (["--logit-bias", "{oops"], "--logit-bias is not JSON"),
        (["--structured-outputs", "{oops}"], "--structured-outputs is not JSON"),
        (["--structured-outputs", '{"xml": 1}'], "must be an object with one of json, json_object"),
        (["--structured-outputs", "json"], "must be an object with one of json, json_object"),
        (["--logit-bias", "[1]"], "--logit-bias must be a JSON object"),
        (["--logit-bias", '{"x": 1}'], 'must name tokens by their ids, such as {"50256": -100}'),
        (["--logit-bias", '{"x": 1}'], "not by 'x'."),
        (["--logit-bias", f'{{"{"9" * 5000}": 1}}'], "must name tokens by their ids"),
        (["--logit-bias", '{"1": NaN}'], "--logit-bias of token 1 must be a number"),
        (["--logit-bias", '{"1": "2"}'], "--logit-bias of token 1 must be a number"),
        (["--speculative-config", "{oops"], "--speculative-config is not JSON"),
        (["--speculative-config", "[]"], "--speculative-config must be a JSON object"),
        (["--speculative-config", '{"method": "ngrm"}'], "did you mean 'ngram'?"),
        (["--speculative-config", '{"method": 3}'], "method must be a drafter's name"),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 1.5}'],
            "num_speculative_tokens must be",
        ),
        (["--speculative-config", '{"method": "ngram", "verify": 3}'], "verify must be"),
        (
            ["--speculative-config", "{}", "--draft", "x"],
            "--speculative-config and --draft exclude",
        ),
        (["--speculative-config", "{}", "-k", "3"], "--speculative-config and -k exclude"),
        (["--method", "ngrm"], "unknown method 'ngrm' (did you mean 'ngram'?)"),
        (["--method", "beam"], "and is asked for by --num-beams"),
        (["--speculative-config", '{"method": "beam"}'], "and is asked for by --num-beams"),
        (["--method", "ngram", "--verify", "tokn"], "did you mean 'token'?"),
        (["--method", "draft_model"], "--method draft_model needs --draft"),
        (["--method", "ngram", "-k", "0"], "-k must be at least 1, not 0"),
        (["--method", "ngram", "-k", "-2"], "-k must be at least 1, not -2"),
        (["--method", "none", "-k", "2"], "-k and --method none exclude each other"),
        (["--method", "ngram", "-k", "many"], "-k must be a whole number or auto, not 'many'"),
        (["--generation-config", "foo"], "--generation-config must be 'auto' or 'none', not 'foo'"),
        (["--draft", "/nonexist"], "there is no folder '/nonexist'"),
        (["--system", "w1"], "--system needs --chat"),
        (["--logprobs", "1"], "--logprobs needs --json"),
    ],
)
def test_options_are_refused_before_a_model_is_loaded(
    generate: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("outpace.building.load", load)
    assert_one_sentence(generate("w1", *flags), words)


def test_chat_templates_that_are_none_are_refused(generate: Run, tmp_path: Path) -> None:
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    (tmp_path / "prose.txt").write_text("This says the same, whatever is asked.\n")
    chat = ("w1", "--chat", "--chat-template")
    assert_one_sentence(generate(*chat, tmp_path / "none"), "No such file or directory")
    assert_one_sentence(generate(*chat, tmp_path / "latin.jinja"), "byte 0xe9 at offset 3")
    assert_one_sentence(generate(*chat, tmp_path / "prose.txt"), "never uses 'messages'")


def test_prompts_are_refused_before_a_model_is_loaded(
    generate: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("outpace.building.load", None)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bad.jsonl").write_text("w1\n")
    file = "--prompt-file"
    assert_one_sentence(generate(file, tmp_path / "latin.txt"), "byte 0xe9 at offset 3")
    assert_one_sentence(generate(file, tmp_path / "bad.jsonl"), "line 1 is not JSON")
    assert_one_sentence(generate(file, tmp_path / "none.txt"), "No such file")
    assert_one_sentence(generate("w1", file, tmp_path / "none.txt"), "not both")
    assert_one_sentence(generate(""), "the prompt is empty")
    assert_one_sentence(generate("-", stdin=b""), "standard input is empty")
    assert_one_sentence(generate("-", stdin=b"\xff"), "byte 0xff at offset 0")


@pytest.mark.parametrize("flags", [["--temperature", "warm"], ["--n", "1.5"], ["--nonsense"]])
def test_what_is_no_option_or_number_is_a_usage_error(generate: Run, flags: list[str]) -> None:
    result = generate("w1", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert flags[0] in result.stderr
    assert "Traceback" not in result.stderr


# -- models ----------------------------------------------------------------------------------------


def test_models_that_are_not_there(run: Run, tmp_path: Path) -> None:
    def load(model: Any) -> Any:
        return run("generate", "w1", "--model", model)

    assert_one_sentence(load("/nonexist"), "there is no folder '/nonexist'")
    assert_one_sentence(load("./no/such/thing"), "there is no folder './no/such/thing'")
    assert_one_sentence(
        load("nobody/nothing"),
        "there is no folder 'nobody/nothing', no model of this name was downloaded before",
    )
    assert_one_sentence(load(tmp_path), "has no config.json")
    assert_one_sentence(load(Path(__file__)), "is a file")


def test_a_folder_without_weights(run: Run, copy_of_target: Path) -> None:
    (copy_of_target / "model.safetensors").unlink()
    result = run("generate", "w1", "--model", copy_of_target)
    assert_one_sentence(result, "has a config.json but no weights")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"{oops", "is not a valid JSON file"),
        ("config.json", b"[]", "cannot read the config.json"),
        ("config.json", b'{"model_type": "frobnicator"}', "frobnicator"),
        ("tokenizer.json", b"{oops", "cannot read the tokenizer"),
        ("tokenizer.json", b"{}", "cannot read the tokenizer"),
        ("model.safetensors", b"", "damaged or cut short"),
        ("model.safetensors", None, "damaged or cut short"),
        ("model.safetensors", POINTER, "is a pointer of Git LFS"),
        ("tokenizer.json", POINTER, "run 'git lfs pull' in its folder"),
        ("config.json", rope_type("helix"), "(rope_type 'helix') that transformers"),
        ("config.json", b'{"model_type": "llama", "vocab_size": "a"}', "'vocab_size': TypeError"),
    ],
)
def test_a_folder_with_a_broken_file(
    run: Run, copy_of_target: Path, name: str, content: bytes | None, words: str
) -> None:
    file = copy_of_target / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert_one_sentence(run("generate", "w1", "--model", copy_of_target), words)


def test_what_has_not_been_fetched_is_no_head_no_adapter_and_no_gguf_file(
    run: Run, target: Path, tmp_path: Path
) -> None:
    head, lora, file = tmp_path / "head", tmp_path / "lora", tmp_path / "a.gguf"
    save_head(Medusa(TargetShape(32, 96, 2), MedusaConfig(depths=2)), head)
    adapter(lora, LlamaForCausalLM.from_pretrained(target), ["q_proj"])
    for path in (head / "model.safetensors", lora / "adapter_model.safetensors", file):
        path.write_bytes(POINTER)
    for words in (("-m", target, "--draft", head), ("-m", target, "--lora", lora), ("-m", file)):
        assert_one_sentence(run("generate", "w1", *words), "is a pointer of Git LFS")
    assert_one_sentence(run("inspect", file), "is a pointer of Git LFS")


def test_a_file_that_aria2_has_not_wholly_downloaded_is_not_read(
    run: Run, copy_of_target: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.gguf", "llama", tiny("llama"))
    for path in (file, copy_of_target / "model.safetensors"):
        path.with_name(f"{path.name}.aria2").touch()  # the file has its whole size already
    for model in (file, copy_of_target):
        for verb in (("inspect", model), ("generate", "w1", "-m", model)):
            assert_one_sentence(run(*verb), "aria2 has not ended the download")


def test_weights_that_are_not_there_are_not_made_up(copy_of_target: Path) -> None:
    file = copy_of_target / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"lack 9 of those .*'model\.layers\.2\."):
        LLM(copy_of_target)
    file.write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ModelLoadError, match="the shapes of its weights"):
        LLM(copy_of_target)


def test_a_drafter_with_another_tokenizer(generate: Run, stranger: Path) -> None:
    config = {"method": "draft_model", "model": str(stranger), "vocabulary": "same"}
    result = generate("w1", "--speculative-config", json.dumps(config))
    assert_one_sentence(result, "drafter and target have different tokenizers")
    drafted = generate("w1", "--draft", stranger, "--max-tokens", 4)
    assert drafted.exit_code == 0, drafted.stderr


def test_what_only_a_loaded_model_can_tell(generate: Run) -> None:
    assert_one_sentence(
        generate("w1 w2 w3", "--max-model-len", 3),
        "the prompt has 3 tokens and the context holds 3",
    )
    assert_one_sentence(generate("w1", "--max-model-len", 1), "--max-model-len must be at least 2")
    assert_one_sentence(
        generate("w1", "--stop-token-id", 99999), "stop_token_ids holds 99999: token ids are"
    )
    assert_one_sentence(
        generate("w1", "--speculative-config", '{"method": "ngram", "lookup": 3}'),
        "unknown key 'lookup' in --speculative-config",
    )
    assert_one_sentence(generate("w1", "--dtype", "int3"), "unknown --dtype 'int3'")
    assert_one_sentence(generate("w1", "--device", "abacus"), "unknown device 'abacus'")


def test_remedies_are_those_of_the_command_line(
    generate: Run, run: Run, copy_of_target: Path
) -> None:
    file = copy_of_target / "generation_config.json"
    file.write_text(json.dumps({"num_beams": 3}))
    result = run("generate", "w1", "-m", copy_of_target, "--max-tokens", 1)
    assert_one_sentence(result, "set it aside with --generation-config none, which ignores")
    flags = ("--generation-config", "none", "--max-tokens", 1)
    assert run("generate", "w1", "-m", copy_of_target, *flags).exit_code == 0


@pytest.mark.parametrize("method", ["medusa", "draft_tree"])
def test_a_method_that_needs_a_drafter_names_its_flag(generate: Run, method: str) -> None:
    assert_one_sentence(generate("w1", "--method", method), "needs --draft")


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("ensemble", "drafters"),
        ("retrieval", "datastore"),
        ("task", "routes"),
        ("tagged", "routes"),
    ],
)
def test_a_method_that_needs_an_option_says_where_it_is_given(
    generate: Run, method: str, option: str
) -> None:
    words = f"method {method!r} needs {option!r} in --speculative-config. "
    assert_one_sentence(generate("w1", "--method", method), words)


def test_a_load_on_no_server_is_refused_before_it_is_sent(run: Run) -> None:
    result = run("bench", "serve", "--url", "http://127.0.0.1:9", "--rate", 0.001)
    assert_one_sentence(result, "no server answers at http://127.0.0.1:9 (Connection refused)")
    assert_one_sentence(run("bench", "serve", "--url", "http://a..b:9"), "no server answers at")


def test_every_remedy_is_one_that_the_library_tells() -> None:
    root = Path(outpace.__file__).parent
    texts = [path.read_text() for path in root.rglob("*.py") if path.name != "printing.py"]
    source = re.sub(r'"\s+f?"', "", "\n".join(texts))  # sentences are written over several lines
    theirs = {"trust_remote_code=True"}  # transformers' own words
    theirs.add("needs 'model' in speculative_config")  # with the name of any option
    assert [told for told in set(REMEDIES) - theirs if told not in source] == []


@pytest.mark.parametrize("shape", ["without a template", "without a tokenizer"])
def test_a_chat_without_a_template_is_refused_before_weights_are_read(
    run: Run, copy_of_target: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    (copy_of_target / "chat_template.jinja").unlink()
    if shape == "without a template":
        monkeypatch.setattr("outpace.building.load", None)
        words = "has no chat template: leave --chat out"
    else:
        for file in copy_of_target.glob("tokenizer*"):
            file.unlink()
        words = "came without a tokenizer, which a chat needs: name a model that has one"
    assert_one_sentence(run("generate", "--chat", "w1", "-m", copy_of_target), words)


def test_a_chat_with_a_model_that_is_not_there(run: Run) -> None:
    result = run("generate", "--chat", "w1", "-m", "nobody/nothing")
    assert_one_sentence(result, "there is no folder 'nobody/nothing'")


# -- the same in Python ----------------------------------------------------------------------------


def assert_told(kind: type[OutpaceError], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert words in str(caught.value)


def test_bad_configuration_in_python(target: Path, drafter: Path, stranger: Path) -> None:
    def made(**config: Any) -> Callable[[], LLM]:
        return lambda: LLM(target, speculative_config=config)

    assert_told(ModelLoadError, "there is no folder", lambda: LLM("/nonexist"))
    assert_told(ModelLoadError, "there is no folder", lambda: LLM("nobody/nothing"))
    assert_told(ModelLoadError, "there is no folder", made(model="/nonexist"))
    assert_told(
        VocabularyMismatch, "different tokenizers", made(model=str(stranger), vocabulary="same")
    )
    assert_told(ConfigError, "unknown key 'foo'", made(model=str(drafter), foo=1))
    assert_told(ConfigError, "did you mean 'ngram'?", made(method="nngram"))
    assert_told(ConfigError, "did you mean 'coupled'?", made(method="ngram", verify="coupld"))
    assert_told(ConfigError, "0 to 256, not -1", made(method="ngram", num_speculative_tokens=-1))
    assert_told(ConfigError, "must be a dict", lambda: LLM(target, speculative_config=3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"stop": [""]},
    ],
)
def test_bad_sampling_options_in_python(options: dict[str, Any]) -> None:
    assert_told(ParamsError, next(iter(options)), lambda: SamplingParams(**options))


def test_bad_prompts_in_python(target: Path) -> None:
    llm = LLM(target, max_model_len=8)
    assert_told(PromptError, "the prompt is empty", lambda: llm.generate(""))
    assert_told(PromptError, "no prompt was given", lambda: llm.generate([]))
    assert_told(PromptError, "9 tokens and the context holds 8", lambda: llm.generate([1] * 9))
    assert_told(PromptError, "prompt 2 of 2: ", lambda: llm.generate(["w1", ""]))
    assert_told(PromptError, "not Unicode text", lambda: llm.stream("a\ud800"))
    assert_told(PromptError, "[0, 96)", lambda: llm.generate([96]))
    assert llm.generate("w1", SamplingParams(max_tokens=2))[0].token_ids, "it still works"
