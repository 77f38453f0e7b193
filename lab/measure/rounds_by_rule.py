"""Tensor operations and ms of one verdict by rule, and ms of the distributions it goes by, at 1, 8
and 60 drafted nodes and 152,064 tokens: ``python lab/measure/rounds_by_rule.py [RULE ...]``."""

import statistics
import sys
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from usage import usage

from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import Deterministic, DraftSampling, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.core.trees.tree_shape import TreeShape
from outpace.heads.classifiers import JudgeHead
from outpace.verify.base import Evidence, draw_verdict
from outpace.verify.registry import make_rule, rules

usage(__doc__)

VOCABULARY = 152_064
BRANCHING = {1: [1], 8: [2, 1, 1, 1], 60: [4, 2, 2, 1, 1]}
OPTIONS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "repetition_penalty": 1.1},
]


class Operations(TorchDispatchMode):
    """Counts tensor operations, views included."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def milliseconds(call, times=5):
    """The median of the time that this thread spends: neighbours on the machine do not count."""
    took = []
    for _ in range(times + 1):
        begin = time.thread_time()
        call()
        took.append(time.thread_time() - begin)
    return 1e3 * statistics.median(took[1:])


def scores(nodes):
    """As of a language model: a few likely tokens, and a long tail that falls with the rank."""
    made = [
        torch.randperm(VOCABULARY).add_(1).float().log_().mul_(-1.6).add_(10) for _ in range(nodes)
    ]
    return torch.stack(made)[None]


def verdict(rule, drawn, nodes, p, near):
    """The function that draws one verdict on a tree, or on a chain where the rule takes no trees,
    and the operations that it takes."""
    parents = TreeShape.branching(BRANCHING[nodes]).parents if rule.trees else range(nodes)
    parents = list(parents)
    q = near[:, parents]
    tokens = q.flatten(0, 1).multinomial(1).view(1, -1)
    distribution = (
        Deterministic()
        if drawn is DraftSampling.DETERMINISTIC
        else Sampled(q, with_replacement=drawn is DraftSampling.IID)
    )
    tree, counts = Tree.uniform(parents, 1), torch.tensor([nodes])
    proposal = Proposal(tokens, tree, counts, distribution)
    states = torch.ones(1, nodes + 1, 3)
    ready = rule.with_evidence(
        Evidence(hidden_states=states, second_copy_probs=near, softmax_probs=p, draft_probs=q)
    )
    key = torch.tensor([1])

    def once():
        draw_verdict(ready, p, proposal, key, key)

    once()  # what a tree derives is made once for a shape
    with Operations() as operations:
        once()
    return once, operations.count


def print_rules(names):
    print("| rule | drafted |", " | ".join(f"{nodes} | ms" for nodes in BRANCHING), "|")
    print("|---|---|" + "---:|---:|" * len(BRANCHING))
    probs = {}
    for nodes in BRANCHING:
        p = scores(nodes + 1).softmax(-1)
        probs[nodes] = p, (p.log() + torch.randn_like(p) / 2).softmax(-1)
    for name in names:
        options = {"head": JudgeHead(torch.ones(3))} if name == "judge" else {}
        rule = make_rule(name, **options)
        for drawn in [each for each in DraftSampling if each in rule.takes]:
            cells = []
            for nodes, (p, near) in probs.items():
                call, operations = verdict(rule, drawn, nodes, p, near)
                took = milliseconds(call, 2 if name == "canonical" else 5)
                cells.append(f"{operations} | {took:.1f}")
            print(f"| {name} | {drawn.value} |", " | ".join(cells), "|", flush=True)


def print_probs():
    print("| options |", " | ".join(f"{nodes + 1} distributions" for nodes in BRANCHING), "|")
    print("|---|" + "---:|" * len(BRANCHING))
    logits = {nodes: scores(nodes + 1) for nodes in BRANCHING}
    for options in OPTIONS:
        pipeline = LogitsPipeline([RowOptions(SamplingParams(**options).resolve({}))], VOCABULARY)
        make = pipeline.argmax_tokens if options["temperature"] == 0 else pipeline
        cells = []
        for nodes, given in logits.items():
            tokens = torch.arange(nodes).expand(1, nodes + 1, nodes)
            branches = Branches(tokens, torch.ones(1, nodes + 1, nodes).tril(-1).bool())
            history = History([[1, 2, 3]], [[4, 5]])
            cells.append(f"{milliseconds(lambda: make(given, branches, history), 3):.1f}")
        name = ", ".join(f"{key} {value}" for key, value in options.items())
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


torch.set_num_threads(1)
torch.manual_seed(0)
with torch.inference_mode():
    print_rules(sys.argv[1:] or list(rules()))
    print()
    print_probs()
