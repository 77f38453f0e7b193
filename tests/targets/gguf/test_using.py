"""GGUF files as users name them: paths, folders, the hub; chats, stop tokens, drafters."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from huggingface_hub import HfApi, constants
from tokenizers.pre_tokenizers import ByteLevel
from typer.testing import CliRunner

from outpace import LLM, SamplingParams
from outpace.cli.main import app
from outpace.errors import (
    ModelLoadError,
    OutpaceError,
    PromptError,
    UnsupportedModel,
    VocabularyMismatch,
)
from outpace.targets.hf.gguf.file import parts_of, read_model
from outpace.targets.hf.gguf.vocabulary import tokenizer_of
from outpace.targets.hf.loading import source
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.reading import read_tokenizer
from outpace.targets.hf.loading.source import check_path, locate
from targets.gguf.files import tiny, write
from targets.gguf.words import TEMPLATE, TOKENS, VOCABULARY

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CHAT = [{"role": "user", "content": "hello the"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return write(folder / "target.gguf", "qwen2", tiny("qwen2"), "Q8_0")


@pytest.fixture(scope="module")
def drafter(folder: Path) -> Path:
    return write(folder / "drafter.gguf", "llama", tiny("llama"), "Q4_0")


# -- texts -------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_files(path: Path) -> None:
    tokenizer = load(path).tokenizer
    text = "hello the <|im_end|>"
    ids = tokenizer(text).input_ids
    assert [TOKENS[token] for token in ids] == ["hello", "\u0120t", "he", "\u0120", "<|im_end|>"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.chat_template == TEMPLATE
    assert read_tokenizer(str(path), False)("hello").input_ids == [TOKENS.index("hello")]


def test_a_chat_is_rendered_and_ends_with_the_turn(path: Path) -> None:
    llm = LLM(path)
    ends = [TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>")]
    assert llm.target.eos_ids == tuple(ends), "those that the file names, and the usual ones"
    output = llm.chat(CHAT, GREEDY)
    text = llm.tokenizer.decode(output.prompt_token_ids)
    assert text == "<|im_start|>user\nhello the<|im_end|>\n<|im_start|>assistant\n"
    for end in ends:
        forced = llm.generate("the", {"allowed_token_ids": [end], "max_tokens": 5})[0].outputs[0]
        assert (forced.token_ids, forced.finish_reason) == ([end], "stop")


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ({"tokenizer.ggml.eot_token_id": 7}, [264, 7, 262]),
        ({"tokenizer.ggml.eos_token_id": None}, [262, 264]),
        ({"tokenizer.ggml.token_type": None}, [264]),
    ],
)
def test_tokens_that_end_a_text(values: dict[str, Any], ends: list[int], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=values)
    assert load(path).eos_ids == tuple(ends)


@pytest.mark.parametrize("calls", [True, False])
def test_a_message_of_gpt_oss_is_no_turn(calls: bool, tmp_path: Path) -> None:
    names = {"<|im_end|>": "<|end|>", "<|endoftext|>": "<|return|>"}
    names |= {"<|im_start|>": "<|call|>"} if calls else {}
    said = {
        "tokenizer.ggml.tokens": [names.get(token, token) for token in TOKENS],
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|endoftext|>"),
    }
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    other = "<|im_start|>" if calls else "<|im_end|>"
    assert load(path).eos_ids == (TOKENS.index("<|endoftext|>"), TOKENS.index(other))


def test_a_message_of_solar_open_is_no_turn(tmp_path: Path) -> None:
    names = {"<|im_end|>": "<|end|>", "<|endoftext|>": "<|flush|>", "<|im_start|>": "<|calls|>"}
    said = {
        "tokenizer.ggml.tokens": [names.get(token, token) for token in TOKENS],
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|endoftext|>"),
    }
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    ends = {TOKENS.index("<|endoftext|>"), TOKENS.index("<|im_start|>")}
    assert set(load(path).eos_ids) == ends


def test_turns_and_calls_of_gemma4_end_a_text(tmp_path: Path) -> None:
    """Files name its end of a text only."""
    names = {"<|im_end|>": "<turn|>", "<|im_start|>": "<|tool_response>"}
    said = {
        "tokenizer.ggml.tokens": [names.get(token, token) for token in TOKENS],
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|endoftext|>"),
    }
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    ends = {TOKENS.index(token) for token in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")}
    assert set(load(path).eos_ids) == ends


def test_an_answer_ends_as_the_files_template_ends_a_turn(tmp_path: Path) -> None:
    """A turn of this file ends with a token that neither it nor llama.cpp calls an end."""
    said = {
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|endoftext|>"),
        "tokenizer.chat_template": TEMPLATE.replace("<|im_end|>", "<|im_start|>"),
    }
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    llm, turn = LLM(path), TOKENS.index("<|im_start|>")
    forced = {"allowed_token_ids": [turn], "max_tokens": 3}
    assert llm.chat(CHAT, forced).token_ids == [turn]
    assert llm.generate("the", forced)[0].token_ids == [turn] * 3
    assert [(end.text, end.chats_only, *end.sources) for end in llm.describe().ends] == [
        ("<|endoftext|>", False, "the file's eos_token_id", "the tokenizer's eos_token"),
        ("<|im_end|>", False, "known by its text"),
        ("<|im_start|>", True, "the chat template"),
    ]


def test_sampling_that_a_file_recommends(tmp_path: Path) -> None:
    said = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 3,
        "general.sampling.penalty_repeat": 1.25,
    }
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    params = LLM(path).resolve()
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.5, 3, 1.25)


@pytest.mark.parametrize("name", ["temp", "top_k", "top_p", "min_p", "penalty_repeat"])
@pytest.mark.parametrize("value", [[1, 2], [1], "many", True, float("nan")])
def test_recommended_sampling_that_is_no_number(name: str, value: Any, tmp_path: Path) -> None:
    said = {f"general.sampling.{name}": value}
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    with pytest.raises(ModelLoadError, match=rf"its general.sampling.{name} is .*, not a number"):
        load(path)


@pytest.mark.parametrize("value", [[1, 2], ["a", "b"], 5])
def test_a_template_that_is_no_text(value: Any, tmp_path: Path) -> None:
    said = {"tokenizer.chat_template": value}
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    with pytest.raises(ModelLoadError, match=r"its chat template is .*, not a text: download"):
        load(path)


def test_without_a_template_or_a_tokenizer(tmp_path: Path) -> None:
    said = {"tokenizer.chat_template": None}
    bare = write(tmp_path / "bare.gguf", "qwen2", tiny("qwen2"), changes=said)
    with pytest.raises(PromptError, match="has no chat template: use generate"):
        LLM(bare).chat(CHAT)
    none = write(tmp_path / "none.gguf", "qwen2", tiny("qwen2"), tokens=False)
    assert load(none).tokenizer is None
    with pytest.raises(PromptError, match="came without a tokenizer"):
        LLM(none).generate("the")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "cannot read the tokenizer .*rwkv"),
        ({"tokenizer.ggml.tokens": None}, "names a tokenizer and holds no tokens"),
        ({"tokenizer.ggml.merges": ["h q"]}, "cannot read the tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 4000}, "its eos_token_id is 4000, which is no token"),
        ({"tokenizer.ggml.tokens": ["a"] * 5000}, "holds 5000 tokens and weights for 272"),
    ],
)
def test_tokenizers_that_make_no_sense(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=values)
    with pytest.raises(ModelLoadError, match=reason):
        load(path)


@pytest.mark.parametrize("name", ["scores", "token_type"])
def test_arrays_that_are_shorter_than_the_vocabulary(name: str, tmp_path: Path) -> None:
    said = {f"tokenizer.ggml.{name}": [1] * 7}
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    with pytest.raises(ModelLoadError, match=f"holds 272 tokens and a {name} of 7 of them"):
        load(path)


def test_arrays_that_are_longer_take_no_memory(tmp_path: Path) -> None:
    types = [1] * len(TOKENS) + [5] * (VOCABULARY - len(TOKENS))
    said = {
        "tokenizer.ggml.precompiled_charsmap": [777] * 1_000_000,
        "tokenizer.ggml.scores": [0.5] * 1_000_000,
        "tokenizer.ggml.token_type": types + [1] * 1_000_000,
    }
    model = read_model(write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said))
    tracemalloc.start()
    try:
        assert len(tokenizer_of(model)) == VOCABULARY
        assert tracemalloc.get_traced_memory()[1] < 5e6, "bytes"
    finally:
        tracemalloc.stop()


def test_a_token_for_which_working_out_merges_would_take_forever(tmp_path: Path) -> None:
    said = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": [*TOKENS, "a" * 20_000],
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) + 1),
        "tokenizer.ggml.scores": [0.0] * (len(TOKENS) + 1),
    }
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    with pytest.raises(ModelLoadError, match=r"of at most 1000 characters, and a token of 20000:"):
        load(path)


def test_special_tokens_that_there_are_not(tmp_path: Path) -> None:
    names = ("bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id")
    said = {f"tokenizer.ggml.{name}": 0xFFFFFFFF for name in names}  # as -1 is written
    config = load(write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_an_unknown_way_to_split_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = {"tokenizer.ggml.pre": "own-way"}
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=said)
    with caplog.at_level(logging.WARNING, "outpace"):
        load(path)
    assert "splits texts in its own way ('own-way')" in caplog.text


RUDE = "\x1b[31mred\r\nnext line" + "x" * 1_000_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qwen2.embedding_length", RUDE),
        ("qwen2.rope.scaling.type", RUDE),
        ("tokenizer.ggml.eos_token_id", RUDE),
        ("tokenizer.ggml.merges", [RUDE + " " + RUDE]),
        ("tokenizer.ggml.model", RUDE),
        ("tokenizer.ggml.pre", RUDE),
        ("tokenizer.chat_template", [RUDE]),
        ("general.sampling.temp", RUDE),
        ("general.alignment", RUDE),
    ],
)
def test_what_a_file_says_is_shown_in_one_short_line(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"qwen2.rope.scaling.factor": 2.0, name: value}
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes=changes)
    try:
        load(path)
        said = "".join(record.getMessage() for record in caplog.records)
    except OutpaceError as error:
        said = str(error)
    assert said.isprintable()
    assert 50 < len(said) < 700


def test_gemma4_reads_a_token_of_beginning_whatever_its_file_says(tmp_path: Path) -> None:
    first = TOKENS.index("<|endoftext|>")
    values = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.bos_token_id": first}
    path = write(tmp_path / "model.gguf", "gemma4", tiny("gemma4"), changes=values)
    tokenizer = read_tokenizer(str(path), trust_remote_code=False)
    assert tokenizer("hello").input_ids[0] == first


@pytest.mark.parametrize(
    ("split", "said", "first", "begun"),
    [
        ("llama-bpe", None, True, True),  # as in the first files of Llama 3
        ("tekken", None, True, True),
        ("llama-bpe", False, True, False),
        ("llama-bpe", None, False, False),
        ("qwen2", None, True, False),
        ("qwen2", True, True, True),
    ],
)
def test_texts_begin_as_llamacpp_begins_them(
    split: str, said: bool | None, first: bool, begun: bool, tmp_path: Path
) -> None:
    """said: what the file says of a token of beginning; first: whether it names one."""
    beginning = TOKENS.index("<|endoftext|>")
    values = {
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.add_bos_token": said,
        "tokenizer.ggml.bos_token_id": beginning if first else None,
    }
    path = write(tmp_path / "model.gguf", "llama", tiny("llama"), changes=values)
    tokenizer = read_tokenizer(str(path), trust_remote_code=False)
    assert (tokenizer("hello").input_ids[0] == beginning) == begun


# -- drafting ----------------------------------------------------------------------------------


def test_a_drafter_in_a_file_changes_no_word(path: Path, drafter: Path) -> None:
    plain = LLM(path, dtype="float64").chat(CHAT, GREEDY)
    config = {"model": str(drafter), "num_speculative_tokens": 3}
    llm = LLM(path, dtype="float64", speculative_config=config)
    assert llm.chat(CHAT, GREEDY).token_ids == plain.token_ids
    described = llm.describe().drafter
    assert described is not None
    assert (described.dtype, described.quantization) == ("float32", None)
    assert described.blocks == "Q4_0 100 %"


def test_a_drafter_with_other_tokens(path: Path, tmp_path: Path) -> None:
    other = [*sorted(ByteLevel.alphabet(), reverse=True), "he"]
    said = {
        "tokenizer.ggml.tokens": other, "tokenizer.ggml.token_type": [1] * 257,
        "tokenizer.ggml.merges": ["h e"], "tokenizer.ggml.eos_token_id": None,
        "tokenizer.ggml.padding_token_id": None,
    }  # fmt: skip
    drafter = write(tmp_path / "model.gguf", "llama", tiny("llama", vocab_size=257), changes=said)
    with pytest.raises(VocabularyMismatch, match="different tokenizers"):
        LLM(path, speculative_config={"model": str(drafter), "vocabulary": "same"})


def test_from_the_command_line(path: Path, drafter: Path) -> None:
    args = ["generate", "--model", path, "--draft", drafter, "--chat", "hello", "--json"]
    result = CliRunner().invoke(app, [*map(str, args), "--max-tokens", "3", "--temperature", "0"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    conversation = [{"role": "user", "content": "hello"}]
    expected = LLM(path).chat(conversation, SamplingParams(temperature=0, max_tokens=3))
    assert found["token_ids"] == expected.token_ids


# -- places ------------------------------------------------------------------------------------


def split(path: Path, count: int, said: Mapping[str, int] | None = None) -> list[Path]:
    """Splits a file as llama.cpp's tool does: all values in the first part, and in each which part
    it is. said: what else they say of that."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"big-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "qwen2")
        fields = reader.fields.values() if number == 0 else ()
        for field in fields:
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind, inner = field.types[0], field.types[-1]
            sub = inner if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
        own = {"no": number, "count": count, "tensors.count": len(reader.tensors), **(said or {})}
        for key, value in own.items():
            writer.add_int32(f"split.{key}", value)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names


def test_a_model_in_parts(path: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(path.read_bytes())
    parts = split(whole, 3)
    whole.unlink()
    expected = LLM(path).chat(CHAT, GREEDY).token_ids
    for named in (*parts, tmp_path):
        assert LLM(named).chat(CHAT, GREEDY).token_ids == expected
    parts[1].unlink()
    for named in (parts[0], parts[2], tmp_path):
        with pytest.raises(ModelLoadError, match=r"in 3 files, and big-00002-of-00003.gguf"):
            check_path(named)
    with pytest.raises(ModelLoadError, match=r"big-00002-of-00003.gguf is not next to it"):
        parts_of(parts[0])
    parts[2].unlink()
    with pytest.raises(
        ModelLoadError, match=r"00002-of-00003.gguf, .*00003.gguf are not next to it"
    ):
        parts_of(parts[0])


def test_a_folder_that_lacks_the_first_part_names_it(path: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(path.read_bytes())
    first, *others = split(whole, 3)
    first.unlink()
    whole.unlink()
    for named in (*others, tmp_path):
        with pytest.raises(ModelLoadError, match=r"big-00001-of-00003.gguf is not next to it"):
            check_path(named)


def test_parts_that_were_joined_as_they_are(path: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(path.read_bytes())
    parts = split(whole, 3)
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(ModelLoadError, match=r"joined as they are: .* llama-gguf-split --merge"):
        load(whole)


def test_a_part_with_another_name(path: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(path.read_bytes())
    part = split(whole, 3)[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelLoadError, match=r"one of 3 parts .* again as NAME-00001-of-00003.gg"):
        load(part)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"count": 3}, "part 1 of 2 by its name, and says itself that it is one of 3 parts"),
        ({"no": 1}, "part 1 of 2 by its name, and says itself that it is part 2 of"),
        ({"tensors.count": 7}, "weights together, and big-00001-of-00002.gguf says that there are"),
        ({"no": -1}, "its split.no is -1, which counts nothing"),
    ],
)
def test_parts_that_do_not_belong_together(
    said: dict[str, int], reason: str, path: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match=reason):
        load(split(whole, 2, said)[0])


def test_a_model_that_was_put_together_again(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "qwen2", tiny("qwen2"), changes={"split.count": 0})
    assert load(path).model is not None


def test_a_folder_with_one_file_or_several(path: Path, tmp_path: Path) -> None:
    (tmp_path / "one-Q8_0.gguf").write_bytes(path.read_bytes())
    (tmp_path / "mmproj-one.gguf").write_bytes(b"GGUF")
    check_path(tmp_path)
    assert locate(str(tmp_path)) == str(tmp_path / "one-Q8_0.gguf")
    (tmp_path / "two-Q4_0.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match=r"\(one-Q8_0.gguf, two-Q4_0.gguf\): name one of them"):
        check_path(tmp_path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"general.type": "adapter"}, "holds a LoRA adapter, not a language model"),
        ({"general.type": "mmproj"}, "holds the image or audio projector of another model"),
        ({"general.architecture": "clip"}, "holds the image or audio projector"),
        (
            {"general.architecture": "rwkv7"},
            "of architecture 'rwkv7', and outpace reads GGUF files",
        ),
        ({"general.architecture": "t5"}, "of architecture 't5'"),
    ],
)
def test_files_that_are_no_readable_model(
    values: dict[str, Any], reason: str, path: Path, tmp_path: Path
) -> None:
    arch = values.get("general.architecture", "qwen2")
    data = path.read_bytes()
    if "general.type" in values:
        file = write(tmp_path / "m.gguf", "qwen2", tiny("qwen2"), changes=values)
    else:
        file = tmp_path / "m.gguf"
        old, new = (len(word).to_bytes(8, "little") + word.encode() for word in ("qwen2", arch))
        pad = 32 - len(data) % 32 + (len(old) - len(new)) % 32
        file.write_bytes(shifted(data, old, new) + b"\0" * pad)
    with pytest.raises(UnsupportedModel, match=reason):
        load(file)


def shifted(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replaces a text near the start by one of another length; what follows moves on."""
    place = data.index(old)
    return data[:place] + new + data[place + len(old) :]


def test_a_vocabulary_alone_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="holds no weights, only a vocabulary"):
        load(tmp_path / "vocab.gguf")


def test_weights_without_a_place_and_places_without_weights(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(64)}
    path = write(tmp_path / "more.gguf", "llama", tiny("llama"), tensors=extra)
    with pytest.raises(UnsupportedModel, match=r"has no place for .'blk.0.attn_q.bias' is one"):
        load(path)
    less = write(tmp_path / "less.gguf", "qwen2", tiny("qwen2"))
    less.write_bytes(less.read_bytes().replace(b"blk.0.attn_q.bias", b"blk.0.attn_q.bios"))
    with pytest.raises(UnsupportedModel, match=r"'blk.0.attn_q.bios' is one"):
        load(less)


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("part", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_experts_that_are_there_in_part(arch: str, part: str, tmp_path: Path) -> None:
    without = [f"blk.1.{part}.weight"]
    path = write(tmp_path / "less.gguf", arch, tiny(arch), without=without)
    with pytest.raises(ModelLoadError, match="lacks 1 of the weights that a model of its arch"):
        load(path)


@pytest.mark.parametrize(("used", "said"), [(5, "5"), (0, "0"), (None, "no")])
def test_more_experts_than_there_are(used: int | None, said: str, tmp_path: Path) -> None:
    changes = {"qwen3moe.expert_used_count": used}
    path = write(tmp_path / "m.gguf", "qwen3moe", tiny("qwen3moe"), "Q8_0", changes=changes)
    with pytest.raises(ModelLoadError, match=f"has 4 experts and that each token uses {said} of"):
        load(path)


# -- the hub -----------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]
    found = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(HfApi, "model_info", lambda *args, **options: found)
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return names


def test_a_file_on_the_hub(hub: list[str], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=r"as 'some/m:FILE' .it has m-Q4_K_M.gguf, m-Q8"):
        locate("some/m")
    check_path("some/m:m-Q8_0.gguf")
    with pytest.raises(ModelLoadError, match=r"has no file 'm-Q2.gguf': it has m-Q4_K_M.gguf"):
        locate("some/m:m-Q2.gguf")
    monkeypatch.setattr(source, "hf_hub_download", lambda *_: str(path))
    assert LLM("some/m:m-Q8_0.gguf").chat(CHAT, GREEDY) is not None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE forbids to download it"):
        locate("some/m:m-Q8_0.gguf")


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no file .*missing.gguf.*: name a GGUF file"):
        check_path(tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("not weights at all")
    with pytest.raises(ModelLoadError, match="no GGUF file"):
        check_path(tmp_path / "text.gguf")
