"""windlass: multi-GPU LoRA fine-tuning that fails loudly instead of training the wrong thing."""

__version__ = "0.2.0"
