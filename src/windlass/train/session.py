"""What a rank has from its start to its end, for one run or for several on one base."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from windlass.files import WriteGuard
from windlass.observe.background import BackgroundReport
from windlass.ranks.rank import Rank, StopSignal
from windlass.train.shared_base import SharedBase

PAUSED: Final = -1  # returned for a run that has reached `pause_at`


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    resume: bool = False  # continue an unfinished run
    debug_freq: int | None = None  # how often the recorder samples every counter; None: as train.logging_steps
    allow_other_base: bool = False


@dataclass(frozen=True)
class Session:
    """What a rank has, besides the plan."""

    here: Rank
    console: Console  # prints on rank 0 only
    stop_signal: StopSignal
    report: BackgroundReport  # report.html, written again after every checkpoint
    unwritten: WriteGuard
    identity: str = ""  # fingerprint of the base's files
    options: Options = Options()
    base: SharedBase = field(default_factory=SharedBase)
    around: Path | None = None  # the folder of several runs: their tokens, the base's figures, whether they stopped
    pauses: tuple[int, ...] = ()  # steps after which the run may be left, to be continued
    pause_at: int | None = None  # the next of them
