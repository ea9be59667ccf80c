"""Measure every step, watch for what goes wrong, report what happened."""
