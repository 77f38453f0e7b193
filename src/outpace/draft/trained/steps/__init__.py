"""Drafters with heads that go on from the target's last hidden state."""
