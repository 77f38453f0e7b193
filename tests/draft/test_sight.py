"""Draft models that look at the images of prompts."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from outpace import LLM, SamplingParams
from outpace.engine.scheduler import HEADROOM
from outpace.errors import ConfigError, OutpaceError
from outpace.hf import speculative
from outpace.methods.models.window import reserve
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import noised
from targets.generating import greedy, ids
from targets.vision_families import CONTEXT, PROMPTS, build, plain, target, with_image
from targets.vision_processors import (
    VOCABULARY,
    llava,
    llava_processor,
    picture,
    tokenizer,
)

LENGTH = 14
WITH, WITHOUT = (0, 2), (1, 3)
"""Prompts by whether they show images."""
FAMILIES = ("llava", "qwen2_vl", "gemma3", "paligemma", "qwen3_5")
"""Plain positions, rotary ones of three axes, spans and prompts that are read both ways, states."""
FIGURES = {"llava": ("22 of 22", "0 of 92"), "qwen2_vl": ("22 of 22", "6 of 75")}
"""Accepted of drafted tokens with images and without: the figures of vision_language.md."""
TEXT = "see <image> and say:"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def drafted(family: str, method: str = "draft_model", model: Any = None, **more: Any) -> LLM:
    """Returns a target with a drafter, which is the target itself unless another one is given."""
    own: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, **more}
    return LLM(
        target(family),
        speculative_config={**own, "model": model or target(family)},
        max_num_seqs=4,
        max_model_len=CONTEXT,
    )


def prompts(family: str) -> list[Any]:
    return [with_image(family, prompt) for prompt in PROMPTS]


def shares(outputs: Any) -> list[float]:
    """The share of the drafted tokens that was accepted, by prompt."""
    metrics = [output.metrics for output in outputs]
    return [one.num_accepted_tokens / one.num_draft_tokens for one in metrics]


def counted(outputs: Any) -> str:
    """How many drafted tokens were accepted after prompts with images."""
    metrics = [outputs[row].metrics for row in WITH]
    accepted = sum(one.num_accepted_tokens for one in metrics)
    return f"{accepted} of {sum(one.num_draft_tokens for one in metrics)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_itself_guesses_right_if_it_sees_what_the_target_sees(family: str) -> None:
    seeing = drafted(family).generate(prompts(family), greedy(LENGTH))
    hidden = drafted(family, images=False).generate(prompts(family), greedy(LENGTH))
    assert ids(seeing) == ids(hidden) == plain(family, LENGTH)
    if family in FIGURES:
        assert (counted(seeing), counted(hidden)) == FIGURES[family]
    assert shares(seeing) == [1.0] * len(PROMPTS)
    assert all(shares(hidden)[row] < 1 for row in WITH)
    alone = drafted(family).generate(prompts(family)[2], greedy(LENGTH))
    assert ids(alone) == [plain(family, LENGTH)[2]]
    assert shares(alone) == [1.0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("branching", [[2, 1, 1], "dynamic"])
def test_trees_grow_from_what_is_seen(family: str, branching: Any) -> None:
    """A tree of the target's own likeliest tokens holds the next ones, as deep as it is."""
    more = {"top_k": 2, "depth": 3} if branching == "dynamic" else {}
    llm = drafted(family, "draft_tree", branching=branching, num_speculative_tokens=6, **more)
    outputs = llm.generate(prompts(family), greedy(LENGTH))
    assert ids(outputs) == plain(family, LENGTH)
    passes = [output.metrics.num_target_passes for output in outputs]
    assert max(passes[row] for row in WITH) <= max(passes[row] for row in WITHOUT)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_a_drafter_without_all_tokens_of_the_target_sees_its_images(family: str) -> None:
    """The places of the tokens that it lacks are left out of what comes with the tokens, too."""
    small = build(family, vocab_size=63)  # the target's prompts have no token 63, its texts do
    llm = drafted(
        family, model=LoadedModel(small, None, "a small one", same_tokens=True), images=True
    )
    with_last = [{**with_image(family, [63, *PROMPTS[0]])}, prompts(family)[1]]
    outputs = llm.generate(with_last, greedy(LENGTH))
    alone = LLM(target(family), max_model_len=CONTEXT).generate(with_last, greedy(LENGTH))
    assert ids(outputs) == ids(alone)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen3_5"])
def test_a_text_that_outgrows_the_drafters_context_is_read_without_images(family: str) -> None:
    room = with_image(family, PROMPTS[2])["input_ids"].shape[1] + 8
    model = build(family, max_position_embeddings=2 * room)  # half of a short context is for drafts
    assert reserve(2 * room) == room
    outputs = drafted(family, model=model).generate(prompts(family), greedy(LENGTH))
    assert ids(outputs) == plain(family, LENGTH)
    assert shares(outputs)[0] == 1.0
    assert 0 < outputs[2].metrics.num_accepted_tokens < outputs[2].metrics.num_draft_tokens


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"])
def test_samples_of_one_prompt_see_its_images(family: str) -> None:
    (output,) = drafted(family).generate(prompts(family)[2], greedy(LENGTH, n=3))
    assert [one.token_ids for one in output.outputs] == [plain(family, LENGTH)[2]] * 3
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"])
def test_rows_that_are_put_aside_see_the_images_again(family: str) -> None:
    asked = [prompts(family)[row] for row in WITH]
    tokens = sum(given["input_ids"].shape[1] for given in asked)
    llm = LLM(
        target(family),
        speculative_config={
            "method": "draft_model",
            "model": target(family),
            "num_speculative_tokens": 4,
        },
        max_num_seqs=2,
        max_model_len=90,
        max_batch_total_tokens=tokens + 4 * HEADROOM,
    )
    requests = [one for given in asked for one in llm.requests(given, greedy(50))]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert any(request.preemptions for request in requests)
    alone = LLM(target(family), max_model_len=90)
    texts = [request.output_ids for request in requests]
    assert texts == [ids(alone.generate(given, greedy(50)))[0] for given in asked]
    metrics = [request.metrics for request in requests]
    assert all(one.num_accepted_tokens == one.num_draft_tokens > 0 for one in metrics)


def test_an_interruption_costs_neither_text_nor_sight() -> None:
    llm = drafted("qwen2_vl")
    groups = [llm.requests(prompt, greedy(LENGTH)) for prompt in prompts("qwen2_vl")]
    requests = [request for group in groups for request in group]
    propose, calls = llm.engine.drafter.propose, 0

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        made = propose(*given)
        if calls == 2:
            raise KeyboardInterrupt
        return made

    llm.engine.drafter.propose = interrupted  # type: ignore[method-assign]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        with suppress(KeyboardInterrupt):
            llm.engine.step()
    assert calls > 2
    assert [request.output_ids for request in requests] == plain("qwen2_vl", LENGTH)
    metrics = [request.metrics for request in requests]
    assert all(one.num_accepted_tokens == one.num_draft_tokens > 0 for one in metrics)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_inside_generate_it_sees_the_pixels_and_not_the_targets_features(family: str) -> None:
    faster = speculative(method="draft_model", model=target(family), num_speculative_tokens=4)
    inputs = prompts(family)[2]
    made = target(family).generate(
        **inputs,
        custom_generate=faster,
        max_new_tokens=LENGTH,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert made[0, inputs["input_ids"].shape[1] :].tolist() == plain(family, LENGTH)[2]
    (metrics,) = faster.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_seeds_repeat_whatever_the_company(family: str) -> None:
    params = SamplingParams(temperature=1.2, seed=4, max_tokens=LENGTH, ignore_eos=True)
    model = noised(target(family), 0.02)
    together = drafted(family, model=model).generate(prompts(family), params)
    alone = [drafted(family, model=model).generate(one, params)[0] for one in prompts(family)]
    assert ids(together) == ids(alone)


# -- drafters with another processor ---------------------------------------------------------------


@cache
def other_processor() -> Any:
    """Returns one that says something else of itself, and makes the same of images in RGB."""
    processor = llava_processor(template="another {PLACE}")
    processor.image_processor.do_convert_rgb = False
    return processor


@cache
def expected() -> list[list[int]]:
    llm = LLM(llava(), processor=llava_processor())
    return [ids(llm.generate(one, GREEDY))[0] for one in illustrated()]


def illustrated() -> list[Any]:
    return [
        {"prompt": TEXT, "images": [picture()]},
        "nothing to see",
        {"prompt": "<image> and <image>: ", "images": [picture(), picture((0, 9, 200))]},
    ]


def with_processors(model: Any, processor: Any, **more: Any) -> LLM:
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": model, **more}
    return LLM(
        llava(),
        processor=llava_processor(),
        speculative_config={**config, "processor": processor},
        max_num_seqs=3,
    )


def test_a_drafter_with_another_processor_prepares_the_images_itself() -> None:
    llm = with_processors(llava(), other_processor(), tokenizer=tokenizer())
    outputs = llm.generate(illustrated(), GREEDY)
    assert ids(outputs) == expected()
    assert shares(outputs) == [1.0] * 3


def test_a_loaded_drafter_takes_the_processor_that_it_was_loaded_without() -> None:
    drafter = LoadedModel(llava(), tokenizer(), "a drafter")
    llm = with_processors(drafter, other_processor(), images=True)
    assert llm.engine.drafter.needs.images
    outputs = llm.generate(illustrated(), GREEDY)
    assert ids(outputs) == expected()
    assert shares(outputs) == [1.0] * 3


def test_a_drafter_reads_as_many_placeholders_as_it_makes_features() -> None:
    """A tower of smaller images: 4 features and not 16."""
    model, processor = smaller()
    llm = with_processors(model, processor, tokenizer=tokenizer(), images=True)
    fed: list[int] = []
    drafter: Any = llm.engine.drafter
    forward = drafter.runner.forward

    def note(tokens: Any, *args: Any, **options: Any) -> Any:
        if "through" in options:  # all other passes are of text
            fed.extend(tokens.flatten().tolist())
        return forward(tokens, *args, **options)

    drafter.runner.forward = note
    for prompt, text in zip(illustrated(), expected(), strict=True):
        fed.clear()
        assert ids(llm.generate(prompt, GREEDY)) == [text]
        images = len(prompt["images"]) if isinstance(prompt, dict) else 0
        assert fed.count(VOCABULARY.index("<image>")) == 4 * images
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "this?"}],
        }
    ]
    fed.clear()
    llm.chat(messages, GREEDY)
    assert fed.count(VOCABULARY.index("<image>")) == 4


def smaller() -> tuple[Any, Any]:
    """Returns a LLaVA that reads images of 8 x 8, and its processor."""
    config = llava().config.to_dict()
    config["vision_config"]["image_size"] = 8
    config["image_seq_length"] = 4
    torch.manual_seed(2)
    kind: Any = transformers.LlavaForConditionalGeneration
    model = kind(transformers.LlavaConfig(**config)).double().eval()
    processor = llava_processor()
    processor.image_processor.size = {"shortest_edge": 8}
    processor.image_processor.crop_size = {"height": 8, "width": 8}
    return model, processor


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_a_drafter_with_another_tokenizer_sees_images_too(vocabulary: str) -> None:
    model, processor = renumbered()
    llm = with_processors(
        model, processor, tokenizer=processor.tokenizer, vocabulary=vocabulary, images=True
    )
    outputs = llm.generate(illustrated(), GREEDY)
    assert ids(outputs) == expected()
    blind = with_processors(
        model, processor, tokenizer=processor.tokenizer, vocabulary=vocabulary, images=False
    )
    others = blind.generate(illustrated(), GREEDY)
    assert ids(others) == expected()
    accepted = [sum(one.metrics.num_accepted_tokens for one in made) for made in (outputs, others)]
    assert accepted[0] > accepted[1]


def renumbered() -> tuple[Any, Any]:
    """Returns the target with its tokens in another order, and a processor for it."""
    import copy

    from tokenizers import Tokenizer, decoders, models

    count = len(VOCABULARY)
    order = [*range(9), *range(count - 1, 8, -1)]  # of the old tokens
    letters = Tokenizer(
        models.BPE(
            vocab={VOCABULARY[old]: new for new, old in enumerate(order)},
            merges=[],
            unk_token="<unk>",
        )
    )
    letters.decoder = decoders.Fuse()
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(VOCABULARY[4:9]),
    )
    model = copy.deepcopy(llava())
    with torch.no_grad():
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.weight.copy_(part.weight[order].clone())
    processor = llava_processor()
    processor.tokenizer = words
    return model, processor


# -- what is refused -------------------------------------------------------------------------------


def test_where_images_are_required_what_cannot_be_shown_is_refused_alone() -> None:
    """What the target's processor has made is of no use to a drafter with another one."""
    model, processor = smaller()
    made = dict(llava_processor()(text=[TEXT], images=[picture()], return_tensors="pt"))
    strict = with_processors(model, processor, tokenizer=tokenizer(), images=True)
    refused, other = strict.generate([made, illustrated()[2]], GREEDY)
    assert "give the text and its images to LLM" in str(refused.outputs[0].error)
    assert other.token_ids == expected()[2]
    lenient = with_processors(model, processor, tokenizer=tokenizer())
    assert ids(lenient.generate([made, illustrated()[2]], GREEDY)) == [expected()[0], expected()[2]]


def test_pixels_that_do_not_fit_the_drafter_are_refused_where_images_are_required() -> None:
    """Without processors nothing says that the two models need other inputs."""
    model, _ = smaller()
    inputs = dict(llava_processor()(text=[TEXT], images=[picture()], return_tensors="pt"))
    for images, refused in ((True, True), ("auto", False)):
        config = {"method": "draft_model", "model": model, "images": images}
        llm = LLM(llava(), speculative_config={**config, "num_speculative_tokens": 2})
        if refused:
            with pytest.raises(OutpaceError, match="set 'images' of the drafter to false"):
                llm.generate(inputs, GREEDY)
        else:
            assert ids(llm.generate(inputs, GREEDY)) == [expected()[0]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"images": "yes"}, "True, False or 'auto'"),
        ({"images": True, "model": "text"}, "reads text only"),
        ({"images": True, "model": "other"}, "give it as 'processor'"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_loaded(
    options: dict[str, Any], sentence: str
) -> None:
    models: dict[Any, Any] = {
        None: lambda: target("llava"),
        "text": lambda: transformers.LlamaForCausalLM(text_config()).double(),
        "other": lambda: _with_another_mark(),
    }
    given = {**options, "model": models[options.get("model")]()}
    with pytest.raises(ConfigError, match=sentence):
        LLM(target("llava"), speculative_config={"method": "draft_model", **given})


def text_config() -> Any:
    return transformers.LlamaConfig(**{**target("llava").config.get_text_config().to_dict()})


def _with_another_mark() -> Any:
    model = build("llava")
    model.config.image_token_id = model.config.image_token_index = 57
    return model


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"images": True}, "give 'model', too"), ({"images": 3}, "True, False or 'auto'")],
)
def test_without_a_draft_model_there_is_nobody_to_show_images_to(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(target("llava"), speculative_config={"method": "auto", **options})


@pytest.mark.parametrize("method", ["auto", "ensemble", "staged"])
def test_drafters_of_several_show_images_to_the_draft_model_among_them(method: str) -> None:
    model = {"model": llava(), "processor": other_processor(), "tokenizer": tokenizer()}
    several = {"drafters": [{"method": "draft_model", **model}, {"method": "ngram"}]}
    config = {"method": method, "num_speculative_tokens": 3}
    llm = LLM(
        llava(),
        processor=llava_processor(),
        speculative_config={**config, **(several if method == "ensemble" else model)},
        max_num_seqs=3,
    )
    outputs = llm.generate(illustrated(), GREEDY)
    assert ids(outputs) == expected()
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 12
