"""The parts that the law of a next token is made of."""
