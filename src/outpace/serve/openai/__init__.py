"""OpenAI's API: bodies and answers, and how they are described and checked."""
