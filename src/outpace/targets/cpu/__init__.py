"""Our own kernels for passes over a few tokens on a CPU."""
