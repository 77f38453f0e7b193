"""Images as they are given (PIL images, files, data: URLs, arrays), and the prompts that the
processor of a vision-language model makes of texts with them."""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from urllib.request import url2pathname

from outpace.core.request import MultiModalInputs, MultiModalPrompt
from outpace.core.values import shown
from outpace.errors import ConfigError, PromptError, reason_of
from outpace.inputs import chats
from outpace.inputs.chats import Conversation
from outpace.targets.hf.kinds import placeholders
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.plain import is_causal_by_default
from outpace.targets.hf.tokenizer import SharedTokenizer
from outpace.targets.hf.vision.processor import mark_of, prepared

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What image files are read: others are decoded by programs of their own, or are no pictures."""

MAX_PIXELS = 50_000_000
"""Pixels of an image, at most: a small file may hold very many, each of which takes 3 bytes and
more."""

_INSTALL = "images need Pillow: install it with pip install 'outpace[vision]'."


def opened(image: Any, files: bool = True) -> Any:
    """Returns an image as processors take it: a PIL image in RGB, or an array as it is.

    image: a PIL image, a file's path, a ``data:`` or ``file:`` URL, or an array of numbers. files:
    whether files are read. Raises ``PromptError`` for what is no image or lies elsewhere,
    ``ConfigError`` without Pillow.
    """
    pil = _pillow()
    if isinstance(image, pil.Image):
        return _decoded(lambda: image, _named(getattr(image, "filename", "") or "given"))
    if hasattr(image, "__array__"):
        return image
    if isinstance(image, (str, os.PathLike)):
        name = _named(str(image))
        content = io.BytesIO(_bytes_of(str(image), files))
        return _decoded(lambda: _checked(pil.open(content, formats=FORMATS), name), name)
    raise PromptError(
        f"an image is a PIL image, a file, a data: URL or an array, not {shown(image)}."
    )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    return Image


def _bytes_of(name: str, files: bool) -> bytes:
    """The content of a file or of a data: URL."""
    scheme = name.partition(":")[0].lower()
    if scheme == "data":
        return _data(name)
    if scheme in ("http", "https", "ftp", "s3", "gs"):
        raise PromptError(
            f"the image {_named(name)} lies elsewhere, and outpace fetches nothing: download it "
            "and give the file, or its content as a data: URL."
        )
    if not files:
        raise PromptError("images are read from data: URLs here, not from files: send the content.")
    path = _path_of(name) if scheme == "file" else name
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PromptError(
            f"cannot read the image {_named(name)} ({reason}): check its path."
        ) from error


def _path_of(url: str) -> str:
    """The path that a ``file:`` URL names; in a URL a blank is written %20, and so on."""
    return url2pathname(url.partition(":")[2].removeprefix("//").removeprefix("localhost"))


def _data(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise PromptError(
            f"the image {_named(url)} is no data: URL of an image: write 'data:image/png;base64,' "
            "and then its content in base64."
        )
    # As browsers read it: blanks and line breaks do not count, and the padding may be missing.
    body = "".join(unquote(body).split())
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(
            f"the image {_named(url)} is not in base64 ({error}): encode it again."
        ) from error


def _decoded(given: Callable[[], Any], name: str) -> Any:
    """A PIL image in RGB: PIL reads most of a file only now."""
    try:
        return _in_rgb(given())
    except PromptError:
        raise
    except Exception as error:  # decoders raise all sorts over a broken file
        reason = reason_of(error)
        known = ", ".join(FORMATS)
        reason = f"it is none of {known}" if "cannot identify" in reason else reason
        raise PromptError(
            f"cannot read the image {name} ({reason}): give a whole PNG, JPEG or WebP file."
        ) from error


def _in_rgb(image: Any) -> Any:
    """A PIL image in RGB: turned as its camera says, on white where it is transparent, and of grey
    values with 16 bits the upper 8."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:  # else what lies under the transparent parts would be seen
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    elif image.mode.startswith("I;16"):  # else all but the darkest would be white
        image = image.point(lambda grey: grey * (1 / 256)).convert("L")
    elif image.mode in ("I", "F"):  # PIL would cut them off at 0 and 255
        raise ValueError("it holds numbers of 32 bits, and does not say how bright they are")
    return image.convert("RGB")


def _checked(image: Any, name: str) -> Any:
    """The same image; ``PromptError`` before one with too many pixels is decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise PromptError(
            f"the image {name} has {width:,} x {height:,} pixels, and {MAX_PIXELS:,} are the "
            "most: make it smaller."
        )
    return image


def _named(name: str) -> str:
    """An image's name for error messages, which may be megabytes of base64."""
    return repr(name if len(name) <= 80 else name[:60] + "...")


# -- prompts with images ---------------------------------------------------------------------------

MAX_TOTAL_PIXELS = 200_000_000
"""Pixels of all images of a prompt."""
MAX_IMAGES = 256
"""Images of a prompt: a processor may enlarge each of them to megabytes."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as a chat template writes it."""

    text: str
    images: Sequence[Any]
    special: bool
    """Whether the tokenizer has to add its special tokens: the template has not begun the text."""


class Processed(dict[str, Any]):
    """What a processor made of a text and its images, and these themselves.

    ends: of a conversation, the tokens that end an answer to it.
    """

    def __init__(
        self, made: Mapping[str, Any], given: MultiModalPrompt, ends: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(made)
        self.given = given
        self.ends = ends


class ImagePrompts:
    """Makes prompts with images for one loaded model, and refuses those that cannot be.

    shared: the model's tokenizer, which `rendered` uses, too: its lock has to be held for that.
    """

    def __init__(self, loaded: LoadedModel, shared: SharedTokenizer) -> None:
        self._loaded, self._shared = loaded, shared
        model: Any = loaded.model
        self._placeholders = placeholders(model.config)
        self._arguments = set(inspect.signature(model.forward).parameters)
        self._both_ways = not is_causal_by_default(model)
        self.keeps_images = False
        """Whether a drafter wants images as they were given."""

    def media(
        self,
        ids: Sequence[int],
        inputs: Mapping[str, Any],
        pixels: Mapping[str, Any] | None = None,
        given: MultiModalPrompt | None = None,
    ) -> MultiModalInputs | None:
        """Returns what comes with a prompt as the target takes it, None for nothing.

        inputs: what the processor made of the prompt's images; pixels, given: as in
        `MultiModalInputs`. Raises ``PromptError`` for a prompt with places for images that come
        without any, or for images without places.
        """
        self._check(ids, inputs)
        if not (inputs or self._both_ways):
            return None
        # Where a prompt is read both ways it has to be said how far it goes.
        return MultiModalInputs(inputs, len(ids), pixels, given if self.keeps_images else None)

    def _check(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> None:
        name, places = self._loaded.name, not self._placeholders.isdisjoint(ids)
        # transformers' generate has turned pixels into features already.
        shows = any(key.startswith(("pixel_values", "mm_encoder_outputs")) for key in inputs)
        if inputs and not self._placeholders:
            raise PromptError(
                f"{name} reads text only: leave out {sorted(inputs)}, or use a vision-language "
                "model."
            )
        unknown = sorted(set(inputs) - self._arguments)
        if unknown:
            raise PromptError(
                f"{name} takes no {unknown} with a prompt: give what its own processor returns."
            )
        if places and not shows:
            raise PromptError(
                "the prompt has a place for an image, and no image came with it: give one as "
                "'images', or take the place out."
            )
        if shows and not places:
            raise PromptError(
                f"the prompt has no place for its images: write {self._place()} where each of them "
                "belongs."
            )
        if places and ids[-1] in self._placeholders:
            raise PromptError("the prompt ends with an image: put some text after it.")

    def processed(
        self, text: str, images: Sequence[Any], files: bool = True, **options: Any
    ) -> Processed:
        """Returns what the processor makes of a text and its images: a prompt.

        files: whether images may be files. options: the processor's. Raises ``PromptError`` where
        there is no processor, or it cannot.
        """
        self._needs_processor()
        return self.prompt(text, self.decoded(images, files), **options)

    def decoded(self, images: Sequence[Any], files: bool = True) -> list[Any]:
        """Returns images as processors take them; ``PromptError`` for what is none, and for more
        pixels than a prompt may have. files: whether images may be files."""
        if len(images) > MAX_IMAGES:
            raise PromptError(
                f"the prompt has {len(images):,} images, and {MAX_IMAGES} are the most: give fewer."
            )
        found: list[Any] = []
        pixels = 0
        for image in images:
            found.append(opened(image, files))
            size = getattr(found[-1], "size", None)
            pixels += math.prod(size) if isinstance(size, tuple) else 0  # arrays are there already
            if pixels > MAX_TOTAL_PIXELS:
                raise PromptError(
                    f"the first {len(found)} images of the prompt have {pixels:,} pixels, and "
                    f"{MAX_TOTAL_PIXELS:,} are the most: give fewer, or make them smaller."
                )
        return found

    def prompt(self, text: str, pixels: Sequence[Any], **options: Any) -> Processed:
        """Returns what the processor makes of a text and its images, which are `decoded`."""
        whole = self._needs_processor()
        self._check_count(text, len(pixels))
        given = MultiModalPrompt(text, list(pixels), options)
        with self._shared.processor(whole) as processor:
            return Processed(prepared(processor, self._loaded.name, given), given)

    def rendered(self, messages: Conversation, /, **for_template: Any) -> Rendered:
        """Returns what the chat template makes of a conversation.

        for_template: what else the template is given; its text, as ``chat_template``, comes before
        the model's own.
        """
        loaded, processor = self._loaded, self._needs_processor()
        own = getattr(processor, "chat_template", None) or loaded.tokenizer.chat_template
        template = for_template.pop("chat_template", None) or own
        place = None if self._takes_parts(template) else self._place()
        read, images = chats.illustrated(messages, place)
        text = chats.applied(
            loaded.tokenizer, loaded.name, read, **for_template, chat_template=template
        )
        # As transformers' own apply_chat_template does.
        start = getattr(loaded.tokenizer, "bos_token", None)
        begun = start is not None and text.startswith(start)
        return Rendered(text, images, not begun)

    # -- inside --------------------------------------------------------------------------------

    def _needs_processor(self) -> Any:
        if not self._placeholders:
            raise PromptError(
                f"{self._loaded.name} reads text only: leave out the images, or use a "
                "vision-language model."
            )
        if self._loaded.processor is None:
            raise PromptError(
                f"{self._loaded.name} came without a processor, which prompts with images need: "
                "pass processor=, or give what the processor returns."
            )
        return self._loaded.processor

    def _place(self) -> str:
        """What stands for an image in a text."""
        return mark_of(self._loaded.processor) or "the model's image token"

    def _check_count(self, text: str, images: int) -> None:
        """Raises ``PromptError`` for a text with some places, but not as many as images.

        Without any, the processor decides: some put images before the text.
        """
        place = self._place()
        places = text.count(place)
        if places and places != images:
            raise PromptError(
                f"images wanted by the prompt ({place!r}): {places}, images that came with it: "
                f"{images}; give one image for each place."
            )

    def _takes_parts(self, template: str | None) -> bool:
        """Whether a chat template reads contents that are lists of parts, and not texts only."""
        if template is None:
            return False
        parts = [{"role": "user", "content": [{"type": "text", "text": chats.ANSWER}]}]
        try:
            text = chats.applied(
                self._loaded.tokenizer, self._loaded.name, parts, chat_template=template
            )
        except PromptError:
            return False
        return chats.ANSWER in text and "'text'" not in text
