"""Speculation inside transformers: what ``model.generate`` takes as ``custom_generate``.

>>> from outpace import hf
>>> faster = hf.speculative("a/smaller-model")
>>> model.generate(**inputs, custom_generate=faster, max_new_tokens=100)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from outpace.building import Speculation
from outpace.config import DEFAULT_TOKENS, SpeculativeConfig
from outpace.core.faults import ProcessorFault
from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.request import EncoderInputs
from outpace.core.stats import Metrics
from outpace.draft.registry import find_drafter
from outpace.engine.request import EngineRequest
from outpace.errors import ConfigError
from outpace.heads.base import Head
from outpace.heads.checkpoint import find_head_kind
from outpace.llm import LLM
from outpace.methods.models.loading import OF_LOADING, load_draft_model
from outpace.targets.hf.generating import criteria, processors
from outpace.targets.hf.generating.calls import (
    arguments_of_generate,
    check_config,
    media_of,
    pixels_of,
    unpadded,
)
from outpace.targets.hf.generating.processors import AsGenerate, RowProcessors, of_row, split
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.loading.loaded import LoadedModel, check_same_vocabulary, check_tokenizer
from outpace.targets.hf.model_snapshot import ModelSnapshot, recorded_parts
from outpace.targets.hf.seq2seq.inputs import of_decoder, sources_of


def speculative(
    drafter: str | os.PathLike[str] | nn.Module | None = None,
    *,
    method: str | None = None,
    num_speculative_tokens: int | Literal["auto"] = DEFAULT_TOKENS,
    verify: str | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    drafter_tokenizer: Any = None,
    **options: Any,
) -> Speculative:
    """Returns what ``generate`` takes as ``custom_generate``.

    drafter: the smaller model, by path, hub name or loaded, or the method's trained head (also
    accepted as ``model``, its name in ``speculative_config``). method: as in
    ``speculative_config``; unset, look-ups draft where that pays, with a drafter if there is one
    ("auto"); "none" decodes plainly.
    num_speculative_tokens: tokens to draft per round; "auto" chooses. verify: a rule's name; unset:
    the one that suits the drafter. options: the drafter's own. The tokenizers are only needed where
    the models' vocabularies differ in size.

    ``generate``'s own options are honoured: processors, criteria, streamer, padding, seeds drawn
    from torch's generator. What cannot be is refused with a ``ConfigError`` that names it. Three
    things are otherwise than in plain ``generate``:

    - A cache that is handed over stays empty: the text is read into slots.
    - transformers takes ``stop_strings`` only without a ``custom_generate`` function, from which
      it withholds the tokenizer. The same is had with
      ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.
    - A row that has ended is filled with ``pad_token_id``, also where ``generate`` would go on
      writing after the end because no eos token is set.

    The result keeps one set of caches, and the drafter, for the model that it was last called with.
    """
    model = options.pop("model", None)
    if drafter is not None and model is not None:
        raise ConfigError("the drafter was given twice: drop 'model'.")
    drafter = model if drafter is None else drafter
    config = dict(options)
    if num_speculative_tokens != DEFAULT_TOKENS:  # transformers' name may be among the options
        config["num_speculative_tokens"] = num_speculative_tokens
    if verify is not None:
        config["verify"] = verify
    if method is None:
        named = config if drafter is None else {**config, "model": drafter}
        method = SpeculativeConfig.from_dict(named).method
    config["method"] = method
    found = Speculative(config, drafter, tokenizer, drafter_tokenizer)
    found.check()
    return found


class Speculative:
    """A ``custom_generate`` function. ``metrics``: the costs of each row of the last call."""

    def __init__(
        self,
        config: Mapping[str, Any],
        drafter: str | os.PathLike[str] | nn.Module | None = None,
        tokenizer: Any = None,
        drafter_tokenizer: Any = None,
    ) -> None:
        self.metrics: list[Metrics] = []
        self._config = dict(config)
        self._drafter = drafter
        self._tokenizers = (tokenizer, drafter_tokenizer)
        self._loaded: LoadedModel | None = None
        self._llm: LLM | None = None
        self._snapshots: list[Hashable] = []  # of the models that it was made for

    def check(self) -> None:
        """Raises ``ConfigError`` for options that make no sense. Nothing is loaded."""
        for tokenizer in self._tokenizers:
            check_tokenizer(tokenizer)
        self._speculation()

    def _speculation(self) -> Speculation:
        """Who drafts, with all options as the caller gave them."""
        named = {} if self._drafter is None else {"model": self._drafter}
        return Speculation.of(SpeculativeConfig.from_dict({**self._config, **named}))

    @property
    def _runs_a_model(self) -> bool:
        """Whether what drafts is a language model, and not a trained head."""
        if isinstance(self._drafter, Head) or find_head_kind(self._drafter) is not None:
            return False  # "auto" takes either
        options = {one.name for one in fields(find_drafter(self._config["method"]).Options)}
        return options.issuperset(OF_LOADING)

    @property
    def _handed_over(self) -> tuple[nn.Module, ...]:
        """The drafter, where it came as a loaded module and stays the caller's."""
        return (self._drafter,) if isinstance(self._drafter, nn.Module) else ()

    @property
    def _own_options(self) -> dict[str, Any]:
        """The config without what only says how to load a draft model."""
        left_out = OF_LOADING if self._runs_a_model else ()
        return {name: value for name, value in self._config.items() if name not in left_out}

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        """Returns what ``generate`` returns."""
        asked = arguments_of_generate()
        streamer = asked.get("streamer") if streamer is None else streamer
        if synced_gpus or asked.get("synced_gpus") or asked.get("assistant_model") is not None:
            raise ConfigError(
                "generate's synced_gpus and assistant_model do not go with outpace.hf.speculative: "
                "drop the first, and give the second to speculative()."
            )
        check_config(generation_config)
        reads = is_encoder_decoder(model)
        media = {} if reads else media_of(model, input_ids, model_kwargs)
        shown = pixels_of(model, media, asked)
        prompts = unpadded(input_ids, of_decoder(model, model_kwargs) if reads else model_kwargs)
        sources: list[EncoderInputs | None] = [None] * len(prompts)
        if reads:
            sources = [*sources_of(model, len(prompts), model_kwargs, asked)]
        with _evaluating(model, *self._handed_over):
            llm = self._engine_for(model, len(prompts))
            call = _Call(
                generation_config, logits_processor, stopping_criteria, input_ids, prompts, sources
            )
            requests = call.requests(llm.target.vocabulary, llm.max_model_len)
            for request in requests:
                request.media = llm.input_processor.images.media(request.prompt_ids, media, shown)
            columns = _Columns(requests, call.padding, streamer)
            self._decode(llm, requests, columns)
        self.metrics = [request.metrics for request in requests]
        sequences = torch.cat([input_ids, columns.tensor(input_ids)], 1)
        if generation_config.return_dict_in_generate:
            output = GenerateEncoderDecoderOutput if reads else GenerateDecoderOnlyOutput
            return output(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    @staticmethod
    def _decode(llm: LLM, requests: Sequence[EngineRequest], columns: _Columns) -> None:
        engine = llm.engine
        for request in requests:
            engine.add(request)
        try:
            while any(request.finish_reason is None for request in requests):
                engine.step()
                for request in requests:
                    if isinstance(request.error, ProcessorFault) and request.error.__cause__:
                        raise request.error.__cause__  # as generate lets it through
                    if request.error is not None:  # generate has no way to return half a batch
                        raise request.error
                columns.show()
        finally:
            for request in requests:
                if request.finish_reason is None:
                    engine.remove(request)
            engine.flush()
        columns.end()

    def _engine_for(self, model: nn.Module, rows: int) -> LLM:
        llm = self._llm
        if llm is None or not self._suits(llm, model, rows):
            llm = self._llm = None  # its caches go before the new ones come
            target = LoadedModel(model, None, type(model).__name__)
            config = dict(self._config)
            if self._drafter is not None:
                given = self._drafter_for(target) if self._runs_a_model else self._drafter
                config = {**self._own_options, "model": given}
            llm = LLM(
                target,
                speculative_config=config,
                max_num_seqs=rows,
                generation_config="none",
                # By the next call the caller may have trained the models.
                enable_prefix_caching=False,
            )
            self._llm, self._snapshots = llm, self._snapshots_with(model)
        return llm

    def _suits(self, llm: LLM, model: nn.Module, rows: int) -> bool:
        """Whether an engine was made for this model and the drafter as they are now, and has room
        for ``rows`` rows."""
        same = llm.target.model is model and self._snapshots == self._snapshots_with(model)
        return same and rows <= llm.engine.target.max_rows

    def _snapshots_with(self, model: nn.Module) -> list[Hashable]:
        """The snapshots of a target and of the draft model, where the caller can change it."""
        models = (model, *(self._handed_over if self._runs_a_model else ()))
        return [(ModelSnapshot.of(each), recorded_parts(each)) for each in models]

    def _drafter_for(self, target: LoadedModel) -> LoadedModel:
        """Returns the drafter, which is loaded once; ``VocabularyMismatch`` unless its tokens are
        the target's."""
        own_device = self._config.get("device")
        if self._loaded is None or not (own_device or self._loaded.device == target.device):
            options = replace(self._speculation().options, tokenizer=self._tokenizers[1])
            self._loaded = load_draft_model(options, target)
        theirs = self._tokenizers[1] or self._loaded.tokenizer
        check_same_vocabulary(
            LoadedModel(target.model, self._tokenizers[0], target.name),
            LoadedModel(self._loaded.model, theirs, self._loaded.name),
        )
        return replace(self._loaded, tokenizer=None, processor=None, same_tokens=True)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of ``generate``, row by row."""

    config: GenerationConfig
    processors: Sequence[Any]
    criteria: Sequence[Any]
    input_ids: Tensor
    prompts: list[list[int]]
    sources: Sequence[EncoderInputs | None]

    @property
    def padding(self) -> int | None:
        pad = self.config._pad_token_tensor
        return None if pad is None else int(pad)

    def requests(self, vocabulary: int, context: int) -> list[EngineRequest]:
        """Returns a request for each row."""
        processors.check(self.processors, self.input_ids, vocabulary)
        criteria.check(self.criteria, self.input_ids)
        rows = range(len(self.prompts))
        # From torch's generator, so that torch.manual_seed repeats a text, however much is drafted
        # by then; greedy text needs none.
        seeds: list[int | None] = [None] * len(rows)
        if self.config.do_sample:
            seeds = torch.randint(2**63 - 1, (len(rows),)).tolist()
        return [self._request(row, seed, context) for row, seed in enumerate(seeds)]

    def _request(self, row: int, seed: int | None, context: int) -> EngineRequest:
        prompt = self.prompts[row]
        view = AsGenerate(self.input_ids[row], len(prompt))
        limit = self._limit()
        if len(prompt) + limit > context:
            raise ConfigError(
                f"row {row} has {len(prompt)} tokens and may get {limit} more, but the model has "
                f"positions for {context}: lower max_length or max_new_tokens."
            )
        return EngineRequest(
            prompt_ids=prompt,
            options=RowOptions(self._params(row, view, seed)),
            seed=seed or 0,
            max_tokens=limit,
            eos_ids=self._eos_ids(),
            stop_when=self._stop_when(view),
            source=self.sources[row],
        )

    def _params(self, row: int, view: AsGenerate, seed: int | None) -> SamplingParams:
        left, options = split(self.processors) if self.config.do_sample else (self.processors, {})
        own = [of_row(processor, row, len(self.prompts)) for processor in left]
        options.setdefault("temperature", 1.0 if self.config.do_sample else 0.0)
        joined = (RowProcessors(own, view),) if own else ()
        return SamplingParams(**options, seed=seed, logits_processors=joined).resolve({})

    def _limit(self) -> int:
        ends = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        if not ends:
            raise ConfigError("generate was given no length: set max_new_tokens or max_length.")
        return max(1, min(ends) - self.input_ids.shape[1])  # generate writes one token at least

    def _eos_ids(self) -> tuple[int, ...]:
        ends = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        return tuple(int(token) for tokens in ends for token in tokens)

    def _stop_when(self, view: AsGenerate) -> Callable[[list[int]], bool] | None:
        other = [c for c in self.criteria if type(c) not in criteria.OF_THE_ENGINE]
        return criteria.RowCriteria(other, view) if other else None


class _Columns:
    """The new tokens of all rows as one table, in which rows that have ended are filled up.

    A column is the tokens that ``generate`` would make in one step: a streamer is given columns.
    """

    def __init__(
        self, requests: Sequence[EngineRequest], padding: int | None, streamer: Any
    ) -> None:
        self._requests = requests
        self._padding = padding
        self._streamer = streamer
        self._shown = 0

    def show(self) -> None:
        """Gives the streamer each column that is complete, as ``generate`` does: one per call."""
        if self._streamer is None:
            return
        longest = max(len(request.output_ids) for request in self._requests)
        growing = [len(r.output_ids) for r in self._requests if r.finish_reason is None]
        for column in range(self._shown, min([longest, *growing])):
            self._streamer.put(torch.tensor([self._at(r, column) for r in self._requests]))
            self._shown = column + 1

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    def tensor(self, like: Tensor) -> Tensor:
        """Returns the table ``[B, longest]``, in the dtype and on the device of ``like``."""
        longest = max(len(request.output_ids) for request in self._requests)
        table = [[self._at(r, column) for column in range(longest)] for r in self._requests]
        return torch.tensor(table, dtype=like.dtype, device=like.device)

    def _at(self, request: EngineRequest, column: int) -> int:
        if column < len(request.output_ids):
            return request.output_ids[column]
        if self._padding is None:
            raise ConfigError(
                "the rows end at different lengths: set pad_token_id to fill them up."
            )
        return self._padding


@contextmanager
def _evaluating(*models: nn.Module) -> Iterator[None]:
    """Puts models into evaluation mode (no dropout), and afterwards each of their modules back."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
