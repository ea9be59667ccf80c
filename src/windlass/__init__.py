"""windlass: LoRA fine-tuning of large language models over many GPUs that can't be silently wrong."""

__version__ = "0.1.0"
