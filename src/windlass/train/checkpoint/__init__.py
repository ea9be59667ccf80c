"""Checkpoints of a run: written, found, resumed."""
