"""Sweeps: trials on one base. On top of train/, which knows of none.

trials          the trials of a sweep, in turn, each an ordinary run in a folder of its own: read this first
halving         which trials go on
together        trials that train at once: one forward for the rows of all, then each trial's own step
slices          linear layers for the rows of several trials; sliced_experts: experts
copies          modules that share a base's weights
"""
