"""Scripts as people write them for torchrun, for tests to start."""

# What every rank was told, and a training of a line through points: falling loss, evaluations, a save.
LOOP = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from windlass.meter import StepProfiler

dist.init_process_group("gloo")
folder = os.environ["WINDLASS_OUTPUT_DIR"]
told = {"argv": sys.argv[1:], "env": dict(os.environ), "name": __name__}
json.dump(told, open(f"{folder}/told-{dist.get_rank()}.json", "w"))
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
rows = [(torch.randn(4, 8), torch.ones(4, 1)) for _ in range(20)]
with StepProfiler(unit="images", debug_freq=5, script_name="line", report_meta={"of": "points"}) as meter:
    for epoch in range(2):
        for x, y in meter.batches(rows):
            loss = (model(x) - y).pow(2).mean()
            meter.mark("forward")
            loss.backward()
            meter.mark("backward")
            optimizer.step()
            optimizer.zero_grad()
            meter.mark("optimizer")
            meter.step(items=len(x), loss=loss, learning_rate=0.05, epoch=epoch)
        meter.event("eval", eval_loss=loss.item(), map=0.5)
    meter.event("save")
dist.destroy_process_group()
"""
# Says that it listens, then saves when it is told to stop.
SAVES = """
import os, signal, sys, time
folder = os.environ["WINDLASS_OUTPUT_DIR"]
def save(*_):
    open(f"{folder}/saved-{os.environ['RANK']}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(f"{folder}/ready-{os.environ['RANK']}", "w").close()
time.sleep(600)
"""
# Rank 0 has more to save than the others, and they end before it.
SLOW = SAVES.replace("def save(*_):", "def save(*_):\n    time.sleep(3 if os.environ['RANK'] == '0' else 0)")
DEAF = SAVES.replace("signal.signal(signal.SIGTERM, save)", "")
# Rank 1 ends with the code that it is given; the other would go on.
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("words of rank 1", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
time.sleep(600)
"""
# A loss that is no number, as a meter would write it.
DIVERGES = """
import json, os, time
with open(os.environ["WINDLASS_OUTPUT_DIR"] + f"/steps-rank{os.environ['RANK']}.jsonl", "w") as steps:
    for step in range(1, 4):
        line = {"step": step, "loss": 1.0 if step < 3 else None, "step_seconds": 0.1, "images": 4}
        steps.write(json.dumps(line | ({} if step < 3 else {"non_finite": ["loss"]})) + "\\n")
time.sleep(600)
"""
# The same, and a save when it is stopped for that, which takes rank 0 longer than the others.
DIVERGES_SAVES = SLOW.replace("time.sleep(600)", DIVERGES)
# A step, and then none any more.
STALLS = """
import time
from windlass.meter import StepProfiler

with StepProfiler(unit="images", report=False) as meter:
    meter.step(items=1)
    time.sleep(600)
"""
