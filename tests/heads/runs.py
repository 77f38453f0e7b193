"""Targets on which published heads are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.published import SIZE, VOCABULARY
from outpace import LLM
from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from targets.families import build
from targets.generating import greedy, ids


class Model:
    """The parts of a target that a head uses."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.embeddings = torch.randn(VOCABULARY, SIZE, dtype=torch.float64)
        self.output = torch.randn(VOCABULARY, SIZE, dtype=torch.float64)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embeddings[tokens]

    @property
    def embedding_scale(self) -> float:
        return 1.0

    def compute_logits(self, states: Tensor) -> Tensor:
        return states @ self.output.T

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        return logits


@cache
def target() -> Any:
    return build(
        "llama", vocab_size=VOCABULARY, hidden_size=SIZE, num_hidden_layers=12,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
    )  # fmt: skip


def decoder(model: Any, folder: Path | None, **more: Any) -> LLM:
    config = {"method": "eagle3", "model": folder, "check": False, "num_speculative_tokens": 4}
    speculation = None if folder is None else {**config, **more}
    return LLM(model, speculative_config=speculation or {"method": "none"}, max_num_seqs=3)


PROMPTS = [[3, 4, 7, 11], [12], [19, 3, 0, 0, 5, 9, 2]]


@cache
def plain_texts() -> list[list[int]]:
    return ids(decoder(target(), None).generate(PROMPTS, greedy(8)))


@torch.no_grad()
def hidden_states(model: Any, text: Sequence[int]) -> dict[int, Tensor]:
    """Returns the embeddings of a text, 0, what each layer puts out, from 1, and what the output
    matrix reads, -1: ``[T, H]`` each."""
    found: dict[int, Tensor] = {}

    def note(number: int) -> Any:
        return lambda _, __, output: found.update({number: output[0]})

    modules = [model.model.embed_tokens, *model.model.layers]
    handles = [module.register_forward_hook(note(at)) for at, module in enumerate(modules)]
    handles.append(model.model.norm.register_forward_hook(note(-1)))
    model(torch.tensor([text]))
    for handle in handles:
        handle.remove()
    return found


def referred(made: Callable[..., Any], folder: Path, text: Sequence[int]) -> Any:
    """Returns the reference of a head, made of a folder and the target's embeddings and output
    matrix, which has read a text of the target."""
    model = target()
    reference = made(folder, model.get_input_embeddings().weight, model.lm_head.weight)
    states = hidden_states(model, text)
    reference.block(torch.cat([states[at][:-1] for at in (2, 6, 11)], -1), text[-1], 4)
    return reference


def drafted(
    found: Proposal, row: int, root: int
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Returns of each node of a row's draft the tokens from the root to it, and its children's."""
    paths, under = {0: [root]}, {0: list[int]()}
    parents = found.tree.parents[row].tolist()
    for node in range(1, int(found.counts[row]) + 1):
        parent, token = parents[node - 1], int(found.tokens[row, node - 1])
        paths[node], under[node] = [*paths[parent], token], []
        under[parent].append(token)
    return paths, under


def watch_drafts(llm: LLM, made: Callable[..., Any], folder: Path) -> list[int]:
    """Compares the nodes that are drafted from now on with those that a head's makers' code would
    draft; returns the tokens that were compared so far, which go on. made: the reference, of a
    folder and the target's embeddings and output matrix."""
    drafter: Any = llm.engine.drafter
    propose, checked = drafter.propose, list[int]()

    def watched(rows: Rows, budgets: Sequence[int]) -> Proposal:
        found: Proposal = propose(rows, budgets)
        for row in range(len(rows)):
            text = rows.since(row, 0)
            if not int(found.counts[row]):
                continue
            reference, (paths, under) = referred(made, folder, text), drafted(found, row, text[-1])
            for node, tokens in under.items():
                if tokens:
                    best = reference.after(paths[node]).topk(len(tokens)).indices.tolist()
                    assert tokens == best
                    checked.extend(tokens)
        return found

    drafter.propose = watched
    return checked
