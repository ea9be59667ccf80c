"""Export an adapter alone, in PEFT's format: as saved or in 16 bits, with its base's name instead of a path."""

import shlex
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from windlass.data.trained_template import has_template, write_template
from windlass.errors import UserError
from windlass.export.card import describe_evaluation, write_card
from windlass.export.deltas import read_deltas
from windlass.export.proof import list_unplaced
from windlass.export.screen import Say
from windlass.export.served import (
    MatrixPair,
    convert_adapter,
    name_tensors,
    prove_served,
    report_missing_files,
    require_served,
)
from windlass.export.source import (
    ADAPTER,
    COMPANIONS,
    CONFIG,
    WEIGHTS,
    AdapterSource,
    claim_folder,
    find_local_base,
    require_local_base,
)
from windlass.files import write_json
from windlass.model import Base
from windlass.model.mistral_layout import has_mistral_layout
from windlass.model.wrapped import Rename, inner_name, outer_name, rename_config, rename_keys
from windlass.run_folder import BASE_MODEL, FINAL, describe_files
from windlass.serve.servers import PEFT, SERVERS, ServerVerdict, list_commands
from windlass.train.checkpoint.snapshot import save_tensors
from windlass.weights.same_base import CHAT_TEMPLATE, describe_quantization, read_recorded_base

SHORT_NAMES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OUTPUT_DTYPES: Final = SHORT_NAMES | {str(dtype).removeprefix("torch."): dtype for dtype in SHORT_NAMES.values()}


def export_adapter(
    source: AdapterSource,
    to: Path,
    *,
    base_name: str,
    opened_by: str,
    dtype: str | None,
    model_class: str | None,
    server: str,
    environment: Mapping[str, str],
    say: Say,
) -> dict[str, Any]:
    """Write and prove the adapter; return what export.json records. `opened_by`: what PEFT opens the base by."""
    # 1. If the base is available, the adapter must fit it; and a server must apply all of it.
    base = require_local_base(source) if source.base else find_local_base(source)
    deltas = read_deltas(source, base) if base else None
    if deltas is None or base is None:
        say("base      not on this machine: the adapter's names and shapes are not checked against it")
    else:
        say(f"base      {base.name}: {len(deltas.by_name)} of its parameters are adapted")
    openers = list_model_classes(base, model_class, f"--for {server}" if server != PEFT else "")
    verdicts: list[ServerVerdict] = []
    if server != PEFT and base and deltas:
        verdicts = require_served(server, base, deltas, source.config, environment, source.run_folder or source.folder)
        for verdict in verdicts:
            if not verdict.is_served:
                say(f"note      {verdict}: compare its answers, `windlass verify URL {shlex.quote(str(to))}`")
        if base.path:
            report_missing_files(base, base_name, base.path, has_mistral_layout(base), say)
    if dtype is not None and dtype not in OUTPUT_DTYPES:
        hint = f"one of {', '.join(SHORT_NAMES)}"
        raise UserError(f"an adapter can't be written as {dtype!r}", "--dtype", hint, "no-such-dtype")

    # 2. Write.
    claim_folder(source, base.path if base else None, to, ADAPTER)
    config = {**source.config, "base_model_name_or_path": opened_by, "inference_mode": True}
    saved = load_file(source.weights)
    tensors = saved
    rename: Rename = str
    pairs: list[MatrixPair] = []
    if base and base.wrapper:
        rename = inner_name if openers[0] == base.family.causal_lm else partial(outer_name, place=base.wrapper.place)
        tensors = rename_keys(saved, rename)
    if base and deltas and verdicts:
        pairs, converted = convert_adapter(saved, source.config, deltas, base, verdicts, rename)
        config |= converted
    if pairs:
        tensors = name_tensors(pairs)
        openers = []
        say(f"written   for {SERVERS[server].title}: {', '.join(sorted({v.row.form for v in verdicts} - {''}))}")
    elif base and base.wrapper:
        config |= rename_config(config, saved, rename)
        say(f"named     for {openers[0]}; for {openers[1]}: --for {openers[1]}")
    # PEFT writes this list as a set, in varying order: sorted, two exports can be compared.
    if isinstance(config.get("target_modules"), list):
        config["target_modules"] = sorted(config["target_modules"])
    write_json(to / CONFIG, config)
    if dtype:
        tensors = {key: tensor.to(OUTPUT_DTYPES[dtype]) for key, tensor in tensors.items()}
    if dtype is None and not pairs and tensors.keys() == saved.keys():
        shutil.copyfile(source.weights, to / WEIGHTS)
    else:
        save_tensors(tensors, to / WEIGHTS, {"format": "pt"})
    for companion in _find_companions(source):
        shutil.copyfile(companion, to / companion.name)
    recorded = read_recorded_base(source.folder)
    template = recorded.get(CHAT_TEMPLATE, {})
    write_template(to, template)
    own_template = bool(template and base and base.path and not has_template(base.path, template))
    if recorded:
        write_json(to / BASE_MODEL, recorded | describe_files(to))
    trained_on = describe_quantization(recorded.get("base_quantisation", {}))
    if trained_on:
        say(f"trained   on the base in {trained_on}")
    write_card(
        source,
        to,
        base_name,
        dtype=dtype,
        other_base=recorded.get("other_base", ""),
        openers=openers,
        place=base.wrapper.place if base and base.wrapper else "",
        commands=list_commands(server, base_name, config, verdicts, own_template=own_template),
        evaluation="" if pairs else describe_evaluation(source, base, f"pretrained={base_name},peft=."),
    )

    # 3. Open it again: the same tensors, each the one that was saved, and each with its place where it is opened.
    written = load_file(to / WEIGHTS)
    deviations = [*_compare_tensors(tensors, written)]
    how = "rounded once" if dtype else "byte-equal"
    if pairs and deltas:
        deviations += prove_served(pairs, written, config, deltas)
        how = "each pair the adapter's change at alpha / r alone"
    elif base is not None and not deviations:
        deviations = list_unplaced(base, openers[0], to)
        how += f", each at its place in {openers[0]}"
    if not deviations:
        say(f"proven    opened again: every tensor present, {how}")
    return {
        "dtype": dtype,
        "for": server,
        "opened_by": openers[:1],
        "base_digest": recorded.get("base_digest"),
        "other_base": recorded.get("other_base", ""),
        "deviations": deviations,
    }


def list_model_classes(base: Base | None, wanted: str | None, needed_for: str = "") -> list[str]:
    """Return the classes of transformers that open the adapter: the one it is named for, and a wrapper's other one."""
    if base is None:
        if wanted or needed_for:
            problem = "the names of its modules follow from the base model, which is not on this machine"
            hint = "name the folder that holds it: --base DIR"
            raise UserError(problem, needed_for or "--for", hint, "base-not-here")
        return []
    classes = [base.family.causal_lm]
    if base.wrapper:
        classes.insert(0, base.wrapper.architecture)
    if wanted and wanted not in classes:
        hint = f"a server: {', '.join(SERVERS)}; or a class that opens it: {', '.join(classes)}"
        raise UserError(f"{base.name} is no {wanted}", "--for", hint, "no-such-reader")
    return sorted(classes, key=lambda name: name != wanted)


def _find_companions(source: AdapterSource) -> list[Path]:
    """Return the tokenizer's files: of the adapter's folder, or else of the run's final adapter."""
    folders = [source.folder]
    if source.run_folder:
        folders.append(source.run_folder / FINAL)
    for folder in folders:
        companions = {path for pattern in COMPANIONS for path in folder.glob(pattern)}
        if companions:
            return sorted(companions)
    return []


def _compare_tensors(expected: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what is wrong with each tensor that is not bit-equal to the expected one, or not finite."""
    for key in sorted(expected.keys() | written.keys()):
        before = expected.get(key)
        after = written.get(key)
        if before is None or after is None or before.dtype != after.dtype or not torch.equal(before, after):
            yield f"{key} is not what was saved"
        elif not bool(after.isfinite().all()):
            yield f"{key} is not finite"
