"""The families whose prompts with images are known to be read as transformers reads them."""

IDENTICAL = frozenset(
    {
        "gemma3",
        "gemma4",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "paligemma",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "smolvlm",
    }
)
"""By ``model_type``. Their texts are compared with those of ``generate`` in tests; what any other
model makes of images is tried with the first prompt that has some."""
