"""What the run file and the Accelerate file ask for together. Where they disagree, both places are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from windlass.errors import Problem, raise_all
from windlass.model.family import Family
from windlass.plan.layout.accelerate import AccelerateFile
from windlass.plan.layout.shape import LAYOUTS, check_wrap

AUTO = "auto"
# Optimizers that treat every number by itself: a part of a tensor becomes what it would have become in the whole.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Layouts that the run file may name beside an FSDP file that names another: FSDP files know no experts,
# and under expert parallelism the dense rest is sharded as they say.
ALONGSIDE = {"expert-parallel": ("full-shard", "no-reshard", "hybrid")}
# What a key of `layout` means where no layout is named. The first kind is as good as a name; the second goes with
# what an FSDP file names, and means a layout only where nobody names one.
IMPLIED = {"expert_parallel": "expert-parallel", "replicate": "hybrid"}
WEAKLY = {"reshard_after_forward": "full-shard", "shard": "full-shard", "offload": "full-shard"}


class Run(Protocol):
    """The sections of the run file that are read here."""

    @property
    def layout(self) -> Any: ...
    @property
    def cluster(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def lora(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Demand:
    """Everything about the layout that does not follow from the costs. None: nobody asked, so it is derived."""

    name: str  # auto, or one of LAYOUTS
    where: str  # who named it
    nodes: int
    gpus_per_node: int
    shard: int | None = None
    replicate: int | None = None
    expert_parallel: int | None = None
    reshard_after_forward: bool | None = None
    offload: bool | None = None  # False: not under any layout
    activation_checkpointing: bool = False
    precision: str = "bf16"
    base_dtype: str | None = None  # bf16 or fp8; None: derived
    barred: Mapping[str, str] = field(default_factory=dict)  # layouts that the rest of the run rules out, and why

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class _Said:
    value: Any
    where: str


class _Sources:
    """Collects who says what, and every disagreement."""

    def __init__(self, run: Run, where: Callable[[str], str], accelerate: AccelerateFile | None) -> None:
        self.run = run
        self.where = where
        self.accelerate = accelerate
        self.problems: list[Problem] = []

    def file(self, path: str) -> _Said | None:
        """The run file's value, where the user wrote one."""
        place = self.where(path)
        if path == "layout.name" and place.startswith("default"):
            place = self.where("layout")  # written short, `layout: hybrid`
        if place.startswith("default"):
            return None
        value: Any = self.run
        for name in path.split("."):
            value = getattr(value, name, None)
        return None if value is None or value == AUTO else _Said(value, place)

    def default(self, path: str, otherwise: Any) -> Any:
        value: Any = self.run
        for name in path.split("."):
            value = getattr(value, name, None)
        return otherwise if value is None else value

    def wish(self, name: str) -> _Said | None:
        wish = self.accelerate.wishes.get(name) if self.accelerate else None
        return None if wish is None else _Said(wish.value, wish.where)

    def agree(self, what: str, *said: _Said | None) -> _Said | None:
        """The one value that all who speak agree on."""
        speakers = [one for one in said if one is not None]
        for other in speakers[1:]:
            if other.value != speakers[0].value:
                self.problems.append(
                    Problem(
                        f"{what} is {other.value} here, but {speakers[0].value} at {speakers[0].where}",
                        other.where,
                        "make the two agree, or keep one of them",
                    )
                )
        return speakers[0] if speakers else None


def demand(
    run: Run,
    where: Callable[[str], str],
    family: Family | None = None,
    accelerate: AccelerateFile | None = None,
    *,
    experts_adapted: bool = False,
) -> Demand:
    """Both sources as one. Raises every disagreement, and a layer class that the model does not have."""
    sources = _Sources(run, where, accelerate)
    nodes, gpus = _size(sources)
    name = _name(sources)
    reshard = sources.agree(
        "reshard_after_forward", sources.file("layout.reshard_after_forward"), sources.wish("reshard_after_forward")
    )
    wrap = sources.agree("the wrapped layer", _joined(sources.file("layout.wrap")), sources.wish("wrap"))
    if wrap and family and (problem := check_wrap(str(wrap.value), family, wrap.where)):
        sources.problems.append(problem)
    offload = sources.agree("offload", sources.file("layout.offload"), sources.wish("offload"))
    shard = sources.agree("shard", sources.file("layout.shard"), sources.wish("shard"))
    replicate = sources.agree("replicate", sources.file("layout.replicate"), sources.wish("replicate"))
    experts = sources.file("layout.expert_parallel")
    base_dtype = sources.file("layout.base_dtype")
    found = Demand(
        name=name.value,
        where=name.where,
        nodes=nodes,
        gpus_per_node=gpus,
        shard=shard.value if shard else None,
        replicate=replicate.value if replicate else None,
        expert_parallel=experts.value if experts else None,
        reshard_after_forward=reshard.value if reshard else None,
        offload=bool(offload.value) if offload else None,
        activation_checkpointing=_checkpointing(sources),
        precision=_precision(sources),
        base_dtype=str(base_dtype.value) if base_dtype else None,
        barred=_barred(run, experts_adapted) if nodes * gpus > 1 else {},
    )
    raise_all(sources.problems)
    return found


def _joined(said: _Said | None) -> _Said | None:
    """A list of layer classes as Accelerate writes it."""
    return _Said(",".join(said.value), said.where) if said and isinstance(said.value, list | tuple) else said


def _size(sources: _Sources) -> tuple[int, int]:
    """Nodes, and GPUs on each."""
    nodes = sources.agree("the number of nodes", sources.file("cluster.nodes"), sources.wish("nodes"))
    count = int(nodes.value) if nodes else int(sources.default("cluster.nodes", 1))
    gpus = sources.file("cluster.gpus_per_node")
    per_node = int(gpus.value) if gpus else int(sources.default("cluster.gpus_per_node", 1))
    given = sources.wish("ranks")
    for said, least in ((nodes, 1), (given, 1)):
        if said and int(said.value) < least:
            sources.problems.append(Problem(f"{said.value} is too few", said.where, "give 1 or more"))
            return max(count, 1), max(per_node, 1)
    if given and given.value % count:
        sources.problems.append(
            Problem(
                f"{given.value} ranks do not spread evenly over {count} nodes",
                given.where,
                f"{nodes.where} says the nodes; give a multiple of {count}" if nodes else f"give a multiple of {count}",
            )
        )
    elif given and gpus and given.value != count * per_node:
        by = f"{nodes.where} x {gpus.where}" if nodes else gpus.where
        sources.problems.append(
            Problem(
                f"the number of ranks is {given.value} here, but {count} x {per_node} = {count * per_node} by {by}",
                given.where,
                "make the two agree, or keep one of them",
            )
        )
    elif given:
        per_node = given.value // count
    asked = sources.file("layout.ranks")
    if asked and asked.value != count * per_node:
        sources.problems.append(
            Problem(
                f"layout.ranks is {asked.value}, but {count} nodes x {per_node} GPUs are {count * per_node}",
                asked.where,
                "leave layout.ranks out, or change cluster.nodes and cluster.gpus_per_node",
            )
        )
    return count, per_node


def _name(sources: _Sources) -> _Said:
    """Which layout is asked for, if any. The run file speaks first; an FSDP file is never `auto`."""
    mine = sources.file("layout.name") or _implied(sources, IMPLIED)
    if mine is None:
        return _accelerate_name(sources) or _implied(sources, WEAKLY) or _Said(AUTO, "")
    reshard = sources.wish("reshard_after_forward")
    explicit = sources.wish("name") or (reshard and _Said(_by_reshard(bool(reshard.value)), reshard.where))
    if explicit and mine.value != explicit.value and explicit.value not in ALONGSIDE.get(mine.value, ()):
        sources.agree("the layout", mine, explicit)
    return mine


def _implied(sources: _Sources, meanings: Mapping[str, str]) -> _Said | None:
    """The layout that the run file's other keys mean when it names none: no key is left without effect."""
    for key, name in meanings.items():
        said = sources.file(f"layout.{key}")
        if said and key == "reshard_after_forward":
            return _Said(_by_reshard(bool(said.value)), said.where)
        if said and (said.value is True or int(said.value) > 1):
            return _Said(name, said.where)
    return None


def _accelerate_name(sources: _Sources) -> _Said | None:
    name, reshard = sources.wish("name"), sources.wish("reshard_after_forward")
    replicate, sharded = sources.wish("replicate"), sources.wish("sharded")
    if sharded is None or not sharded.value:
        return None
    if replicate and int(replicate.value) > 1:
        return _Said("hybrid", replicate.where)
    if name and (name.value != "full-shard" or reshard is None):
        return name
    if reshard:
        return _Said(_by_reshard(bool(reshard.value)), reshard.where)
    return _Said("full-shard", sharded.where)


def _by_reshard(reshard: bool) -> str:
    return "full-shard" if reshard else "no-reshard"


def _checkpointing(sources: _Sources) -> bool:
    said = sources.agree(
        "activation checkpointing",
        sources.file("train.gradient_checkpointing"),
        sources.file("layout.activation_checkpointing"),
        sources.wish("activation_checkpointing"),
    )
    if said:
        return bool(said.value)
    return bool(
        sources.default("layout.activation_checkpointing", False)
        or sources.default("train.gradient_checkpointing", False)
    )


def _precision(sources: _Sources) -> str:
    written = [
        _Said(kind, said.where)
        for kind in ("bf16", "fp16")
        if (said := sources.file(f"train.{kind}")) is not None and said.value
    ]
    off = sources.file("train.bf16")
    if not written and off is not None and not sources.default("train.fp16", False):
        written = [_Said("no", off.where)]  # train.bf16: false, and no fp16 either
    said = sources.agree("precision", *written, sources.wish("precision"))
    if said:
        return str(said.value)
    kinds = [kind for kind in ("bf16", "fp16") if sources.default(f"train.{kind}", kind == "bf16")]
    return kinds[0] if kinds else "no"


def needs_weights(lora: Any) -> str:
    """Which setting of the adapter computes with the base's weights, and so bears neither shards nor FP8 codes."""
    return "lora.use_dora needs the norm of base weights" if lora.use_dora else ""


def _barred(run: Run, experts_adapted: bool) -> dict[str, str]:
    """What the adapter does not bear. Each goes when the engine learns it."""
    lora, optim = run.lora, run.train.optim
    why = needs_weights(lora)
    barred = {name: f"{why}, and a rank would hold a shard of them" for name in LAYOUTS if why and name != "resident"}
    if experts_adapted and optim not in ELEMENTWISE and not why:
        why = f"train.optim: {optim} looks at a whole tensor, and experts' adapters would be split"
        barred["expert-parallel"] = why
    return barred
