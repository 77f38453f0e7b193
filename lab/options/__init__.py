"""The table of options: every one under every drafter and rule."""
