"""Which families of transformers' models are decoded, and whether their texts are the same."""
