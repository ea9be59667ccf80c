"""Libraries, driver, model class and attention against what the tests ran with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.launch.check.result import Result, failed, passed, unseen, warned
from windlass.runfile.names import absent_trackers

if TYPE_CHECKING:
    from windlass.runfile import Loaded

Installed = Mapping[str, str]  # distribution -> version


@dataclass(frozen=True, slots=True)
class Tested:
    """A library's supported range, and the version that the tests ran with."""

    least: str
    below: str
    ran: str


# The ranges are pyproject's (a test compares them), where their reasons stand.
TESTED: dict[str, Tested] = {
    "torch": Tested("2.11", "3", "2.13.0"),
    "transformers": Tested("5.23", "5.24", "5.23.0"),
    "trl": Tested("1.16", "1.17", "1.16.0"),
    "peft": Tested("0.21", "0.22", "0.21.2"),
    "accelerate": Tested("1.15", "2", "1.15.0"),
    "datasets": Tested("5", "6", "5.2.0"),
    "safetensors": Tested("0.7", "1", "0.8.0"),
}
# The oldest Linux driver for each CUDA major version, whose minor versions all run on it: NVIDIA's CUDA Compatibility,
# "Minor Version Compatibility", table 1, with the full numbers of CUDA 11.0, 12.0 and 13.0 from the CUDA release notes.
DRIVERS: dict[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
# PEFT 0.21 raises ImportError for an older one as soon as it looks for layers to adapt (peft/import_utils.py).
TORCHAO_LEAST = "0.16.0"
# transformers' first release with each family's class: its published wheel has it, and that of the minor version before
# has it not.
MODEL_SINCE: dict[str, str] = {
    "Mistral4ForCausalLM": "5.4",
    "Ministral3ForCausalLM": "5.0",
    "MistralForCausalLM": "4.34",
    "MixtralForCausalLM": "4.36",
    "LlamaForCausalLM": "4.28",
    "Qwen2ForCausalLM": "4.37",
    "Qwen3ForCausalLM": "4.51",
    "Qwen3MoeForCausalLM": "4.51",
}
# Attention implementations: the package that must be installed (module, distribution), the class's flag.
ATTENTION: dict[str, tuple[tuple[str, str] | None, str]] = {
    "eager": (None, ""),
    "sdpa": (None, "_supports_sdpa"),
    "flex_attention": (None, "_supports_flex_attn"),
    "flash_attention_2": (("flash_attn", "flash-attn"), "_supports_flash_attn"),
    "flash_attention_3": (("flash_attn_interface", "flash-attn-3"), "_supports_flash_attn"),
    "flash_attention_4": (("flash_attn", "flash-attn-4"), "_supports_flash_attn"),
}
INSTALL = "pip install 'windlass[train]', or use the image that the Containerfile builds"


def number(version: str) -> tuple[int, ...]:
    """The release part of a version, for comparison: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def older(version: str, than: str) -> bool:
    a, b = number(version), number(than)
    width = max(len(a), len(b))
    return a + (0,) * (width - len(a)) < b + (0,) * (width - len(b))


def installed() -> dict[str, str]:
    """Every distribution that Python would import from, by its normalised name; the first on the path counts."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def libraries(have: Installed) -> list[Result]:
    """Each library of the tested table. A prerelease or development build counts as its release."""
    return [library(name, tested, have.get(name)) for name, tested in TESTED.items()]


def library(name: str, tested: Tested, version: str | None) -> Result:
    title, wanted = f"library {name}", f">={tested.least},<{tested.below}"
    if version is None:
        return failed(title, "not installed", INSTALL)
    if not number(version):
        return unseen(title, f"{version!r} is no version that can be compared")
    if older(version, tested.least) or not older(version, tested.below):
        return failed(title, f"{version}; supported is {wanted}", f"pip install '{name}{wanted}'")
    if number(version)[:2] != number(tested.ran)[:2]:
        return warned(title, f"{version}; the tests ran with {tested.ran}", f"pip install {name}=={tested.ran}")
    return passed(title, f"{version}, tests ran with {tested.ran}")


def torchao(have: Installed) -> Result:
    version = have.get("torchao")
    if version is None:
        return passed("torchao", "not installed, and not needed")
    if older(version, TORCHAO_LEAST):
        return failed(
            "torchao",
            f"{version}: PEFT refuses one older than {TORCHAO_LEAST} and would not attach the adapter",
            f"pip uninstall torchao, or pip install 'torchao>={TORCHAO_LEAST}'",
        )
    return passed("torchao", version)


def cuda(torch_cuda: str | None, driver: str | None, gpus: int, works: Callable[[], bool] = lambda: False) -> Result:
    """torch's CUDA against the driver. `torch_cuda` is None in a build for processors alone.

    works: whether CUDA starts all the same. NVIDIA's images bring libraries by which it does on an older driver.
    """
    if torch_cuda is None:
        if gpus:
            return failed(
                "CUDA",
                f"{gpus} GPUs, and a torch built without CUDA",
                "install torch's CUDA build, or use an NGC image",
            )
        return unseen("CUDA", "torch is built without CUDA, and there is no GPU")
    if driver is None:
        return unseen("CUDA", f"torch is built for CUDA {torch_cuda}; no driver answers here")
    least = DRIVERS.get(number(torch_cuda)[0])
    if least is None:
        return unseen("CUDA", f"no driver is known to be the oldest for CUDA {torch_cuda}; this one is {driver}")
    if older(driver, least) and works():
        return passed("CUDA", f"torch is built for CUDA {torch_cuda}; it starts on driver {driver}, older than {least}")
    if older(driver, least):
        return failed(
            "CUDA",
            f"torch is built for CUDA {torch_cuda}, whose oldest driver is {least}; this one is {driver}",
            "ask for a node with a newer driver, or use an image with an older CUDA",
        )
    return passed("CUDA", f"torch is built for CUDA {torch_cuda}, driver {driver}")


def model_class(name: str, have: Installed, place: str) -> tuple[Any, list[Result]]:
    """The class that is trained, imported as training will; None and why not."""
    version = have.get("transformers")
    if version is None or "torch" not in have:
        return None, [unseen("model class", f"{'transformers' if version is None else 'torch'} is not installed")]
    try:
        import transformers

        found = getattr(transformers, name)
    except (AttributeError, ImportError, RuntimeError, OSError) as error:
        return None, [no_class(name, version, error, place)]
    return found, [passed("model class", f"{name} of transformers {version}")]


def no_class(name: str, version: str, error: Exception, place: str) -> Result:
    since = MODEL_SINCE.get(name)
    if since and older(version, since):
        said = f"transformers {version} has no {name}: {since} is the first that has"
    elif since and isinstance(error, AttributeError):
        said = f"transformers {version} should have {name} and has not: the installation is damaged"
    else:
        said = f"{name} cannot be imported from transformers {version}: {str(error).splitlines()[0]}"
    ran = TESTED["transformers"].ran
    return failed("model class", said, f"pip install transformers=={ran}, which the tests ran with", place)


def trackers(loaded: Loaded) -> list[Result]:
    """Those of train.report_to."""
    place, asked = loaded.where("train.report_to"), loaded.run.train.report_to
    absent = absent_trackers(asked)
    names = [name for name in ([asked] if isinstance(asked, str) else asked) if name not in ("none", *absent)]
    found = [
        failed(f"tracker {name}", "not installed", f"{cure}, or take it out", place) for name, cure in absent.items()
    ]
    return [*found, *(passed(f"tracker {name}", "installed") for name in names)]


def attention(loaded: Loaded, model: Any, have: Installed) -> Result:
    """Whether the implementation that the run asks for is installed, and the model class takes it."""
    asked = loaded.run.model.attn_implementation or "sdpa"
    place = loaded.where("model.attn_implementation")
    if asked not in ATTENTION:  # the run file takes these names, and hub kernels
        if "kernels" not in have:
            hint = "pip install kernels, or set sdpa"
            return failed("attention", f"{asked} is a hub kernel, and `kernels` is not installed", hint, place)
        return unseen("attention", f"{asked} is fetched from the hub when the model is loaded")
    needs, flag = ATTENTION[asked]
    if needs and needs[1] not in have:
        hint = f"pip install {needs[1]}, or set model.attn_implementation: sdpa"
        return failed("attention", f"{asked} needs {needs[1]}, which is not installed", hint, place)
    if needs and importlib.util.find_spec(needs[0]) is None:
        return failed("attention", f"{needs[1]} is installed and has no module {needs[0]}", "install it again", place)
    if model is None:
        return unseen("attention", f"{asked}: whether the model takes it is not known without its class")
    if flag and not getattr(model, flag, False):
        return failed("attention", f"{model.__name__} does not take {asked}", "set eager or sdpa", place)
    return passed("attention", f"{asked}, which {model.__name__} takes")
