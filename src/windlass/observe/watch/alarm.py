"""Moved: see watch/alarms.py."""

from windlass.observe.watch.alarms import Alarm as Alarm
from windlass.observe.watch.alarms import append as append
