"""`windlass submit` and `windlass check`: the plan as files that start the run on a platform, and what would stop it.

check       what would stop a run before it loads anything
rendezvous  TCP rendezvous and all-gather between nodes, and a watch on which of them are alive
interfaces  which network interfaces the environment chooses
job         what every launcher needs to know of the plan
submit      the table of platforms; submit, status, logs, stop
local, script, slurm, runai, kubernetes, openshift    the platforms; pod and kubectl belong to the last two
"""

PLATFORMS = ("local", "script", "slurm", "runai", "kubernetes", "openshift")
