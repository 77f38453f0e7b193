"""outpace as a model of EleutherAI's lm-evaluation-harness.

    python -m outpace.lm_eval run --model outpace --model_args pretrained=M draft=D --tasks gsm8k

is the harness's own command line, to which this module has added the model: the harness itself
looks for no models in other packages. In Python: ``import outpace.lm_eval``, then
``lm_eval.simple_evaluate(model="outpace", ...)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.core.extras import extra
from outpace.errors import ConfigError
from outpace.llm import LLM

_harness: Any = partial(extra, what="the model for lm-evaluation-harness", install="outpace[eval]")
_TemplateLM: Any = _harness("lm_eval.api.model", called="lm-eval").TemplateLM
_harness("lm_eval.models")  # its own first: it registers them only while there are no others
_register: Any = _harness("lm_eval.api.registry", called="lm-eval").register_model

UNASKED = ("cuda", "cuda:0")
"""What the harness says where nobody has named a device."""

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""A context and its continuation: as texts, under which the harness caches the answer, and as token
ids."""


@_register("outpace")
class OutpaceLM(_TemplateLM):  # type: ignore[misc]
    """Scores texts by the target's plain logits, and writes texts with speculation."""

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        draft: str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        device: str | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """pretrained: as ``LLM`` takes it; unset: the bundled model. draft: a smaller model or a
        trained head, short for ``speculative_config={"model": ...}``. device: `UNASKED` is a GPU
        where there is one. batch_size: texts that are written at once; "auto", and
        "auto:N": 16, or max_batch_size. The others that are named here are those of the harness's
        class "hf"; arguments: those of ``LLM``."""
        super().__init__()
        if draft is not None and speculative_config is not None:
            raise ConfigError("the drafter was given twice: put draft into speculative_config.")
        config = speculative_config if draft is None else {"model": draft}
        rows = max_batch_size if str(batch_size).startswith("auto") else int(batch_size)
        if rows is not None:
            arguments.setdefault("max_num_seqs", rows)
        if device is not None and device not in UNASKED:
            arguments["device"] = device
        self.llm = LLM(pretrained, speculative_config=config, max_model_len=max_length, **arguments)
        if self.llm.tokenizer is None:
            raise ConfigError(f"{self.llm.target.name} has no tokenizer, which the harness needs.")
        self.tokenizer = self.llm.tokenizer
        self.max_length = self.llm.max_model_len
        self.max_gen_toks = max_gen_toks
        self._add_bos = add_bos_token
        tokens = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        self._begin = next((token for token in tokens if token is not None), None)
        self._for_template = dict(chat_template_args or {})
        self._utils = _harness("lm_eval.models.utils")

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored from its beginning, as with "hf"."""
        if self._begin is None:
            raise ConfigError(
                f"the tokenizer of {self.llm.target.name} has no token for the beginning or the "
                "end of a text, after which texts are scored: name one as prefix_token_id."
            )
        return int(self._begin)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns a text's token ids, without a second token for its beginning."""
        if add_special_tokens is None:
            begin = "" if self._begin is None else self.tokenizer.decode([self._begin])
            begun = string.startswith(begin or "\0")
            add_special_tokens = False if begun else self._add_bos
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))

    # -- scoring ---------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **rest: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether it is the greedy one: of
        none at all 0, and yes, as vLLM's class says.

        Answers to one question often differ in their last token only: such texts are read once.
        """
        longest_after = max((len(after) for _, _, after in requests), default=0)
        if longest_after > self.max_length:
            raise ConfigError(
                f"a continuation has {longest_after} tokens, and the context of "
                f"{self.llm.target.name} has {self.max_length}: leave the task out."
            )
        texts = [(before + after)[-(self.max_length + 1) :] for _, before, after in requests]
        longest: dict[tuple[int, ...], int] = {}
        for text, (_, _, after) in zip(texts, requests, strict=True):
            read = tuple(text[:-1])
            longest[read] = max(longest.get(read, 0), len(after))
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(texts)), key=lambda index: (-len(texts[index]), texts[index]))
        known: tuple[tuple[int, ...], Tensor] | None = None
        for index in self._shown(order, "scoring", disable_tqdm):
            key, _, after = requests[index]
            read = tuple(texts[index][:-1])
            if after and (known is None or known[0] != read):
                known = read, self._logprobs(read, longest[read])
            found[index] = _answer(known[1], after) if after and known else (0.0, True)
            if key is not None:  # parts of a text that is scored whole are nobody's answer
                self.cache_hook.add_partial("loglikelihood", key, found[index])
        return [found[index] for index in range(len(texts))]

    def _logprobs(self, read: Sequence[int], last: int) -> Tensor:
        """``[last, V]`` after each of the last tokens of a text, read in one plain forward."""
        found: list[Tensor] = []

        def score() -> None:
            found.append(self.llm.engine.target.forward_uncached(read, last))

        self.llm.engine.run_between_rounds(score)
        kind = torch.promote_types(found[0].dtype, torch.float32)
        return found[0].to(kind).log_softmax(-1)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each text, in windows as long as the context."""
        windows = _harness("lm_eval.utils")
        totals = []
        for (text,) in [request.args for request in requests]:
            rolling = windows.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            pairs = [(None, *windows.make_disjoint_window(each)) for each in rolling]
            parts = self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)
            totals.append(sum(logprob for logprob, _ in parts))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    # -- writing ---------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that follows each context, up to the first of its stop strings."""
        prompts, params, stops = [], [], []
        usual = self.llm.input_processor.defaults.get("temperature")
        for context, given in [request.args for request in requests]:
            options = self._utils.normalize_gen_kwargs(given, self.max_gen_toks)
            stop = [each for each in options.pop("until") or [] if each]
            room = self.max_length - options["max_gen_toks"]
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks is {options['max_gen_toks']}, and the context of "
                    f"{self.llm.target.name} has {self.max_length} tokens: ask for fewer."
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(ids[-room:])
            params.append(_sampling(options, stop, usual))
            stops.append(stop)
        outputs = self.llm.generate_each(prompts, params)
        texts: list[str] = []
        for output in self._shown(outputs, "generating", disable_tqdm, len(prompts)):
            context, given = requests[len(texts)].args
            end = self._utils.postprocess_generated_text(output.text, stops[len(texts)], None)
            texts.append(end)
            self.cache_hook.add_partial("generate_until", (context, given), end)
        return texts

    @staticmethod
    def _shown(
        items: Iterable[Any], what: str, hidden: bool, total: int | None = None
    ) -> Iterable[Any]:
        shown: Iterable[Any] = _harness("tqdm").tqdm(items, desc=what, disable=hidden, total=total)
        return shown

    # -- chats and records -------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.target.name).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._for_template,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """Returns what the harness writes with its results."""
        return {"model_computed": str(self.llm.describe()), "method": self.llm.config.method}


def _answer(logprobs: Tensor, after: Sequence[int]) -> tuple[float, bool]:
    """The log-probability of a continuation, and whether greedy decoding would write it."""
    own = logprobs[-len(after) :]  # [T, V]
    tokens = torch.tensor(after, device=own.device)
    greedy = bool((own.argmax(-1) == tokens).all())
    return float(own.gather(1, tokens[:, None]).sum()), greedy


def _sampling(
    options: Mapping[str, Any], stop: Sequence[str], usual: float | None
) -> dict[str, Any]:
    """Returns ``SamplingParams`` for what a task asks of `generate_until`. usual: the temperature
    that the model's generation_config names."""
    left = dict(options)
    longest, drawn = left.pop("max_gen_toks"), left.pop("do_sample", False)
    seed = int(torch.randint(2**63 - 1, ())) if drawn else None  # the harness seeds torch
    if not drawn:
        left["temperature"] = 0.0
    elif left.get("temperature") is None:  # as transformers does it
        left["temperature"] = 1.0 if usual is None else usual
    return {**left, "max_tokens": longest, "stop": list(stop), "seed": seed}


def main() -> None:
    """Runs the harness's command line."""
    _harness("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
