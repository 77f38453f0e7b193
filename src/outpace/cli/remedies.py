"""What an error's sentence tells a caller of Python to do, in the words of the command line."""

from __future__ import annotations

REMEDIES = {
    "LLM(..., generation_config='none')": "--generation-config none",
    "as SamplingParams": "as flags",
    "trust_remote_code=True": "--trust-remote-code",
    "pass tokenizer=, or give token ids": "name a model that has one",
    "leave compile out": "leave --compile out",
    "leave batch_invariant out": "leave --batch-invariant out",
    "leave enable_prefix_caching or batch_invariant out": "use --no-prefix-caching, or leave "
    "--batch-invariant out",
    "leave max_batch_total_tokens or batch_invariant out": "leave --max-batch-total-tokens or "
    "--batch-invariant out",
    "use compile=False": "use --no-compile",
    "beam_width": "--num-beams",
    "LLM.beam_search": "--num-beams",
    "or lower n.": "or lower --n.",
    "a trained head needs 'model'": "a trained head needs --draft",
    "in speculative_config": "in --speculative-config",
    "a draft model needs 'model'": "a draft model needs --draft, or 'model' in the JSON",
}
"""From what the library's sentences say to the flag that does the same."""


def for_command_line(sentence: str) -> str:
    """Returns the sentence with flags in the place of Python's arguments.

    >>> for_command_line("set trust_remote_code=True.")
    'set --trust-remote-code.'
    """
    for python, flag in REMEDIES.items():
        sentence = sentence.replace(python, flag)
    return sentence
