"""Engines of several processes: Ray starts the first one of each, and that one the others."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from outpace import LLM
from outpace.errors import ConfigError
from processes import free_port

from .conftest import LLM_OPTIONS, processes

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

SPLIT = {**LLM_OPTIONS, "tensor_parallel_size": 2}
FOLLOWER = "outpace.targets.parallel.follower"
PROMPTS = [f"{at} birds" for at in range(6)]
OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What one process writes alone."""
    return [one.outputs[0].text for one in LLM(**LLM_OPTIONS).generate(PROMPTS, OPTIONS)]


def test_a_replica_of_two_processes_that_loses_one_comes_back(texts: list[str]) -> None:
    import outpace.ray

    port = free_port()
    settings = {"model_name": "tiny"}
    with outpace.ray.served(1, "127.0.0.1", port, dict(SPLIT), settings=settings):
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20)

        def written() -> list[str]:
            asked = (
                client.completions.create(model="tiny", prompt=prompt, **OPTIONS)
                for prompt in PROMPTS
            )
            return [answer.choices[0].text for answer in asked]

        assert written() == texts
        (follower,) = processes(FOLLOWER)
        follower.kill()
        end = time.monotonic() + 120
        while not (now := [one for one in processes(FOLLOWER) if one.pid != follower.pid]):
            assert time.monotonic() < end, "no other replica was started"
            time.sleep(0.1)
        assert written() == texts
    assert psutil.wait_procs(now, timeout=30)[1] == []


def test_workers_of_two_processes(texts: list[str], tmp_path: Path) -> None:
    import outpace.ray
    from outpace.serve.batch_files import Answers, Requests

    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "custom_id": f"{at}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, **OPTIONS},
        }
        for at, prompt in enumerate(PROMPTS)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    requests = Requests(path, 1 << 20)
    served = {"model_name": "tiny", "max_body_bytes": 1 << 20}
    with Answers(out, requests, "tiny") as answers:
        outpace.ray.run_batch(requests, answers, 2, lambda: None, SPLIT, **served)
    found = {one["custom_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    for at, text in enumerate(texts):
        assert found[f"{at}"]["response"]["body"]["choices"][0]["text"] == text


def test_a_gpu_for_each_process_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import outpace.ray

    def machines(*gpus: int) -> None:
        nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": float(one)}} for one in gpus]
        monkeypatch.setattr(outpace.ray.ray, "nodes", lambda: nodes)

    machines(4, 4)
    four = {"tensor_parallel_size": 4}
    assert outpace.ray._share(2, four) == {"num_cpus": 8, "num_gpus": 4}
    assert outpace.ray._share(8, {}) == {"num_cpus": 2, "num_gpus": 1}
    assert outpace.ray._share(2, {**four, "device": "cpu"})["num_gpus"] == 0
    machines(2, 6)
    with pytest.raises(ConfigError, match="8 GPUs, and each of 2 engines needs 4 on one machine"):
        outpace.ray._share(2, four)
    for cpus, engines, each in ((10.0, 3, 3), (64.0, 5, 12), (20.0, 6, 3), (16.0, 3, 5)):
        one = [{"Alive": True, "Resources": {"CPU": cpus}}]
        monkeypatch.setattr(outpace.ray.ray, "nodes", lambda one=one: one)
        assert outpace.ray._share(engines, {}) == {"num_cpus": each, "num_gpus": 0}
