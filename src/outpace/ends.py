"""The tokens that end the texts of one model, and those that end an answer in a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.targets.hf.loading.loaded import TEMPLATE, TOKENIZER, End, Loaded

QUESTION, ANSWER = "a question", "a text to look for"

KEPT = 16
"""Chat templates of which it is remembered how they end a turn."""


class Ends:
    """Texts end as the model's generation_config says, as in transformers' ``generate``.

    That may be too few for chats: some models were taught to end a turn with a token that only
    their tokenizer or their chat template knows of. So an answer ends with any of the three.
    Templates are rendered with the tokenizer: whoever shares it holds its lock.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._turns: dict[str, int | None] = {}  # by template

    @property
    def of_texts(self) -> tuple[int, ...]:
        """The tokens that end any text."""
        return self._loaded.eos_ids

    def of_chats(self, template: str | None = None) -> tuple[int, ...]:
        """Returns the tokens that end an answer. template: the chat's, if it is not the model's."""
        return tuple(self._named(template))

    def told(self) -> tuple[End, ...]:
        """Returns all of them, with who names them; where there is no chat template, and so no
        chat, those that end any text."""
        texts, chats = self.of_texts, self._template(None) is not None
        return tuple(
            End(token, self._text(token), tuple(sources), token not in texts)
            for token, sources in self._named(None).items()
            if chats or token in texts
        )

    def _text(self, token: int) -> str:
        tokenizer = self._loaded.tokenizer
        known = self._names().get(token)
        if known is None and hasattr(tokenizer, "convert_ids_to_tokens"):
            known = tokenizer.convert_ids_to_tokens(token)
        return str(token if known is None else known)

    def _named(self, template: str | None) -> dict[int, list[str]]:
        """Who names each token that ends an answer; those that end any text come first."""
        loaded, tokenizer = self._loaded, self._loaded.tokenizer
        found = {token: list(loaded.sources_of(token)) for token in self.of_texts}
        end = getattr(tokenizer, "eos_token_id", None)
        for token, source in ((end, TOKENIZER), (self._end_of_turn(template), TEMPLATE)):
            if token is not None and token < loaded.vocabulary:
                found.setdefault(token, []).append(source)
        return {token: list(dict.fromkeys(sources)) for token, sources in found.items()}

    def _end_of_turn(self, template: str | None) -> int | None:
        """The token that a chat template writes behind an answer; None where it writes none."""
        used = self._template(template)
        if used is None:
            return None
        key = str(used)
        if key not in self._turns:
            if len(self._turns) >= KEPT:
                self._turns.clear()
            self._turns[key] = self._looked_up(used)
        return self._turns[key]

    def _template(self, asked: str | None) -> Any:
        """The template of a chat: a text or, of a tokenizer with several, a dict of them."""
        owners = (self._loaded.processor, self._loaded.tokenizer)
        own = [getattr(owner, "chat_template", None) for owner in owners]
        return next((template for template in (asked, *own) if template), None)

    def _looked_up(self, template: Any) -> int | None:
        rest, names = self._behind_an_answer(template).lstrip(), self._names()
        known = [token for token, text in names.items() if rest.startswith(text)]
        return max(known, key=lambda token: len(names[token]), default=None)

    def _behind_an_answer(self, template: Any) -> str:
        """What a template writes behind the answer at the end of a chat; "" where it takes none."""
        asked = {"chat_template": template} if isinstance(template, str) else {}
        for in_parts in (False, True):  # some vision-language models take lists of parts only
            turns = [_turn("user", QUESTION, in_parts), _turn("assistant", ANSWER, in_parts)]
            try:
                text = str(
                    self._loaded.tokenizer.apply_chat_template(
                        turns, tokenize=False, add_generation_prompt=False, **asked
                    )
                )
            except Exception:  # a template is a program of the model's, and raises what it likes
                continue
            if ANSWER in text:
                return text.rpartition(ANSWER)[2]
        return ""

    def _names(self) -> Mapping[int, str]:
        """The tokens that a text holds as they are written, special ones among them."""
        added = getattr(self._loaded.tokenizer, "added_tokens_decoder", {})
        return {token: entry.content for token, entry in added.items() if entry.content}


def _turn(role: str, text: str, in_parts: bool) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
