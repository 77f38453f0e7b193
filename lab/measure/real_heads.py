"""Trains drafters for a real target on text that it writes itself, measures them, and makes the
table and the picture of lab/results/heads-real-target.md.

    python lab/measure/real_heads.py --target MODEL.gguf --data DATA --out build/real-heads

DATA holds ``corpus/`` with questions to learn from and ``prompts/`` with others to measure by, as
JSON lines. All stages go on where they were stopped when the same command is given again; --only
names some of the drafters. Minutes are processor time of one thread, not the clock's: other work
on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outpace import LLM, SamplingParams
from outpace.heads.registry import head_names
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.answers import FILE, Answers, AnswerSettings, fingerprint, prompts
from outpace.train.checkpoint import LOG
from outpace.train.data import cut_answers
from outpace.train.draft_model import DRAFT_MODEL, PRUNED
from outpace.train.metrics import Progress
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings
from outpace.train.state_cache import HiddenStateCache
from outpace.train.teacher import Teacher, signature_of

KINDS = (("mbpp_train",), ("gsm8k_train",), ("oasst_en100", "selfinstruct_seed"))
"""Files with questions: about code, mathematics and everything else, which take turns."""
HELD_OUT = {
    "humaneval": "code",
    "mbpp_test": "code",
    "gsm8k_test": "maths",
    "mt_bench": "chat",
}
LONGEST_PROMPT, LONGEST_ANSWER = 160, 256
TEMPERATURE, ROWS = 0.8, 32
DRAFTED = 4
MINUTES = "minutes.json"


@dataclass(frozen=True)
class Plan:
    """How a drafter is trained."""

    pace: float
    """Steps that a core (Zen 3) does in a minute, for a `--pace` of 1; by `--minutes` of them the rate
    has fallen."""
    batch: int
    learning_rate: float
    sizes: Mapping[str, Any]


PLANS = {
    "medusa": Plan(70, 2, 1e-3, {}),
    "hydra": Plan(60, 2, 1e-3, {}),
    "eagle3": Plan(20, 2, 7e-4, {}),
    "dflash": Plan(60, 2, 7e-4, {"layers": 2}),
    "mlp_speculator": Plan(85, 2, 2e-3, {"inner_size": 512}),
    "draft_model": Plan(14, 2, 2e-4, {"layers": 2}),
}
GIVEN = Plan(14, 2, 1e-5, {})
"""For a draft model that begins as another one: it knows the language, and a high rate ruins it."""


def main() -> None:
    """Writes answers, has the target read them once, trains, measures, and makes the page."""
    options = _options()
    torch.set_num_threads(options.threads)
    stages = {"train": _trained, "bench": _measured, "report": _reported}
    for name in options.stages:
        stages[name](options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="the model's GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="a folder with corpus/, prompts/")
    parser.add_argument("--out", type=Path, required=True, help="a folder for all that is written")
    parser.add_argument("--answers", type=int, default=48, help="texts to learn from")
    parser.add_argument("--minutes", type=float, default=1.6, help="of training for each drafter")
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--prompts", type=int, default=2, help="to measure by, of each kind")
    parser.add_argument("--tokens", type=int, default=40, help="of each text to measure by")
    parser.add_argument("--beside", help="a draft model to measure beside them")
    parser.add_argument("--start", default="pruned", help="of draft_model, as for outpace train")
    parser.add_argument("--layers", type=int, help="that draft_model keeps; unset: all of a model")
    parser.add_argument("--quantization", help="that draft_model learns to bear, and drafts in")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens that heads guess")
    parser.add_argument("--prefix", action="store_true", help="hydra has a prefix layer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto", help="as for outpace train")
    parser.add_argument("--pace", type=float, default=1.0, help="of this machine's steps")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=("train", "bench", "report"),
        default=("train", "bench", "report"),
    )
    parser.add_argument("--picture", type=Path, help="where; unset: beside the drafters")
    return parser.parse_args()


# -- training ------------------------------------------------------------------------------------


def _trained(options: argparse.Namespace) -> None:
    target = load(options.target)
    answers = list(islice(_answers(target, options), options.answers))
    tokens, own = cut_answers(answers, target.tokenizer.eos_token_id, 256)
    _say(f"{len(answers)} answers, {tokens.numel():,} tokens, {int(own.sum()):,} of them its own")
    sizes = {"answers": len(answers), "tokens": tokens.numel(), "own": int(own.sum())}
    (options.out / "text.json").write_text(json.dumps(sizes))
    hidden_states = HiddenStateCache(options.out / "hidden-states", signature_of(target), 5 * 10**9)
    reads = build_target_layer_ids(target)
    clock, teacher = _Minutes(options.out), Teacher(target, (*reads, -1), state_cache=hidden_states)
    for number, block in enumerate(tokens):
        teacher.read(block[None])
        clock.note()
        _say(f"read {number + 1} of {len(tokens)} blocks")
    for method in options.only:
        plan, folder = _plan(method, options), options.out / method
        steps = round(plan.pace * options.pace * options.minutes)
        settings = TrainSettings(
            method=method,
            steps=steps,
            learning_rate=plan.learning_rate,
            batch=plan.batch,
            warmup=5,
            held_out=0.05,
            head=_sizes(method, options, reads),
            start=options.start,
            precision=options.precision,
            quantization=options.quantization if method == DRAFT_MODEL else None,
        )
        run = TrainingRun(
            target, tokens, settings, folder, own=own, state_cache=hidden_states, preparing=_said
        )
        if run.step < steps:
            _play(run, method, folder, options.minutes)


def build_target_layer_ids(target: LoadedModel) -> list[int]:
    """The target's layers that EAGLE-3 reads by itself, and DFlash is told to: they are kept
    once."""
    count = int(target.config.num_hidden_layers)
    return [2, count // 2, count - 3]


def _plan(method: str, options: argparse.Namespace) -> Plan:
    return GIVEN if method == DRAFT_MODEL and options.start != PRUNED else PLANS[method]


def _sizes(method: str, options: argparse.Namespace, reads: list[int]) -> dict[str, Any]:
    sizes = {"depths": DRAFTED, **_plan(method, options).sizes}
    if method == "hydra" and options.prefix:
        sizes["prefix"] = True
    if method in head_names():
        sizes["draft_vocab_size"] = options.vocabulary
    elif options.layers:
        sizes["layers"] = options.layers
    return {**sizes, "reads": reads} if method == "dflash" else sizes


def _play(run: TrainingRun, method: str, folder: Path, minutes: float) -> None:
    """Trains until the folder has had so much processor time."""
    begin, clock = time.process_time(), _Minutes(folder)
    left = 60 * (minutes - _minutes(folder))

    def report(reached: Progress) -> None:
        clock.note()
        _say(f"{method}, step {reached.step}: {reached.sentence}")

    weights = sum(weight.numel() for weight in run.network.parameters())
    (folder / "weights.json").write_text(json.dumps(weights))  # the page wants it of a stopped run
    if left > 0:
        every = max(1, run.settings.steps // 10)
        run.play(report, every, stop=lambda: time.process_time() - begin > left)


def _answers(target: LoadedModel, options: argparse.Namespace) -> Answers:
    asked = _asked(target, options.data / "corpus")
    settings = AnswerSettings(
        target=target.name,
        temperature=TEMPERATURE,
        max_tokens=LONGEST_ANSWER,
        seed=0,
        prompts=fingerprint(asked),
    )
    answers = Answers(options.out / FILE, settings, 10**9)
    if answers.count < options.answers:
        answers.extend(asked, options.answers, _writer(target), lambda n: _say(f"answer {n}"))
    return answers


def _writer(target: LoadedModel) -> Any:
    llm = LLM(target, speculative_config={"method": "none"}, max_num_seqs=ROWS, max_model_len=512)

    def write(texts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[int]]:
        params = [
            SamplingParams(temperature=TEMPERATURE, max_tokens=LONGEST_ANSWER, seed=seed)
            for seed in seeds
        ]
        for output in llm.generate_each([list(text) for text in texts], params):
            yield output.outputs[0].token_ids

    return write


def _asked(target: LoadedModel, corpus: Path) -> list[list[int]]:
    """The questions as prompts, one of each kind after the other."""
    kinds = [
        prompts([corpus / f"{name}.jsonl" for name in names], target.tokenizer, target.name, 512)
        for names in KINDS
    ]
    short = [[prompt for prompt in kind if len(prompt) <= LONGEST_PROMPT] for kind in kinds]
    return [prompt for prompt in chain(*zip_longest(*short)) if prompt is not None]


class _Minutes:
    """Adds the processor time from now on to what a folder has had before."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._before = folder / MINUTES, _minutes(folder)
        self._begin = time.process_time()

    def note(self) -> None:
        """Writes it down, for the case that what follows is stopped."""
        spent = self._before + (time.process_time() - self._begin) / 60
        self._file.write_text(json.dumps(spent))


def _minutes(folder: Path) -> float:
    path = folder / MINUTES
    return float(json.loads(path.read_text())) if path.exists() else 0.0


def _say(text: str) -> None:
    print(text, flush=True)


def _said(step: str, done: float) -> None:
    _say(f"{step}: {done:.0%}")


# -- measuring -----------------------------------------------------------------------------------


def _measured(options: argparse.Namespace) -> None:
    """Runs the benchmark on held-out questions, all drafters against plain decoding."""
    asked = options.out / "held_out.jsonl"
    asked.write_text("".join(_held_out(options.data / "prompts", options.prompts)))
    for temperature in ("0", "0.8"):
        found = options.out / f"bench-{temperature}.json"
        if found.exists():
            continue
        command = [sys.executable, "-m", "outpace", "bench", "run", "-m", options.target]
        command += ["--chat", "--prompts", str(asked), "--temperature", temperature]
        command += ["--to-end", "--again"]
        command += ["--max-tokens", str(options.tokens), "--threads", str(options.threads)]
        command += ["--llm", '{"max_model_len": 768}', "--json", str(found)]
        for config in _configs(options):
            for count in (DRAFTED, "auto"):
                asked_for = {**config, "num_speculative_tokens": count}
                command += ["--speculative-config", json.dumps(asked_for)]
        subprocess.run(command, check=True)


def _configs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What drafts: the trained ones, and another model to compare them with."""
    for method in options.only:
        config = {"method": method, "model": str(options.out / method)}
        if method in head_names():
            yield {**config, "check": False}  # So little training may fail it.
        else:
            yield {**config, "quantization": options.quantization or "auto"}
    if options.beside:
        yield {"method": "draft_model", "model": options.beside}


def _held_out(folder: Path, count: int) -> Iterator[str]:
    """Lines with prompts: of each kind so many, evenly from its files."""
    for kind in dict.fromkeys(HELD_OUT.values()):
        files = [name for name, of in HELD_OUT.items() if of == kind]
        listed = [(folder / f"{name}.jsonl").read_text().splitlines() for name in files]
        taken = [line for lines in zip(*listed, strict=False) for line in lines][:count]
        for line in taken:
            entry = json.loads(line)
            found = {"id": entry["id"], "task": kind, "prompt": entry["prompt"]}
            yield json.dumps(found) + "\n"


# -- the page ------------------------------------------------------------------------------------


def _reported(options: argparse.Namespace) -> None:
    methods = [method for method in options.only if (options.out / method / MINUTES).exists()]
    found = "\n\n".join([_training(options.out, methods), *_benchmarks(options.out)])
    (options.out / "tables.md").write_text(found + "\n")
    _say(found)
    _curves(options.out, methods, options.picture or options.out / "curves.png")


def _training(out: Path, methods: Sequence[str]) -> str:
    lines = ["| drafter | weights, million | tokens learned from | passes through the text | minutes "
             "| simulated | by depth, % | last doubling |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    size = json.loads((out / "text.json").read_text())["tokens"]
    for method in methods:
        log = _log(out / method)
        best = max(log, key=lambda entry: entry["acceptance_length"])
        weights = json.loads((out / method / "weights.json").read_text()) / 1e6
        depths = ", ".join(f"{100 * share:.0f}" for share in best["by_depth"])
        lines.append(
            f"| `{method}` | {weights:.1f} | {log[-1]['tokens']:,} | {log[-1]['tokens'] / size:.1f} "
            f"| {_minutes(out / method):.1f} | {best['acceptance_length']:.2f} | {depths} "
            f"| {_doubling(log):+.2f} |"
        )
    return "\n".join(lines)


def _log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def _doubling(log: Sequence[Mapping[str, Any]]) -> float:
    """What the second half of the tokens has brought to the best so far. Between two reports that is
    taken to rise with the logarithm of the tokens; before the first one it is 1."""
    best = list(accumulate((entry["acceptance_length"] for entry in log), max))
    tokens = [entry["tokens"] for entry in log]
    return float(best[-1] - np.interp(np.log(tokens[-1] / 2), np.log(tokens), best, left=1.0))


def _benchmarks(out: Path) -> Iterator[str]:
    for temperature in ("0", "0.8"):
        path = out / f"bench-{temperature}.json"
        if not path.exists():
            continue
        (cell,) = json.loads(path.read_text())["cells"]
        kinds = list(dict.fromkeys(HELD_OUT.values()))
        yield f"Temperature {temperature}, {cell['prompts']} prompts:"
        _, again, *drafting = cell["methods"]  # plain decoding is the first, and the second
        pairs = list(zip(drafting[::2], drafting[1::2], strict=True))
        head = ["", "accepted at positions 1 to 4, %", "tokens/pass", *kinds]
        yield _table(head, [_accepted(fixed, kinds) for fixed, _ in pairs])
        head = ["over plain", "four drafted", "with the length chosen", *kinds]
        same = ["the same again", "", _times(again["speedup"]), *_by_kind(again, kinds)]
        yield _table(head, [same, *(_sped_up(*pair, kinds) for pair in pairs)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _accepted(fixed: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """What a drafter's chains of `DRAFTED` tokens bring."""
    parts = {task["task"]: task["acceptance"] for task in fixed["tasks"]}
    lengths = [f"{parts[kind]['emitted'] / parts[kind]['passes']:.2f}" for kind in kinds]
    emitted, passes = (sum(part[key] for part in parts.values()) for key in ("emitted", "passes"))
    accepted = by_position(list(parts.values()))
    return [_named(fixed), accepted, f"{emitted / passes:.2f}", *lengths]


def _sped_up(
    fixed: Mapping[str, Any], chosen: Mapping[str, Any], kinds: Sequence[str]
) -> list[str]:
    """A drafter's speed with `DRAFTED` tokens, and with as many as pay."""
    speeds = map(_times, (fixed["speedup"], chosen["speedup"]))
    return [_named(fixed), *speeds, *_by_kind(chosen, kinds)]


def _by_kind(method: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    speeds = {task["task"]: task["speedup"] for task in method["tasks"]}
    return [_times(speeds[kind]) for kind in kinds]


def _named(method: Mapping[str, Any]) -> str:
    return f"`{method['name'].split()[0]}`"


def _times(speedup: Mapping[str, float]) -> str:
    return f"{speedup['mean']:.2f} [{speedup['low']:.2f}, {speedup['high']:.2f}]"


def by_position(parts: Sequence[Mapping[str, Any]]) -> str:
    """Of the drafts that were accepted so far, which share is accepted at each position, in %."""
    drafted = [part["drafted_per_position"] for part in parts]
    accepted = [part["accepted_per_position"] for part in parts]
    reached = [sum(column) for column in zip_longest(*drafted, fillvalue=0)][:DRAFTED]
    kept = [sum(column) for column in zip_longest(*accepted, fillvalue=0)][:DRAFTED]
    # A chain is drafted whole: a position counts where all before it were accepted.
    asked = [reached[0], *(min(a, b) for a, b in zip(kept, reached[1:], strict=False))]
    pairs = zip(kept, asked, strict=True)
    return ", ".join(f"{100 * a / b:.0f}" if b else "-" for a, b in pairs)


def _curves(out: Path, methods: Sequence[str], picture: Path) -> None:
    """Draws simulated acceptance lengths against tokens learned from."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for method in methods:
        log = _log(out / method)
        tokens = [entry["tokens"] for entry in log]
        axes.plot(tokens, [entry["acceptance_length"] for entry in log], "-o", ms=3, label=method)
    axes.set_xscale("log")
    axes.set_xlabel("tokens learned from")
    axes.set_ylabel("simulated acceptance length")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
