"""Figures for the exported pair: held-out perplexity, and how often the drafter is right.

Perplexity is over windows of 512 tokens without overlap. Agreement and acceptance are measured on
the text that the target itself writes after each prompt, since that is what a decoder drafts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import HELDOUT, documents
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

WINDOW = 512
PROMPT_FILES = {
    "indomain_text": False,
    "indomain_dialogue": False,
    "gsm8k_test": True,
    "mbpp_test": True,
    "humaneval": False,
}
SAMPLES = (
    ("Once upon a time there was a little girl named Lily.", False),
    ("There was once a poor woodcutter who lived in the forest with his three sons.", False),
    ("User: I want to find a restaurant in San Jose.\nAssistant:", False),
    ("Tom has 5 apples and buys 7 more. He eats 3. How many apples does Tom have?", True),
    ("Write a function to find the sum of a list of numbers.", True),
    ('def read_lines(path):\n    """Return the lines of a file."""\n', False),
)


@dataclass(frozen=True)
class Fit:
    """How two distributions meet on a text: means over its tokens."""

    tokens: int
    agreement: float
    acceptance: float
    per_pass: float


class Evaluation:
    """The pair in float32 and the data it is measured on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.pair / "target")
        self.target = self._load("target")
        self.drafter = self._load("drafter")

    def _load(self, name: str) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(self.options.pair / name, dtype="float32")
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def windows(self, source: str) -> Iterator[Tensor]:
        """Held-out windows, spread over the whole file."""
        text = self.tokenizer.eos_token.join(documents(self.options.data, source))
        tokens = torch.tensor(self.tokenizer(text, verbose=False).input_ids)
        whole = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
        step = max(1, len(whole) * WINDOW // self.options.tokens)
        return iter(whole[::step].to(self.target.device).split(8))

    def perplexity(self, source: str) -> None:
        """Prints perplexity per token and bits per byte of both models, and their fit."""
        sums = torch.zeros(4, dtype=torch.float64)
        tokens = size = 0
        for batch in self.windows(source):
            logp, logq = (m(batch).logits[:, :-1].log_softmax(-1) for m in self._both())
            labels = batch[:, 1:, None]
            sums[0] -= logp.gather(-1, labels).sum().cpu()
            sums[1] -= logq.gather(-1, labels).sum().cpu()
            sums[2] += torch.minimum(logp, logq).exp().sum().cpu()
            sums[3] += (logp.argmax(-1) == logq.argmax(-1)).sum().cpu()
            tokens += labels.numel()
            size += sum(len(text.encode()) for text in self.tokenizer.batch_decode(batch[:, 1:]))
        cells = [f"{math.exp(nats / tokens):.1f}" for nats in sums[:2].tolist()]
        cells += [f"{nats / math.log(2) / size:.3f}" for nats in sums[:2].tolist()]
        cells += [f"{share / tokens:.3f}" for share in sums[2:].tolist()]
        print(f"| {source} | {tokens} | " + " | ".join(cells) + " |", flush=True)

    def _both(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        return self.target, self.drafter

    def prompts(self) -> dict[str, list[str]]:
        """Evenly spaced prompts of every task, ready to be continued."""
        found: dict[str, list[str]] = {}
        for name, as_chat in PROMPT_FILES.items():
            lines = (self.options.data / "prompts" / f"{name}.jsonl").read_text().splitlines()
            for row in map(json.loads, lines):
                found.setdefault(row["task"], []).append(self._ready(row["prompt"], as_chat))
        count = self.options.prompts
        return {
            task: texts[:: max(1, len(texts) // count)][:count] for task, texts in found.items()
        }

    def _ready(self, prompt: str, as_chat: bool) -> str:
        if not as_chat:
            return prompt
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )

    def written(self, prompts: list[str], sample: bool) -> Iterator[tuple[Tensor, int]]:
        """Each prompt with what the target writes after it, and the prompt's length."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        batch = batch.to(self.target.device)
        more = {"do_sample": True, "top_k": 0} if sample else {}
        out = self.target.generate(**batch, max_new_tokens=self.options.new_tokens, **more)
        pad = self.tokenizer.pad_token_id
        width = batch.input_ids.shape[1]
        for row, mask in zip(out, batch.attention_mask, strict=True):
            start = int(mask.sum())
            row = row[width - start :]
            yield torch.cat([row[:start], row[start:][row[start:] != pad]])[None], start

    def fit(self, prompts: list[str], sample: bool) -> Fit:
        """Agreement, acceptance and tokens per target pass after these prompts."""
        hits, mass, passes = 0, 0.0, 0
        count = 0
        for out, start in self.written(prompts, sample):
            zp, zq = (m(out).logits[0, start - 1 : -1] for m in self._both())
            agreed = zp.argmax(-1) == zq.argmax(-1)
            hits += int(agreed.sum())
            mass += float(torch.minimum(zp.softmax(-1), zq.softmax(-1)).sum())
            passes += rounds(agreed.tolist(), self.options.draft)
            count += len(agreed)
        return Fit(count, hits / count, mass / count, count / passes)

    def samples(self) -> None:
        """Prints greedy continuations."""
        for prompt, as_chat in SAMPLES:
            for out, start in self.written([self._ready(prompt, as_chat)], sample=False):
                print(f"\n> {prompt!r}\n\n{self.tokenizer.decode(out[0, start:])}", flush=True)


def rounds(agreed: list[bool], draft: int) -> int:
    """Target passes that greedy decoding needs with drafts of this length."""
    place = passes = 0
    while place < len(agreed):
        taken = 0
        while taken < draft and place + taken < len(agreed) and agreed[place + taken]:
            taken += 1
        place += taken + 1
        passes += 1
    return passes


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("pair", type=Path, help="folder with target/ and drafter/")
    add("--data", type=Path, required=True, help="folder with corpus_heldout/ and prompts/")
    add("--tokens", type=int, default=60_000, help="held-out tokens per file, about")
    add("--prompts", type=int, default=20, help="prompts per task")
    add("--new-tokens", type=int, default=96, help="tokens written after each prompt")
    add("--draft", type=int, default=4, help="drafted tokens per target pass")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0, help="of the sampled continuations")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    evaluation = Evaluation(options)
    print(
        "| file | tokens | target ppl | drafter ppl | target bits/byte | drafter bits/byte "
        "| acceptance | same top token |\n|---|---|---|---|---|---|---|---|"
    )
    for source in HELDOUT:
        evaluation.perplexity(source)
    print(
        "\n| task | text | tokens | same top token | acceptance | tokens per pass |\n"
        "|---|---|---|---|---|---|"
    )
    for task, prompts in evaluation.prompts().items():
        for sample in (False, True):
            found = evaluation.fit(prompts, sample)
            how = "sampled" if sample else "greedy"
            # A pass over sampled text is not settled by the top tokens alone.
            passes = "" if sample else f"{found.per_pass:.2f}"
            print(
                f"| {task} | {how} | {found.tokens} | {found.agreement:.3f} "
                f"| {found.acceptance:.3f} | {passes} |",
                flush=True,
            )
    evaluation.samples()


if __name__ == "__main__":
    main()
