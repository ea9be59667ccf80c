"""Faster forms of what layers compute: fused adapters, compiled layers, kept products."""
