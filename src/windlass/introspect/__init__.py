"""Ask transformers, on the meta device, what it would build: for a plan without torch."""
