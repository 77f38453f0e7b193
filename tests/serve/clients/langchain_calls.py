"""LangChain's ordinary calls; prints what they returned as JSON. Argument: an address."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI

COLOUR = {
    "title": "Colour",
    "description": "A colour.",
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def main(url: str) -> dict[str, Any]:
    where: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": "tiny"}
    options = {"temperature": 1.0, "seed": 7, "max_retries": 0}
    chat = ChatOpenAI(**where, **options, max_completion_tokens=16)
    asked = [("system", "Be kind."), ("user", "Tell me about a cat.")]
    whole = chat.invoke(asked)
    streamed = list(chat.stream(asked, stream_usage=True))
    joined = streamed[0]
    for part in streamed[1:]:
        joined = joined + part
    told = chat.bind(logprobs=True, top_logprobs=2).invoke(asked)
    shaped = chat.with_structured_output(COLOUR, method="json_schema").invoke(asked)
    text = OpenAI(**where, **options, max_tokens=16, stop=["."])
    return {
        "chat": whole.content,
        "usage": whole.usage_metadata["total_tokens"],
        "finish_reason": whole.response_metadata["finish_reason"],
        "streamed": joined.content,
        "streamed_usage": joined.usage_metadata["total_tokens"],
        "pieces": len(streamed),
        "batch": [one.content for one in chat.batch([asked, asked])],
        "logprobs": [
            len(token["top_logprobs"]) for token in told.response_metadata["logprobs"]["content"]
        ],
        "shaped": shaped,
        "text": text.invoke("One day"),
        "text_streamed": "".join(text.stream("One day")),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))  # noqa: T201
