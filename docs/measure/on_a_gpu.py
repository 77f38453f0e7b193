"""A pair shaped like a real one, made on a GPU, decoded in several ways: tokens per second.

    python docs/measure/on_a_gpu.py llama-8b --json found.json

The target is random and the drafter its first layers (`outpace bench pair`): what they cost is what
models of this shape cost, and how often they agree is set. All ways write texts of the same length
to the same prompts, in turns; the first prompt is played once by each before anything is timed.
Ratios are over the plain way, prompt by prompt: their median, the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from outpace import LLM, SamplingParams
from outpace.bench.synthetic.agreement import Texts, generated, greedy_agreement
from outpace.bench.synthetic.model_shapes import shape_named
from outpace.bench.synthetic.pair import find_scale
from outpace.bench.synthetic.weights import LaterLayersScale, first_layers, random_model


def make(name: str, layers: int, agreement: float, device: torch.device) -> tuple[Any, Any]:
    shape = shape_named(name, draft_layers=layers)
    target = random_model(
        shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device, 0
    )
    drafter, factor = first_layers(target, shape), LaterLayersScale(target, shape)
    texts = Texts.random(8, 48, 1, device)

    def agreement_at(scale: float) -> float:
        factor.scale = scale
        return greedy_agreement(drafter, generated(target, texts), 12)

    factor.scale = find_scale(agreement_at, agreement, 0.02, 5)
    print(f"agreement {agreement_at(factor.scale):.2f}")
    factor.fix()
    return target, drafter


def of_transformers(model: Any, temperature: float, **options: Any) -> Any:
    sampling = (
        {"do_sample": False}
        if not temperature
        else {"do_sample": True, "temperature": temperature, "top_k": 0}
    )

    def write(prompts: list[list[int]], tokens: int) -> int:
        ids = torch.tensor(prompts, device=model.device)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            **sampling,
            **options,
        )
        return made[:, ids.shape[1] :].numel()

    return write


def of_outpace(llm: LLM, temperature: float) -> Any:
    def write(prompts: list[list[int]], tokens: int) -> int:
        params = [
            SamplingParams(temperature=temperature, seed=row, max_tokens=tokens, ignore_eos=True)
            for row in range(len(prompts))
        ]
        return sum(len(output.token_ids) for output in llm.generate(prompts, params))

    return write


def timed(
    ways: dict[str, Any], prompts: list[list[list[int]]], tokens: int, until: float
) -> dict[str, list[float]]:
    """Returns tokens per second of each way, by prompt."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for write in ways.values():
        write(prompts[0], tokens)
    for prompt in prompts:
        for name, write in ways.items() if time.time() < until else ():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            count = write(prompt, tokens)
            rates[name].append(count / (time.perf_counter() - start))
    return rates


def rows_of(rates: dict[str, list[float]], **setting: Any) -> list[dict[str, Any]]:
    rows = []
    for name, each in rates.items():
        if each:
            ratios = sorted(one / plain for one, plain in zip(each, rates["plain"], strict=True))
            row = {
                **setting,
                "way": name,
                "tokens/s": statistics.median(each),
                "ratio": statistics.median(ratios),
                "lowest": ratios[0],
                "highest": ratios[-1],
            }
            rows.append(row)
            print(
                f"| {setting['batch']} | {setting['temperature']:g} | {name} | {row['tokens/s']:.0f} | {row['ratio']:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] |",
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
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    until, device = (
        time.time() + asked.seconds,
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    target, drafter = make(asked.shape, asked.layers, asked.agreement, device)
    drafts: dict[str, Any] = {"method": "draft_model", "model": drafter}
    ours: dict[str, tuple[dict[str, Any], Any]] = {
        "plain": ({"method": "none"}, "auto"),
        "plain, not recorded": ({"method": "none"}, False),
        "draft_model, 5": ({**drafts, "num_speculative_tokens": 5}, "auto"),
        "draft_model, auto": (drafts, "auto"),
        "draft_tree, auto": ({**drafts, "method": "draft_tree"}, "auto"),
        "auto": ({**drafts, "method": "auto"}, "auto"),
    }
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
                compile=compiled,
                max_num_seqs=batch,
                max_model_len=1024,
            )
            for name, (config, compiled) in ours.items()
        }
        for temperature in (0.0, 0.8):
            ways = {name: of_outpace(llm, temperature) for name, llm in llms.items()}
            ways["transformers"] = of_transformers(target, temperature)
            if batch == 1:
                ways["transformers, assisted"] = of_transformers(
                    target, temperature, assistant_model=drafter
                )
            found += rows_of(
                timed(ways, prompts, asked.tokens, until), batch=batch, temperature=temperature
            )
    if asked.json:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        settings = {key: str(value) for key, value in vars(asked).items()}
        asked.json.write_text(
            json.dumps(
                {"device": where, "torch": torch.__version__, **settings, "rows": found}, indent=1
            )
        )


if __name__ == "__main__":
    main()
