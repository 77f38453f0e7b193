"""A pair shaped like a real one, made on a GPU, decoded in several ways: tokens per second.

    python docs/measure/on_a_gpu.py llama-8b --json found.json

The target is random and the drafter its first layers (`outpace bench pair`): what they cost is what
models of this shape cost, and how often they agree is set. All ways write texts of the same length
to the same prompts, in turns; the first prompt is played once by each before anything is timed.
Ratios are over the plain way, prompt by prompt: their median, the lowest and the highest. The last
column says how many of the greedy texts are those of plain decoding with the same options, token for
token.
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
from outpace.bench.synthetic.agreement import Texts as Prompts
from outpace.bench.synthetic.agreement import generated, greedy_agreement
from outpace.bench.synthetic.model_shapes import shape_named
from outpace.bench.synthetic.pair import find_scale
from outpace.bench.synthetic.weights import LaterLayersScale, first_layers, random_model


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
INVARIANT = ", batch_invariant"


def of_transformers(model: Any, temperature: float, **options: Any) -> Any:
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

    return write


def of_outpace(llm: LLM, temperature: float) -> Any:
    def write(prompts: Texts, tokens: int) -> Texts:
        params = [
            SamplingParams(temperature=temperature, seed=row, max_tokens=tokens, ignore_eos=True)
            for row in range(len(prompts))
        ]
        return [output.token_ids for output in llm.generate(prompts, params)]

    return write


def timed(
    ways: dict[str, Any], prompts: list[Texts], tokens: int, until: float
) -> tuple[dict[str, list[float]], dict[str, Texts]]:
    """Returns tokens per second of each way, by prompt, and all texts of each way."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, Texts] = {name: [] for name in ways}
    for write in ways.values():
        write(prompts[0], tokens)
    for prompt in prompts:
        for name, write in ways.items() if time.time() < until else ():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            written = write(prompt, tokens)
            rates[name].append(sum(map(len, written)) / (time.perf_counter() - start))
            texts[name] += written
    return rates, texts


def same_as_plain(name: str, texts: dict[str, Texts]) -> int:
    """Returns how many texts of a way are those of plain decoding with the same options."""
    plain = texts["plain" + (INVARIANT if name.endswith(INVARIANT) else "")]
    return sum(one == other for one, other in zip(texts[name], plain, strict=True))


def rows_of(
    rates: dict[str, list[float]], texts: dict[str, Texts], **setting: Any
) -> list[dict[str, Any]]:
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
                "texts": len(texts[name]),
                "same": None if setting["temperature"] else same_as_plain(name, texts),
            }
            rows.append(row)
            same = "" if row["same"] is None else f"{row['same']} of {row['texts']}"
            print(
                f"| {setting['batch']} | {setting['temperature']:g} | {name} | {row['tokens/s']:.0f} | {row['ratio']:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] | {same} |",
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
            rates, texts = timed(ways, prompts, asked.tokens, until)
            found += rows_of(rates, texts, batch=batch, temperature=temperature)
            if asked.json:
                write_json(asked, device, found)


def write_json(asked: argparse.Namespace, device: torch.device, rows: list[Any]) -> None:
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    settings = {key: str(value) for key, value in vars(asked).items() if key != "json"}
    content = {"device": where, "torch": torch.__version__, **settings, "rows": rows}
    asked.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
