"""Compute a plan from a run file and checkpoint headers: what can be known about a run before a GPU is reserved.

plan         the plan, and its JSON; make: how it is made, in numbered steps; validate: settings that can't work
resolve      a value for each setting that is `auto`
machine      the hardware, as in the table or as calibrated
rows         sequences, steps, evaluations, checkpoints
layout       the layout that a run file requests: its sizes, derived and checked
search       layouts and micro-batches, compared
cost         workload, memory, step_time (and traffic): what a layout needs
advice       what would be faster, and what is probably not intended
show         the plan as text
script       the plan of a run of kind: script; finished: a finished run's file, changed to evaluate it again
"""

from windlass.plan.make import make_plan
from windlass.plan.plan import Plan
from windlass.plan.resolve import fill_in_choices
from windlass.plan.script import write_plan

__all__ = ["Plan", "fill_in_choices", "make_plan", "write_plan"]
