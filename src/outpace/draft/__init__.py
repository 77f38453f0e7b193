"""The protocol and registry of drafters, and the chains, trees and caches that they share.

While they draft, they see the batch: the committed texts and what they ask for in `Needs`. Only
those that are built from the target's own parts, as heads and self-speculation are, hold its
model; nobody but the engine commits anything to its cache. The drafters are in `outpace.methods`.
"""
