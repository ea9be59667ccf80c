"""Environment variables of NCCL, torch, Python and the platforms: what each does, and what windlass does with it."""

from __future__ import annotations

from dataclasses import dataclass

NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH = "docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
ALLOCATOR = "docs.pytorch.org/docs/stable/notes/cuda.html#memory-management"
HUB = "huggingface.co/docs/huggingface_hub/package_reference/environment_variables"
ELASTIC = "docs.pytorch.org/docs/stable/elastic/run.html"
ACCELERATE = "huggingface.co/docs/accelerate, utils/launch.py of 1.15"

WRITABLE = "windlass sets a writable path on OpenShift, whose HOME is not; elsewhere only where cluster.env does"
NEVER = "windlass leaves it alone"
SITE = "windlass sets it where cluster.env or cluster.network names it: the right value is the site's"
PLATFORM = "the platform or the launcher sets it; windlass reads it"

# What whoever starts the ranks gives each of them; torchrun's own settings are PET_*.
STARTED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
)


def started(name: str) -> bool:
    """A variable that is set by what starts the ranks, and by nobody else."""
    return name.startswith("PET_") or name in STARTED


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable. `value` is what windlass sets it to in every job; empty where it does not, or where it depends."""

    name: str
    about: str
    windlass: str  # whether windlass sets it, and when
    source: str
    value: str = ""
    published: str = ""  # its value in the published recipe; empty where the recipe lacks it
    verdict: str = ""  # on the recipe's use of it, or on what is often said of it
    exists: bool = True


def _nccl(name: str, about: str, windlass: str = NEVER, **more: str) -> Variable:
    return Variable(name, about, windlass, NCCL, **more)  # type: ignore[arg-type]


_NCCL = (
    _nccl(
        "NCCL_DEBUG",
        "how much NCCL prints: VERSION, WARN, INFO, TRACE",
        "windlass sets WARN; take INFO for the first launch on a new site, to see which network is used",
        value="WARN",
        published="INFO",
        verdict="right for a first launch, too loud afterwards",
    ),
    _nccl("NCCL_DEBUG_SUBSYS", "which parts of NCCL print at INFO: INIT, NET, GRAPH …"),
    _nccl("NCCL_DEBUG_FILE", "file that NCCL's messages go to; %h is the host, %p the process"),
    _nccl(
        "NCCL_SOCKET_IFNAME",
        "network interfaces for NCCL's sockets: prefixes, `=net1` for exactly that one, `^docker` for all but those",
        SITE,
        published="net1",
        verdict="with InfiniBand only the ranks' first contact goes over it, and it does not choose the card "
        "(NCCL_IB_HCA does); without InfiniBand it decides everything. `net1` matches net10 too, `=net1` is exact; "
        "the interface needs an IP address",
    ),
    _nccl(
        "NCCL_IB_HCA",
        "InfiniBand or RoCE cards that are used: mlx5_0,mlx5_1; `=` for exact names, `^` for not those",
        SITE,
        verdict="the way to choose cards; the recipe lacks it",
    ),
    _nccl("NCCL_IB_DISABLE", "1 makes NCCL use sockets although there is InfiniBand", verdict="only to find a fault"),
    _nccl("NCCL_IB_GID_INDEX", "which address of a RoCE port is used", SITE),
    _nccl("NCCL_IB_TC", "traffic class of RoCE and InfiniBand packets", SITE),
    _nccl("NCCL_IB_TIMEOUT", "how long a card waits for an answer before it sends again"),
    _nccl("NCCL_IB_RETRY_CNT", "how often a card sends again before it gives up"),
    _nccl(
        "NCCL_IB_QPS_PER_CONNECTION",
        "queue pairs between two cards",
        published="1",
        verdict="1 is the default: without effect",
    ),
    _nccl(
        "NCCL_IB_SPLIT_DATA_ON_QPS",
        "whether one message is split over the queue pairs of a connection",
        published="1",
        verdict="without effect with one queue pair",
    ),
    _nccl(
        "NCCL_SOCKET_NTHREADS",
        "CPU threads of each socket connection",
        published="2",
        verdict="for the socket transport alone: without effect over InfiniBand",
    ),
    _nccl(
        "NCCL_NSOCKS_PERTHREAD",
        "sockets of each such thread",
        published="2",
        verdict="for the socket transport alone: without effect over InfiniBand",
    ),
    _nccl("NCCL_NET_GDR_LEVEL", "how far a card may be from a GPU and still read its memory directly"),
    _nccl("NCCL_P2P_DISABLE", "1 forbids direct traffic between GPUs of a node", verdict="only to find a fault"),
    _nccl("NCCL_P2P_LEVEL", "how far two GPUs may be from each other and still exchange directly"),
    _nccl("NCCL_SHM_DISABLE", "1 forbids shared memory between processes of a node", verdict="only to find a fault"),
    _nccl("NCCL_ALGO", "which algorithms collectives may use", verdict="NCCL chooses better by itself"),
    _nccl("NCCL_PROTO", "which protocols collectives may use", verdict="a wrong choice can corrupt data on some cards"),
    _nccl("NCCL_BUFFSIZE", "bytes of the buffer between two GPUs, 4 MB by default"),
    _nccl("NCCL_CUMEM_ENABLE", "whether NCCL takes its memory through CUDA's cuMem functions"),
    _nccl("NCCL_NVLS_ENABLE", "whether NVLink switches add up by themselves"),
    _nccl("NCCL_TOPO_FILE", "a file that describes the node's PCI tree, for virtual machines", SITE),
    Variable(
        "NCCL_TIMEOUT",
        "nothing: NCCL has no such variable",
        "the time after which a stuck collective fails is train.ddp_timeout in the run file",
        NCCL,
        published="(raise it)",
        verdict="does not exist; the timeout belongs to torch's process group",
        exists=False,
    ),
    Variable(
        "NCCL_ASYNC_ERROR_HANDLING",
        "the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
        NEVER,
        TORCH,
        verdict="write the new name, or better nothing: the default is right",
        exists=False,
    ),
    Variable(
        "NCCL_BLOCKING_WAIT",
        "the old name of TORCH_NCCL_BLOCKING_WAIT",
        NEVER,
        TORCH,
        verdict="write the new name, or better nothing: the default is right",
        exists=False,
    ),
)

_TORCH = (
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "whether a failed or timed-out collective ends the process",
        NEVER,
        TORCH,
        verdict="the default (3) is right: 0 would let a rank hang for ever",
    ),
    Variable("TORCH_NCCL_BLOCKING_WAIT", "1 makes the CPU wait for every collective", NEVER, TORCH),
    Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "how long NCCL's watchdog may be silent", NEVER, TORCH),
    Variable("TORCH_NCCL_ENABLE_MONITORING", "whether a second thread watches the watchdog", NEVER, TORCH),
    Variable(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "how many collectives the flight recorder keeps, to tell which rank was missing",
        NEVER,
        TORCH,
        verdict="2000 helps to find a hang; newer torch calls it TORCH_FR_BUFFER_SIZE",
    ),
    Variable("TORCH_FR_BUFFER_SIZE", "the newer name of TORCH_NCCL_TRACE_BUFFER_SIZE", NEVER, TORCH),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "whether the flight recorder is written to files on a timeout", NEVER, TORCH
    ),
    Variable("TORCH_NCCL_DESYNC_DEBUG", "whether a timeout says which ranks were behind", NEVER, TORCH),
    Variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "how NCCL keeps tensors alive while they travel", NEVER, TORCH),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        "OFF, INFO or DETAIL: DETAIL compares shapes and order of every collective between ranks",
        NEVER,
        "docs.pytorch.org/docs/stable/distributed.html",
        verdict="DETAIL finds a rank that calls another collective than the rest, and is slow",
    ),
    Variable(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "seconds that the launcher waits after SIGTERM before it kills the ranks, 30 by default",
        "raise it in cluster.env where saving takes longer",
        ELASTIC,
    ),
    Variable(
        "PYTORCH_CUDA_ALLOC_CONF",
        "settings of torch's GPU memory allocator; expandable_segments:True lets a segment grow instead of fragmenting",
        "windlass sets expandable_segments:True under both names: torch 2.9.1 ignored it under the new one",
        ALLOCATOR,
        value="expandable_segments:True",
        published="expandable_segments:True",
        verdict="right; torch 2.8 to 2.11 warn about this name, harmlessly",
    ),
    Variable(
        "PYTORCH_ALLOC_CONF",
        "the newer name of PYTORCH_CUDA_ALLOC_CONF",
        "windlass sets expandable_segments:True under both names: torch 2.9.1 ignored it under the new one",
        ALLOCATOR,
        value="expandable_segments:True",
        published="expandable_segments:True",
        verdict="right, but set PYTORCH_CUDA_ALLOC_CONF as well",
    ),
    Variable(
        "TORCHINDUCTOR_CACHE_DIR",
        "where compiled kernels are kept",
        WRITABLE,
        "docs.pytorch.org/docs/stable/torch.compiler.html",
    ),
    Variable("TRITON_CACHE_DIR", "where Triton keeps its kernels", WRITABLE, "triton-lang.org"),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "network interface of gloo, which CPU runs use; one exact name",
        SITE,
        "docs.pytorch.org/docs/stable/distributed.html",
    ),
)

_PROCESS = (
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "which GPUs a process sees, by number",
        PLATFORM,
        "docs.nvidia.com/cuda/cuda-programming-guide, environment variables",
        published="0",
        verdict="drop it: the scheduler gives a pod its GPUs, and 0 hides all but one where there are more",
    ),
    Variable(
        "OMP_NUM_THREADS",
        "CPU threads of one process",
        "windlass gives each rank its share of the node's processors where nothing is said",
        ACCELERATE,
    ),
    Variable(
        "TOKENIZERS_PARALLELISM",
        "whether fast tokenizers use several threads",
        "windlass sets false in its ranks, but for the time in which they tokenize",
        "github.com/huggingface/tokenizers, bindings/python/src/lib.rs",
        published="false",
        verdict="right, and windlass sets it: with true, a process forked after threads were used waits for ever; "
        "unset, the library turns its threads off there by itself",
    ),
    Variable(
        "RDMAV_FORK_SAFE",
        "asks libibverbs to survive fork()",
        "no need",
        "man ibv_fork_init",
        published="1",
        verdict="redundant: NCCL calls ibv_fork_init itself",
    ),
    Variable("HF_HOME", "where Hugging Face libraries keep models, data sets and tokens", WRITABLE, HUB),
    Variable(
        "HF_HUB_OFFLINE", "1 forbids every request to the Hub", "set it in cluster.env where nodes reach no Hub", HUB
    ),
    Variable("HF_TOKEN", "the token for gated models", "windlass passes a reference to a secret, never the value", HUB),
    Variable(
        "HOME",
        "the user's folder",
        "windlass sets a writable path on OpenShift, where it is / and unwritable",
        "docs.redhat.com, OpenShift: creating images",
    ),
    Variable(
        "LOGNAME",
        "the user's name",
        "windlass sets it on OpenShift, whose arbitrary user ID has no name",
        "docs.python.org/3/library/getpass.html",
    ),
    Variable(
        "PIP_INDEX_URL",
        "the package index that pip asks",
        "no need: an image holds what the job runs, a job installs nothing",
        "pip.pypa.io/en/stable/topics/configuration",
        published="(the site's mirror)",
        verdict="right spelling, for installing at start, which makes a job depend on the mirror",
    ),
    Variable(
        "PIP_INDEX",
        "what `pip search` and `pip index` ask, not `pip install`",
        "no need",
        "pip.pypa.io/en/stable/topics/configuration",
        published="(the site's mirror)",
        verdict="without effect on installing: PIP_INDEX_URL is the one",
    ),
    Variable(
        "PIP_TRUSTED_HOST",
        "a host whose certificate pip does not check",
        "no need",
        "pip.pypa.io/en/stable/topics/configuration",
        published="(the site's mirror)",
        verdict="give pip the site's certificate (PIP_CERT) instead",
    ),
    Variable(
        "MSYS_NO_PATHCONV",
        "keeps Git Bash on Windows from rewriting paths in arguments",
        NEVER,
        "git-scm.com, Git for Windows",
        published="1",
        verdict="right on the Windows machine that submits, and only there",
    ),
    Variable(
        "MSYS2_ARG_CONV_EXCL",
        "the same for MSYS2",
        NEVER,
        "msys2.org/docs/filesystem-paths",
        published="*",
        verdict="right on the Windows machine that submits, and only there",
    ),
)

_RANKS = tuple(
    Variable(name, about, PLATFORM, source, verdict=verdict)
    for name, about, source, verdict in (
        (
            "RANK",
            "this process's number; on Run:ai and PyTorchJob the pod's, until a launcher starts ranks",
            ELASTIC,
            "",
        ),
        ("LOCAL_RANK", "this process's number within its node", ELASTIC, ""),
        ("WORLD_SIZE", "ranks: pods x processes on Run:ai and PyTorchJob", ELASTIC, "never feed it to --nnodes"),
        ("MASTER_ADDR", "address of the process that ranks meet at", ELASTIC, ""),
        ("MASTER_PORT", "its port: 29500 by torch's default, 23456 on Run:ai and PyTorchJob", ELASTIC, ""),
        ("PET_NNODES", "number of nodes, for torch's launcher", ELASTIC, ""),
        ("PET_NODE_RANK", "this node's number, for torch's launcher", ELASTIC, ""),
        ("PET_NPROC_PER_NODE", "processes per node, for torch's launcher", ELASTIC, ""),
        ("PET_MASTER_ADDR", "address of node 0, for torch's launcher", ELASTIC, ""),
        ("PET_MASTER_PORT", "port of node 0, for torch's launcher", ELASTIC, ""),
    )
)

_ACCELERATE = (
    Variable(
        "ACCELERATE_USE_FSDP",
        "tells Accelerate in a rank to wrap the model itself",
        "windlass reads the launcher's settings, then clears it: else the model would be sharded a second time",
        ACCELERATE,
    ),
    Variable(
        "ACCELERATE_MIXED_PRECISION",
        "the launcher's mixed_precision",
        "the run file's precision takes its place",
        ACCELERATE,
    ),
    Variable("ACCELERATE_USE_CPU", "makes Accelerate use the CPU", NEVER, ACCELERATE),
    Variable("ACCELERATE_DEBUG_MODE", "Accelerate compares shapes before its own collectives", NEVER, ACCELERATE),
    Variable("ACCELERATE_CPU_AFFINITY", "bind a process to the CPU cores near its GPU", NEVER, ACCELERATE),
)

VARIABLES: dict[str, Variable] = {
    variable.name: variable for variable in (*_NCCL, *_TORCH, *_PROCESS, *_RANKS, *_ACCELERATE)
}

# What every job gets. What depends on the platform or the site is added by the launchers.
DEFAULTS: dict[str, str] = {name: variable.value for name, variable in VARIABLES.items() if variable.value}
