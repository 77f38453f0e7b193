"""The input processor, which turns prompts, conversations and params into an engine's requests."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from outpace import arguments
from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.request import MultiModalInputs
from outpace.core.text_decoder import TextDecoder
from outpace.core.unicode import check_unicode
from outpace.core.values import number, shown
from outpace.engine.request import EngineRequest
from outpace.errors import ConfigError, OutpaceError, ParamsError, PromptError, PromptTooLong
from outpace.forms import contradictions
from outpace.forms.grammars import Grammar, Grammars
from outpace.inputs import chats
from outpace.inputs.chats import Conversation, EndTokens
from outpace.inputs.images import ImagePrompts, Processed
from outpace.inputs.prompts import (
    ChatIds,
    Prompt,
    SourceReader,
    check_text,
    is_text,
    processed,
    split_images,
    split_processed,
    token_ids_of,
    unwrapped,
)
from outpace.targets.hf.generating import generation, processors
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.loading.loaded import End, LoadedModel
from outpace.targets.hf.tokenizer import SharedTokenizer, tokenized
from outpace.verify.base import Rule

SEED_STEP = 0x9E3779B97F4A7C15
"""How far apart the seeds of the n texts of one request are: any odd number, since streams hash
the seed."""


class InputProcessor:
    """Makes requests for one loaded model, and refuses what it cannot serve.

    defaults: what unset options of a request mean, by the model's own generation_config.
    max_length: tokens of a prompt and its text together. decoder: makes text of tokens; None
    without a tokenizer. ends: the tokens that end texts.
    """

    def __init__(self, loaded: LoadedModel, max_length: int, own_config: bool) -> None:
        """own_config: whether the model's generation_config is asked."""
        self._loaded = loaded
        self.max_length = max_length
        model: Any = loaded.model
        self._own: Any = model.generation_config if own_config else None
        if self._own is not None:
            generation.check(self._own)
        self.defaults = {} if self._own is None else loaded.defaults
        arguments.check_defaults(self.defaults)
        self.ends = EndTokens(loaded)
        self._grammars: dict[tuple[int, ...], Grammars] = {}  # by the tokens that end a text
        self.decoder = None if loaded.tokenizer is None else TextDecoder(loaded.tokenizer)
        self._shared = SharedTokenizer(loaded.tokenizer)
        reads_sources = is_encoder_decoder(loaded.model)
        self._sources = SourceReader(loaded, self.token_ids) if reads_sources else None
        self.images = ImagePrompts(loaded, self._shared)
        self.takes_predictions = False
        """Whether the drafter looks into `SamplingParams.prediction`."""

    def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns a text's token ids."""
        self._needs_tokenizer("a text prompt")
        check_text(text)
        return self._shared.ids(text, add_special_tokens=add_special_tokens)

    def chat_prompt(
        self, /, messages: Conversation, files: bool = True, **for_template: Any
    ) -> Prompt:
        """Returns the prompt that a chat template makes of one conversation: token ids or, with
        images, what the processor makes of it.

        files: whether images may be files. for_template: what else the chat template is given, such
        as ``tools``.
        """
        tokenizer, given = self._needs_tokenizer("a chat"), chats.messages_of(messages)
        if self._loaded.processor is not None:
            return self._illustrated(given, files, **for_template)
        with self._shared.lock:
            text = chats.rendered(tokenizer, self._loaded.name, given, **for_template)
            ends = self.ends.of_chats(for_template.get("chat_template"))
        return ChatIds(self._shared.ids(text, add_special_tokens=False), ends)

    def _illustrated(self, given: Conversation, files: bool, /, **for_template: Any) -> Prompt:
        """As `chat_prompt`, for a model with a processor. Others may use the tokenizer while images
        are decoded and processed, and while a long text without any is tokenised."""
        with self._shared.lock:
            made = self.images.rendered(given, **for_template)
            ends = self.ends.of_chats(for_template.get("chat_template"))
        if not made.images:
            return ChatIds(self._shared.ids(made.text, add_special_tokens=made.special), ends)
        pixels = self.images.decoded(made.images, files)
        prompt = self.images.prompt(made.text, pixels, add_special_tokens=made.special)
        prompt.ends = ends
        return prompt

    def all_ends(self) -> tuple[End, ...]:
        """Returns the tokens that end texts, and those that end answers only, with who says so."""
        with self._shared.lock:
            return self.ends.described()

    def ends_of(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the tokens that end a text after a prompt: more of them in a chat."""
        if isinstance(prompt, ChatIds) and prompt.ends is None:
            with self._shared.lock:
                return self.ends.of_chats()
        ends = prompt.ends if isinstance(prompt, (ChatIds, Processed)) else None
        return self.ends.of_texts if ends is None else ends

    def chat_ids(self, /, messages: Conversation, **for_template: Any) -> list[int]:
        """Returns the token ids of `chat_prompt`."""
        return token_ids_of(self.chat_prompt(messages, **for_template))

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        streaming: bool = False,
        priority: float = 0,
        continues: bool | None = None,
        shown: Collection[str] = (),
        keep_cached: bool = True,
    ) -> list[EngineRequest]:
        """Returns the ``n`` requests of one prompt. streaming: pieces of their texts are wanted
        while they grow. priority: the smallest joins the batch first, where that is the order.
        continues, shown: whether their texts go on from the prompt's, and which special tokens they
        hold all the same (`LLM.requests`). keep_cached: as in `EngineRequest`."""
        priority = number("priority", priority, -math.inf, math.inf, closed=True)
        ends = self.ends_of(prompt)
        source, media = None, None
        continues = is_text(prompt) if continues is None else continues
        if self._sources is not None:
            source, ids = self._sources(prompt)
            self._check_length(ids)
        else:
            ids, media = self.read(prompt)
        resolved = params.resolve(self.defaults)
        room = self.max_length - len(ids)
        if self._own is not None:
            device = self._loaded.device
            encoded = None if source is None else source.token_ids
            resolved = generation.completed(
                self._own, params, resolved, ids, ends, room, device, encoded
            )
        decoder = self.decoder
        if decoder is not None and shown:
            decoder = decoder.with_special_tokens(shown)
        resolved, stop_names = self._with_named_stops(resolved, decoder)
        options, most = self.row_options(resolved, ends), min(resolved.max_tokens or room, room)
        contradictions.check(options, ids, self._loaded.vocabulary, most)
        prediction = self._predicted(params.prediction)
        group = object() if params.n > 1 else None
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return [
            EngineRequest(
                prompt_ids=ids,
                options=options.for_another_row(),
                seed=(seed + index * SEED_STEP) % (1 << 63),
                max_tokens=most,
                eos_ids=ends,
                decoder=decoder,
                stop_names=stop_names,
                continues=continues and source is None,  # a decoder's text is one of its own
                streaming=streaming,
                group=group,
                source=source,
                tag=params.tag,
                prediction=prediction,
                priority=priority,
                media=media,
                keep_cached=keep_cached,
            )
            for index in range(params.n)
        ]

    def _predicted(self, given: str | Sequence[int] | None) -> Sequence[int]:
        """The tokens of a text that is expected; ``ParamsError`` where nobody looks into it."""
        if given is None:
            return ()
        if not self.takes_predictions:
            raise ParamsError(
                "prediction is a text from which some look-ups draft, and none of them drafts "
                "here: use method 'auto', 'suffix' or 'ngram', or leave it out."
            ).about("prediction")
        ids = self.token_ids(given, add_special_tokens=False) if isinstance(given, str) else given
        if len(ids) > self.max_length:
            raise ParamsError(
                f"prediction has {len(ids)} tokens, and prompt and text have {self.max_length} "
                "together at most: give the part that you expect."
            ).about("prediction")
        arguments.check_ids("prediction", ids, self._loaded.config.vocab_size)
        return ids

    def all_requests(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        keep_cached: bool = True,
    ) -> list[list[EngineRequest]]:
        """Returns the requests of several prompts, those of each with its own params.

        Raises what `requests` and `check_processors` do, with the number of a prompt that is to
        blame.
        """
        groups = []
        for position, (prompt, options) in enumerate(zip(prompts, params, strict=True), 1):
            try:
                groups.append(self.requests(prompt, options, keep_cached=keep_cached))
            except PromptError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {position} of {len(prompts)}: {error}") from error
        self.check_processors(params, groups)
        return groups

    def check_processors(
        self, params: Sequence[SamplingParams], groups: Sequence[Sequence[EngineRequest]]
    ) -> None:
        """Raises ``ConfigError`` for a logits processor with a memory. Params that several prompts
        share are tried out with the first of them."""
        pairs = {
            id(options): (options, group) for options, group in zip(params, groups, strict=True)
        }
        for options, group in pairs.values():
            prompt = torch.tensor([group[0].prompt_ids], device=self._loaded.device)
            processors.check(options.logits_processors, prompt, self._loaded.vocabulary)

    def second_copy_token_ids(self, rule: Rule) -> list[int]:
        """Returns the tokens of the text between the two copies of the draft, for a rule that has
        the draft scored twice."""
        text = rule.needs.second_copy_prompt
        if text is None:
            return []
        tokenizer = self._needs_tokenizer(f"verify={rule.name!r}")
        ids = tokenized(tokenizer, text, add_special_tokens=False)
        if not ids:
            raise ConfigError(
                f"verify={rule.name!r} is given {shown(text)}, of which the tokenizer makes no "
                "token: give another text."
            )
        return ids

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of one prompt; ``PromptError`` for one that cannot be continued.

        Of an encoder-decoder, those that the encoder reads.
        """
        if self._sources is not None:
            return list(self._sources(prompt)[0].token_ids)
        return self.read(prompt)[0]

    def read(self, prompt: Prompt) -> tuple[list[int], MultiModalInputs | None]:
        """Returns the token ids of one prompt, and what a processor made of its images, if there
        are any; ``PromptError`` for a prompt that cannot be continued."""
        prompt, images = split_images(prompt)
        if images:
            prompt = self._processed(prompt, images)
        if processed(prompt):
            ids, inputs = split_processed(prompt)  # type: ignore[arg-type]
        else:
            found, inputs = unwrapped(prompt), {}
            ids = self.token_ids(found) if isinstance(found, str) else found
        self._check_ids(ids, made=is_text(prompt) or isinstance(prompt, ChatIds))
        given = prompt.given if isinstance(prompt, Processed) else None
        return ids, self.images.media(ids, inputs, given=given)

    def _processed(self, prompt: Prompt, images: Sequence[Any]) -> Prompt:
        """What the processor makes of a text and its images."""
        text = unwrapped(prompt)
        if not isinstance(text, str):
            raise PromptError(
                "images come with a text, in which the processor gives them their places, not with "
                "token ids: give the text, or what the processor returns."
            )
        check_unicode("the prompt", text)
        return self.images.processed(text, images)

    def _check_ids(self, ids: Sequence[int], made: bool) -> None:
        """Raises ``PromptError`` for token ids that cannot be continued. made: by our tokenizer."""
        if not ids:
            raise PromptError("the prompt is empty: give at least one token.")
        top = self._loaded.config.vocab_size
        beyond = next((i for i in ids if not 0 <= i < top), None)
        if beyond is not None and made:  # tokens were added, and the weights not resized
            token = self._loaded.tokenizer.convert_ids_to_tokens(beyond)
            raise PromptError(
                f"{shown(token)} in the prompt is token {beyond} of the tokenizer, and "
                f"{self._loaded.name} has weights for {top} tokens: leave it out, or give the "
                "tokenizer that the model was saved with."
            )
        if beyond is not None:
            raise PromptError(f"prompt token ids must be whole numbers in [0, {top}).")
        self._check_length(ids)

    def _check_length(self, ids: Sequence[int]) -> None:
        if len(ids) >= self.max_length:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_length}, of "
                "which one must be left for the text: shorten the prompt."
            )

    def _with_named_stops(
        self, params: SamplingParams, decoder: TextDecoder | None
    ) -> tuple[SamplingParams, dict[int, str]]:
        """Returns resolved params with the tokens that its stop strings name, and these strings: a
        special token has no text in which a string could be found. decoder: the text's."""
        if params.stop_strings:
            self._needs_tokenizer("a stop string")
        if decoder is None or not params.skip_special_tokens:
            return params, {}
        named = decoder.named_by(params.stop_strings)
        tokens = dict.fromkeys((*params.stop_token_ids, *named))
        return replace(params, stop_token_ids=tuple(tokens)), named

    def row_options(
        self, params: SamplingParams, eos_ids: Sequence[int] | None = None
    ) -> RowOptions:
        """Returns the row options of resolved params, with every word as token ids.

        eos_ids: the tokens that end the text; unset: those that end any text."""
        words = {tuple(word) for word in params.bad_words_ids or ()}
        for word in params.bad_words or ():
            words |= self._spellings(word)
        named = {
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_ids": [token for word in words for token in word],
            "stop_token_ids": params.stop_token_ids,
        }
        for name, tokens in named.items():
            arguments.check_ids(name, tokens, self._loaded.vocabulary)
        ends_text = self.ends.of_texts if eos_ids is None else eos_ids
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else ends_text)}
        form = params.structured_outputs
        mask = None if form is None else self._grammar(form, ends_text).copy()
        return RowOptions(params, tuple(sorted(words)), tuple(sorted(ends)), mask)

    def _spellings(self, word: str) -> set[tuple[int, ...]]:
        """The token ids of a forbidden word, at the beginning of a text and after a space;
        ``ParamsError`` for one that the tokenizer leaves out altogether."""
        self._needs_tokenizer("bad_words")
        found = {tuple(self.token_ids(text, False)) for text in (word, " " + word)} - {()}
        if not found:
            raise ParamsError(
                f"bad_words holds {word!r}, of which the tokenizer makes no token: leave it out."
            ).about("bad_words")
        return found

    def is_special(self, word: str) -> bool:
        """Returns whether a word is a special token, which texts leave out."""
        return self.decoder is not None and self.decoder.is_special(word)

    def check_form(self, form: Mapping[str, Any]) -> None:
        """Raises ``ParamsError`` for a form that no text can be made to follow."""
        self._grammar(form, self.ends.of_texts)

    def _grammar(self, form: Mapping[str, Any], ends: Sequence[int]) -> Grammar:
        """The grammar of a form; ``ParamsError`` for one that is not sound. ends: the tokens that
        end the text."""
        ((kind, value),) = form.items()
        try:
            return self._grammars_with(tuple(ends)).compile(kind, value)
        except OutpaceError as error:
            error.about("structured_outputs")
            raise

    def _grammars_with(self, ends: tuple[int, ...]) -> Grammars:
        if ends not in self._grammars:
            loaded = self._loaded
            made = Grammars(loaded.tokenizer, loaded.vocabulary, ends)
            self._grammars.setdefault(ends, made)  # another thread may have been here
        return self._grammars[ends]

    def _needs_tokenizer(self, what: str) -> Any:
        if self._loaded.tokenizer is None:
            raise PromptError(
                f"{self._loaded.name} came without a tokenizer, which {what} needs: pass "
                "tokenizer=, or give token ids."
            )
        return self._loaded.tokenizer
