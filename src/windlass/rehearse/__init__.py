"""`windlass rehearse`: the user's own run, start to end, on a twin of the model and this machine's CPU.

run       the phases in their order
before    the user's run file through plan, check and submit; first rows and twin   } each phase starts
during    the run in small through its launch script: stopped, resumed              } commands as a user would
after     best, export, merge, and plain transformers opening them                  }
spread    how many ranks        derived  the run file in small        sizes   the twin's numbers
make      a process: rows (ends: do they?) and twin        reload  a process: plain transformers and PEFT
stage     the folder, the record, the commands        process  one of them        record, show  what came of it
"""

from __future__ import annotations

from windlass.rehearse.record import Record
from windlass.rehearse.run import rehearse

__all__ = ["Record", "rehearse"]
