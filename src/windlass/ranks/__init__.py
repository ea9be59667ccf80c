"""Ranks: this node's environment, its processes and their supervision, rendezvous and collectives."""
