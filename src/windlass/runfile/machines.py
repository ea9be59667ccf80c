"""The run file's `layout` and `cluster` sections: how a run is spread, and the machines it is spread over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from windlass.runfile.kinds import (
    AbsolutePath,
    Count,
    Image,
    Label,
    Natural,
    Processors,
    Qualified,
    Quantity,
    Release,
    SecretKey,
    Section,
    Subdomain,
    Text,
    Variable,
)

GRACE_SECONDS: Final = 120  # to save in after a stop signal, where neither the run file nor the plan says more


class LayoutSection(Section):
    """How the run is spread over ranks. What is left out follows from the name and the machines."""

    name: Literal["auto", "full-shard", "no-reshard", "hybrid", "expert-parallel", "resident"] = "auto"
    """auto chooses by the plan's numbers. full-shard gathers each layer for each pass, no-reshard keeps it gathered
    through accumulation, hybrid shards in groups, expert-parallel splits experts, resident keeps all on each GPU."""
    ranks: Count | None = None
    """Processes, one per GPU. Default: cluster.nodes x cluster.gpus_per_node."""
    shard: Count | None = None
    """Ranks that the weights are split over."""
    replicate: Count | None = None
    """Groups that each hold all shards; shard x replicate = ranks."""
    expert_parallel: Count | None = None
    """Ranks that routed experts are split over; must divide the number of experts, and `shard`."""
    reshard_after_forward: bool | None = None
    """Free a gathered layer after its forward pass and gather it again in backward."""
    base_dtype: Literal["bf16", "fp8"] | None = None
    """How the frozen base is held: fp8 as published, dequantised as it is used; null: the plan chooses."""
    offload: bool = False
    """Keep the frozen base in host memory, for GPUs that can't hold their part; the adapter and all of its own stay on
    the GPU. Slow: each layer crosses PCIe in every pass."""
    activation_checkpointing: bool = False
    """The same as train.gradient_checkpointing; one of the two is enough."""
    wrap: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    """Classes that are sharded as a unit. Default: the model's decoder layer."""
    state_dict: Literal["full"] | None = None
    """How checkpoints hold the adapter: whole, in one file, always."""


class GpuFigures(Section):
    """A GPU that the hardware table does not have, by its data sheet."""

    name: Text
    """What to call it in the plan."""
    memory_gib: Annotated[float, Field(gt=0)]
    """Memory that one process can take."""
    bf16_tflops: Annotated[float, Field(gt=0)]
    """Dense peak in bfloat16."""
    memory_gb_per_second: Annotated[float, Field(gt=0)]
    """Bandwidth of its memory."""
    achieved_tflops: Annotated[float, Field(gt=0)] | None = None
    """What real training sustains; null: a third of the peak."""


class FabricFigures(Section):
    """A link or network that the hardware table does not have."""

    name: Text
    """What to call it in the plan."""
    gb_per_second: Annotated[float, Field(gt=0)]
    """What a transfer really gets, per GPU and direction."""


class Volume(Section):
    """A persistent volume claim and where it is mounted."""

    claim: Subdomain
    """Name of the claim."""
    path: AbsolutePath
    """Where it is mounted."""


class User(Section):
    """Who the container runs as. OpenShift's default policy wants none given."""

    uid: Natural
    """Number of the user."""
    gid: Natural | None = None
    """Number of the group; null: as the platform decides."""


class Secret(Section):
    """A value that stays in the cluster: the name of a secret and a key in it."""

    secret: Subdomain
    """Name of the secret."""
    key: SecretKey
    """Key within it."""


class Toleration(Section):
    """A taint of nodes that the run may be placed on nevertheless."""

    key: Qualified
    """Key of the taint."""
    value: str | None = None
    """Its value; null: any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Its effect; null: any."""


def _value(value: Any) -> Any:
    """1 and 0.5 are as good as "1" and "0.5" in an environment; true and false would be anybody's guess."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_EnvText = Annotated[str, BeforeValidator(_value, json_schema_input_type=str | float)]
_Cores = Annotated[Processors, BeforeValidator(_value, json_schema_input_type=str | float)]


class Cluster(Section):
    """The machines: how many, which GPUs and fabrics, and how a job gets onto them."""

    nodes: Count = 1
    """How many machines the run takes."""
    gpus_per_node: Count = 1
    """GPUs of each that the run takes; one rank each. On a CPU: ranks."""
    gpu: Text | GpuFigures | None = None
    """A name of the hardware table, cpu, or the figures of another one; null: what this machine has."""
    link: Text | FabricFigures | None = None
    """Between GPUs of a node: nvlink, pcie, …; null: what the GPU usually has."""
    network: Text | FabricFigures | None = None
    """Between nodes: infiniband-400, …; needed for more than one."""
    nics_per_node: Count = 1
    """Network cards of each node that the run can use."""
    host_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of each node that the run can use; null: not checked."""
    platform: Literal["local", "script", "runai", "kubernetes"] = "local"
    """How the run is started: here, as a script for each node, through Run:ai, or through Kubernetes."""
    engine: Literal["auto", "trainer", "pytorchjob", "jobset", "job"] = "auto"
    """On Kubernetes: Kubeflow Trainer, PyTorchJob, JobSet or an indexed Job; auto: the first that is installed."""
    trainer_version: Release | None = None
    """Kubeflow Trainer's version, such as "2.3", whose fields differ between versions; null: read from the cluster."""
    image: Image | None = None
    """Container image, best with its digest."""
    image_pull_secrets: list[Subdomain] = Field(default=[])
    """Secrets that the image is pulled with."""
    project: Label | None = None
    """Run:ai project."""
    namespace: Label | None = None
    """Kubernetes namespace."""
    service_account: Subdomain | None = None
    """Service account of the pods."""
    runtime: Subdomain = "torch-distributed"
    """Kubeflow Trainer's ClusterTrainingRuntime that a TrainJob refers to."""
    queue: Subdomain | None = None
    """Kueue queue, which starts all pods of the run together or none."""
    priority_class: Subdomain | None = None
    """Priority class of the pods."""
    preemptible: bool | None = None
    """May be interrupted for others; null: the platform's own rule."""
    volumes: list[Volume] = Field(default=[])
    """Volume claims and where they are mounted."""
    networks: list[Text] = Field(default=[])
    """Secondary networks that the pods are attached to (annotation k8s.v1.cni.cncf.io/networks)."""
    annotations: dict[Qualified, str] = Field(default={})
    """Further annotations of the pods."""
    gpu_resource: Qualified = "nvidia.com/gpu"
    """What Kubernetes calls the GPUs, such as nvidia.com/mig-7g.141gb."""
    extended_resources: dict[Qualified, Count] = Field(default={})
    """Devices that each pod asks for besides GPUs, such as `openshift.io/mellanoxnics: 1`."""
    cpu: _Cores | None = None
    """Processors of each pod."""
    memory_request: Quantity | None = None
    """Host memory that each pod asks for, such as 500Gi."""
    memory_limit: Quantity | None = None
    """Host memory that each pod may take."""
    large_shm: bool = True
    """Mount /dev/shm as large as the run needs; data-loading processes share their batches there."""
    node_selector: dict[Qualified, str] = Field(default={})
    """Labels that nodes must have."""
    affinity: dict[str, Any] = Field(default={})
    """Kubernetes' own `affinity` of the pods, as its reference has it."""
    topology_key: Qualified | None = None
    """Label of nodes, such as a rack's or a switch's, whose value all nodes of the run must share."""
    tolerations: list[Toleration] = Field(default=[])
    """Taints of nodes that the run may be placed on nevertheless."""
    user: User | None = None
    """Who the container runs as; null: as the platform decides."""
    working_dir: AbsolutePath | None = None
    """Folder that the run is started in."""
    install: list[Text] = Field(default=[])
    """What each node installs with pip before it starts, from the mirror that PIP_INDEX_URL names; best nothing."""
    env: dict[Variable, _EnvText | Secret] = Field(default={})
    """Environment variables; secrets by reference: `HF_TOKEN: {secret: hub, key: token}`."""
    max_restarts: Natural = 3
    """How often a run that was lost is started again; it resumes from its newest checkpoint."""
    grace_seconds: Count | None = None
    """Time to save after a stop signal; null: from the plan."""
    deadline_seconds: Count | None = None
    """End the job after so long, whatever it is doing; null: never."""


def admission(cluster: Cluster, where: Callable[[str], str]) -> tuple[str, ...]:
    """What OpenShift's default policy would refuse, and the one that admits it."""
    if cluster.user is None:
        return ()
    scc = "anyuid" if cluster.user.uid == 0 else "nonroot-v2"
    return (
        f"{where('cluster.user')}: user {cluster.user.uid} is not admitted by OpenShift's restricted-v2 unless it lies "
        f"in the namespace's range: the service account needs the SCC {scc}, or leave cluster.user out",
    )
