"""Read a model's names, shapes, dtypes and bytes from config.json and safetensors headers, without torch or weights."""

from windlass.model.base import find_base, find_published_base, read_base
from windlass.model.family import PARTS
from windlass.model.parameters import Base, Parameter, Piece, Stored

__all__ = ["PARTS", "Base", "Parameter", "Piece", "Stored", "find_base", "find_published_base", "read_base"]
