"""Checks of the input, before any machine: plan, weights, tokenizer, data, the script, and the installed libraries."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import plan as planning
from windlass.data import sources
from windlass.errors import UserError
from windlass.hardware import GIB
from windlass.launch.check.results import ALONE, Result, failed, not_here, passed, refused, skipped, warned
from windlass.model.family import FAMILIES
from windlass.plan.script import ScriptPlan, make_script
from windlass.runfile.names import absent_trackers

if TYPE_CHECKING:
    from packaging.version import Version

    from windlass.plan import Plan
    from windlass.plan.accelerate import AccelerateFile
    from windlass.runfile import Loaded, LoadedScript

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


def check_run(
    loaded: Loaded,
    accelerate: Callable[[], AccelerateFile | None],
    have: Installed,
    depth: str,
    folders: Callable[[Plan | None], list[Result]],
    *,
    elsewhere: bool,
) -> tuple[Plan | None, list[Result]]:
    """A language model's run. Making the plan checks targets, layout, classes and batch. `folders`: where it writes."""
    try:
        plan = planning.make(loaded, accelerate())
    except UserError as error:
        lost = [skipped(name, "there is no plan") for name in ("weights", "tokenizer")]
        results = [*refused("plan", error.problems), *check_libraries(loaded, None, have, depth), *folders(None), *lost]
        return None, [*results, check_data(loaded, None, elsewhere=elsewhere)]
    targets = sum(len(target.modules) for target in plan.adapter.targets)
    tokenizer, opened = check_tokenizer(plan)
    return plan, [
        passed("model", f"{plan.base.name}: {plan.base.family.causal_lm}, {plan.total:,} parameters"),
        passed("adapter", f"{targets:,} modules, {plan.adapter.trainable:,} trainable parameters"),
        passed("layout", f"{plan.layout.name} over {plan.layout.ranks} ranks, by {plan.base.family.layer}"),
        passed("batch", f"{plan.schedule.global_sequences} sequences per step"),
        check_memory(plan),
        *check_libraries(loaded, plan, have, depth),
        *folders(plan),
        check_weights(plan, elsewhere=elsewhere),
        opened,
        check_data(loaded, tokenizer, elsewhere=elsewhere),
    ]


def check_memory(plan: Plan) -> Result:
    """Whether it fits by the plan's arithmetic: each GPU, and the host's memory if that is stated."""
    cost, gpu = plan.cost, plan.machine.gpu
    seen = f"{cost.gpu_gib:.1f} of {gpu.memory_gib:.1f} GiB on each {gpu.name}, {cost.host_gib:.1f} GiB of host memory"
    if cost.fits:
        return passed("memory", seen)
    return failed("memory", f"does not fit: {seen}", cost.remedy, plan.loaded.where("cluster.gpu"))


def check_weights(plan: Plan, *, elsewhere: bool) -> Result:
    """A plan can be made from a published config, a run can't."""
    name, where = plan.loaded.run.model.model_name_or_path, plan.loaded.where("model.model_name_or_path")
    if plan.disk_bytes is not None:
        return passed("weights", f"{size(plan.disk_bytes)} in {plan.base.path}")
    if elsewhere:
        return not_here("weights", name)
    hint = "mount the volume, name the model's folder, or download it with `windlass fetch`"
    return failed("weights", f"{name} holds no weights", hint, where)


def check_tokenizer(plan: Plan) -> tuple[Any, Result]:
    """The tokenizer next to the weights, opened as training does, and its ids against the embedding's rows."""
    path, where = plan.base.path, plan.loaded.where("model.model_name_or_path")
    if path is None:
        return None, skipped("tokenizer", "there is no model folder on this machine")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        return None, skipped("tokenizer", f"transformers can't be imported: {error}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=plan.loaded.run.model.trust_remote_code)
    except Exception as error:  # the library raises whatever a damaged file makes it stumble on
        seen = f"{path} holds no tokenizer that opens: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
        return None, failed("tokenizer", seen, "copy tokenizer.json and tokenizer_config.json there", where)
    rows = plan.base.dims["vocab"]
    if len(tokenizer) > rows:
        hint = "these files belong to another model: copy the tokenizer that was published with this one"
        return tokenizer, failed("tokenizer", f"{len(tokenizer):,} tokens, and the embedding has {rows:,} rows", hint)
    return tokenizer, passed("tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} of {rows:,} ids")


def check_data(loaded: Loaded, tokenizer: Any, *, elsewhere: bool) -> Result:
    """That the first training rows can be read and have the columns that the run needs."""
    run, name = loaded.run, loaded.run.data.dataset_name_or_path
    if elsewhere and not Path(name).expanduser().exists():
        return not_here("data", name)
    try:
        from windlass.data.formats import choose_format
        from windlass.data.prepare import check_selection, select_rows

        if sources.resolve(run.data, loaded.where).format == "hub":
            return skipped("data", f"{name} is downloaded from the Hub", "download it before with `windlass fetch RUN`")
        chosen = select_rows(run.data, loaded.where, lambda _: None)
        chat = bool(run.data.messages_field) or {"messages", "conversations"} & set(chosen.columns)
        if tokenizer is None and chat:
            return skipped("data", f"{', '.join(chosen.columns)}: rendering chats needs the tokenizer")
        form = choose_format(run.data, chosen.columns, tokenizer, loaded.where)
    except UserError as error:
        return refused("data", error.problems)[0]
    except ImportError as error:
        return skipped("data", f"{error.name} is not installed")
    if problems := check_selection(run, chosen, loaded.where):
        return refused("data", problems)[0]
    validation = f", validation {run.data.val_split}" if chosen.validation else ", no validation rows"
    seen = f"{chosen.source.how}: {form.description}; train {run.data.train_split}{validation}"
    if not (chosen.validation or chosen.fraction) and run.train.eval_strategy != "no":
        hint = "hold some out with data.val_fraction: 0.05, or set train.eval_strategy: no"
        return warned("data", f"{seen}, so nothing is evaluated", hint, loaded.where("data.val_split"))
    return passed("data", seen)


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


# --- kind: script ---------------------------------------------------------------------------------------------------


def check_script(
    loaded: LoadedScript, have: Installed, folder: Result, *, elsewhere: bool
) -> tuple[ScriptPlan | None, list[Result]]:
    """A run of kind: script. Model, data and optimizer are the script's own. `folder`: whether it can write."""
    try:
        plan = make_script(loaded)
    except UserError as error:
        return None, refused("plan", error.problems)
    spread = plan.layout
    if "torch" in have:
        torch = passed("library torch", have["torch"])
    elif elsewhere:
        torch = not_here("library torch", "the image's torch")
    else:
        torch = failed("library torch", "not installed", "pip install torch, or use an image that has it")
    return plan, [
        passed("layout", f"{spread.ranks} ranks, {spread.gpus_per_node} on each of {spread.nodes} nodes"),
        check_script_file(loaded, elsewhere=elsewhere),
        torch,
        folder,
        skipped("model, data and optimizer", "they are the script's own; its memory and time are not known"),
    ]


def check_script_file(loaded: LoadedScript, *, elsewhere: bool) -> Result:
    """That the script is here, and is Python."""
    script, where = loaded.run.script, loaded.where("script.path")
    if script.module:
        return skipped("script", f"module {script.module}: importing it would run the packages around it")
    path = Path(str(script.path))
    if elsewhere and not path.is_file():
        return not_here("script", str(path))
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        hint = f"paths are relative to the folder that the run is started in, here {Path.cwd()}"
        return failed("script", f"{path} can't be read: {error.strerror}", hint, where)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        return failed("script", f"{path}{line} is not Python: {why}", "fix it, or name another file", where)
    return passed("script", f"{path}, {len(tree.body)} statements")


# --- libraries ------------------------------------------------------------------------------------------------------


def installed() -> dict[str, str]:
    """Every distribution that Python would import from, by its normalised name; the first on the path counts."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def release(version: str) -> Version | None:
    """For comparison: prereleases and local builds count as their release; None for what is no version."""
    from packaging.version import InvalidVersion, Version  # torch brings it; a login node may lack both

    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return None


def older(version: str, than: str) -> bool:
    mine, other = release(version), release(than)
    return mine is not None and other is not None and mine < other


def check_libraries(loaded: Loaded, plan: Plan | None, have: Installed, depth: str) -> list[Result]:
    """On a machine that only plans, missing libraries are no fault."""
    if depth == ALONE and loaded.run.cluster.platform != "local":
        return [not_here("libraries", "the image's Python")]
    if depth == ALONE and "torch" not in have:
        return [skipped("libraries", "torch is not installed on this machine", "`--here`, on a node of the run")]
    results = [*(check_library(name, have.get(name)) for name in TESTED), check_torchao(have), *check_trackers(loaded)]
    if plan is None:
        return [*results, *(skipped(name, "there is no plan") for name in ("model class", "attention"))]
    where = loaded.where("model.model_name_or_path")
    model, result = check_model_class(plan.base.family.causal_lm, have, where)
    return [*results, result, check_attention(loaded, model, have)]


def check_library(name: str, version: str | None) -> Result:
    title, tested = f"library {name}", TESTED[name]
    wanted = f">={tested.least},<{tested.below}"
    if version is None:
        return failed(title, "not installed", INSTALL)
    mine, ran = release(version), release(tested.ran)
    if mine is None:
        return skipped(title, f"{version!r} is no version that can be compared")
    if older(version, tested.least) or not older(version, tested.below):
        return failed(title, f"{version}; supported is {wanted}", f"pip install '{name}{wanted}'")
    if ran and (mine.major, mine.minor) != (ran.major, ran.minor):
        return warned(title, f"{version}; the tests ran with {tested.ran}", f"pip install {name}=={tested.ran}")
    return passed(title, f"{version}, tests ran with {tested.ran}")


def check_torchao(have: Installed) -> Result:
    version = have.get("torchao")
    if version is None:
        return passed("torchao", "not installed, and not needed")
    if older(version, TORCHAO_LEAST):
        seen = f"{version}: PEFT refuses versions before {TORCHAO_LEAST} and would not attach the adapter"
        return failed("torchao", seen, f"pip uninstall torchao, or pip install 'torchao>={TORCHAO_LEAST}'")
    return passed("torchao", version)


def check_trackers(loaded: Loaded) -> list[Result]:
    where, names = loaded.where("train.report_to"), loaded.run.train.report_to
    absent = absent_trackers(names)
    present = [name for name in ([names] if isinstance(names, str) else names) if name not in ("none", *absent)]
    return [
        *(failed(f"tracker {name}", "not installed", f"{fix}, or take it out", where) for name, fix in absent.items()),
        *(passed(f"tracker {name}", "installed") for name in present),
    ]


def check_cuda(
    torch_cuda: str | None, driver: str | None, gpus: int, works: Callable[[], bool] = lambda: False
) -> Result:
    """torch's CUDA against the driver. `torch_cuda` is None for a CPU build.

    works: whether CUDA starts all the same. NVIDIA's images bring libraries that make it start on an older driver.
    """
    if torch_cuda is None:
        if gpus:
            hint = "install torch's CUDA build, or use an NGC image"
            return failed("CUDA", f"{gpus} GPUs, and a torch built without CUDA", hint)
        return skipped("CUDA", "torch is built without CUDA, and there is no GPU")
    if driver is None:
        return skipped("CUDA", f"torch is built for CUDA {torch_cuda}; there is no driver here")
    least = DRIVERS.get(int(torch_cuda.partition(".")[0]))
    if least is None:
        return skipped("CUDA", f"the oldest driver for CUDA {torch_cuda} is not known; this one is {driver}")
    if not older(driver, least):
        return passed("CUDA", f"torch is built for CUDA {torch_cuda}, driver {driver}")
    if works():
        return passed("CUDA", f"torch is built for CUDA {torch_cuda}; it starts on driver {driver}, older than {least}")
    return failed(
        "CUDA",
        f"torch is built for CUDA {torch_cuda}, which needs driver {least}; this one is {driver}",
        "use a node with a newer driver, or an image with an older CUDA",
    )


def check_model_class(name: str, have: Installed, where: str) -> tuple[Any, Result]:
    """The class that is trained, imported as training will."""
    version = have.get("transformers")
    if version is None or "torch" not in have:
        return None, skipped("model class", f"{'transformers' if version is None else 'torch'} is not installed")
    try:
        import transformers

        return getattr(transformers, name), passed("model class", f"{name} of transformers {version}")
    except (AttributeError, ImportError, RuntimeError, OSError) as error:
        return None, missing_class(name, version, error, where)


def missing_class(name: str, version: str, error: Exception, where: str) -> Result:
    since = next((family.since for family in FAMILIES.values() if family.causal_lm == name), None)
    if since and older(version, since):
        seen = f"transformers {version} has no {name}: {since} is the first that has"
    elif since and isinstance(error, AttributeError):
        seen = f"transformers {version} should have {name} and doesn't: the installation is damaged"
    else:
        seen = f"{name} can't be imported from transformers {version}: {str(error).splitlines()[0]}"
    ran = TESTED["transformers"].ran
    return failed("model class", seen, f"pip install transformers=={ran}, which the tests ran with", where)


def check_attention(loaded: Loaded, model: Any, have: Installed) -> Result:
    """Whether the configured implementation is installed, and the model class takes it."""
    name = loaded.run.model.attn_implementation or "sdpa"
    where = loaded.where("model.attn_implementation")
    if name not in ATTENTION:  # the run file takes these names, and hub kernels
        if "kernels" not in have:
            hint = "pip install kernels, or set sdpa"
            return failed("attention", f"{name} is a hub kernel, and `kernels` is not installed", hint, where)
        return skipped("attention", f"{name} is downloaded from the Hub when the model is loaded")
    needs, flag = ATTENTION[name]
    if needs and needs[1] not in have:
        hint = f"pip install {needs[1]}, or set model.attn_implementation: sdpa"
        return failed("attention", f"{name} needs {needs[1]}, which is not installed", hint, where)
    if needs and importlib.util.find_spec(needs[0]) is None:
        return failed("attention", f"{needs[1]} is installed and has no module {needs[0]}", "reinstall it", where)
    if model is None:
        return skipped("attention", f"{name}: without the model's class it is not known whether the model takes it")
    if flag and not getattr(model, flag, False):
        return failed("attention", f"{model.__name__} does not take {name}", "set eager or sdpa", where)
    return passed("attention", f"{name}, which {model.__name__} takes")
