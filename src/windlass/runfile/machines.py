"""The run file's `layout` and `cluster` sections: how a run is spread over GPUs, and the machines it runs on."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from windlass.runfile.values import Auto, Count, LooseText, Natural, Positive, Section, Text, match_pattern

RUN_LABEL: Final = "app.kubernetes.io/instance"  # by these two a run's objects are found again
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
GRACE_SECONDS: Final = 120  # to save in after a stop signal, if neither the run file nor the plan says otherwise

# RFC 1123: what Kubernetes accepts as the name of an object, and of a label's part.
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"([a-z0-9][-a-z0-9.]{0,251}[a-z0-9]/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"

Label = Annotated[str, match_pattern(_LABEL, "at most 63 lower-case letters, digits and dashes, no dash first or last")]
Subdomain = Annotated[str, match_pattern(_SUBDOMAIN, "lower-case letters, digits, dashes and dots (RFC 1123)")]
Qualified = Annotated[
    str, match_pattern(_QUALIFIED, "a name such as `rdma/nic`, with at most 63 letters after the slash")
]
LabelValue = Annotated[str, match_pattern(_LABEL_VALUE, "at most 63 letters, digits, dashes, dots and underscores")]
Device = Annotated[Qualified, match_pattern(r"[^/]+/[^/]+", "a device as domain/name, such as nvidia.com/gpu")]
_MOUNTED = "an absolute path without a colon or comma, and none that windlass mounts itself (/dev/shm, /etc/windlass)"
MountPath = Annotated[str, match_pattern(r"(?!/dev/shm/*$|/etc/windlass(/|$))/[^\n:,]*", _MOUNTED)]
AbsolutePath = Annotated[str, match_pattern(r"/[^\n]*", "an absolute path, starting with /")]
RelativePath = Annotated[
    str, match_pattern(r"(?!(.*/)?\.\.(/|$))[^/\n:,][^\n:,]*", "a path inside the volume, without ..")
]
Quantity = Annotated[
    str, match_pattern(r"\d{1,15}(\.\d{1,9})?(m|k|[MGTPE]|[KMGTPE]i)", "an amount with its unit, such as 64G or 500Gi")
]
Cpus = Annotated[LooseText, match_pattern(r"\d{1,6}(\.\d{1,3}|m)?", "a number of CPUs such as 8, 0.5 or 500m")]
VariableName = Annotated[
    str, match_pattern(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name: letters, digits and underscores")
]
Image = Annotated[str, match_pattern(r"[!-~]{1,1024}", "an image's name, without spaces")]
Release = Annotated[str, match_pattern(r"\d{1,4}\.\d{1,4}", 'a version such as "2.3", in quotes')]
HugePage = Annotated[str, match_pattern(r"2Mi|1Gi", "2Mi or 1Gi")]
OptionName = Annotated[str, match_pattern(r"[a-z][a-z-]+", "an option's long name, such as reservation")]
Infra = Annotated[str, match_pattern(r"[a-z0-9]+(/[^/\s]+){0,2}", "cloud, cloud/region or cloud/region/zone")]
Mount = Annotated[
    str, match_pattern(r"[a-z0-9]+://\S*[^/\s]|[a-z0-9][-a-z0-9_.]*", "a bucket such as s3://runs, or a volume's name")
]
SecretKey = Annotated[str, match_pattern(r"[-._a-zA-Z0-9]{1,253}", "letters, digits, dashes, dots and underscores")]


# The layout that a key implies if none is named.
IMPLIED: Final = {
    "expert_parallel": "expert-parallel",
    "replicate": "hybrid",
    "reshard_after_forward": "",  # as its value says
    "shard": "full-shard",
    "offload": "full-shard",
}


class Ranks(Section):
    """How many processes. How they share the work is up to the script."""

    ranks: Count | None = None
    """Processes, one per GPU. Default: cluster.nodes x cluster.gpus_per_node."""


class LayoutSection(Ranks):
    """How the model is placed on the GPUs. What is left out follows from the name and the machines."""

    name: Literal["auto", "full-shard", "no-reshard", "hybrid", "expert-parallel", "resident"] = "auto"
    """auto: the fastest that fits, by the plan. full-shard: each layer is gathered for every micro-batch (FSDP2,
    ZeRO-3). no-reshard: layers stay gathered during accumulation. hybrid: sharded in groups. expert-parallel: each GPU
    stores some of the experts. resident: each GPU stores the whole base model."""
    shard: Count | None = None
    """GPUs that the weights are sharded over. More of them take less memory and gather more."""
    replicate: Count | None = None
    """Groups that each store all shards; shard x replicate = ranks. More of them gather less across nodes, but each
    stores the whole base."""
    expert_parallel: Count | None = None
    """GPUs that the routed experts are split over; must divide the number of experts, and `shard`. Tokens are sent
    instead of the experts' weights."""
    context_parallel: Count | None = None
    """GPUs that the tokens of each row are split over, for rows whose activations don't fit one GPU; null: 1, each GPU
    reads rows of its own. Must divide the number of GPUs. A step has as many rows fewer."""
    reshard_after_forward: bool | None = None
    """Free a gathered layer after its forward pass and gather it again in backward. false gathers once, and keeps the
    gathered weights."""
    base_dtype: Literal["bf16", "fp8", "nf4", "mxfp4", "nvfp4", "int4", "uint4"] | None = None
    """How the frozen base model is stored: bf16; as published: fp8, mxfp4, bitsandbytes' nf4, or
    compressed-tensors' nvfp4, int4 and uint4 (int4 with zero points); or nf4, quantized to 4 bits while loading.
    Dequantized on use. null: the plan chooses bf16 or the published dtype. fp8 halves the base, 4
    bits quarter it. As published it keeps bf16's values; quantized to 4 bits while loading each weight is off by about
    9 %."""
    offload: bool | Auto = "auto"
    """Store the frozen base model in host memory. The adapter, its gradients and its optimizer stay on the GPU. Slow:
    every micro-batch copies each layer over PCIe. auto: only if the layout is `auto` too and nothing else fits."""
    activation_checkpointing: bool | Auto = "auto"
    """Same as train.gradient_checkpointing; one of the two is enough. auto: as that."""
    wrap: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    """Classes that are sharded as one unit. Default: the model's decoder layer. Small units overlap better; a unit is
    gathered at once."""
    state_dict: Literal["full"] | None = None
    """How checkpoints store the adapter: always unsharded, in one file."""

    @property
    def named(self) -> tuple[str, str]:
        """The layout's name, or `auto`, and the key that sets or implies it: no key is ignored."""
        if self.name != "auto":
            return self.name, "layout.name"
        for key, name in IMPLIED.items():
            value = getattr(self, key)
            if key == "reshard_after_forward" and value is not None:
                return "full-shard" if value else "no-reshard", f"layout.{key}"
            if value is True or (isinstance(value, int) and value > 1):
                return name, f"layout.{key}"
        return "auto", ""


class GpuFigures(Section):
    """A GPU that the hardware table lacks, by its data sheet."""

    name: Text
    """Its name in the plan."""
    memory_gib: Positive
    """Memory that one process can use, in GiB."""
    bf16_tflops: Positive
    """Dense bfloat16 peak, in TFLOP/s."""
    memory_gb_per_second: Positive
    """Memory bandwidth, in GB/s."""
    achieved_tflops: Positive | None = None
    """TFLOP/s that its largest products sustain; null: 70 % of the peak."""


class FabricFigures(Section):
    """A link or network that the hardware table lacks."""

    name: Text
    """Its name in the plan."""
    gb_per_second: Positive
    """Measured bandwidth per GPU and direction, in GB/s."""


class Volume(Section):
    """What is mounted into the container, and where. Exactly one of claim, secret, config_map, empty_dir and host."""

    path: MountPath
    """Where it is mounted."""
    claim: Subdomain | None = None
    """Name of the claim."""
    secret: Subdomain | None = None
    """A secret, each key a file."""
    config_map: Subdomain | None = None
    """A ConfigMap, each key a file, such as the site's CA bundle."""
    empty_dir: Quantity | None = None
    """An empty folder of at most this size, gone with the pod."""
    medium: Literal["Memory", "HugePages"] | None = None
    """Where an empty_dir is stored; null: on the node's disk."""
    host: MountPath | None = None
    """A folder of the node, for Slurm's containers."""
    sub_path: RelativePath | None = None
    """The part of the volume that is mounted: a folder, or one file of a ConfigMap or secret."""
    read_only: bool = False
    """Mount it read-only."""

    @property
    def sources(self) -> dict[str, str]:
        """What is mounted, by its key: one, once the rules are kept."""
        found = {key: getattr(self, key) for key in ("claim", "secret", "config_map", "empty_dir", "host")}
        return {key: value for key, value in found.items() if value is not None}


class User(Section):
    """The user that the container runs as. OpenShift's default policy wants none."""

    uid: Natural
    """Numeric user ID."""
    gid: Natural | None = None
    """Numeric group ID; null: the platform's default."""


class Secret(Section):
    """A value that stays in the cluster: the name of a secret and a key in it."""

    secret: Subdomain
    """Name of the secret."""
    key: SecretKey
    """Key in it."""


class Toleration(Section):
    """A node taint that the run tolerates."""

    key: Qualified
    """Key of the taint."""
    value: LabelValue | None = None
    """Its value; null: any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Its effect; null: any."""


class Pods(Section):
    """Keys of the pods that Kubernetes, OpenShift and Run:ai create."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled; null: the platform's default."""
    priority_class: Subdomain | None = None
    """Priority class of the pods."""
    networks: list[Text] = Field(default=[])
    """Secondary networks of the pods (annotation k8s.v1.cni.cncf.io/networks)."""
    labels: dict[Qualified, LabelValue] = Field(default={})
    """Labels of the job and its pods, such as a cost center."""
    annotations: dict[Qualified, str] = Field(default={})
    """Annotations of the job and its pods."""
    extended_resources: dict[Device, Count] = Field(default={})
    """Devices that each pod requests besides GPUs, such as `openshift.io/mellanoxnics: 1`."""
    topology_key: Qualified | None = None
    """Node label, such as a rack's or a switch's, whose value all nodes of the run share."""
    topology: Literal["required", "preferred"] = "required"
    """Whether nodes must share topology_key's value, or should."""
    tolerations: list[Toleration] = Field(default=[])
    """Node taints that the run tolerates."""
    user: User | None = None
    """User that the container runs as; null: the platform's default."""
    supplemental_groups: list[Natural] = Field(default=[])
    """Further groups of the user, such as the one that may read a shared volume."""
    ttl_seconds: Natural | None = None
    """Delete the job this long after its end, with its pods and their logs; null: keep it."""


class Kubernetes(Pods):
    """Keys of Kubernetes and OpenShift."""

    engine: Literal["auto", "trainer", "pytorchjob", "jobset", "job"] = "auto"
    """Kubeflow Trainer, PyTorchJob, JobSet or an indexed Job; auto: JobSet where it is installed."""
    trainer_version: Release | None = None
    """Version of Kubeflow Trainer, "2.3" or newer."""
    runtime: Subdomain = "torch-distributed"
    """ClusterTrainingRuntime of Kubeflow Trainer that a TrainJob uses."""
    namespace: Label | None = None
    """Namespace of the job."""
    service_account: Subdomain | None = None
    """Service account of the pods."""
    image_pull_secrets: list[Subdomain] = Field(default=[])
    """Secrets to pull the image with."""
    queue: LabelValue | None = None
    """Kueue queue, which starts all pods of the run together or none; or a Volcano queue."""
    queue_priority: LabelValue | None = None
    """Kueue's WorkloadPriorityClass, which decides the run's place in the queue."""
    gang: Literal["volcano", "coscheduling"] | None = None
    """Scheduler that starts all pods together by a PodGroup, where that isn't Kueue; null: as scheduler_name says."""
    scheduler_name: Subdomain | None = None
    """Scheduler of the pods; null: that of `gang`, or the cluster's default."""
    gpu_resource: Device = "nvidia.com/gpu"
    """Resource name of the GPUs, such as nvidia.com/mig-7g.141gb."""
    hugepages: dict[HugePage, Quantity] = Field(default={})
    """Huge pages of each pod by their size, such as `2Mi: 4Gi`."""
    ephemeral_storage: Quantity | None = None
    """Disk of the node that each pod may use for logs and temporary files."""
    node_selector: dict[Qualified, LabelValue] = Field(default={})
    """Labels that nodes must have."""
    affinity: dict[str, Any] = Field(default={})
    """The pods' `affinity`, as in Kubernetes."""
    fs_group: Natural | None = None
    """Group that volumes belong to; null: the platform's default."""
    runtime_class: Subdomain | None = None
    """RuntimeClass of the pods, such as nvidia."""
    network_policy: Literal["ingress", "all"] | None = None
    """A NetworkPolicy that lets the ranks talk. ingress: only pods of the run may connect to them. all: besides, they
    may connect only to each other and to DNS, unless another policy allows more."""
    pod_monitor: bool = False
    """A PodMonitor, by which the Prometheus operator scrapes watch.prometheus_port."""


class Runai(Pods):
    """Keys of Run:ai."""

    project: Label | None = None
    """Run:ai project."""
    node_pools: list[Text] = Field(default=[])
    """Node pools, in the order in which they are tried."""
    preemptible: bool | None = None
    """May be preempted by other jobs; null: the platform's default."""


class Slurm(Section):
    """Keys of Slurm."""

    account: Label | None = None
    """Account that the job is charged to."""
    partition: LabelValue | None = None
    """Partition that the job waits in."""
    qos: Subdomain | None = None
    """Quality of service."""
    container: Literal["pyxis", "apptainer"] | None = None
    """What runs `cluster.image`: pyxis with enroot, or apptainer; null: run without a container."""
    sbatch: dict[OptionName, LooseText] = Field(default={})
    """Further options of sbatch without dashes, such as `reservation: gpus`, `constraint: ib` or `switches: 1`; empty
    text for a switch."""


class Skypilot(Section):
    """Keys of SkyPilot."""

    infra: Infra | None = None
    """Where machines are rented: a cloud with its region and zone if wanted, such as aws/us-east-1; null: the cheapest
    that has them."""
    accelerator: Text | None = None
    """SkyPilot's name of the GPU, such as A10G; null: that of cluster.gpu."""
    spot: bool = False
    """Rent machines that may be taken back: they cost less, and the run resumes on others."""
    disk_gb: Count | None = None
    """Disk of each node, in GB; null: SkyPilot's default."""
    mounts: dict[MountPath, Mount] = Field(default={})
    """Path on the nodes -> a bucket such as s3://runs/mistral, or a volume's name. The bucket with the run folder is
    mounted; others are copied to each node's disk. Paths of this machine that none of them has are uploaded."""


# Platform -> the section of `cluster` with its own keys; a run on this machine and a script have none.
PLATFORM_SECTIONS: Final = {
    "slurm": "slurm",
    "runai": "runai",
    "kubernetes": "kubernetes",
    "openshift": "kubernetes",
    "skypilot": "skypilot",
}


class Cluster(Section):
    """The machines, and how a job is submitted to them."""

    nodes: Count | Auto = "auto"
    """Number of machines. auto: 1; `windlass train` takes what its launcher says, if all sizes are auto."""
    gpus_per_node: Count | Auto = "auto"
    """GPUs on each machine, one rank each. On a CPU: ranks. auto: 1; `windlass train` takes its launcher's, else this
    machine's, if neither nodes nor layout.ranks is set."""
    gpu: Text | GpuFigures | None = None
    """Name in the hardware table such as h200, `cpu`, or the figures of another GPU; null: this machine's GPU."""
    machine: Text | None = None
    """Measurements of this kind of machine, a file of `windlass calibrate`; null: on one node the file for this host if
    there is one, else data sheets."""
    link: Text | FabricFigures | None = None
    """Between the GPUs of a node: nvlink, pcie …; null: what the GPU usually has."""
    network: Text | FabricFigures | None = None
    """Between nodes: infiniband-400 …; required for more than one node."""
    nics_per_node: Count = 1
    """Network cards per node that the run can use."""
    host_memory_gib: Positive | None = None
    """Host memory per node that the run can use, in GiB; null: not checked."""
    platform: Literal["local", "script", "runai", "kubernetes", "openshift", "slurm", "skypilot"] = "local"
    """How the run is started: on this machine, as a script for each node, or by one of these platforms."""
    image: Image | None = None
    """Container image, preferably with its digest; on Slurm for cluster.slurm.container."""
    volumes: list[Volume] = Field(default=[])
    """What is mounted into the container, and where."""
    cpu: Cpus | None = None
    """CPUs of each pod, or of a Slurm job on each node."""
    cpu_limit: Cpus | None = None
    """CPUs that each pod may use; the same as `cpu`, with memory alike, is the QoS class Guaranteed."""
    memory_request: Quantity | None = None
    """Host memory that each pod requests, such as 500Gi."""
    memory_limit: Quantity | None = None
    """Host memory that each pod, or a Slurm job on each node, may use."""
    large_shm: bool = True
    """Mount a /dev/shm as large as the run needs; data loader processes pass their batches through it."""
    working_dir: AbsolutePath | None = None
    """Folder that the run is started in."""
    install: list[Text] = Field(default=[])
    """What each node installs with pip before it starts, from PIP_INDEX_URL; better an image that has it."""
    env: dict[VariableName, LooseText | Secret] = Field(default={})
    """Environment variables; secrets by reference: `HF_TOKEN: {secret: hub, key: token}`."""
    max_restarts: Natural = 3
    """How often a lost run is restarted; it resumes from its newest checkpoint. A stop signal is not counted."""
    grace_seconds: Count | None = None
    """Seconds to save in after a stop signal; null: from the plan."""
    deadline_seconds: Count | None = None
    """End the job after this time, whatever it is doing; null: never. On Slurm the time limit of each try."""
    log_format: Literal["text", "json"] = "text"
    """json: each line of a node's log as JSON with time, run, node and host."""
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    """Keys of Kubernetes and OpenShift."""
    runai: Runai = Field(default_factory=Runai)
    """Keys of Run:ai."""
    slurm: Slurm = Field(default_factory=Slurm)
    """Keys of Slurm."""
    skypilot: Skypilot = Field(default_factory=Skypilot)
    """Keys of SkyPilot."""

    @property
    def size(self) -> tuple[int, int]:
        """Nodes and GPUs on each; auto is one."""
        nodes = 1 if self.nodes == "auto" else self.nodes
        gpus = 1 if self.gpus_per_node == "auto" else self.gpus_per_node
        return nodes, gpus
