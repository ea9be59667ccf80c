"""Data: rows to text, text to tokens with the learnt part marked, packed, cached, audited."""

from windlass.data.prepare import Prepared, prepare

__all__ = ["Prepared", "prepare"]
