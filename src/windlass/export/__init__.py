"""A run's best adapter as others open it, or merged into its base in the published layout; proven either way."""

from __future__ import annotations

from windlass.export.push import push
from windlass.export.run import Exported, Names, export, served

__all__ = ["Exported", "Names", "export", "push", "served"]
