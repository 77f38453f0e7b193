"""Pairs of target and drafter that are made here and cost what real models cost."""
