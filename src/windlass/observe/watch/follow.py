"""Moved: see watch/patrol.py."""

from windlass.observe.watch.patrol import Tail as Tail
