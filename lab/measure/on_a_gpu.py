"""A pair shaped like a real one, made on a GPU, decoded in several ways: tokens per second.

    python lab/measure/on_a_gpu.py llama-8b --json found.json

The target is random and the drafter its first layers (`outpace bench pair`): what they cost is what
models of this shape cost, and how often they agree is set. All ways write texts of the same length
to the same prompts, in turns; the first prompt is played once by each before anything is timed.
Ratios are over the plain way, prompt by prompt: their median, the lowest and the highest. The last
columns say how many of the greedy texts are those of plain decoding with the same options, token for
token, and how many of the seconds went into recording passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outpace import LLM, SamplingParams
from outpace.bench.model_shapes import LaterLayersScale, first_layers, random_model, shape_named
from outpace.bench.synthetic import Texts as Prompts
from outpace.bench.synthetic import find_scale, generated, greedy_agreement


def make(name: str, layers: int, agreement: float, device: torch.device) -> tuple[Any, Any]:
    shape = shape_named(name, draft_layers=layers)
    target = random_model(
        shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device, 0
    )
    drafter, factor = first_layers(target, shape), LaterLayersScale(target, shape)
    texts = Prompts.random(8, 48, 1, device)

    def agreement_at(scale: float) -> float:
        factor.scale = scale
        return greedy_agreement(drafter, generated(target, texts), 12)

    factor.scale = find_scale(agreement_at, agreement, 0.02, 5)
    print(f"agreement {agreement_at(factor.scale):.2f}")
    factor.fix()
    return target, drafter


Texts = list[list[int]]


class Way(NamedTuple):
    """One way to write texts."""

    write: Callable[[Texts, int], Texts]
    recording: Callable[[], float]
    """The seconds that went into recording passes so far."""


INVARIANT = ", batch_invariant"


def of_transformers(model: Any, temperature: float, **options: Any) -> Way:
    sampling = (
        {"do_sample": False}
        if not temperature
        else {"do_sample": True, "temperature": temperature, "top_k": 0}
    )

    def write(prompts: Texts, tokens: int) -> Texts:
        ids = torch.tensor(prompts, device=model.device)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            **sampling,
            **options,
        )
        return made[:, ids.shape[1] :].tolist()

    return Way(write, lambda: 0.0)


def of_outpace(llm: LLM, temperature: float) -> Way:
    def write(prompts: Texts, tokens: int) -> Texts:
        params = [
            SamplingParams(temperature=temperature, seed=row, max_tokens=tokens, ignore_eos=True)
            for row in range(len(prompts))
        ]
        llm.forget_texts()  # or look-ups would draft a prompt that comes again from its own text
        return [output.token_ids for output in llm.generate(prompts, params)]

    return Way(write, lambda: llm.compile_seconds)


class Timed:
    """What was measured of one way."""

    def __init__(self) -> None:
        self.rates: list[float] = []  # tokens per second, by prompt
        self.texts: Texts = []
        self.seconds = self.recording = 0.0


def timed(
    ways: dict[str, Way], prompts: list[Texts], tokens: int, until: float
) -> dict[str, Timed]:
    found = {name: Timed() for name in ways}
    for way in ways.values():
        way.write(prompts[0], tokens)
    for prompt in prompts:
        for name, way in ways.items() if time.time() < until else ():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            recorded, start = way.recording(), time.perf_counter()
            written = way.write(prompt, tokens)
            seconds = time.perf_counter() - start
            found[name].seconds += seconds
            found[name].recording += way.recording() - recorded
            found[name].rates.append(sum(map(len, written)) / seconds)
            found[name].texts += written
    return found


def same_as_plain(name: str, found: dict[str, Timed]) -> int:
    """Returns how many texts of a way are those of plain decoding with the same options."""
    plain = found["plain" + (INVARIANT if name.endswith(INVARIANT) else "")]
    return sum(one == other for one, other in zip(found[name].texts, plain.texts, strict=False))


def rows_of(found: dict[str, Timed], **setting: Any) -> list[dict[str, Any]]:
    rows = []
    for name, way in found.items():
        if way.rates:
            pairs = zip(way.rates, found["plain"].rates, strict=False)  # time may be up
            ratios = sorted(one / plain for one, plain in pairs)
            row = {
                **setting,
                "way": name,
                "tokens/s": statistics.median(way.rates),
                "ratio": statistics.median(ratios),
                "lowest": ratios[0],
                "highest": ratios[-1],
                "texts": len(way.texts),
                "same": None if setting["temperature"] else same_as_plain(name, found),
                "seconds": way.seconds,
                "recording": way.recording,
            }
            rows.append(row)
            same = "" if row["same"] is None else f"{row['same']} of {row['texts']}"
            print(
                f"| {setting['batch']} | {setting['temperature']:g} | {name} | {row['tokens/s']:.0f} | {row['ratio']:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] | {same} | {way.recording:.1f} of {way.seconds:.1f} s |",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("--layers", type=int, default=2, help="of the drafter")
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="nothing new is begun after so many"
    )
    parser.add_argument("--ways", help="some of ours, with semicolons between; unset: all")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    until, device = (
        time.time() + asked.seconds,
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    target, drafter = make(asked.shape, asked.layers, asked.agreement, device)
    drafts: dict[str, Any] = {"method": "draft_model", "model": drafter}
    five = {**drafts, "num_speculative_tokens": 5}
    ours: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({"method": "none"}, {}),
        "plain, not recorded": ({"method": "none"}, {"compile": False}),
        "plain" + INVARIANT: ({"method": "none"}, {"batch_invariant": True}),
        "draft_model 5": (five, {}),
        "draft_model 5" + INVARIANT: (five, {"batch_invariant": True}),
        "draft_model": (drafts, {}),
        "draft_model" + INVARIANT: (drafts, {"batch_invariant": True}),
        "draft_tree": ({**drafts, "method": "draft_tree"}, {}),
        "auto": ({**drafts, "method": "auto"}, {}),
    }
    if asked.ways:
        ours = {name: ours[name.strip()] for name in asked.ways.split(";")}
    found = []
    for batch in map(int, asked.batch.split(",")):
        prompts = [
            torch.randint(0, 256, (batch, 64), generator=torch.Generator().manual_seed(n)).tolist()
            for n in range(asked.prompts)
        ]
        llms = {
            name: LLM(
                target,
                speculative_config=config,
                **options,
                max_num_seqs=batch,
                max_model_len=1024,
            )
            for name, (config, options) in ours.items()
        }
        for temperature in (0.0, 0.8):
            ways = {name: of_outpace(llm, temperature) for name, llm in llms.items()}
            ways["transformers"] = of_transformers(target, temperature)
            if batch == 1:
                ways["transformers, assisted"] = of_transformers(
                    target, temperature, assistant_model=drafter
                )
            timings = timed(ways, prompts, asked.tokens, until)
            found += rows_of(timings, batch=batch, temperature=temperature)
            if asked.json:
                write_json(asked, device, found)


def write_json(asked: argparse.Namespace, device: torch.device, rows: list[Any]) -> None:
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    settings = {key: str(value) for key, value in vars(asked).items() if key != "json"}
    content = {"device": where, "torch": torch.__version__, **settings, "rows": rows}
    asked.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
