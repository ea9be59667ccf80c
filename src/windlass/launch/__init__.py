"""`windlass submit` and `windlass check`: write the files that start a run on a platform, and check it beforehand.

check       checks that find what would stop a run before anything is loaded
rendezvous  TCP rendezvous and all-gather between nodes, and a watch on which of them are alive
interfaces  the network interfaces that environment variables choose
job         the parts of the plan that every launcher needs
submit      the table of platforms; submit, status, logs, stop
local, script, slurm, runai, kubernetes, openshift    the platforms; the last two use pod and kubectl
"""
