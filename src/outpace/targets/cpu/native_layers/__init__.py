"""Layers and whole models that `native.cpp` computes."""
