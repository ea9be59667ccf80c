"""Measure every step, watch for what goes wrong, report what happened.

recorder     a line per step and rank; steps: the names in it; reader: those lines, read again
counters     memory, GPU and machine; flops: arithmetic per token; profiler: a user's own script, or a trace
watch/       alarms while a run goes on: detectors judge, heartbeat notices stalls, run and monitor act, live shows
symptoms     what a finished run's figures point to
report/      the page of a run; background: written while the run goes on
format       numbers for people
"""
