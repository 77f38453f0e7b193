"""Drafters that stand for others: several at once, or one chosen among them."""
