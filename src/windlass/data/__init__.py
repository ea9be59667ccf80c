"""Data: rows to text, text to tokens with the learnt part marked, packed, cached, audited."""

from windlass.data.prepare import Prepared, prepare
from windlass.data.show import render, show

__all__ = ["Prepared", "prepare", "render", "show"]
