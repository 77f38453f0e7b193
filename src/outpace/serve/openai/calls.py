"""From the body of a request to what the engine is asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.core.params import SamplingParams
from outpace.engine.request import EngineRequest
from outpace.errors import OutpaceError, ParamsError, PromptError, PromptTooLong
from outpace.forms.json_schemas import SchemaChecker
from outpace.inputs.chats import NO_VARIABLES
from outpace.inputs.prompts import Prompt, token_ids_of
from outpace.llm import LLM
from outpace.serve.openai import schemas, tools
from outpace.serve.openai.errors import ApiError
from outpace.serve.openai.tools import BEGIN, END
from outpace.serve.openai.validation import check
from outpace.serve.settings import Settings

COMPLETION_TOKENS = 16
"""Tokens of a completion that does not say how many: OpenAI's, and vLLM's."""

RESERVED = NO_VARIABLES | {"chat_template", "files", "tools"}
"""Names that ``chat_template_kwargs`` must not hold. A template is a program, which may run without
end: only who starts the server chooses it. Files are those of this machine, and tools have a field
of their own."""


@dataclass(frozen=True)
class Call:
    """What one request asks for, and how it wants to be answered."""

    requests: Sequence[EngineRequest]
    """The texts, those of one prompt next to each other."""
    chat: bool
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
    logprobs: int | None
    """How many of the most probable tokens are reported with each token; None: no
    log-probabilities at all."""
    parses_tools: bool = False
    trace: bool = False
    counts: bool = False
    """Whether each event of a stream says how many tokens it brings."""
    texts_per_prompt: int = 1
    user: str | None = None
    """Who asks, by their own account."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt counted once; of an encoder-decoder those of the
        source as well."""
        each = self.requests[:: self.texts_per_prompt]
        sources = [one.source.token_ids for one in each if one.source is not None]
        return sum(map(len, [*sources, *(one.prompt_ids for one in each)]))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were cached, so that they were not read anew."""
        return sum(one.cached_tokens for one in self.requests[:: self.texts_per_prompt])


OF_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
            "guided_grammar", "tool_choice", "tools")  # fmt: skip
"""Fields of a body that say what form a text must have; the last two have that of a call."""


class Reader:
    """Reads bodies for one model. Raises ``ApiError`` for what cannot be honoured."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self._llm = llm
        self._settings = settings
        self._schemas = SchemaChecker()

    def completion(self, body: Any) -> Call:
        """Reads the body of ``/v1/completions``."""
        given = self._checked(body, schemas.COMPLETION)
        params = self._sampling(given, given.get("logprobs"), COMPLETION_TOKENS)
        if given.get("best_of", params.n) != params.n:
            raise ApiError(400, "best_of must equal n: texts are not ranked here.", "best_of")
        form = self._form(given)
        prompts = _prompts(given["prompt"])
        self._check_count(params.n * len(prompts), "prompt" if len(prompts) > 1 else "n")
        requests = [
            one for prompt in prompts for one in self._requests(given, prompt, params, form)
        ]
        return self._call(given, requests, params, chat=False, logprobs=given.get("logprobs"))

    def chat(self, body: Any) -> Call:
        """Reads the body of ``/v1/chat/completions``."""
        given = self._checked(body, schemas.CHAT)
        logprobs = _chat_logprobs(given)
        params = self._sampling(given, logprobs, self._llm.max_model_len)
        offered, choice = self._tools(given)
        form = self._form(given)
        tags = (BEGIN, END) if offered else ()
        special = [tag for tag in tags if self._llm.input_processor.is_special(tag)]
        demanded = tools.form_of(choice, offered, special)
        if form and demanded:
            raise ApiError(400, "tool_choice and a form of the text exclude each other.", "tools")
        prompt = self._chat_prompt(given, offered)
        wanted = demanded
        if form:
            wanted = self._form_or_calls(given, form, offered, special) if offered else form
        try:
            requests = self._requests(given, prompt, params, wanted, special)
        except ApiError as error:
            if offered and wanted not in (None, form) and error.param in OF_FORMS:
                self._check_tools(offered, choice)
            raise
        return self._call(given, requests, params, True, logprobs, parses_tools=bool(offered))

    def tokens(self, body: Any) -> list[int]:
        """Reads the body of ``/tokenize``; returns the token ids."""
        given = self._checked(body, schemas.TOKENIZE)
        if ("prompt" in given) == ("messages" in given):
            raise ApiError(400, "give either a prompt or messages.", "prompt")
        if "messages" in given:
            if "add_special_tokens" in given:
                raise ApiError(
                    400,
                    "add_special_tokens is about a prompt; a chat has those of its template.",
                    "add_special_tokens",
                )
            return token_ids_of(self._chat_prompt(given, []))
        try:
            return self._llm.token_ids(given["prompt"], given.get("add_special_tokens", True))
        except OutpaceError as error:
            raise ApiError(400, self.without_paths(str(error)), "prompt") from error

    def text(self, body: Any) -> str:
        """Reads the body of ``/detokenize``; returns the text."""
        given = self._checked(body, schemas.DETOKENIZE)
        top = self._llm.target.vocabulary
        if any(token >= top for token in given["tokens"]):
            raise ApiError(400, f"token ids are whole numbers in [0, {top}).", "tokens")
        decoder = self._llm.input_processor.decoder
        if decoder is None:
            raise ApiError(400, "the model came without a tokenizer.", "tokens")
        return decoder.text(given["tokens"], skip_special_tokens=False)

    def _chat_prompt(
        self, given: Mapping[str, Any], offered: Sequence[Mapping[str, Any]]
    ) -> Prompt:
        """The prompt that a chat template makes of a conversation. Files of this machine are no
        business of those who send it."""
        more = dict(given.get("chat_template_kwargs", {}))
        reserved = RESERVED & set(more)
        if reserved:
            raise ApiError(
                400,
                f"chat_template_kwargs must not hold {min(reserved)!r}: it may hold variables of "
                "the model's chat template only.",
                "chat_template_kwargs",
            )
        if offered:
            more["tools"] = list(offered)
        try:
            return self._llm.chat_prompt(given["messages"], files=False, **more)
        except PromptError as error:
            raise ApiError(400, self.without_paths(str(error)), "messages") from error

    def without_paths(self, text: str) -> str:
        """Returns a sentence for clients. Where models lie on this machine is no business of
        theirs: they know the target by the name that it is served under, and a drafter's own name
        is enough."""
        names = {str(self._llm.target.name): self._settings.model_name}
        drafter = self._llm.engine.drafter.loaded
        if drafter is not None:
            names.setdefault(str(drafter.name), os.path.basename(str(drafter.name)))
        for name in sorted(names, key=len, reverse=True):
            text = text.replace(name, names[name]) if os.sep in name else text
        return text

    # -- inside ------------------------------------------------------------------------------------

    def _checked(self, body: Any, schema: schemas.Schema) -> dict[str, Any]:
        """The fields that are given, without those that are null."""
        check(body, schema)
        given = {name: value for name, value in body.items() if value is not None}
        name = given.get("model", self._settings.model_name)
        if name != self._settings.model_name:
            raise ApiError(
                404,
                f"there is no model {name!r} here: the one that is served is "
                f"{self._settings.model_name!r}.",
                "model",
                "model_not_found",
            )
        return given

    def _sampling(self, given: Mapping[str, Any], logprobs: Any, tokens: int) -> SamplingParams:
        options = {name: given[name] for name in schemas.SAMPLING if name in given}
        options.pop("structured_outputs", None)  # see `_form`
        if "max_completion_tokens" in given:
            if "max_tokens" in options:
                raise ApiError(
                    400, "max_tokens and max_completion_tokens exclude each other.", "max_tokens"
                )
            options["max_tokens"] = given["max_completion_tokens"]
        options.setdefault("max_tokens", tokens)
        if "logit_bias" in options:
            options["logit_bias"] = _bias(options["logit_bias"])
        if "prediction" in options:
            options["prediction"] = _predicted(options["prediction"]["content"])
        self._check_count(options.get("n", 1))
        for name, value in options.items():
            try:
                SamplingParams(**{name: value})
            except ParamsError as error:
                raise ApiError(400, str(error), name) from error
        try:
            return SamplingParams(**options, logprobs=logprobs)
        except ParamsError as error:  # two options that contradict each other
            raise ApiError(400, str(error), _field(error, given)) from error

    def _check_count(self, texts: int, param: str = "n") -> None:
        """Raises ``ApiError`` for more texts than one request can ever have. Those that only have
        to wait for others are refused where they are handed over, and may come again."""
        settings = self._settings
        room = self._llm.engine.target.max_rows + settings.max_waiting
        most = min(settings.max_n, room, settings.max_per_client or room)
        if texts > most:
            raise ApiError(400, f"one request may ask for {most} texts at most.", param)

    def _form(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The form that the text must have, from whichever of the three ways to say so."""
        said = given.get("structured_outputs", {})
        found = _response_format(given.get("response_format", {}))
        found += [{kind: value} for kind, value in said.items() if value not in (None, False)]
        for kind in ("json", "regex", "choice", "grammar"):
            if f"guided_{kind}" in given:
                found.append({kind: given[f"guided_{kind}"]})
        if len(found) > 1:
            raise ApiError(
                400, "a text can have one form only: give one of them.", "structured_outputs"
            )
        return found[0] if found else None

    def _form_or_calls(
        self,
        given: Mapping[str, Any],
        form: Mapping[str, Any],
        offered: Sequence[Mapping[str, Any]],
        special: Sequence[str],
    ) -> dict[str, Any]:
        """The form of a text that has a form or calls tools, as the model chooses."""
        try:
            self._llm.input_processor.check_form(form)  # by itself: its fault is called by its name
            return tools.form_or_calls(form, offered, special)
        except OutpaceError as error:
            raise self._refusal(error, form, given) from error

    def _tools(self, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
        """The tools that the model may call, and how it is to choose."""
        offered, choice = given.get("tools", []), given.get("tool_choice")
        if not offered and choice not in (None, "none"):
            raise ApiError(400, "tool_choice needs tools.", "tool_choice")
        if not offered or choice == "none":
            return [], None
        if "tools" not in str(self._llm.input_processor.ends.template() or ""):
            raise ApiError(
                400, "the model's chat template does not know tools: leave them out.", "tools"
            )
        if given.get("parallel_tool_calls") is False and choice in (None, "auto"):
            raise ApiError(
                400,
                "parallel_tool_calls can be false only where a call is demanded, which is then the "
                "only one: set tool_choice to 'required' or to a function.",
                "parallel_tool_calls",
            )
        self._check_schemas(offered)
        return list(offered), choice

    def _check_schemas(self, offered: Sequence[Mapping[str, Any]]) -> None:
        """Raises ``ApiError`` for a function whose parameters are no sound JSON schema, by its
        name: also where the model may choose, and no grammar is made of them."""
        functions = [tool["function"] for tool in offered]
        faults = self._schemas.faults([tools.parameters_of(one) for one in functions])
        for number, fault in faults.items():
            raise ApiError(
                400,
                f"the parameters of the function {functions[number]['name']!r} are no sound JSON "
                f"schema ({fault}): correct them.",
                f"tools[{number}].function.parameters",
            )

    def _check_tools(self, offered: Sequence[Mapping[str, Any]], choice: Any) -> None:
        """Raises ``ApiError`` for a function that a text may have to call and whose parameters no
        grammar can follow, by its name."""
        only = choice["function"]["name"] if isinstance(choice, Mapping) else None
        for number, tool in enumerate(offered):
            function = tool["function"]
            if only not in (None, function["name"]):
                continue
            try:
                self._llm.input_processor.check_form({"json": tools.parameters_of(function)})
            except OutpaceError as error:
                raise ApiError(
                    400,
                    f"the parameters of the function {function['name']!r} cannot be followed: "
                    f"{error}",
                    f"tools[{number}].function.parameters",
                ) from error

    def _requests(
        self,
        given: Mapping[str, Any],
        prompt: Any,
        params: SamplingParams,
        form: Any,
        shown: Collection[str] = (),
    ) -> list[EngineRequest]:
        priority = given.get("priority", 0)
        if priority and self._llm.engine.waiting.policy.name != "priority":
            raise ApiError(
                400, "priority needs a server with --scheduling-policy priority.", "priority"
            )
        streaming = bool(given.get("stream"))
        try:
            return self._llm.requests(
                prompt,
                replace(params, structured_outputs=form),
                streaming=streaming,
                priority=priority,
                continues="messages" not in given,
                shown=shown,
            )
        except PromptError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            param = "messages" if "messages" in given else "prompt"
            raise ApiError(400, self.without_paths(str(error)), param, code) from error
        except OutpaceError as error:
            raise self._refusal(error, form, given) from error

    def _refusal(
        self, error: OutpaceError, form: Mapping[str, Any] | None, given: Mapping[str, Any]
    ) -> ApiError:
        """The answer for an option that cannot be honoured, by the name of its field."""
        sentence = self.without_paths(str(error))
        if error.option == "structured_outputs" and form is not None:
            sentence = _named(sentence, next(iter(form)), given)
        return ApiError(400, sentence, _field(error, given))

    def _call(
        self,
        given: Mapping[str, Any],
        requests: Sequence[EngineRequest],
        params: SamplingParams,
        chat: bool,
        logprobs: int | None,
        parses_tools: bool = False,
    ) -> Call:
        stream, options = bool(given.get("stream")), given.get("stream_options", {})
        if options and not stream:
            raise ApiError(400, "stream_options needs stream.", "stream_options")
        own = {name for name, value in given.get("outpace", {}).items() if value}
        if own and not stream:
            raise ApiError(400, f"outpace.{min(own)} needs stream.", "outpace")
        return Call(
            requests=requests,
            chat=chat,
            stream=stream,
            usage=bool(options.get("include_usage")),
            logprobs=logprobs,
            parses_tools=parses_tools,
            trace="trace" in own,
            counts="counts" in own,
            texts_per_prompt=params.n,
            user=given.get("user"),
        )


def _prompts(given: Any) -> list[Any]:
    """Returns the prompts of a completion: one or several texts or lists of token ids."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


def _response_format(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the form that ``response_format`` demands, if it demands one."""
    kind, described = wanted.get("type"), wanted.get("json_schema")
    if kind == "json_schema":
        if described is None:
            raise ApiError(400, "response_format.json_schema is missing.", "response_format")
        return [{"json": described["schema"]}]
    if described is not None:
        raise ApiError(
            400,
            "response_format.json_schema needs the type 'json_schema', not "
            f"{kind!r}: change the type, or leave the schema out.",
            "response_format",
        )
    return [{"json_object": True}] if kind == "json_object" else []


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs.", "top_logprobs")
    return given.get("top_logprobs", 0) if given.get("logprobs") else None


def _bias(given: Mapping[str, Any]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError as error:
        raise ApiError(
            400, "logit_bias must name tokens by their ids, such as {'50256': -100}.", "logit_bias"
        ) from error


def _predicted(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _named(sentence: str, kind: str, given: Mapping[str, Any]) -> str:
    """Returns a sentence about a form with the field that it came in, where it begins with the
    form's kind."""
    schema = ".json_schema.schema" if kind == "json" else ""
    places = {"response_format": schema, "structured_outputs": f".{kind}"}
    places[f"guided_{kind}"] = ""
    field = next((name + place for name, place in places.items() if name in given), kind)
    begins = sentence.startswith(f"{kind} ")
    return f"{field} {sentence[len(kind) + 1 :]}" if begins else sentence


def _field(error: OutpaceError, given: Mapping[str, Any]) -> str | None:
    """Returns the field of a body that an error is about, if it says so and the field is given."""
    if error.option == "structured_outputs":
        return next((name for name in OF_FORMS if name in given), None)
    names = {"max_tokens": ("max_tokens", "max_completion_tokens")}
    known = names.get(error.option or "", (error.option,))
    return next((name for name in known if name in given), None)
