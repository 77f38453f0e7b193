"""The commands, with processes of their own: what they write, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.texts import SIZE, tokenizer, writer
from processes import START_SECONDS, free_port, killed_after
from serve.conftest import call, wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("writer")
    writer(SIZE + 1).save_pretrained(found)
    tokenizer().save_pretrained(found)
    return found


def words(verb: str, folder: Path, *more: object) -> list[str]:
    model = ("-m", folder, "--dtype", "float64", "--threads", 1)
    return [verb, *map(str, (*model, "--tensor-parallel-size", 2, *more))]


@contextmanager
def started(*command: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(
            [sys.executable, "-m", *command], stdout=pipe, stderr=pipe, text=True, env=environment
        ) as one,
        killed_after(START_SECONDS, one),
    ):
        yield one


def children_of(process: subprocess.Popen[str]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="the children of a process are looked up in /proc"
)


@needs_proc
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_no_process_is_left(number: int, folder: Path) -> None:
    """Killed, or stopped by Ctrl-C, in the middle of a text."""
    asked = words("generate", folder, "go: ", "--max-tokens", 100, "--ignore-eos", "--seed", 1)
    with started("outpace", *asked) as process:
        assert process.stdout is not None
        process.stdout.read(3)
        others = children_of(process)
        assert len(others) == 1
        for pid in (process.pid, *others) if number == signal.SIGINT else (process.pid,):
            os.kill(pid, number)  # a terminal sends Ctrl-C to all of them
        process.communicate()
    assert process.returncode in (0, 130, -number)
    wait_for(lambda: not any(map(alive, others)))


@needs_proc
def test_a_server_ends_with_its_process(folder: Path) -> None:
    with started("outpace", *words("serve", folder, "--port", 0)) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "listening at" in line).split()[2][:-1]
        next(line for line in process.stderr if "outpace serves" in line)
        status, body, _ = call(url, "/v1/completions", {"prompt": "go: ", "max_tokens": 4})
        assert status == 200, body
        (other,) = children_of(process)
        os.kill(other, signal.SIGKILL)
        said = process.communicate()[1]
    assert process.returncode == 3, said
    assert "process 1 of the 2 that hold the model has ended (signal 9)" in said


@pytest.mark.slow
def test_torchrun(folder: Path) -> None:
    port = free_port()
    asked = words("generate", folder, "go: ", "--max-tokens", 12, "--temperature", 0)
    texts = []
    for run in (("torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m"), ()):
        with started(*run, "outpace", *asked) as process:
            out, said = process.communicate()
        assert process.returncode == 0, said
        texts.append(out)
    assert texts[0] == texts[1]
    assert texts[0]


TWICE = """
import sys
from outpace import LLM
from outpace.errors import ConfigError
llm = LLM(sys.argv[1], tensor_parallel_size=2)
llm.generate("go: ")
del llm
try:
    LLM(sys.argv[1], tensor_parallel_size=2)
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_second_model_of_torchruns_processes(folder: Path, tmp_path: Path) -> None:
    """They ended with the first one: nobody would come, however long one waited."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    port = free_port()
    asked = (f"--master-port={port}", str(script), str(folder))
    with started("torch.distributed.run", "--nproc-per-node=2", *asked) as process:
        out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "load one model for each start of torchrun" in out
