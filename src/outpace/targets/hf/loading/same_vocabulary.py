"""Whether two models mean the same text by the same token ids."""

from __future__ import annotations

from outpace.errors import VocabularyMismatch
from outpace.targets.hf.loading.loaded import Loaded


def check_same_vocabulary(target: Loaded, drafter: Loaded) -> None:
    """Raises ``VocabularyMismatch`` unless every token id means the same text in both models."""
    if drafter.same_tokens:
        return
    if target.tokenizer is None or drafter.tokenizer is None:
        ours, theirs = target.config.vocab_size, drafter.config.vocab_size
        if ours != theirs:
            raise VocabularyMismatch(
                f"the target has {ours} tokens and the drafter {theirs}, and without both "
                "tokenizers nothing tells that they agree: give the tokenizer of each, or use a "
                "drafter with the target's vocabulary."
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    different = [token for token in theirs if ours.get(token, theirs[token]) != theirs[token]]
    unknown = [token for token in theirs if token not in ours]
    if different or len(unknown) > max(64, len(ours) // 100):
        example = (different or unknown)[0]
        raise VocabularyMismatch(
            f"drafter and target have different tokenizers: the target's has {len(ours)} tokens, "
            f"the drafter's {len(theirs)}, and {example!r} is {ours.get(example, 'absent')} in the "
            f"first and {theirs[example]} in the second; use a drafter trained with the target's "
            "tokenizer."
        )
