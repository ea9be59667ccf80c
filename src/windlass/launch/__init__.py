"""`windlass submit`: the plan as files that start the run on a platform, and the call that does.

check       `windlass check`: what would stop a run before it loads anything
job         what every launcher needs of the plan
script      launch.sh, which runs on every node, and accelerate.yaml
meeting     runs beside the ranks of every node: who comes, who leaves
interfaces  whether those that the environment names are there
runai       the submit command; runai_api: the same as REST, and sent
local       a run that no platform looks after
kubernetes  a ConfigMap and a job of whichever kind the cluster has
pods        what is wrong, or worth a word, with any run that goes into pods
submit      files into the run folder, then one call of the platform's own client; look at it, stop it
"""

PLATFORMS = ("local", "script", "runai", "kubernetes")
