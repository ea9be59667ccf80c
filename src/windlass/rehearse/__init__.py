"""`windlass rehearse`: the whole run in small, on this machine."""
