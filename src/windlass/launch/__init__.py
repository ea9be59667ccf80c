"""`windlass submit`: the plan as files that start the run on a platform, and the one command that does it.

job         what every launcher needs of the plan
script      launch.sh, which runs on every node, and accelerate.yaml
meeting     runs beside the ranks of every node: who comes, who leaves
"""
