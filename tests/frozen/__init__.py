"""What a user sees of outpace, written down, so that a rebuilt tree can be held against it.

`record` writes the files in ``recorded/``, ``test_frozen`` compares today's tree with them. Neither
knows how outpace is built inside: what they need of that stands in `inside`, and nowhere else.
"""
