"""A training run, in every rank that `windlass.start` starts.

Read run, then loop: they are what a training run does.

run         what every rank does, in numbered steps; connect: ranks meet, and those that differ are refused
script      the ranks of a run of kind: script
loop        the training loop; model, updater, step: what it works with; evaluate and samples: between steps
batches     which rows come when; collate: micro-batches of rows; pairs: of a chosen and a rejected answer each
forward     hidden states of the positions whose next token counts; noise: NEFTune
head        losses, log-probabilities and tokens from them, without the logits of a whole batch
loss        the router's balancing loss; losses per data set
optimizer   optimizers and schedules by name
sync        gradients: one all-reduce per step; liveness: proof that the adapter trains
load        the base model, each weight proven against the files
parallel    layouts; fsdp: what is gathered; lora: adapters; initial: PiSSA and OLoRA
patches     every replacement of other libraries' code, and when it may go
console     what a run prints; trackers: what it sends to TensorBoard, W&B and others
logits      with and without the adapter, and how far apart
checkpoint/ what is saved, when, and read again
experts/    routed experts: their low-rank path, and tokens exchanged under expert parallelism
kernels/    faster forms of what layers compute
"""
