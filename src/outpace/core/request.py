"""The part of a request that drafters, policies and targets may use: what was asked for, what is
written, and what is kept of it.

The engine's own class (`outpace.engine.request`) adds how its text ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class MultiModalPrompt:
    """A text and its images as they were given, before any processor has seen them."""

    text: str
    """With the target's mark at the place of each image."""
    images: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the processor."""


@dataclass(frozen=True, eq=False)
class MultiModalInputs:
    """What a processor made of a prompt's images, besides token ids."""

    inputs: Mapping[str, Any]
    """What the model is called with besides token ids, by the names of its arguments."""
    tokens: int
    """How many tokens the prompt with the images has. A text that joins the batch for a second time
    has more; those after the prompt are text alone."""
    pixels: Mapping[str, Any] | None = None
    """The same as another model with this processor takes it, where that is not ``inputs``: the
    target's own features are of no use to any other model."""
    given: MultiModalPrompt | None = None
    """What all this was made of, for a drafter with a processor of its own. Kept only where `Needs`
    ask for it."""


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """What the encoder of an encoder-decoder reads, once for each text."""

    token_ids: Sequence[int] = ()
    """Its tokens; none where features take their place."""
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments of the encoder in the place of tokens, of one row, without the dimension of rows.
    Whisper's are ``{"input_features": [M, F]}``."""
    states: Tensor | None = None
    """The hidden states ``[S, H]`` that an encoder has made of it already, if one has."""
    encoder: object = None
    """The model whose encoder made these states. Any other model reads the source itself."""


@dataclass(eq=False)
class Request:
    """A prompt, its resolved options, what has been generated, and what others keep of it."""

    prompt_ids: list[int]
    options: RowOptions
    seed: int
    max_tokens: int
    eos_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """Why the text has ended; None while it has not."""
    id: int = -1
    """Given by the engine; no two of its requests have the same."""
    group: Hashable = None
    """The samples of one prompt have the same group: the prompt is read once."""
    tag: str | None = None
    """What the request says of itself to drafters, such as its task or language."""
    prediction: Sequence[int] = ()
    """The text that its user expects, where look-ups search first."""
    source: EncoderInputs | None = None
    """What the encoder reads, where the target has one; the prompt is then the decoder's. A drafter
    may look into it, or read it with an encoder of its own."""
    media: MultiModalInputs | None = None
    """What comes with the prompt besides tokens: its images. A drafter may look at them with a
    model of its own."""
    keep_cached: bool = True
    """Whether what is cached of the text stays when it has ended, where the target keeps any, for a
    prompt that begins with it; and whether its own prompt may begin with what is kept. A draft
    model keeps the beginning of other texts at most."""
    reproducible: bool = False
    """Whether what is drafted for it must follow from its own history alone, so that its seed gives
    the same text in every run: a seeded, sampled text, unless the rule is coupled."""
    forked_from: Request | None = None
    """The request of the same prompt whose row it got a copy of when it joined the batch; None
    where its prompt is read."""
    cached_prefix: int = 0
    """How many tokens at the beginning of its text were not read when it joined the batch, since
    target and drafter had kept what they make of them (`Drafter.cached_prefix`)."""
    state: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What drafters, controllers and others keep of the text, each under itself or a `PerRequest`
    of its own. It stays while the request is out of the batch, until the text has ended."""

    @property
    def params(self) -> SamplingParams:
        return self.options.params

    @property
    def length(self) -> int:
        """Committed tokens, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.output_ids)

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """All committed tokens, those of the prompt first."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def all_stop_token_ids(self) -> Sequence[int]:
        """The tokens after which the text ends."""
        eos_ids = () if self.params.ignore_eos else self.eos_ids
        return (*eos_ids, *self.params.stop_token_ids)

    def recover(self) -> None:
        """Forgets what a step that was left half way may have left half changed."""
        for owner in list(self.state):
            if isinstance(owner, PerRequest) and not owner.lasting:
                del self.state[owner]


class PerRequest(Generic[State]):
    """What its owner keeps of each request, in `Request.state`.

    >>> drafts = PerRequest[list[int]](lambda request: [])
    >>> one, other = (Request([token], RowOptions(SamplingParams()), 0, 8) for token in (1, 2))
    >>> drafts[one].append(5)
    >>> drafts[one], drafts[other]
    ([5], [])
    """

    def __init__(
        self,
        first: Callable[[Request], State],
        lasting: bool = False,
        common: State | None = None,
    ) -> None:
        """first: makes the value of a request, when somebody asks for it. lasting: whether it stays
        where a step was interrupted; otherwise it follows from the text and is made anew, since it
        may be half changed. common: the value that all requests have together, but for those that
        are `Request.reproducible`; unset: each has its own."""
        self._first = first
        self.lasting = lasting
        self.common = common
        self._requests: list[weakref.ref[Request]] = []  # that have a value of their own

    def __contains__(self, request: Request) -> bool:
        return self in request.state

    def __getitem__(self, request: Request) -> State:
        if self.common is not None and not request.reproducible:
            return self.common
        if self not in request.state:
            self[request] = self._first(request)
        value: State = request.state[self]
        return value

    def __setitem__(self, request: Request, value: State) -> None:
        if self.common is not None and not request.reproducible:
            self.common = value
            return
        if self not in request.state:
            alive = [ref for ref in self._requests if (one := ref()) is not None and one in self]
            self._requests = [*alive, weakref.ref(request)]
        request.state[self] = value

    def values(self) -> list[State]:
        """Returns the values that are there, of each request that has one of its own."""
        known = (ref() for ref in self._requests)
        missing: Any = object()  # another thread may end a text meanwhile
        found = [one.state.get(self, missing) for one in known if one is not None]
        return [value for value in found if value is not missing]

    def forget(self, requests: Sequence[Request]) -> None:
        """Forgets what is kept of these requests."""
        for request in requests:
            request.state.pop(self, None)


class RowNumbers:
    """Which row of a cache each request of the batch has: new ones stand after the others, and when
    some leave, the others close ranks, as the engine's own rows do.

    >>> one, other = (Request([token], RowOptions(SamplingParams()), 0, 8) for token in (1, 2))
    >>> rows = RowNumbers()
    >>> rows.begin(one), rows.begin(other), rows.end([one]), rows[other]
    (0, 1, [1], 0)
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request: Request) -> int:
        return self._requests.index(request)

    def of(self, requests: Sequence[Request]) -> list[int]:
        """Returns the rows of some requests."""
        return [self[request] for request in requests]

    def begin(self, request: Request) -> int:
        """Adds a request, and returns its row."""
        self._requests.append(request)
        return len(self) - 1

    def end(self, requests: Sequence[Request] | None) -> list[int]:
        """Takes out requests, or all with None; returns the rows of those that stay, as they were
        numbered."""
        gone = self._requests if requests is None else requests
        staying = [row for row, one in enumerate(self._requests) if one not in gone]
        self._requests = [self._requests[row] for row in staying]
        return staying
