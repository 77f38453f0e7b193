"""Prompts with images, as users give them: what comes of them, and what is refused."""

from __future__ import annotations

import base64
import copy
import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.utils.import_utils import is_torchvision_available

from outpace import LLM, SamplingParams
from outpace.cli.loading import ChatTemplate
from outpace.errors import ConfigError, ModelLoadError, OutpaceError, PromptError
from outpace.inputs import images
from outpace.inputs.images import opened
from outpace.serve.openai.calls import Reader
from outpace.serve.openai.errors import ApiError
from outpace.serve.settings import Settings
from outpace.targets.hf.kinds import older_than
from outpace.targets.hf.vision.processor import prepared

from .vision_processors import TEXTS_ONLY, llava, llava_processor, picture, save_qwen

TEXT = "see <image> and say:"
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@cache
def llm(template: str | None = None) -> LLM:
    processor = llava_processor() if template is None else llava_processor(template)
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    return LLM(llava(), processor=processor, speculative_config=speculation, max_num_seqs=3)


def expected(text: str, *images: Any) -> list[int]:
    """What transformers makes of a text and its images."""
    inputs = llava_processor()(text=[text], images=list(images), return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].double()
    made = llava().generate(**inputs, max_new_tokens=10, do_sample=False, eos_token_id=None)
    text_ids: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
    return text_ids


def png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def test_images_come_as_pil_images_files_urls_and_arrays(tmp_path: Path) -> None:
    image, file = picture(), tmp_path / "a picture.png"
    file.write_bytes(png(image))
    forms: list[dict[str, Any]] = [
        {"multi_modal_data": {"image": image}},
        {"multi_modal_data": {"image": [image]}},
        {"images": [str(file)]},
        {"images": file},
        {"images": [f"file://{file}"]},
        {"images": [file.as_uri()]},  # with %20 for the blank
        {"images": [file.as_uri().replace("://", "://localhost")]},
        {"images": [data_url(image)]},
        {"images": [torch.tensor(list(image.tobytes())).view(30, 20, 3).byte().numpy()]},
    ]
    wanted = expected(TEXT, image)
    for output in llm().generate([{"prompt": TEXT, **form} for form in forms], GREEDY):
        assert output.outputs[0].token_ids == wanted
        assert output.prompt == TEXT


def test_a_photograph_is_upright_however_it_is_given(tmp_path: Path) -> None:
    """Cameras write a picture as it lies, and beside it how it is to be turned."""
    turned, file = Image.Exif(), tmp_path / "photograph.jpg"
    turned[0x0112] = 6
    picture().save(file, "JPEG", exif=turned)
    sent = "data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode()
    for given in (file, Image.open(file), sent):
        assert opened(given).size == picture().size[::-1]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
def test_what_is_transparent_is_white(mode: str) -> None:
    """A drawing in black on nothing would be black on black."""
    drawing = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    drawing.paste((0, 0, 0, 255), (2, 2, 5, 5))
    drawing = drawing.quantize(8) if mode in ("P", "PA") else drawing
    drawing = drawing.convert(mode)
    forms = [drawing] if mode == "PA" else [drawing, data_url(drawing)]  # no PNG holds the last
    for form in forms:
        seen = opened(form)
        assert (seen.mode, seen.getpixel((0, 0)), seen.getpixel((3, 3))) == (
            "RGB",
            (255, 255, 255),
            (0, 0, 0),
        )


def test_grey_values_of_16_bits_keep_their_upper_8() -> None:
    deep = Image.new("I;16", (3, 1))
    for place, grey in enumerate((0, 0x8000, 0xFFFF)):
        deep.putpixel((place, 0), grey)
    for form in (deep, data_url(deep)):
        seen = opened(form)
        assert [seen.getpixel((place, 0)) for place in range(3)] == [
            (grey, grey, grey) for grey in (0, 128, 255)
        ]


def test_data_urls_are_read_as_browsers_read_them() -> None:
    """Encoders break lines, leave out the padding, or write signs as in any URL."""
    head, _, body = data_url(picture()).partition(",")
    lines = "\r\n".join(body[at : at + 76] for at in range(0, len(body), 76))
    escaped = body.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    for other in (lines, f" {body}\n", body.rstrip("="), escaped):
        assert opened(f"{head},{other}").tobytes() == picture().tobytes()


def test_prompts_with_several_images_and_with_none_in_one_batch() -> None:
    one, other = picture(), picture((0, 0, 255))
    both = "first <image> then <image>: "
    outputs = llm().generate(
        [{"prompt": both, "images": [one, other]}, "no image", {"prompt": TEXT, "images": other}],
        GREEDY,
    )
    assert outputs[0].outputs[0].token_ids == expected(both, one, other)
    assert outputs[2].outputs[0].token_ids == expected(TEXT, other)
    assert outputs[0].outputs[0].token_ids != expected(both, other, one)


def test_while_images_are_processed_others_use_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, going_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        begun.set()
        assert going_on.wait(20)
        return prepared(*given)

    model = llm()
    prompt = {"prompt": TEXT, "images": [picture()]}
    known = model.prompt_ids(prompt)
    monkeypatch.setattr(images, "prepared", slow)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(model.prompt_ids, prompt)
        assert begun.wait(20)
        assert model.token_ids("see")
        assert not found.done()
        going_on.set()
        assert found.result() == known


def test_chats_show_images_to_templates_of_parts_and_of_texts() -> None:
    image = picture()
    parts: list[Any] = [
        {"type": "text", "text": "what is "},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
    ]
    chat = [{"role": "user", "content": parts}]
    output = llm().chat(chat, GREEDY)
    assert output.outputs[0].token_ids == expected("user: what is <image>|assistant: ", image)
    chat[0]["content"] = [parts[0], {"type": "image", "image": image}]
    assert llm().chat(chat, GREEDY).outputs[0].token_ids == output.outputs[0].token_ids
    older = llm(TEXTS_ONLY).chat(chat, GREEDY)
    assert older.outputs[0].token_ids == expected("user: what is \n<image>|assistant: ", image)


def test_chats_without_images_go_through_the_same_template() -> None:
    for template in (None, TEXTS_ONLY):
        output = llm(template).chat([{"role": "user", "content": "hi"}], GREEDY)
        assert llm().tokenizer.decode(output.prompt_token_ids) == "user: hi|assistant: "


def test_a_folder_without_torchvision_has_a_processor_all_the_same(tmp_path: Path) -> None:
    """That of Qwen2-VL reads videos too, which transformers does with torchvision only."""
    model = save_qwen(tmp_path)
    if older_than("5.18") and not is_torchvision_available():
        with pytest.raises(ModelLoadError, match=r"install torchvision, or transformers 5\.18"):
            LLM(tmp_path)
        return
    loaded = LLM(tmp_path, dtype="float64", cpu_kernels="off", max_num_seqs=2)
    processor = loaded.target.processor
    text = "user: <|vision_start|><|image_pad|><|vision_end|>say|assistant: "
    inputs = processor(text=[text], images=[picture()], return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=10, do_sample=False, eos_token_id=None)
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "say"}],
        }
    ]
    output = loaded.chat(chat, GREEDY)
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert output.outputs[0].token_ids == made[0, inputs["input_ids"].shape[1] :].tolist()
    assert loaded.chat_ids(chat) == output.prompt_token_ids


def cut_short() -> Any:
    """Returns a PIL image of a file whose end is missing, which it has not missed yet."""
    return Image.open(io.BytesIO(png(picture())[:60]))


REFUSED: list[tuple[Any, str]] = [
    ({"prompt": TEXT, "images": [picture(), picture()]}, "give one image for each place"),
    ({"prompt": "no place", "images": [picture()]}, r"refuses this prompt|no place for its images"),
    ({"prompt": "ends with <image>", "images": [picture()]}, "put some text after it"),
    ({"prompt": TEXT, "images": []}, "no image came with it"),
    (TEXT, "no image came with it"),
    ({"prompt": TEXT, "images": ["/no/such.png"]}, "No such file.*check its path"),
    ({"prompt": TEXT, "images": ["https://a.b/c.png"]}, "fetches nothing"),
    ({"prompt": TEXT, "images": ["data:image/png;base64,AAAA"]}, "it is none of PNG, JPEG"),
    ({"prompt": TEXT, "images": ["data:image/png;base64,A"]}, "not in base64"),
    ({"prompt": TEXT, "images": ["data:image/png,A"]}, "no data: URL of an image"),
    ({"prompt": TEXT, "images": [data_url(picture())[:102]]}, "cannot read the image"),
    ({"prompt": TEXT, "images": [cut_short()]}, "cannot read the image .*truncated.*whole PNG"),
    ({"prompt": TEXT, "images": [Image.new("F", (20, 30), 0.5)]}, "numbers of 32 bits"),
    ({"prompt": TEXT, "images": [Image.new("I", (20, 30), 9000)]}, "how bright they are"),
    ({"prompt": TEXT, "images": [3]}, "an image is a PIL image"),
    ({"prompt": TEXT, "images": [picture()], "multi_modal_data": {"image": 1}}, "given twice"),
    ({"prompt": TEXT, "multi_modal_data": {"video": 1}}, "no other media"),
    ({"prompt": TEXT, "multi_modal_data": 1}, "no other media"),
    ({"prompt_token_ids": [9, 10], "images": [picture()]}, "images come with a text"),
    ({"input_ids": [[4] * 16 + [9]], "pixel_values": torch.zeros(2, 3, 16, 16)}, "do not match"),
    ({"input_ids": [[9] * 16], "pixel_values": torch.zeros(1, 3, 16, 16)}, "no place for its"),
    ({"input_ids": [[4, 9]] * 2, "pixel_values": torch.zeros(2, 3, 16, 16)}, "2 prompts with"),
    ({"input_ids": [[4, 9]], "attention_mask": [[0, 1]], "pixel_values": 0}, "padded"),
    ({"input_ids": [[4, 9]], "pixel_values": 0, "colour": 1}, "takes no .'colour'"),
]


@pytest.mark.parametrize(("prompt", "sentence"), REFUSED)
def test_what_cannot_be_read_is_told_in_a_sentence(prompt: Any, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence) as error:
        llm().generate(prompt, GREEDY)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_a_prompt_that_cannot_be_read_ends_alone() -> None:
    bad = {"input_ids": [[4] * 16 + [9]], "pixel_values": torch.zeros(2, 3, 16, 16)}
    good = {"prompt": TEXT, "images": [picture()]}
    wrong, right = llm().generate([bad, good], GREEDY)
    assert wrong.outputs[0].finish_reason == "error"
    assert right.outputs[0].token_ids == expected(TEXT, picture())


def test_images_need_a_vision_language_model_and_its_processor() -> None:
    with pytest.raises(PromptError, match="reads text only"):
        LLM().generate({"prompt": TEXT, "images": [picture()]}, GREEDY)
    without = LLM(llava(), tokenizer=llm().tokenizer, max_num_seqs=1)
    with pytest.raises(PromptError, match="came without a processor"):
        without.generate({"prompt": TEXT, "images": [picture()]}, GREEDY)
    with pytest.raises(ConfigError, match="processor must be a loaded processor"):
        LLM(llava(), processor="a folder")


def test_without_pillow_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(OutpaceError, match=r"pip install 'outpace\[vision\]'"):
        llm().generate({"prompt": TEXT, "images": ["picture.png"]}, GREEDY)


def body(url: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a "}, image]}]}


def test_the_server_reads_images_from_data_urls_and_never_from_its_own_files(
    tmp_path: Path,
) -> None:
    reader = Reader(llm(), Settings(model_name="a model"))
    call = reader.chat({**body(data_url(picture())), "temperature": 0})
    assert call.requests[0].media is not None
    assert len(reader.tokens(body(data_url(picture())))) == call.prompt_tokens
    named = {"chat_template_kwargs": {"given": 1}}  # a template's own names may be any
    assert reader.chat({**body(data_url(picture())), **named}).prompt_tokens == call.prompt_tokens
    file = tmp_path / "secret.png"
    file.write_bytes(png(picture()))
    for url in (str(file), f"file://{file}"):
        with pytest.raises(ApiError, match="not from files"):
            reader.chat(body(url))
    with pytest.raises(ApiError, match="must not hold 'files'"):
        reader.chat({**body(str(file)), "chat_template_kwargs": {"files": True}})


def test_a_template_that_is_given_comes_before_the_processors_own(tmp_path: Path) -> None:
    processor = copy.deepcopy(llava_processor())
    other = LLM(llava(), processor=processor, max_num_seqs=1)
    asked = [{"role": "user", "content": "a"}]
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}b")
    given = other.chat_ids(asked, chat_template=file.read_text())
    assert given != other.chat_ids(asked)
    ChatTemplate(file).put(other.tokenizer, "a model", other.target.processor)
    assert other.chat_ids(asked) == given


def test_huge_images_and_formats_of_other_programs_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from PIL import PngImagePlugin

    file = io.BytesIO()
    Image.new("1", (8000, 8000)).save(file, "PNG")  # some kilobytes
    huge = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    with monkeypatch.context() as patched:
        patched.setattr(PngImagePlugin.PngImageFile, "load", None)  # nothing is decoded
        with pytest.raises(PromptError, match="has 8,000 x 8,000 pixels, and 50,000,000 are the"):
            llm().generate([{"prompt": TEXT, "multi_modal_data": {"image": huge}}], GREEDY)
    eps = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").decode()
    other = {"prompt": TEXT, "multi_modal_data": {"image": f"data:image/png;base64,{eps}"}}
    with pytest.raises(PromptError, match="it is none of PNG, JPEG"):
        llm().generate([other], GREEDY)
    many = {"prompt": TEXT, "multi_modal_data": {"image": [picture()] * 257}}
    with pytest.raises(PromptError, match="has 257 images, and 256 are the most"):
        llm().generate([many], GREEDY)
    monkeypatch.setattr("outpace.inputs.images.MAX_TOTAL_PIXELS", 100)
    with pytest.raises(PromptError, match="the first 1 images of the prompt have"):
        llm().generate([{"prompt": TEXT, "multi_modal_data": {"image": picture()}}], GREEDY)
