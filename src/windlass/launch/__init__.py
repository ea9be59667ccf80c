"""`windlass submit` and `windlass check`: write the files that start a run on a platform, and check it beforehand.

check      checks that find what would stop a run before anything is loaded
job        the parts of the plan that every platform needs, and launch.sh, which every node runs
submit     the table of platforms; submit, status, logs, stop
platforms  a module for each; kubernetes and openshift use pod and kubectl
"""
