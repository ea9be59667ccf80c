"""A model folder's config.json and safetensors headers: names, shapes, dtypes, bytes. No torch, no weights read."""

from __future__ import annotations

from windlass.model.checkpoint import Checkpoint, Parameter, Piece, Stored
from windlass.model.family import PARTS
from windlass.model.find import find, published, read_checkpoint

__all__ = ["PARTS", "Checkpoint", "Parameter", "Piece", "Stored", "find", "published", "read_checkpoint"]
