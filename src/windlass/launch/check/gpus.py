"""GPUs: as many as planned, the planned ones, free, sound, and joined at full width."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass import hardware
from windlass.errors import UserError
from windlass.launch.check.nvml import FAULTS, Card, Seen
from windlass.launch.check.result import Result, failed, passed, unseen, warned
from windlass.plan.script import AnyPlan, ScriptPlan

# The kernel log's line for a GPU's fault: NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus.
XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
# Faults of an application, not of the GPU or its links (NVIDIA, "XID Errors": user application).
XID_APPLICATION = {13, 31, 43, 45, 68}
LOG_BYTES = 1 << 20
NODE = "ask for another node, and have this one drained: nvidia-smi -q shows the GPU's own account"


def check(plan: AnyPlan, seen: Seen, root: Path) -> list[Result]:
    """All that can be said of this node's GPUs; a run on processors asks for none."""
    if plan.machine.gpu.name == "cpu":
        return [unseen("GPUs", "the run computes on processors")]
    if not seen.looked:
        return [unseen("GPUs", seen.why), xid(root)]
    wanted, place = plan.layout.gpus_per_node, plan.loaded.where("cluster.gpus_per_node")
    if len(seen.cards) < wanted:
        hint = "the pod's request for GPUs, or cluster.gpus_per_node"
        said = f"{len(seen.cards)} here, {wanted} planned" + (f": {seen.why}" if seen.why else "")
        return [failed("GPUs", said, hint, place), *sound(seen.cards, plan), xid(root)]
    names = Counter(card.name for card in seen.cards)
    said = ", ".join(f"{count} x {name}" for name, count in names.items())
    first = passed("GPUs", said) if len(names) == 1 else warned("GPUs", f"not alike: {said}", "one kind per node")
    return [first, kind(plan, seen.cards), *sound(seen.cards, plan), xid(root)]


def kind(plan: AnyPlan, cards: Sequence[Card]) -> Result:
    """The plan's figures are those of a GPU: that one should be here."""
    planned, place = plan.machine.gpu, plan.loaded.where("cluster.gpu")
    others = []
    for card in cards:
        try:
            same = hardware.gpu(card.name).name == planned.name
        except UserError:  # not in the table: by its memory
            same = abs(card.memory_gib - planned.memory_gib) < 0.03 * planned.memory_gib
        if not same:
            others.append(f"GPU {card.index} is {card.name} with {card.memory_gib:.0f} GiB")
    if others:
        hint = "state what is there in cluster.gpu, and plan again"
        return failed("GPU kind", f"planned for {planned.name}; {'; '.join(others)}", hint, place)
    return passed("GPU kind", f"{planned.name}, as planned")


@dataclass(frozen=True, slots=True)
class Question:
    """One thing that is asked of each GPU: what it answers (None: the driver does not say), and what is wrong."""

    name: str
    says: Callable[[Card], str | None]
    bad: Callable[[Card], bool]
    hint: str
    otherwise: Callable[[str, str, str], Result] = failed


def errors(card: Card) -> str | None:
    if card.uncorrected is None and card.remap_pending is None:
        return None
    return f"{card.uncorrected or 0} uncorrected" + ", rows wait to be remapped" * bool(card.remap_pending)


QUESTIONS = (
    Question(
        "GPU processes",
        lambda c: None if c.others is None else f"processes {', '.join(map(str, c.others)) or 'none'}",
        lambda c: bool(c.others),
        "end them, or ask for GPUs that are not shared",
    ),
    Question("GPU errors", errors, lambda c: bool(c.uncorrected or c.remap_pending), NODE),
    Question(
        "GPU clocks",
        lambda c: None if c.throttle is None else ", ".join(c.throttle) or "not held down",
        lambda c: any(said in FAULTS for said in c.throttle or ()),
        f"cooling or power supply; {NODE}",
    ),
    Question(
        "GPU persistence",
        lambda c: None if c.persistence is None else "on" if c.persistence else "off",
        lambda c: not c.persistence,
        "nvidia-smi -pm 1 on the node: without it the first call of each process waits for the driver",
        warned,
    ),
    Question(
        "PCIe width",
        lambda c: f"{c.pcie_width} of {c.pcie_width_most or '?'} lanes" if c.pcie_width else None,
        lambda c: bool(c.pcie_width and c.pcie_width_most and c.pcie_width < c.pcie_width_most),
        f"a card that sits badly, or a slot with fewer lanes; {NODE}",
        warned,
    ),
)


def sound(cards: Sequence[Card], plan: AnyPlan) -> list[Result]:
    """Every question to every GPU, one result for all of them: those that are wrong are named."""
    if not cards:
        return []
    if isinstance(plan, ScriptPlan):  # what it needs is not known
        return [*(each(question, cards) for question in QUESTIONS), links(plan, cards)]
    need = plan.cost.gpu_gib
    memory = Question(
        "GPU memory",
        lambda c: f"{c.free_gib:.1f} of {c.memory_gib:.1f} GiB free",
        lambda c: c.free_gib < need,
        f"the run needs {need:.1f} GiB of each: end what else runs on them",
    )
    return [*(each(question, cards) for question in (memory, *QUESTIONS)), links(plan, cards)]


def links(plan: AnyPlan, cards: Sequence[Card]) -> Result:
    if plan.layout.gpus_per_node == 1:
        return unseen("NVLink", "one GPU per node: nothing to link")
    if not plan.machine.link.name.startswith("nvlink"):
        return unseen("NVLink", f"planned between GPUs of a node is {plan.machine.link.name}")
    question = Question(
        "NVLink",
        lambda c: f"{c.links_up} of {c.links} links up" if c.links else "no links",
        lambda c: not c.links or (c.links_up or 0) < c.links,
        f"state cluster.link: pcie if these GPUs have no NVLink; else {NODE}",
    )
    return each(question, cards)


def each(question: Question, cards: Sequence[Card]) -> Result:
    """One result for all GPUs: the bad ones named, else those that don't say, else what they all say."""
    name, said = question.name, {card.index: question.says(card) for card in cards}
    wrong = [card for card in cards if said[card.index] is not None and question.bad(card)]
    if wrong:
        faults = "; ".join(f"GPU {card.index}: {said[card.index]}" for card in wrong)
        return question.otherwise(name, faults, question.hint)
    silent = [index for index, answer in said.items() if answer is None]
    if silent:
        return unseen(name, f"GPU {', '.join(map(str, silent))}: the driver does not say")
    alike = Counter(said.values())
    return passed(
        name, "; ".join(f"{count} x {answer}" if count > 1 else str(answer) for answer, count in alike.items())
    )


def xid(root: Path) -> Result:
    """GPU faults in the kernel's log, which most containers may not read."""
    log = kernel_log(root)
    if log is None:
        return unseen("GPU faults (Xid)", "the kernel's log cannot be read here", "on the node: dmesg | grep Xid")
    found = [(place, int(number)) for place, number in XID.findall(log)]
    faults = [f"{place}: Xid {number}" for place, number in found if number not in XID_APPLICATION]
    if faults:
        return failed("GPU faults (Xid)", "; ".join(dict.fromkeys(faults)), NODE)
    return passed("GPU faults (Xid)", f"none of the GPU's own in the kernel's log, {len(found)} of applications")


def kernel_log(root: Path) -> str | None:
    """The ring buffer where it may be read: a record per read, without waiting for a new one."""
    try:
        file = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    log = b""
    try:
        while len(log) < LOG_BYTES and (record := os.read(file, 8192)):
            log += record
    except BlockingIOError:  # all of it read
        pass
    except OSError:
        if not log:
            return None
    finally:
        os.close(file)
    return log.decode(errors="replace")
