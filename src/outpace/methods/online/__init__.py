"""Drafters that go on learning while they draft."""
