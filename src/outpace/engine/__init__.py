"""The round: draft, score, verify, commit, observe, for a ragged batch of requests."""
