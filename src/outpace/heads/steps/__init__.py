"""Heads that go on from the target's last hidden state, step by step."""
