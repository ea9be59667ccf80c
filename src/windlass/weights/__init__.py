"""Bytes of weights: read, decoded, digested, and certified against the files."""
