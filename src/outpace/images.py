"""Images as they are given: PIL images, files, data: URLs, arrays."""

from __future__ import annotations

import base64
import binascii
import io
import os
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from outpace.core.values import shown
from outpace.errors import ConfigError, PromptError, reason_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What image files are read: others are decoded by programs of their own, or are no pictures."""

MOST_PIXELS = 50_000_000
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
        return image.convert("RGB")
    if hasattr(image, "__array__"):
        return image
    if isinstance(image, (str, os.PathLike)):
        return _decoded(_bytes_of(str(image), files), _named(str(image)))
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
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(
            f"the image {_named(url)} is not in base64 ({error}): encode it again."
        ) from error


def _decoded(content: bytes, name: str) -> Any:
    """A PIL image in RGB, turned as its camera says."""
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        _check_size(image, name)
        return ImageOps.exif_transpose(image).convert("RGB")
    except PromptError:
        raise
    except Exception as error:  # decoders raise all sorts over a broken file
        reason = reason_of(error)
        known = ", ".join(FORMATS)
        reason = f"it is none of {known}" if "cannot identify" in reason else reason
        raise PromptError(
            f"cannot read the image {name} ({reason}): give a whole PNG, JPEG or WebP file."
        ) from error


def _check_size(image: Any, name: str) -> None:
    """Raises ``PromptError`` before an image with too many pixels is decoded."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise PromptError(
            f"the image {name} has {width:,} x {height:,} pixels, and {MOST_PIXELS:,} are the "
            "most: make it smaller."
        )


def _named(name: str) -> str:
    """An image's name for error messages, which may be megabytes of base64."""
    return repr(name if len(name) <= 80 else name[:60] + "...")
