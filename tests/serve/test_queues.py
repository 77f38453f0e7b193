"""Who waits how long: limits by client, fair queues, texts that are put aside."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outpace import LLM
from outpace.errors import ConfigError
from outpace.serve.settings import Settings

from .conftest import MODEL, call, running, wait_for
from .test_limits import ENDLESS, opened, running_now


@pytest.fixture(scope="module")
def narrow() -> LLM:
    """Two rows, with room for little more than one long text, shared fairly."""
    return LLM(
        speculative_config={"method": "draft_model", "verify": "coupled"},
        max_num_seqs=3,
        max_model_len=112,
        max_batch_total_tokens=175,
        scheduling_policy="fair",
    )


def metric(url: str, name: str) -> float:
    lines = call(url, "/metrics")[1].splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"outpace:{name}{{"))


def test_texts_are_put_aside_and_stay_the_same(narrow: LLM, url: str) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 80, "ignore_eos": True, "temperature": 1, "seed": seed}
        for seed, prompt in enumerate(("One day", "The dog", "Lily saw", "Tom"))
    ]
    alone = [call(url, "/v1/completions", body)[1] for body in bodies]
    with running(narrow) as address, ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: call(address, "/v1/completions", body)[1], bodies))
        aside = sum(one["outpace"]["metrics"][0]["preemptions"] for one in together)
        assert metric(address, "num_preemptions_total") == aside > 0
    for one, other in zip(alone, together, strict=True):
        assert other["choices"] == one["choices"]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [other["usage"][name] for name in counts] == [one["usage"][name] for name in counts]


@pytest.mark.parametrize("keys", [("one", "two"), ()])
def test_one_client_keeps_nobody_waiting(narrow: LLM, keys: tuple[str, ...]) -> None:
    """Whoever has asked for twenty texts comes after another who asks for one."""

    def ask(url: str, client: str, tokens: int) -> Any:
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "user": client}
        headers = {"Authorization": f"Bearer {client}"} if keys else {}
        return call(url, "/v1/completions", body, headers=headers)[0]

    with running(narrow, api_keys=keys) as url, ThreadPoolExecutor(20) as pool:
        many = [pool.submit(ask, url, "one", 40) for _ in range(16)]
        headers = {"Authorization": "Bearer one"} if keys else {}
        wait_for(lambda: call(url, "/ready", headers=headers)[1]["waiting"] >= 10)
        assert ask(url, "two", 5) == 200
        assert sum(not one.done() for one in many) > 6
        assert [one.result() for one in many] == [200] * 16


def test_one_client_has_at_most_max_per_client_texts(llm: LLM) -> None:
    with running(llm, max_per_client=2) as url:
        held = [opened(url, {**ENDLESS, "stream": True, "user": "a"}) for _ in range(2)]
        wait_for(lambda: running_now(url) == 2)
        status, answer, headers = call(url, "/v1/completions", {"prompt": "a", "user": "a"})
        assert (status, answer["error"]["code"]) == (429, "too_many")
        assert headers["retry-after"] == "1"
        assert call(url, "/v1/completions", {"prompt": "a", "user": "b"})[0] == 200
        assert call(url, "/v1/completions", {"prompt": "a", "user": "a", "n": 2})[0] == 429
        for connection in held:
            connection.close()
        wait_for(lambda: running_now(url) == 0)
        assert call(url, "/v1/completions", {"prompt": "a", "user": "a"})[0] == 200
    with pytest.raises(ConfigError, match="max_per_client must be at least 1"):
        Settings(model_name=MODEL, max_per_client=0)


@pytest.mark.parametrize(
    ("limit", "most"),
    [({"max_per_client": 2}, 2), ({"max_waiting": 1}, 4), ({"max_n": 2}, 2)],
    ids=str,
)
def test_more_texts_than_there_can_ever_be_are_not_told_to_come_again(
    narrow: LLM, limit: dict[str, int], most: int
) -> None:
    with running(narrow, **limit) as url:
        body = {"prompt": "a", "max_tokens": 1}
        assert call(url, "/v1/completions", {**body, "n": most})[0] == 200
        for more in ({"n": most + 1}, {"prompt": ["a"] * (most + 1)}):
            status, answer, headers = call(url, "/v1/completions", {**body, **more})
            assert (status, answer["error"]["param"]) == (400, *more)
            assert f" {most} texts at most" in answer["error"]["message"]
            assert "retry-after" not in headers
