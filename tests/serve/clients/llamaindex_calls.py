"""LlamaIndex's ordinary calls; prints what they returned as JSON. Argument: an address."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main(url: str) -> dict[str, Any]:
    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "model": "tiny"}
    options = {"temperature": 1.0, "max_tokens": 16, "additional_kwargs": {"seed": 7}}
    limits = {"max_retries": 0, "context_window": 512}
    chat = OpenAILike(**where, **options, **limits, is_chat_model=True)
    text = OpenAILike(**where, **options, **limits, is_chat_model=False)
    asked = [
        ChatMessage(role="system", content="Be kind."),
        ChatMessage(role="user", content="Tell me about a cat."),
    ]
    whole = chat.chat(asked)
    *_, last = chat.stream_chat(asked)
    *_, ended = text.stream_complete("One day")
    return {
        "chat": whole.message.content,
        "usage": whole.raw.usage.total_tokens,
        "streamed": last.message.content,
        "async": asyncio.run(chat.achat(asked)).message.content,
        "text": text.complete("One day").text,
        "text_streamed": ended.text,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))  # noqa: T201
