"""The parts that the distribution of a next token is made of."""
