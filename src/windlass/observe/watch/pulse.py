"""Moved: see watch/run.py."""

from windlass.observe.recorder import _NEXT
from windlass.observe.watch.run import flight_recorder, script_heartbeat

NEXT, recorder, of_script = _NEXT, flight_recorder, script_heartbeat
