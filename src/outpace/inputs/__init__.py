"""The inputs of requests: prompts, conversations, images."""
