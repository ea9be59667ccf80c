"""What goes wrong while a run trains: found from the run folder's files, told, and acted on.

alarm         one finding, and the file that holds them
detect        pure functions: records of steps -> alarms
follow        step files that still grow, read line by line; steps joined over ranks
patrol        all detectors over one run folder, each alarm once
collectives   which rank is absent from which collective
nccl          what NCCL's own log says of the fabric
guard         the patrol beside a script's ranks, from outside
pulse         the heartbeat of a script's rank, from inside
heartbeat     a thread in each rank: signs of life, stalls, stacks; no GIL needed for the stacks
hook          the Trainer callback that ties these to a training run
trackers      each step's values to the trackers of train.report_to
prometheus    the same values as a page to scrape
live          `windlass watch`: the run folder in the terminal

Everything but hook, heartbeat, pulse and trackers runs where there is no torch.
"""
