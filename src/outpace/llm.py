"""The Python entry point: ``LLM``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from rich.console import Console
from rich.progress import track

from outpace import arguments
from outpace.arguments import EngineArgs, Params
from outpace.building import Speculation, build_engine, capture_of, load_target
from outpace.core.beam_params import BeamSearchParams
from outpace.core.options import takes
from outpace.core.params import SamplingParams
from outpace.core.progress import Progress, part, rising, silent
from outpace.core.values import folder as path_of
from outpace.engine.request import EngineRequest
from outpace.engine.verify_on_load import TRIAL, trial_prompts, verify_drafter, verify_invariance
from outpace.errors import ConfigError, OutpaceError, reason_of
from outpace.generation import BeamGeneration, Generation
from outpace.input_processor import InputProcessor
from outpace.inputs import chats
from outpace.inputs.chats import Conversation
from outpace.inputs.prompts import Prompt, listed
from outpace.outputs import BeamSearchOutput, Chunk, RequestOutput
from outpace.policy.base import FrozenController
from outpace.targets.cpu.threads import use_threads
from outpace.targets.describe import Description, describe
from outpace.targets.parallel.follower import follow_unless_first
from outpace.targets.parallel.load import SplitModel

BUNDLED = Path(__file__).parent / "bundled"
"""The small target, and the drafters that come with the package: a model and a head."""

_WARM_UP_DRAFT = 4
_LOADING, _OF_TARGET = 0.95, 0.7
"""The share of loading in what an `LLM` does before it is ready, and the target's share of that,
where something drafts."""


class LLM:
    """A causal language model with speculative decoding: faster, with the same distribution.

    Its arguments are those of `EngineArgs`, where each is explained (docs/options.md): the model,
    and all others by name.

    Several threads may call one ``LLM``: their texts are made in one batch, and each call gets its
    own.

    Raises subclasses of ``outpace.errors.OutpaceError``, which say what to do.

    >>> llm = LLM()                                                           # doctest: +SKIP
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=8))[0].text  # doctest: +SKIP
    """

    @takes(EngineArgs)
    def __init__(self, *given: Any, **named: Any) -> None:
        args = EngineArgs(*given, **named)
        if args.tensor_parallel_size > 1:
            follow_unless_first(args.tensor_parallel_size)
        use_threads(args.threads)
        bundled = BUNDLED if args.model is None else None
        self.config = arguments.speculation(args.speculative_config, bundled)
        speculation = Speculation.of(self.config)
        report = None if args.progress is None else rising(args.progress)
        share = 1.0 if self.config.method == "none" else _OF_TARGET

        def check_length(longest: int) -> None:
            args.context(longest)

        loading = None if report is None else part(report, 0.0, share * _LOADING)
        given_model = BUNDLED / "target" if args.model is None else args.model
        self.target = load_target(given_model, args, loading, check_length)
        try:
            self._make(args, speculation, report or silent, share)
        except BaseException:
            if isinstance(self.target, SplitModel) and self.target is not args.model:
                self.target.processes.close()  # else they would stay as long as the error does
            raise

    def _make(
        self, args: EngineArgs, speculation: Speculation, report: Progress, share: float
    ) -> None:
        """Builds the engine around the loaded target, and tries it out. share: of the progress of
        loading, that is over."""
        self.max_model_len = args.context(self.target.max_length)
        self.input_processor = InputProcessor(
            self.target, self.max_model_len, args.generation_config == "auto"
        )
        drafting = part(report, share * _LOADING, _LOADING)
        self.engine = build_engine(self.target, speculation, self.input_processor, args, drafting)
        self._keeps_all = bool(args.enable_prefix_caching)
        self.input_processor.images.keeps_images = self.engine.drafter.needs.images
        self.input_processor.takes_predictions = self.engine.drafter.capabilities.takes_predictions
        self._generation = Generation(self.engine)
        report("trying it out", _LOADING)
        if capture_of(args, self.target.device) is not None:
            self._prepare(rows=sorted({1, min(2, args.max_num_seqs)}))
        if args.batch_invariant:
            self.engine.run_between_rounds(self._verify_invariance)
        self._verify_drafter()
        report("ready", 1.0)

    def _verify_invariance(self) -> None:
        """Raises ``ConfigError`` where a token's logits depend on what else is in the pass."""
        verify_invariance(self.engine.target, self.target.name, self.target.vocabulary)

    def _verify_drafter(self) -> None:
        """Raises ``ConfigError`` for a drafter that was plainly made for another model."""
        room = self.max_model_len
        for drafter in self.engine.drafter.drafters_to_verify():
            prompts = trial_prompts(self.tokenizer, self.target.vocabulary, max(1, room // 2))
            asked = replace(TRIAL, max_tokens=min(TRIAL.max_tokens or 1, max(1, room // 4)))
            groups = self.input_processor.all_requests(
                prompts, [asked] * len(prompts), keep_cached=False
            )
            verify_drafter(self.engine, drafter, [each for group in groups for each in group])

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.target.tokenizer

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held: target_weights, target_cache, drafter_weights, drafter_cache."""
        return self.engine.memory

    def describe(self) -> Description:
        """Returns how the target and its drafter are computed: kernels, threads, dtype,
        quantisation, and why they are slow where they are; and which tokens end a text, with who
        says so. ``str()`` of it is one line."""
        drafter = self.engine.drafter
        return replace(
            describe(self.target, drafter.loaded),
            ends=self.input_processor.all_ends(),
            drafts_with=drafter.target_module or None,
            kv_cache_dtype=self.engine.target.kv_cache_dtype,
        )

    def save_drafter(self, folder: str | os.PathLike[str]) -> None:
        """Writes what the drafter has learned: one that learns online as ``"model"`` or ``--draft``
        take it, and what "suffix" and "recycling" know, as their ``"datastore"`` takes it.

        Raises ``ConfigError`` for a drafter that does not learn, and for what is no path.
        """
        path = path_of("folder", folder)
        self.engine.run_between_rounds(lambda: self.engine.drafter.save(path))

    def forget_texts(self) -> None:
        """Forgets the texts of earlier requests: those that look-ups draft from ("suffix",
        "recycling" and what is built on them), and what target and draft model or head keep cached
        of them (``enable_prefix_caching``). That is for a measurement in which a prompt comes
        again, or where one user's text shall not speed up another's. What "auto" has learned from
        them stays: how long such texts become, and how much a draft model saves in them.

        Raises ``ConfigError`` for a drafter that learns online.
        """

        if any(self.engine.drafter.learners()):
            raise ConfigError(
                "what a drafter has learned online from a text cannot be taken back: load the "
                "model again, or leave 'online' out."
            )
        self._forget()

    def _forget(self) -> None:
        def forget() -> None:
            self.engine.drafter.forget_texts()
            self.engine.target.forget_texts()

        self.engine.run_between_rounds(forget)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording so far, in target and drafter together."""
        return self.engine.compile_seconds

    def _prepare(self, rows: Sequence[int]) -> None:
        """Compiles or records what most rounds will need; ``ConfigError`` if that cannot be."""
        try:
            self._warm_up(rows)
        except OutpaceError:
            raise
        except Exception as error:  # compilers raise all sorts
            reason = reason_of(error, named=True)
            raise ConfigError(
                f"{self.target.name} cannot be compiled or recorded ({reason}): use compile=False."
            ) from error

    def _warm_up(self, rows: Sequence[int]) -> None:
        """Generates in one row and in several, with and without a draft. These texts are nobody's:
        nothing is learned from them, and none is remembered."""
        prompt = [0] * min(8, self.max_model_len - 1)
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        self.engine.drafter.set_learning(False)
        with self.engine.override_parts(controller=FrozenController(self.engine.controller)):
            for count in rows:
                # Twice, since what is recorded is so when it comes the second time.
                for speculative in ("off", _WARM_UP_DRAFT) * 2:
                    self.generate([prompt] * count, replace(greedy, speculative=speculative))
        self.engine.drafter.set_learning(True)
        self._forget()

    # -- generating ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in order.

        prompts: one or several texts, lists of token ids, or dicts with one of the two as "prompt"
        or "prompt_token_ids"; also what a tokenizer returns, without its padding. For a
        vision-language model: dicts with "prompt" and "images" (PIL images or files), or, as in
        vLLM, "multi_modal_data"; or what its processor returns for one prompt. An encoder-decoder
        reads them with its encoder; what its decoder begins with, and audio, come in dicts with
        "encoder_prompt", "decoder_prompt" and "multi_modal_data". sampling_params: one for all, or
        one for each, as `SamplingParams` or a dict of its options; default: as the
        model's generation_config says. use_tqdm: shows a progress bar on standard error.

        Where a request's options turn out to contradict each other on the way, its text ends there
        with the finish reason "error"; if it was the only one, that is raised.
        """
        return self._generated(listed(prompts), sampling_params, use_tqdm)

    def _generated(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None,
        use_tqdm: bool,
        keep_cached: bool = False,
    ) -> list[RequestOutput]:
        outputs = self._each(prompts, sampling_params, keep_cached)
        return list(with_bar(outputs, len(prompts), shown=use_tqdm))

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields what `generate` returns, each output once it and those before it are done."""
        return self._each(listed(prompts), sampling_params, keep_cached=False)

    def _each(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None,
        keep_cached: bool,
    ) -> Iterator[RequestOutput]:
        params = arguments.paired(sampling_params, len(prompts))
        kept = keep_cached or self._keeps_all
        return self._generation.outputs(
            prompts, self.input_processor.all_requests(prompts, params, kept)
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Mapping[str, Any] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Returns, for each prompt in order, the most likely texts that a beam search finds: the
        same as transformers' ``generate(num_beams=..., do_sample=False)``.

        prompts: as `generate` takes them. Beams are decoded plainly, whatever speculative_config
        says: a beam search draws nothing, so no rule could verify drafts against a distribution. A
        search needs ``beam_width`` of the ``max_num_seqs`` rows, in a cache of its own. Raises
        ``ParamsError`` where there are not as many, and the error of a prompt that is alone.

        >>> llm.beam_search("Once upon a time", BeamSearchParams(beam_width=4))  # doctest: +SKIP
        """
        given = listed(prompts)
        searches = BeamGeneration(self.engine, self.input_processor).outputs(
            given, arguments.beams(params)
        )
        return list(with_bar(searches, len(given), shown=use_tqdm))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        keep_cached: bool = False,
    ) -> Iterator[Chunk]:
        """Yields pieces of the text, each a `Chunk`, as soon as they are safe: whole characters,
        and nothing that a stop string may still swallow. Together their ``text`` is the whole text.
        The last one has a ``finish_reason``.

        keep_cached: as for `requests`; True in a conversation that goes on.

        >>> llm = LLM(speculative_config={"method": "none"})
        >>> for chunk in llm.stream("Once upon a time", {"max_tokens": 6, "temperature": 0}):
        ...     print(chunk.text, end="", flush=True)
         there was a little girl named
        >>> chunk.finish_reason
        'length'
        """
        found = self.requests(prompt, sampling_params, streaming=True, keep_cached=keep_cached)
        return self._generation.chunks(found)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = False,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Returns the assistant's next turn, through the tokenizer's chat template.

        messages: ``[{"role": "user", "content": ...}, ...]``; a content is a text or a list of
        OpenAI's parts: of type "text", and for a vision-language model "image_url" (a data: URL or
        a file) or "image" (a PIL image or a file). Of a list of several conversations, the answers
        are a list. The next turn of one of the last few conversations reads only what is new
        (``enable_prefix_caching``).
        """
        given, several = chats.conversations(messages)
        prompts = [self.chat_prompt(conversation) for conversation in given]
        outputs = self._generated(prompts, sampling_params, use_tqdm, keep_cached=True)
        return outputs if several else outputs[0]

    def chat_ids(self, /, messages: Conversation, **for_template: Any) -> list[int]:
        """Returns the prompt's token ids for one conversation. What is generated from them is an
        answer, which ends where a turn of the conversation does (`LLM.describe`); from a copy of
        the list it is a text like any other.

        for_template: what else the chat template is given, such as ``tools`` or
        ``enable_thinking``; as ``chat_template`` another template than the model's.
        """
        return self.input_processor.chat_ids(messages, **for_template)

    def chat_prompt(
        self, /, messages: Conversation, files: bool = True, **for_template: Any
    ) -> Prompt:
        """Returns the prompt for one conversation, as `generate` takes it: its token ids or, with
        images, what the model's processor makes of it.

        files: whether images may be files of this machine. for_template: as for `chat_ids`.
        """
        return self.input_processor.chat_prompt(messages, files, **for_template)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of one prompt; ``PromptError`` for one that cannot be continued."""
        return self.input_processor.prompt_ids(prompt)

    def resolve(self, sampling_params: Params | None = None) -> SamplingParams:
        """Returns the params with each unset option as the model's generation_config says."""
        (params,) = arguments.paired(sampling_params, 1)
        return params.resolve(self.input_processor.defaults)

    def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns a text's token ids."""
        return self.input_processor.token_ids(text, add_special_tokens)

    def requests(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        streaming: bool = False,
        priority: float = 0,
        continues: bool | None = None,
        shown: Collection[str] = (),
        keep_cached: bool = False,
    ) -> list[EngineRequest]:
        """Returns the requests for one prompt, one for each of its texts, for callers who drive
        ``engine`` themselves, as the server does: `Engine.add` queues them, `Engine.step` runs a
        round.

        streaming: the text is needed on the way (`EngineRequest.new_text`). priority: with the
        scheduling policy "priority", the smallest joins first. continues: whether the text goes on
        from the prompt's, so that it may begin with a blank; unset: after a prompt that is a text,
        not after token ids, such as those of a chat. shown: special tokens that the text holds also
        where it leaves out all others. keep_cached: whether a later prompt will go on from this
        text, so that what is cached of it is kept where ``enable_prefix_caching`` is unset.
        """
        (params,) = arguments.paired(sampling_params, 1)
        kept = keep_cached or self._keeps_all
        requests = self.input_processor.requests(
            prompt, params, streaming, priority, continues, shown, kept
        )
        self.input_processor.check_processors([params], [requests])
        self.engine.check(requests[0])  # the others have the same options
        return requests


Item = TypeVar("Item")


def with_bar(items: Iterable[Item], total: int, *, shown: bool) -> Iterable[Item]:
    """Returns the items, and shows on standard error how many of ``total`` have come."""
    if not shown:
        return items
    return track(items, "generating", total=total, console=Console(stderr=True))
