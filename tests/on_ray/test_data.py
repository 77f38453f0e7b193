"""Batch jobs over several workers: the same texts, whatever happens to a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.errors import ModelLoadError
from processes import free_port

from .conftest import LLM_OPTIONS, processes

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

OPTIONS = {"max_tokens": 12, "temperature": 0.8}
ROWS = [{"prompt": f"Once there were {at} cats", "seed": at} for at in range(24)]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What one process writes alone."""
    llm = LLM(**LLM_OPTIONS)
    params = [{**OPTIONS, "seed": row["seed"]} for row in ROWS]
    outputs = llm.generate([row["prompt"] for row in ROWS], params)
    return {
        row["prompt"]: output.outputs[0].text for row, output in zip(ROWS, outputs, strict=True)
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_seeded_texts_do_not_depend_on_the_number_of_workers(
    workers: int, texts: dict[str, str], tmp_path: Path
) -> None:
    import ray.data

    import outpace.ray

    ray.data.from_items([*ROWS, {"prompt": "word " * 5000, "seed": 0}]).write_parquet(tmp_path)
    rows = (
        ray.data.read_parquet(str(tmp_path))
        .map_batches(
            outpace.ray.Generator,
            fn_constructor_kwargs={"columns": ["prompt", "seed"], "options": OPTIONS} | LLM_OPTIONS,
            compute=ray.data.ActorPoolStrategy(size=workers),
            batch_size=6,
        )
        .take_all()
    )
    found = {row["prompt"]: row["text"] for row in rows}
    assert {name: found[name] for name in texts} == texts
    (refused,) = [json.loads(row["response"]) for row in rows if row["text"] is None]
    assert refused["error"]["code"] == "context_length_exceeded"


def test_chats_are_rows_with_messages() -> None:
    import ray.data

    import outpace.ray

    messages = [{"role": "user", "content": "Hello!"}]
    rows = ray.data.from_items([{"messages": messages, "max_tokens": 3}] * 2).map_batches(
        outpace.ray.Generator,
        fn_constructor_kwargs={"columns": ["messages", "max_tokens"]} | LLM_OPTIONS,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    for row in rows.take_all():
        assert json.loads(row["response"])["usage"]["completion_tokens"] == 3
        assert row["text"]


def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path) -> None:
    import outpace.ray
    from outpace.serve.batch_files import Answers, Requests

    path, out, killed = tmp_path / "in.jsonl", tmp_path / "out.jsonl", []
    body = {"max_tokens": 8, "temperature": 0}
    lines: list[Any] = [
        {"url": "/v1/completions", "body": {"prompt": f"{at} dogs", **body}} for at in range(160)
    ]
    named = [{"custom_id": f"{at}", "method": "POST", **one} for at, one in enumerate(lines)]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in [*named, 3]))
    requests = Requests(path, 1 << 20)
    with Answers(out, requests, "tiny") as answers:

        def kill_one() -> None:
            if answers.count >= 20 and not killed:
                killed.append(processes("MapWorker")[0])
                killed[0].kill()

        served = {"model_name": "tiny", "max_body_bytes": 1 << 20}
        outpace.ray.run_batch(requests, answers, 2, kill_one, LLM_OPTIONS, **served)
    assert killed
    found = [json.loads(one) for one in out.read_text().splitlines()]
    assert len(found) == len({one["id"] for one in found}) == 161
    assert sum(one["error"] is not None for one in found) == 1
    alone = LLM(**LLM_OPTIONS).generate([one["body"]["prompt"] for one in lines[:20]], body)
    by_name = {one["custom_id"]: one for one in found}
    for at, output in enumerate(alone):
        choice = by_name[f"{at}"]["response"]["body"]["choices"][0]
        assert choice["text"] == output.outputs[0].text


NO_DRAFT: dict[str, Any] = {
    **LLM_OPTIONS,
    "speculative_config": {"method": "draft_model", "model": "/no/such/folder"},
}


def test_a_mistake_that_a_worker_finds_is_one_sentence(tmp_path: Path) -> None:
    import outpace.ray
    from outpace.serve.batch_files import Answers, Requests

    path = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    path.write_text(json.dumps(line) + "\n")
    requests = Requests(path, 1 << 20)
    served = {"model_name": "tiny", "max_body_bytes": 1 << 20}
    with (
        Answers(tmp_path / "out.jsonl", requests, "tiny") as answers,
        pytest.raises(ModelLoadError, match=r"/no/such/folder[^\n]*\Z"),
    ):
        outpace.ray.run_batch(requests, answers, 1, lambda: None, NO_DRAFT, **served)


def test_a_mistake_that_a_replica_finds_is_one_sentence() -> None:
    import outpace.ray

    with (
        pytest.raises(ModelLoadError, match=r"/no/such/folder[^\n]*\Z"),
        outpace.ray.served(1, "127.0.0.1", free_port(), dict(NO_DRAFT)),
    ):
        raise AssertionError("it serves")
