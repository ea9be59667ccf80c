"""How the run is spread over ranks: an Accelerate FSDP YAML or the run file's `layout` section -> one Layout.

demand(run, where, family, accelerate)   what the run file and the Accelerate file ask for together
settle(demand, experts)                  the Layout, where they name one
named(demand, experts, fp8)              that layout in each dtype that it leaves open how to hold the base in
candidates(demand, experts, fp8)         the layouts to compare, each possible or with its reason why not
"""

from windlass.plan.layout.accelerate import AccelerateFile, Entry, Wish, read_accelerate
from windlass.plan.layout.compare import Candidate, candidates, named
from windlass.plan.layout.keys import FATES, KEYS
from windlass.plan.layout.launcher import Launched, Process, accelerate_file, find_launcher_config, parents
from windlass.plan.layout.shape import LAYOUTS, Layout, check_wrap
from windlass.plan.layout.sizes import settle
from windlass.plan.layout.sources import Demand, demand, needs_weights

__all__ = [
    "FATES",
    "KEYS",
    "LAYOUTS",
    "AccelerateFile",
    "Candidate",
    "Demand",
    "Entry",
    "Launched",
    "Layout",
    "Process",
    "Wish",
    "accelerate_file",
    "candidates",
    "check_wrap",
    "demand",
    "find_launcher_config",
    "named",
    "needs_weights",
    "parents",
    "read_accelerate",
    "settle",
]
