"""`windlass train`: the ranks are started, or joined, and each runs the numbered steps of `run`."""
