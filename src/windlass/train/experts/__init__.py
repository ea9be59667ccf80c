"""Routed experts: their low-rank path, and their tokens exchanged under expert parallelism."""
