"""``outpace serve``: OpenAI's API over one engine, and a page that shows what was drafted."""
