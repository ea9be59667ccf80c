"""Data: rows to text, text to tokens with the trained-on part marked, packed, cached, audited."""
