"""A server with replicas: the answers of one, and none is lost with a replica."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from outpace import LLM
from processes import free_port, killed_after

from .conftest import LLM_OPTIONS, processes

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

DEPLOY = Path(__file__).parents[2] / "deploy"
COUNT, CLIENTS, TOKENS = 300, 12, 10
REPLICA = "ServeReplica:outpace:outpace"


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """OpenAI's client of two replicas."""
    import outpace.ray

    port = free_port()
    settings = {"model_name": "tiny", "drain_seconds": 60.0}
    with outpace.ray.served(2, "127.0.0.1", port, dict(LLM_OPTIONS), settings=settings):
        # Ray answers with status 500 for a replica that is gone, and the client asks again.
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20)


def options(at: int) -> dict[str, Any]:
    """Every other text is greedy, the others have a seed."""
    return {"temperature": 0} if at % 2 else {"temperature": 0.8, "seed": at}


def asked(client: OpenAI, at: int, tokens: int = TOKENS) -> str | None:
    """Returns a text; None for a stream that ended with an error after it had begun."""
    stream = at % 3 == 0
    answer: Any = client.completions.create(
        model="tiny", prompt=f"{at} birds", max_tokens=tokens, stream=stream, **options(at)
    )
    if not stream:
        return str(answer.choices[0].text)
    text, ended = "", False
    try:
        for event in answer:
            text += event.choices[0].text
            ended |= event.choices[0].finish_reason is not None
    except Exception:  # of OpenAI's package, or of the one that it speaks HTTP with
        return None
    assert ended, "a stream broke off without an error"
    return text


def test_texts_are_those_of_one_process_and_a_killed_replica_comes_back(client: OpenAI) -> None:
    before = {one.pid for one in processes(REPLICA)}
    assert len(before) == 2
    found: dict[int, str | None] = {}

    def ask(at: int) -> None:
        found[at] = asked(client, at)

    def kill_one() -> None:
        while len(found) < COUNT // 4:
            time.sleep(0.01)
        processes(REPLICA)[0].kill()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(ask, range(COUNT)))
    killer.join()
    broken = [at for at, text in found.items() if text is None]
    assert len(found) == COUNT
    assert len(broken) <= CLIENTS
    params = [{"max_tokens": TOKENS, **options(at)} for at in range(COUNT)]
    alone = LLM(**LLM_OPTIONS).generate([f"{at} birds" for at in range(COUNT)], params)
    for at, output in enumerate(alone):
        assert at in broken or found[at] == output.outputs[0].text, at
    for _ in range(1200):
        now = {one.pid for one in processes(REPLICA)}
        if len(now) == 2:
            break
        time.sleep(0.1)
    assert len(now) == 2
    assert len(now & before) == 1


def test_a_session_stays_with_its_replica(client: OpenAI) -> None:
    from ray import serve

    import outpace.ray

    application = outpace.ray.serve_app(
        num_replicas=2,
        session_affinity=True,
        settings={"model_name": "tiny"},
        ray_actor_options={"num_cpus": 0},
        **LLM_OPTIONS,
    )
    serve.run(application, name="sessions", route_prefix="/sessions")
    address = f"{str(client.base_url).removesuffix('/v1/')}/sessions/v1"
    sticky = OpenAI(base_url=address, api_key="none")
    for at in range(8):
        prompt = f"{at} horses met at the river. " * 20
        headers = {"x-session-id": f"session {at}"}
        for turn in range(2):
            answer = sticky.completions.create(
                model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_headers=headers
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            assert bool(details.cached_tokens) == bool(turn)
    serve.delete("sessions")


def test_sigterm_lets_open_requests_end() -> None:
    port = free_port()
    words = ["serve", "--replicas", 2, "--port", port, "--dtype", "float64"]
    with (
        subprocess.Popen(
            [sys.executable, "-m", "outpace", *map(str, words)], stderr=subprocess.PIPE, text=True
        ) as process,
        killed_after(300, process),
    ):
        assert process.stderr is not None
        said = ""
        for said in process.stderr:
            if said.startswith("outpace serves"):
                break
        assert said == f"outpace serves outpace at http://127.0.0.1:{port}, 2 times\n"
        started = psutil.Process(process.pid).children(recursive=True)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        events = client.completions.create(
            model="outpace",
            prompt="A",
            max_tokens=300,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        next(events)
        process.send_signal(signal.SIGTERM)
        *_, last = events
        assert last.choices[0].finish_reason == "length"
        rest = process.stderr.read()
    assert process.returncode == 143, rest
    assert "Traceback" not in rest
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_the_file_for_serve_deploy_is_as_ray_reads_it() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    import outpace.ray

    read = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text()))
    (one,) = read.applications
    assert one.import_path == "outpace.ray:app"
    assert outpace.ray.app(dict(one.args)) is not None
