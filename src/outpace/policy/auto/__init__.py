"""The length policy "auto", and what it measures, learns and chooses from."""
