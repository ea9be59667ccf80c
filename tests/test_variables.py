"""Environment variables as data: what windlass sets, and what the published recipe sets and should not."""

from __future__ import annotations

from windlass.variables import DEFAULTS, VARIABLES

# Every variable of the published job and launch scripts.
PUBLISHED = {
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TIMEOUT",
    "CUDA_VISIBLE_DEVICES",
    "RDMAV_FORK_SAFE",
    "PIP_INDEX",
    "PIP_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "TOKENIZERS_PARALLELISM",
    "MSYS_NO_PATHCONV",
    "MSYS2_ARG_CONV_EXCL",
}


def test_every_variable_of_the_published_recipe_has_a_verdict() -> None:
    assert {name for name, variable in VARIABLES.items() if variable.published} == PUBLISHED
    assert all(VARIABLES[name].verdict for name in PUBLISHED)


def test_every_variable_says_what_it_does_and_what_windlass_does_with_it() -> None:
    for name, variable in VARIABLES.items():
        assert name == variable.name
        assert variable.about
        assert variable.windlass
        assert variable.source
        assert variable.exists or not variable.value  # nothing sets what does not exist


def test_a_job_gets_little_by_default() -> None:
    """Tuning that helps one site harms another: only these are right everywhere."""
    assert DEFAULTS == {
        "NCCL_DEBUG": "WARN",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_what_does_not_exist_is_said_not_to() -> None:
    assert {name for name, variable in VARIABLES.items() if not variable.exists} == {
        "NCCL_TIMEOUT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_BLOCKING_WAIT",
    }


def test_no_name_stands_twice() -> None:
    from windlass import variables

    rows = [*variables._NCCL, *variables._TORCH, *variables._PROCESS, *variables._RANKS, *variables._ACCELERATE]
    assert len(rows) == len(VARIABLES)


def test_torchs_variables_are_torchs() -> None:
    """Those that the installed torch names in its headers; a rename upstream shows here."""
    from pathlib import Path

    import torch

    headers = Path(torch.__file__).parent / "include"
    text = (headers / "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    named = {name for name in VARIABLES if name.startswith("TORCH_NCCL_")}
    assert len(named) > 6
    assert {name for name in named if name not in text} == set()
    allocator = (headers / "c10/cuda/CUDAAllocatorConfig.h").read_text()
    assert {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} <= {name for name in VARIABLES if name in allocator}
