from pathlib import Path

from windlass.weights.checkpoint import Checkpoint


def read_checkpoint(path: Path) -> Checkpoint:
    raise NotImplementedError
