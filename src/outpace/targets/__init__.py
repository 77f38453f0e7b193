"""What is decoded: the protocol of a target, and its implementations."""
