"""`windlass train` and `windlass best`: called once by a user, and once in every rank that this starts.

Read run, then loop: they are what a training run does.

start       this machine's ranks or this node's, or one of them; finished: the run file of a finished run
run         what every rank does, in numbered steps
loop        the training loop
batches     which rows come when; micro-batches of this rank
loss        the loss, without the logits of a whole batch
optimizer   optimizers and schedules by name
sync        gradients: one all-reduce per step; liveness: proof that the adapter trains
checkpoint  what is saved, when, and read again
load        the base model, each weight proven against the files
parallel, lora, experts     layouts, adapters, and what is special about experts
best        the saved adapters of a run, evaluated and ranked
script      a run of kind: script
"""
