"""Files of requests: answered as the server answers, each line once, whatever happens to the
process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.errors import ConfigError, ProcessLost
from outpace.serve import batch_files, in_process
from outpace.serve.batch_files import Answers, Line, Requests, in_order, run
from outpace.serve.in_process import Answered, InProcess
from processes import killed_after, python

from .conftest import MODEL, call, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONGEST = 1 << 20


def line(name: Any, body: Any, url: str = TEXT, **more: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **more})


def written(folder: Path, lines: Iterable[str]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(f"{one}\n" for one in lines))
    return path


def answers_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


class Echo:
    """Stands for a server: gives the prompt back, after a random wait."""

    rows = 4

    def __init__(self, lost_after: int = 1 << 60) -> None:
        self.asked: list[str] = []
        self._lost_after = lost_after

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        yield

    async def ask(self, path: str, body: bytes) -> Answered:
        self.asked.append(json.loads(body)["prompt"])
        for _ in range(random.randrange(3)):
            await asyncio.sleep(0)
        if len(self.asked) > self._lost_after:
            return Answered(503, "r", {"error": {"message": "a process is gone."}})
        return Answered(200, "r", {"model": MODEL, "text": self.asked[-1]})


def answered(path: Path, out: Path, server: Any, model: str = MODEL) -> Answers:
    requests = Requests(path, LONGEST)
    with Answers(out, requests, model) as found:
        asyncio.run(run(server, requests, found, lambda: None))
    return found


# -- what a line is answered -----------------------------------------------------------------------

BODIES: list[tuple[str, Any]] = [
    (TEXT, {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}),
    (TEXT, {"prompt": "A cat", "max_tokens": 9, "seed": 4, "n": 2, "logprobs": 2, "model": MODEL}),
    (TEXT, {"prompt": ["One", "Two"], "max_tokens": 3, "temperature": 0, "speculative": "off"}),
    (TEXT, {"prompt": "x", "max_tokens": -1}),
    (TEXT, {"prompt": "x", "model": "another"}),
    (TEXT, {"prompt": "x", "logit_bias": {"3": float("nan")}}),
    (TEXT, {"prompt": "word " * 2000}),
    (CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
    ("/tokenize", {"prompt": "A cat"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/forget", {}),
    ("/v1/nothing", {}),
]


def bare(body: Any) -> Any:
    """An answer without its id, its times and what it has cost; log-probabilities are rounded,
    since other texts were computed together."""
    left = dict(body)
    for name in ("id", "created", "outpace", "usage"):
        left.pop(name, None)
    return json.loads(json.dumps(left), parse_float=lambda number: round(float(number), 6))


def test_lines_are_answered_as_the_server_answers(tmp_path: Path) -> None:
    llm = LLM(dtype="float64", device="cpu", max_num_seqs=4, max_model_len=512)
    lines = [line(f"é{at}", body, url) for at, (url, body) in enumerate(BODIES)]
    twice = '{"prompt": "a", "prompt": "b"}'
    raw = f'{{"custom_id": "twice", "method": "POST", "url": "{TEXT}", "body": {twice}}}'
    path, out = written(tmp_path, [*lines, "", raw]), tmp_path / "out.jsonl"
    found = answered(path, out, InProcess(llm, MODEL, LONGEST))
    by_name = {one["custom_id"]: one for one in answers_of(out)}
    assert len(by_name) == found.count == len(BODIES) + 1
    with running(llm) as url:
        sent = [(f"é{at}", where, json.dumps(body)) for at, (where, body) in enumerate(BODIES)]
        for name, where, body in [*sent, ("twice", TEXT, twice)]:
            status, content, _ = call(
                url, where, raw=body.encode(), headers={"Content-Type": "application/json"}
            )
            one = by_name[name]
            assert one["error"] is None
            assert one["response"]["status_code"] == status, name
            assert one["response"]["request_id"]
            assert bare(one["response"]["body"]) == bare(content), name
    assert found.failed == sum(one["response"]["status_code"] != 200 for one in by_name.values())
    assert found.failed == 7


def test_each_line_is_sent_once_however_many_texts_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that found no room would be parsed again and again until it does."""
    llm = LLM(dtype="float64", device="cpu", max_num_seqs=4, max_model_len=64)
    body = {"prompt": "A cat", "max_tokens": 1, "n": 64, "speculative": "off"}
    path = written(tmp_path, [line(str(at), {**body, "seed": at}) for at in range(8)])
    sent: list[bytes] = []
    post = in_process.post
    monkeypatch.setattr(
        in_process, "post", lambda app, path, body: (sent.append(body), post(app, path, body))[1]
    )
    assert answered(path, tmp_path / "out.jsonl", InProcess(llm, MODEL, LONGEST)).failed == 0
    assert len(sent) == 8


def test_a_line_that_cannot_be_sent_has_an_error_that_names_it(tmp_path: Path) -> None:
    good = line("good", {"prompt": "p"})
    bad = {
        "invalid_json_line": [
            *("nonsense", "[1]", "{" * 2000, '{"a": 1, "a": 2}', "\x00", '{"a": 1} x'),
            *('{"a": 1,}', '{"a" 1}', "{1: 2}", '{"a": 1', '{"a": NaN, }'),
        ],
        "unknown_parameter": [line("a", {"prompt": "p"}, more=1)],
        "invalid_custom_id": [line(None, {}), line(7, {}), line("", {}), line("\ud800", {})],
        "invalid_method": [line("b", {}).replace("POST", "GET")],
        "invalid_url": [line("c", {}, "http://x/v1/completions"), line("c2", {}, "\ud800")],
        "invalid_body": [
            line("d", None),
            line("e", []),
            line("f", {"prompt": "p", "stream": True}),
        ],
        "duplicate_custom_id": [line("good", {"prompt": "again"})],
        "line_too_long": [line("long", {"prompt": "p" * 2 * LONGEST})],
    }
    lines = [good, "", *(each for several in bad.values() for each in several)]
    path, out = written(tmp_path, lines), tmp_path / "out.jsonl"
    with path.open("ab") as file:
        file.write(b'{"custom_id": "\xff"}')  # no UTF-8, and no line break at the end
    codes = [code for code, several in bad.items() for _ in several]
    server = Echo()
    found = answered(path, out, server)
    assert server.asked == ["p"]
    errors = {one["error"]["line"]: one["error"] for one in answers_of(out) if one["error"]}
    expected = dict(enumerate([*codes, "invalid_json_line"], 3))
    assert {number: error["code"] for number, error in errors.items()} == expected
    assert all(error["message"].endswith(".") for error in errors.values())
    assert found.failed == len(errors) == found.count - 1


def test_a_line_is_read_once_when_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    members = batch_files.members
    monkeypatch.setattr(
        batch_files, "members", lambda text, *more: (read.append(text), members(text, *more))[1]
    )
    one = Line(1, line("a", {"prompt": "p"}).encode())
    asyncio.run(batch_files.answer(Echo(), one, False, LONGEST))  # type: ignore[arg-type]
    assert read == [one.raw.decode()]


def test_lines_are_ordered_by_their_prompts() -> None:
    prompts = ["b" * 300 + "2", "a", "c" * 900, "b" * 300 + "1"]
    lines = [Line(at, line(f"{at}", {"prompt": one}).encode()) for at, one in enumerate(prompts)]
    assert [one.number for one in in_order([*lines, Line(9, b"bad")])] == [2, 3, 0, 1, 9]


def test_memory_hardly_grows_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "WINDOW", 256)
    peaks = []
    for count in (512, 4096):
        path = written(tmp_path, (line(f"{at}", {"prompt": f"{at}"}) for at in range(count)))
        tracemalloc.start()
        try:
            requests = Requests(path, LONGEST)
            assert sum(1 for _ in requests.ordered()) == requests.total == count
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 64 * (4096 - 512)  # a line has more than that in the file


# -- going on --------------------------------------------------------------------------------------


def test_a_job_goes_on_wherever_its_answers_end(tmp_path: Path) -> None:
    lines = [line(f"{at}", {"prompt": f"text {at}"}) for at in range(5)]
    path, out = written(tmp_path, [*lines, "bad"]), tmp_path / "out.jsonl"
    answered(path, out, Echo())
    whole = out.read_bytes()
    for size in range(len(whole)):
        out.write_bytes(whole[:size])
        server = Echo()
        found = answered(path, out, server)
        assert found.count == 6
        assert found.failed == 1
        ids = Counter(one["id"] for one in answers_of(out))
        assert ids == Counter(json.loads(one)["id"] for one in whole.splitlines())


def test_an_editor_may_leave_the_last_line_break_out(tmp_path: Path) -> None:
    path = written(tmp_path, [line(f"{at}", {"prompt": f"text {at}"}) for at in range(3)])
    out = tmp_path / "out.jsonl"
    answered(path, out, Echo())
    first, second, _ = out.read_bytes().splitlines()
    out.write_bytes(first + b"\n" + second)
    server = Echo()
    answered(path, out, server)
    assert len(server.asked) == 1
    assert out.read_bytes().splitlines()[:2] == [first, second]
    assert len(answers_of(out)) == 3


def test_a_job_whose_answers_are_whole_asks_for_nothing(tmp_path: Path) -> None:
    path, out = written(tmp_path, [line("a", {"prompt": "p"})]), tmp_path / "out.jsonl"
    answered(path, out, Echo())
    again = Echo()
    answered(path, out, again)
    assert again.asked == []


def test_a_lost_process_ends_the_job_and_writes_no_answer(tmp_path: Path) -> None:
    lines = [line(f"{at}", {"prompt": f"{at}"}) for at in range(40)]
    path, out = written(tmp_path, lines), tmp_path / "out.jsonl"
    with pytest.raises(ProcessLost, match="a process is gone"):
        answered(path, out, Echo(lost_after=20))
    before = len(answers_of(out))
    assert 0 < before < 40
    assert answered(path, out, Echo()).count == 40
    assert all(one["response"]["status_code"] == 200 for one in answers_of(out))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ("some text\n", "what is no answer"),
        ('{"my": "only copy"}', "what is no answer"),
        ('{"id": 3}\n', "what is no answer"),
        ('{"id": "batch_req_1_0000000000000000", "response": null}\n', "an answer to a line that"),
    ],
)
def test_a_file_that_holds_something_else_is_not_written(
    tmp_path: Path, held: str, words: str
) -> None:
    path, out = written(tmp_path, [line("a", {"prompt": "p"})]), tmp_path / "out.jsonl"
    out.write_text(held)
    with pytest.raises(ConfigError, match=words):
        answered(path, out, Echo())
    assert out.read_text() == held


def test_answers_to_other_lines_or_of_another_model_are_refused(tmp_path: Path) -> None:
    path, out = written(tmp_path, [line("a", {"prompt": "p"})]), tmp_path / "out.jsonl"
    answered(path, out, Echo())
    with pytest.raises(ConfigError, match="another model, 'tiny'"):
        answered(path, out, Echo(), "large")
    written(tmp_path, [line("a", {"prompt": "changed"})])
    with pytest.raises(ConfigError, match="an answer to a line that"):
        answered(path, out, Echo())


def test_two_jobs_do_not_write_into_one_file(tmp_path: Path) -> None:
    path, out = written(tmp_path, [line("a", {"prompt": "p"})]), tmp_path / "out.jsonl"
    requests = Requests(path, LONGEST)
    with (
        Answers(out, requests, MODEL),
        pytest.raises(ConfigError, match="another outpace batch writes"),
    ):
        Answers(out, requests, MODEL)


LIVES = """
import asyncio, os, random, signal, sys, time
from pathlib import Path
from outpace import LLM
from outpace.serve.batch_files import Answers, Requests, run
from outpace.serve.in_process import InProcess

path, out, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
llm = LLM(max_num_seqs=4, max_model_len=128, threads=1)
draws = random.Random(0)

def work():
    requests = Requests(path, 1 << 20)
    with Answers(out, requests, "tiny") as answers:
        asyncio.run(run(InProcess(llm, "tiny", 1 << 20), requests, answers, lambda: None))

def size():
    return out.stat().st_size if out.exists() else 0

def gone(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)

ended = 0
while ended < kills:
    begun = size()
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    while ended % 2 and size() == begun and not gone(child):  # every other one gets on
        time.sleep(0.002)
    time.sleep(draws.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        break  # it had come to its end
    ended += 1
print(ended, out.read_bytes().count(b"\\n"), flush=True)
work()
"""
"""Loads the model once, and has children do the job, each of which is killed at a random moment.
The parent has no thread when it forks."""


@pytest.mark.parametrize(
    ("kills", "count"), [(12, 150), pytest.param(50, 600, marks=pytest.mark.slow)]
)
def test_killed_at_any_moment_no_line_is_lost_and_none_comes_twice(
    tmp_path: Path, kills: int, count: int
) -> None:
    body = {"max_tokens": 24, "temperature": 0}
    lines = [line(f"{at}", {"prompt": f"{at} cats", "seed": at, **body}) for at in range(count)]
    path, out = written(tmp_path, lines), tmp_path / "out.jsonl"
    with (
        subprocess.Popen(
            python(LIVES, path, out, kills),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as process,
        killed_after(600, process),
    ):
        said, _ = process.communicate()
    assert process.returncode == 0
    killed, before = map(int, said.split())
    assert killed == kills
    assert 0 < before < count
    found = answers_of(out)
    assert sorted(int(one["custom_id"]) for one in found) == list(range(count))
    assert all(one["response"]["body"]["choices"][0]["text"] for one in found)


# -- the command -----------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "outpace", "batch", *map(str, arguments)]


def test_the_command_goes_on_after_sigterm_and_counts_failures(tmp_path: Path) -> None:
    """Also where Ctrl-C is ignored, as it is in a shell's background jobs."""
    lines = [line(f"{at}", {"prompt": f"{at}", "max_tokens": 20}) for at in range(120)]
    path, out = written(tmp_path, [*lines, "bad"]), tmp_path / "out.jsonl"
    flags = (path, out, "--max-num-seqs", 8)
    job = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command(*flags)]
    with (
        subprocess.Popen(job, stderr=subprocess.PIPE, text=True) as process,
        killed_after(300, process),
    ):
        assert process.stderr is not None
        for said in process.stderr:
            if said.startswith("batch: "):
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stderr.read()
    assert process.returncode == 143
    assert "the same command goes on" in rest
    assert "Traceback" not in rest
    some = len(answers_of(out))
    assert 0 < some < 121
    done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=300)
    assert done.returncode == 4
    assert f"holds {some} of 121 answers" in done.stderr
    assert "1 of 121 lines failed (the first: line 121: " in done.stderr
    assert len({one["id"] for one in answers_of(out)}) == len(answers_of(out)) == 121
