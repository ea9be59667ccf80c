"""Detect problems in a training run from its run folder's files, log them and act on them."""
