"""Platforms that a run can be submitted to."""
