"""What callers give: prompts, conversations, images."""
