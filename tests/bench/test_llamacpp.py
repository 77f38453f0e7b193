"""llama.cpp and ik_llama.cpp as contestants: asked over HTTP, refused by name, ended in time."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

import pytest

from outpace.bench.contest import BatchJob
from outpace.bench.peers.llamacpp import IK_LLAMA_CPP, LLAMA_CPP, LlamaCpp, LlamaServer
from outpace.bench.peers.registry import Models, check_peers, peers
from outpace.errors import ConfigError

JOB = BatchJob(((3, 1, 4),), 6, 0.0)

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

words = sys.argv[1:]
if "broken.gguf" in words[words.index("-m") + 1]:
    print("error: the file is broken")
    sys.exit(1)
open(os.environ["ASKED"], "a").write(json.dumps({"pid": os.getpid(), "words": words}) + "\\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        open(os.environ["ASKED"], "a").write(json.dumps(asked) + "\\n")
        drafts = "-md" in words and "idle.gguf" not in words[words.index("-md") + 1]
        timings = {"draft_n": 4, "draft_n_accepted": 2} if drafts else {}
        if self.path == "/tokenize":
            return self.answer({"tokens": [ord(letter) for letter in asked["content"]]})
        count = asked["n_predict"]
        silent = "silent.gguf" in words[words.index("-m") + 1]  # tells no token ids
        told = {"content": "abc", "tokens_predicted": count} if silent else {}
        told = told or {"tokens": list(range(count))}
        self.answer({**told, "timings": timings})

    def answer(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *words):
        pass


HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a stand-in for llama-server writes how it was called."""
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    monkeypatch.setenv(LLAMA_CPP.variable, str(program))
    monkeypatch.setenv(IK_LLAMA_CPP.variable, str(program))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return tmp_path / "asked"


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_plain_and_speculative_run_the_same_file(asked: Path) -> None:
    found = peers(["llamacpp"], Models("t.gguf", "d.gguf", "float32", "cpu"))
    assert [c.name for c in found] == [
        "llamacpp",
        "llamacpp-speculative-3",
        "llamacpp-speculative-5",
    ]
    for contestant in found:
        assert contestant.run(JOB).texts == [[0, 1, 2, 3, 4, 5]]
        assert contestant.refusal(2, 0.0) is not None
    started = [line["words"] for line in lines(asked) if "words" in line]
    drafted = [w[w.index("--spec-draft-n-max") + 1] for w in started if "-md" in w]
    assert drafted == ["3", "5"]
    assert all(w[w.index("-m") + 1] == "t.gguf" for w in started)
    requests = [line for line in lines(asked) if "prompt" in line]
    assert requests[0]["prompt"] == [3, 1, 4]
    assert requests[0]["n_predict"] == 6
    assert requests[0]["cache_prompt"] is False


def test_the_process_ends_with_its_object(asked: Path) -> None:
    server = LlamaServer(LLAMA_CPP, "t.gguf", None, 0, 1)
    pid = lines(asked)[0]["pid"]
    assert isinstance(pid, int)
    os.kill(pid, 0)  # it runs
    del server
    gc.collect()
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_what_drafts_nothing_is_not_called_speculative(asked: Path) -> None:
    contestant = LlamaCpp(LLAMA_CPP, LlamaServer(LLAMA_CPP, "t.gguf", "idle.gguf", 3, 1), 3)
    with pytest.raises(ConfigError, match="drafted nothing"):
        contestant.run(JOB)


@pytest.mark.parametrize(("count", "tokens"), [(2, [97, 98]), (5, [97, 98, 99, -1, -1])])
def test_tokens_that_a_server_does_not_tell_are_read_from_its_text(
    count: int, tokens: list[int], asked: Path
) -> None:
    contestant = LlamaCpp(LLAMA_CPP, LlamaServer(LLAMA_CPP, "silent.gguf", None, 0, 1), None)
    assert contestant.run(BatchJob(((3, 1, 4),), count, 0.0)).texts == [tokens]


def test_ik_llama_cpp_repacks_and_has_its_own_options(asked: Path) -> None:
    names = ["ik_llamacpp-plain", "ik_llamacpp-speculative-5"]
    found = peers(names, Models("t.gguf", "d.gguf", "float32", "cpu"))
    assert [c.name for c in found] == ["ik_llamacpp", "ik_llamacpp-speculative-5"]
    plain, drafting = [line["words"] for line in lines(asked) if "words" in line]
    assert "--run-time-repack" in plain
    assert "-md" not in plain
    assert drafting[drafting.index("--spec-type") + 1] == "draft:n_max=5"


def test_without_a_draft_model_a_whole_peer_is_plain_and_a_drafting_one_refused(
    asked: Path,
) -> None:
    models = Models("t.gguf", None, "float32", "cpu")
    assert [c.name for c in peers(["llamacpp"], models)] == ["llamacpp"]
    with pytest.raises(ConfigError, match="needs a draft model"):
        peers(["llamacpp-speculative-3"], models)


@pytest.mark.parametrize(
    "name", ["lamacpp", "llamacpp-speculative-4", "hf-plain-plain", "openvino-"]
)
def test_unknown_peers_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown peer '{name}'"):
        check_peers([name])


def test_a_server_that_does_not_start_says_why(asked: Path) -> None:
    with pytest.raises(ConfigError, match="does not start: error: the file is broken"):
        LlamaServer(LLAMA_CPP, "broken.gguf", None, 0, 1)


def test_a_missing_program_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LLAMA_CPP.variable, "no-such-program")
    with pytest.raises(ConfigError, match="needs its program llama-server: build"):
        peers(["llamacpp"], Models("t.gguf", None, "float32", "cpu"))


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (Models("folder", None, "float32", "cpu"), "reads GGUF files"),
        (Models("t.gguf", "folder", "float32", "cpu"), "reads GGUF files"),
        (Models("t.gguf", None, "float32", "cuda"), "runs on the CPU"),
        (Models("t.gguf", None, "float32", "cpu", "int8"), "quantises them to int8"),
        (Models("t.gguf", None, "float32", "cpu", adapted=True), "without the adapter"),
    ],
)
def test_what_it_cannot_run_is_refused(asked: Path, models: Models, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        peers(["llamacpp"], models)


def test_a_text_that_exceeds_its_context_is_refused(asked: Path) -> None:
    contestant = LlamaCpp(LLAMA_CPP, LlamaServer(LLAMA_CPP, "t.gguf", None, 0, 1), None)
    with pytest.raises(ConfigError, match="context of 8192"):
        contestant.run(BatchJob(((1,) * 8190,), 6, 0.0))
