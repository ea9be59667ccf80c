"""Checks of the input, before any machine: plan, weights, tokenizer, data, the script, and the installed libraries."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data import sources
from windlass.data.inputs import find_absent_files
from windlass.data.select import list_all_sets
from windlass.errors import UserError, find_install_command
from windlass.hardware import GIB, Gpus
from windlass.launch.check.results import (
    NO_PLAN,
    Context,
    Result,
    failed,
    passed,
    problems_to_results,
    skipped,
    skipped_elsewhere,
    warned,
)
from windlass.observe.format import format_plural
from windlass.plan.rows import sample_data
from windlass.plan.script import AnyPlan, ScriptPlan, make_any_plan
from windlass.runfile import Loaded, LoadedScript
from windlass.runfile.names import find_absent_trackers
from windlass.versions import TESTED, find_lacking, is_newer, is_older, is_too_old, parse_release

if TYPE_CHECKING:
    from windlass.model.family import Family
    from windlass.plan import Plan

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


def check_plan(loaded: Loaded | LoadedScript) -> tuple[AnyPlan | None, list[Result]]:
    """Make the plan, which checks targets, layout, classes and batch, and check its estimate of memory."""
    try:
        plan = make_any_plan(loaded)
    except UserError as error:
        return None, problems_to_results("plan", error.problems)
    layout = plan.layout
    if isinstance(plan, ScriptPlan):
        nodes = format_plural(layout.nodes, "node")
        seen = f"{format_plural(layout.ranks, 'rank')}, {layout.gpus_per_node} on each of {nodes}"
        return plan, [passed("layout", seen)]
    cost = plan.cost
    gpu = plan.machine.gpu
    targets = sum(len(target.modules) for target in plan.adapter.targets)
    seen = f"{cost.gpu_gib:.1f} of {gpu.memory_gib:.1f} GiB on each {gpu.name}, {cost.host_gib:.1f} GiB of host memory"
    spread = f"{layout.name} over {format_plural(layout.ranks, 'rank')}"
    if plan.layout.context_parallel > 1:
        spread += f", each row over {plan.layout.context_parallel} of them"
    where = loaded.where("cluster.gpu")
    return plan, [
        passed("model", f"{plan.base.name}: {plan.base.family.causal_lm}, {plan.total:,} parameters"),
        passed("adapter", f"{targets:,} modules, {plan.adapter.trainable:,} trainable parameters"),
        passed("layout", f"{spread}, by {plan.base.family.layer}"),
        passed("batch", f"{format_plural(plan.schedule.global_sequences, plan.run.train.unit)} per step"),
        passed("memory", seen) if cost.fits else failed("memory", f"does not fit: {seen}", cost.remedy, where),
    ]


def check_inputs(c: Context) -> list[Result]:
    """Check the run's inputs: weights, tokenizer, data, libraries; for a script, itself and torch."""
    if isinstance(c.loaded, LoadedScript):
        missing = failed("library torch", "not installed", "pip install torch, or use an image that has it")
        torch = [] if c.elsewhere else [passed("library torch", c.have["torch"]) if "torch" in c.have else missing]
        return [check_script(c, c.loaded), *torch, skipped("model, data and optimizer", "they are the script's own")]
    libraries = check_libraries(c, c.loaded)
    if c.plan is None or isinstance(c.plan, ScriptPlan):
        weights = [skipped("weights and tokenizer", NO_PLAN)]
        return [*libraries, *weights, *check_all_data(c, c.loaded, None), *check_files(c, c.loaded)]
    tokenizer, opened = check_tokenizer(c.plan)
    data = check_all_data(c, c.loaded, tokenizer)
    return [*libraries, check_weights(c, c.plan), opened, *data, *check_files(c, c.loaded)]


def check_files(c: Context, loaded: Loaded) -> list[Result]:
    found = [absent for run in loaded.runs for absent in find_absent_files(run.run, run.where)]
    if c.elsewhere:
        return [skipped_elsewhere("file", path) for path, _ in found]
    return problems_to_results("file", [problem for _, problem in found])


def check_weights(c: Context, plan: Plan) -> Result:
    if not plan.missing_weights:
        return passed("weights", f"{format_size(plan.disk_bytes or 0)} in {plan.base.path}")
    if c.elsewhere:
        return skipped_elsewhere("weights", plan.run.model.model_name_or_path)
    return problems_to_results("weights", plan.missing_weights)[0]


def check_tokenizer(plan: Plan) -> tuple[Any, Result]:
    """Open the tokenizer next to the weights as training does, and compare its ids with the embedding's rows."""
    rows = plan.base.dims["vocab"]
    if plan.base.path is None:
        return None, skipped("tokenizer", "it comes with the weights")
    try:
        from windlass.data.tokenize import open_tokenizer

        tokenizer = open_tokenizer(plan.base, plan.run.model, plan.where)
    except ImportError as error:
        return None, skipped("tokenizer", f"transformers can't be imported: {error}")
    except UserError as error:
        return None, problems_to_results("tokenizer", error.problems)[0]
    if len(tokenizer) > rows:
        hint = "these files belong to another model: copy the tokenizer that was published with this one"
        return tokenizer, failed("tokenizer", f"{len(tokenizer):,} tokens, and the embedding has {rows:,} rows", hint)
    return tokenizer, passed("tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} of {rows:,} ids")


def check_all_data(c: Context, loaded: Loaded, tokenizer: Any) -> list[Result]:
    """Check the data of every run in the file, equal ones once."""
    runs = {run.run.data.model_dump_json(): run for run in loaded.runs}
    results = [check_data(c, run, tokenizer) for run in runs.values()]
    names = [f"data of trial {run.trial.name}" if run.trial and len(runs) > 1 else "data" for run in runs.values()]
    return [replace(result, name=name) for result, name in zip(results, names, strict=True)]


def check_data(c: Context, loaded: Loaded, tokenizer: Any) -> Result:
    """Check that rows can be read, the first and those of a plan's sample, and have the columns that the run needs."""
    run = loaded.run
    sets = list_all_sets(loaded.run.data, loaded.where)
    try:
        from windlass.data.choose import choose_format
        from windlass.data.select import require_validation, select_rows

        for each in sets:
            name = each.data.dataset_name_or_path
            if c.elsewhere and not Path(name).expanduser().exists():
                return skipped_elsewhere("data", name)
            if sources.resolve_source(each.data, each.where).format == "hub":
                hint = "download it before with `windlass fetch RUN`"
                return skipped("data", f"{name} is downloaded from the Hub", hint)
        selected = [select_rows(each, lambda _: None) for each in sets]
        columns = dict.fromkeys(column for each in selected for column in each.columns)
        chat = bool(run.data.messages_field) or {"messages", "conversations", "instruction", "chosen"} & columns.keys()
        if tokenizer is None and chat:
            return skipped("data", f"{', '.join(columns)}: rendering chats needs the tokenizer")
        forms = [choose_format(each.data, each.columns, tokenizer, each.where) for each in selected]
        if unread := sample_data(run.data, None, loaded.where).problems:
            return problems_to_results("data", unread)[0]
        require_validation(run, selected, loaded.where)
    except UserError as error:
        return problems_to_results("data", error.problems)[0]
    except ImportError as error:
        return skipped("data", f"{error.name} is not installed")
    validation = ", no validation rows"
    if selected[0].validation:
        validation = f", validation {run.data.validation_split}"
    elif run.data.val_fraction:
        validation = f", {run.data.val_fraction:.1%} of them held out to validate"
    seen = f"{selected[0].source.how}: {forms[0].description}; train {run.data.train_split}{validation}"
    if len(sets) > 1:
        named = zip(selected, forms, strict=True)
        seen = "; ".join(f"{each.name}: {each.source.how}: {form.description}" for each, form in named)
    if not any(each.validated for each in selected) and run.train.eval_strategy != "no":
        hint = "hold some out with data.val_fraction: 0.05, or set train.eval_strategy: no"
        return warned("data", f"{seen}, so nothing is evaluated", hint, loaded.where("data.val_split"))
    return passed("data", seen)


def format_size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def check_script(c: Context, loaded: LoadedScript) -> Result:
    script = loaded.run.script
    path = Path(str(loaded.run.script.path))
    where = loaded.where("script.path")
    if script.module:
        return skipped("script", f"module {script.module}: importing it would run the packages around it")
    if c.elsewhere and not path.is_file():
        return skipped_elsewhere("script", str(path))
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        hint = f"paths are relative to the folder that the run is started in, here {Path.cwd()}"
        return failed("script", f"{path} can't be read: {error.strerror}", hint, where)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return failed("script", f"{path}{line} is not Python: {error}", "fix it, or name another file", where)
    return passed("script", f"{path}, {len(tree.body)} statements")


def list_distributions() -> dict[str, str]:
    """Return every distribution that Python would import, by its normalized name; the first on the path counts."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def check_libraries(c: Context, loaded: Loaded) -> list[Result]:
    """Check library versions. On a machine that only plans, missing libraries are not an error."""
    if c.elsewhere:
        return [skipped_elsewhere("libraries", "the image's Python")]
    if c.alone and "torch" not in c.have:
        return [skipped("libraries", "torch is not installed on this machine", "`--here`, on a node of the run")]
    results = [*(check_library(name, c.have.get(name)) for name in TESTED), *check_trackers(loaded)]
    torchao = c.have.get("torchao", TORCHAO_LEAST)
    if is_older(torchao, TORCHAO_LEAST):
        seen = f"{torchao}: PEFT refuses versions before {TORCHAO_LEAST} and would not attach the adapter"
        hint = f"pip uninstall torchao, or pip install 'torchao>={TORCHAO_LEAST}'"
        results.append(failed("library torchao", seen, hint))
    if c.plan is None or isinstance(c.plan, ScriptPlan):
        return [*results, skipped("model class and attention", NO_PLAN)]
    layout = c.plan.layout
    if lacks := find_lacking(layout.needs, c.have):
        results.append(failed("layout", *lacks, loaded.where("layout.name")))
    model, result = check_model_class(c, c.plan.base.family)
    return [*results, result, check_attention(c, loaded, model)]


def check_library(name: str, version: str | None) -> Result:
    title = f"library {name}"
    (supported, ran) = TESTED[name]
    if version is None:
        hint = f"{find_install_command()}, or use the image that the Containerfile builds"
        return failed(title, "not installed", hint)
    if parse_release(version) is None:
        return skipped(title, f"{version!r} is not a version that can be compared")
    if is_too_old(name, version):
        return failed(title, f"{version}; supported is {supported}", f"pip install '{name}{supported}'")
    if is_newer(name, version):
        return warned(title, f"{version} is newer than supported: {supported}", f"pip install '{name}{supported}'")
    return passed(title, f"{version}, tests ran with {ran}")


def check_trackers(loaded: Loaded) -> list[Result]:
    where = loaded.where("train.report_to")
    names = loaded.run.train.report_to
    absent = find_absent_trackers(names)
    present = [name for name in ([names] if isinstance(names, str) else names) if name not in ("none", *absent)]
    return [
        *(failed(f"tracker {name}", "not installed", f"{fix}, or take it out", where) for name, fix in absent.items()),
        *(passed(f"tracker {name}", "installed") for name in present),
    ]


def check_cuda(c: Context, gpus: Gpus) -> Result:
    """Compare torch's CUDA version with the driver."""
    if "torch" not in c.have:
        return skipped("CUDA", "torch is not installed")
    try:
        import torch.cuda
        from torch.version import cuda as built_for
    except (ImportError, OSError) as error:
        return skipped("CUDA", f"torch can't be imported: {str(error).splitlines()[0]}")
    if built_for is None and gpus.gpus:
        what = f"{format_plural(len(gpus.gpus), 'GPU')}, and a torch built without CUDA"
        return failed("CUDA", what, "install torch's CUDA build")
    if built_for is None:
        return skipped("CUDA", "torch is built without CUDA, and there is no GPU")
    seen = f"torch is built for CUDA {built_for}"
    least = DRIVERS.get(int(built_for.split(".")[0]))
    driver = gpus.driver
    if driver is None or least is None:
        return skipped("CUDA", f"{seen}; {'its oldest driver is not known' if driver else 'there is no driver here'}")
    if not is_older(driver, least):
        return passed("CUDA", f"{seen}, driver {driver}")
    if torch.cuda.is_available():  # NVIDIA's images have libraries that make it work with an older driver
        return passed("CUDA", f"{seen}; it starts on driver {driver}, older than {least}")
    hint = "use a node with a newer driver, or an image with an older CUDA"
    return failed("CUDA", f"{seen}, which needs driver {least}; this one is {driver}", hint)


def check_model_class(c: Context, family: Family) -> tuple[Any, Result]:
    version = c.have.get("transformers")
    name = family.causal_lm
    if version is None or "torch" not in c.have:
        return None, skipped("model class", f"{'transformers' if version is None else 'torch'} is not installed")
    try:
        import transformers

        return getattr(transformers, name), passed("model class", f"{name} of transformers {version}")
    except (AttributeError, ImportError, RuntimeError, OSError) as error:
        seen = f"{name} can't be imported from transformers {version}: {str(error).splitlines()[0]}"
        if is_older(version, family.since):
            seen = f"transformers {version} has no {name}: {family.since} is the first that has"
        hint = f"pip install transformers=={TESTED['transformers'][1]}, which the tests ran with"
        return None, failed("model class", seen, hint, c.loaded.where("model.model_name_or_path"))


def check_attention(c: Context, loaded: Loaded, model: Any) -> Result:
    """Check that the configured implementation is installed and the model class supports it."""
    family = None if c.plan is None or isinstance(c.plan, ScriptPlan) else c.plan.base.family
    name = loaded.run.model.attn_implementation or (family.usual_attention if family else "sdpa")
    needs, flag = ATTENTION.get(name, (("kernels", "kernels"), ""))  # else a hub kernel: the only other choice
    problem = hint = ""
    if needs and needs[1] not in c.have:
        problem = f"{name} needs {needs[1]}, which is not installed"
        hint = f"pip install {needs[1]}, or set sdpa"
    elif needs and name in ATTENTION and importlib.util.find_spec(needs[0]) is None:
        problem = f"{needs[1]} is installed and has no module {needs[0]}"
        hint = "reinstall it"
    elif name not in ATTENTION:
        return skipped("attention", f"{name} is downloaded from the Hub when the model is loaded")
    elif model is None:
        return skipped("attention", f"{name}: without the model's class it is not known whether the model takes it")
    elif flag and not getattr(model, flag, False):
        problem = f"{model.__name__} does not take {name}"
        hint = "set eager or sdpa"
    if problem:
        return failed("attention", problem, hint, loaded.where("model.attn_implementation"))
    return passed("attention", f"{name}, which {model.__name__} takes")
