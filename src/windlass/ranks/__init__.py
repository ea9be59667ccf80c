"""Ranks: this node's place in a job, its processes and their supervision, rendezvous and collectives.

place        which node or rank this process is, by the variables that launchers set; the interfaces that these choose
job          what launch.sh passes on; a log as JSON
node         one node of several: joins the others, checks, runs its ranks, tells the others how it ended
rendezvous   the process next to the ranks that keeps the connections between nodes
supervisor   starts this machine's ranks, forwards signals, explains why they failed
rank         one rank: its status, its errors, its signals
collectives  Python objects between ranks, and errors that all raise together
"""
