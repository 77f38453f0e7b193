"""Several engines through Ray: batch jobs over a pool of workers (Ray Data), and a server with
replicas (Ray Serve). All that needs Ray is here, and only the commands that ask for it import it.

Ray starts the processes, hands out the work, and starts again what was killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np

try:
    import ray
    import ray.data
    from ray import serve
    from ray.serve.config import RequestRouterConfig
except ImportError as error:
    raise ImportError(f"this needs Ray ({error}): pip install 'outpace[ray]'.") from error

from outpace.errors import ConfigError, ProcessLost, error_of_stack, reason_of
from outpace.llm import LLM
from outpace.serve.app import Server
from outpace.serve.batch_files import Answers, Requests, answer, line_at
from outpace.serve.in_process import Answered, InProcess
from outpace.serve.listening import log_to_stderr
from outpace.serve.settings import Settings
from outpace.targets.hf.loading.source import check_path

ROWS = 16
"""Texts that a worker or a replica writes at once, as `outpace serve` does."""


# -- batch jobs ------------------------------------------------------------------------------------


class Worker:
    """A server in a process of Ray Data. It begins with its first batch, in the event loop of that.

    model_name: by which requests call the model. llm: the arguments of ``LLM``.
    """

    def __init__(self, model_name: str, max_body_bytes: int, llm: Mapping[str, Any]) -> None:
        with_cache = {"max_num_seqs": ROWS, "enable_prefix_caching": "auto", **llm}
        self._server = InProcess(LLM(**with_cache), model_name, max_body_bytes)
        self._begun: asyncio.Future[Any] | None = None

    async def begin(self) -> None:
        """Returns when requests are taken; the server ends with its process."""
        if self._begun is None:
            self._stack = AsyncExitStack()
            entering = self._stack.enter_async_context(self._server.started())
            self._begun = asyncio.ensure_future(entering)
        await self._begun


class Generator(Worker):
    """Writes a text for each row of a Ray Dataset, as its class for ``map_batches``.

    model: as for ``LLM``. columns: what a row says of its request, under the names of OpenAI's API:
    "prompt" or "messages", and maybe "seed", "max_tokens" and others. options: what holds for all
    rows, under the same names. llm: other arguments of ``LLM``.

    Rows get two columns: ``text``, None where the request was refused, and ``response``, the
    server's whole answer as JSON. Seeded texts do not depend on which worker writes them.
    """

    def __init__(
        self,
        model: str | None = None,
        columns: Sequence[str] = ("prompt",),
        options: Mapping[str, Any] | None = None,
        **llm: Any,
    ) -> None:
        super().__init__("outpace", 1 << 40, {"model": model, **llm})
        self._columns, self._options = columns, options or {}
        chat = "messages" in columns
        self._path = "/v1/chat/completions" if chat else "/v1/completions"

    async def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        await self.begin()
        given = zip(*(batch[name] for name in self._columns), strict=True)
        answers = await asyncio.gather(*map(self._ask, given))
        texts = [_text_of(one.body) if one.status == 200 else None for one in answers]
        responses = [json.dumps(one.body, ensure_ascii=False) for one in answers]
        return {
            **batch,
            "text": np.array(texts, object),
            "response": np.array(responses, object),
        }

    async def _ask(self, values: Sequence[Any]) -> Answered:
        body = {**self._options, **dict(zip(self._columns, values, strict=True))}
        found = await self._server.ask(self._path, json.dumps(body, default=_plain).encode())
        if found.status == 503:
            _leave()
        return found


def _plain(value: Any) -> Any:
    """Returns a value of NumPy as Python's."""
    return value.tolist()


def _text_of(body: Any) -> str:
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text or ""  # a call of a function may have none


def _leave() -> None:
    """Ends a worker that has lost a part of its model: Ray starts another, which does its batch."""
    os._exit(3)


class LineWorker(Worker):
    """Answers lines of a file of requests, which each machine finds under the same path."""

    def __init__(self, path: str, longest: int, **server: Any) -> None:
        super().__init__(**server)
        self._path, self._longest = Path(path), longest

    async def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        await self.begin()
        answers = await asyncio.gather(*(self._answer(*row) for row in batch["data"].tolist()))
        return {"answer": np.array(answers, object)}

    async def _answer(self, number: int, offset: int, repeats: int) -> bytes:
        line = line_at(self._path, number, offset, self._longest)
        try:
            return await answer(self._server, line, bool(repeats), self._longest)
        except ProcessLost:
            _leave()
            raise


LINES = 64
"""Lines that a worker takes at once, at most: it loses as many where it is killed."""


def run_batch(
    requests: Requests,
    answers: Answers,
    workers: int,
    report: Callable[[], None],
    llm: Mapping[str, Any],
    **server: Any,
) -> None:
    """Answers all lines that have no answer in a pool of workers; this process alone writes.
    report: is called after each line. llm, server: as for `Worker`."""
    start(llm)
    ray.data.DataContext.get_current().enable_progress_bars = False  # ``report`` shows it
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    places = (
        (line.number, line.offset, requests.repeats(line.number)) for line in requests.ordered()
    )
    rows = np.fromiter(places, np.dtype((np.int64, 3)))  # [N, 3]
    size = max(1, min(LINES, len(rows) // (4 * workers)))
    parts = np.array_split(rows, ceil(len(rows) / size))
    given = {"path": str(requests.path.resolve()), "longest": requests.longest, "llm": dict(llm)}
    answered = ray.data.from_numpy(parts).map_batches(
        LineWorker,
        fn_constructor_kwargs={**given, **server},
        batch_size=None,
        # The next lines wait where the last ones are written.
        compute=ray.data.ActorPoolStrategy(size=workers, max_concurrent_calls_per_actor=2),
        **_share(workers, llm),
    )
    batches = iter(answered.iter_batches(batch_size=None))
    while True:
        with as_they_were():
            batch = next(batches, None)
        if batch is None:
            break
        for one in batch["answer"]:
            answers.add(one)
            report()
    if requests.left:
        raise ProcessLost(
            f"{requests.left} lines came back without an answer: start the same command again."
        )


def start(llm: Mapping[str, Any], address: str | None = None) -> None:
    """Checks what can be known of a model, and connects to a cluster where that is not done yet: by
    default to the one that RAY_ADDRESS names; without one, or for "local", starts Ray here."""
    if llm.get("model") is not None:
        check_path(llm["model"])
    if not ray.is_initialized():
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster answers ({reason_of(error)}): start it, or correct RAY_ADDRESS; "
                "without that, Ray starts here."
            ) from error
        if callable(handler):  # of a command that stops in its own way; Ray has set its own
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def as_they_were() -> Iterator[None]:
    """Returns a context in which errors of this library that were raised in a process of Ray, and
    come back as Ray's with the stack in their text, are raised as what they were."""
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError) as error:
        found = error_of_stack(str(error))
        if found is None:
            raise
        raise found from error


def _share(count: int, llm: Mapping[str, Any]) -> dict[str, float]:
    """Returns what each of several engines takes of the cluster: its part of the processors and,
    where there are GPUs and the model may use them, one of these for each of its processes. All of
    an engine is on one machine: the first process, which Ray starts, starts the others."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [machine.get("CPU", 0.0) for machine in machines]
    # The most that each can have, with every one of them on some machine.
    shares = sorted({node / part for node in nodes for part in range(1, count + 1)}, reverse=True)
    # A machine's share of a third may be a little more than it, as numbers are rounded.
    fit = (one for one in shares if one and sum(int(n / one + 1e-9) for n in nodes) >= count)
    processors = next(fit, 1.0)
    gpus = [int(machine.get("GPU", 0)) for machine in machines]
    size = llm.get("tensor_parallel_size", 1)
    on_gpu = llm.get("device") != "cpu" and sum(gpus) > 0
    if on_gpu and sum(each // size for each in gpus) < count:
        raise ConfigError(
            f"the cluster has {sum(gpus)} GPUs, and each of {count} engines needs {size} on one "
            "machine, one for each of its processes: ask for fewer."
        )
    places = llm.get("device_map")
    named = {places} if isinstance(places, str) else {str(one) for one in (places or {}).values()}
    if on_gpu and max(gpus) > 1 and not named <= {"0", "cuda", "cuda:0", "cpu", "disk"}:
        raise ConfigError(
            "Ray gives an engine one GPU for each of its processes, and this device_map lays one "
            "process over several: use tensor_parallel_size, or leave device_map out."
        )
    return {"num_cpus": floor(processors) or processors, "num_gpus": size * int(on_gpu)}


# -- replicas --------------------------------------------------------------------------------------

BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

CLOSING_SECONDS = 5
"""Seconds that a replica has to end when its requests have ended."""


@serve.deployment(name="outpace")
@serve.ingress()
class Replica:
    """The server of `outpace serve` as a deployment of Ray Serve."""

    def __init__(self, settings: Mapping[str, Any], llm: Mapping[str, Any]) -> None:
        log_to_stderr()
        self._llm = LLM(**llm)
        self._server = Server(self._llm, Settings(**settings))

    def __serve_build_asgi_app__(self) -> Any:
        return self._server.app

    def check_health(self) -> None:
        """Raises where nothing can be computed any more: Ray then starts another replica."""
        reason = self._llm.engine.target.failure_reason
        if reason is not None or not self._server.thread.alive:
            raise RuntimeError(reason or "the engine's thread has ended.")


def serve_app(
    model: str | None = None,
    *,
    num_replicas: int | Sequence[int] = 1,
    session_affinity: bool = False,
    settings: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **llm: Any,
) -> serve.Application:
    """Returns `outpace serve` as an application for ``ray.serve.run``.

    num_replicas: how many servers there are, or the fewest and the most, between which Ray chooses
    by the number of open requests. session_affinity: send requests with the same header
    ``x-session-id`` to the same replica, whose prefix cache holds the turns before; those without
    one then go to any, not to the less busy of two. settings: of the server (`Settings`), as its
    limits and keys; it is Ray that listens. ray_actor_options: what a replica needs, as
    {"num_gpus": 1}; of a model with ``tensor_parallel_size``, for all of its processes. llm: other
    arguments of ``LLM``.
    """
    llm = {"model": model, "max_num_seqs": ROWS, "enable_prefix_caching": "auto", **llm}
    given = {"model_name": "outpace", "host": "0.0.0.0", **(settings or {})}
    checked, rows = Settings(**given), llm["max_num_seqs"]
    options: dict[str, Any] = {"num_replicas": num_replicas}
    if not isinstance(num_replicas, int):
        fewest, most = num_replicas
        options = {
            "autoscaling_config": {
                "min_replicas": fewest,
                "max_replicas": most,
                "target_ongoing_requests": rows,
            }
        }
    if session_affinity:
        options["request_router_config"] = RequestRouterConfig(request_router_class=BY_SESSION)
    deployment: Any = Replica
    return deployment.options(
        **options,
        # Others wait in Ray's proxy, where they survive the replica.
        max_ongoing_requests=2 * rows,
        max_queued_requests=checked.max_waiting,
        graceful_shutdown_timeout_s=checked.drain_seconds + CLOSING_SECONDS,
        ray_actor_options=dict(ray_actor_options or {}),
    ).bind(given, llm)


def app(arguments: dict[str, Any]) -> serve.Application:
    """Returns `serve_app` of a configuration file, such as deploy/ray-serve.yaml."""
    return serve_app(**arguments)


@contextmanager
def served(replicas: int, host: str, port: int, llm: dict[str, Any], **app: Any) -> Iterator[None]:
    """Serves at an address while the block runs, on a Ray of this machine. Requests that are open
    then have the time of the settings. llm, app: as for `serve_app`."""
    start(llm, "local")
    application = serve_app(
        num_replicas=replicas, ray_actor_options=_share(replicas, llm), **app, **llm
    )
    serve.start(http_options={"host": host, "port": port})
    try:
        try:
            serve.run(application, name="outpace")
        except RuntimeError as error:  # which does not say why
            deployments = serve.status().applications["outpace"].deployments.values()
            found = error_of_stack("\n".join(one.message for one in deployments))
            if found is None:
                raise
            raise found from error
        yield
    finally:
        serve.delete("outpace")  # which lets open requests end
        serve.shutdown()
