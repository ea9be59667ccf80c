"""Write an export's probe: from the run, if its last evaluation has written one, else computed here."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from windlass.data.packing import open_rows
from windlass.errors import UserError
from windlass.export.card import add_note
from windlass.export.generate import choose_base_dtype, load_model
from windlass.export.proof import FLOAT32_SHARE, read_free_memory
from windlass.export.screen import Say
from windlass.export.source import MERGED, AdapterSource, require_local_base
from windlass.files import write_atomic
from windlass.model import Base, read_base
from windlass.observe.format import describe_served
from windlass.plan.layout import Layout
from windlass.run_folder import PROBE, describe_files
from windlass.runfile import RunFile
from windlass.runfile.recorded import read_recorded_data
from windlass.serve.hypotheses import compute_probe, read_coarsest_dtype
from windlass.serve.probe import ROUNDED, ROWS, TOKENS, describe_probe, find_probe, hash_probe
from windlass.serve.rows import add_chats, choose_rows
from windlass.train.kernels.products import as_served
from windlass.train.load import load_base
from windlass.train.logits import find_rows, open_adapter
from windlass.weights.same_base import read_recorded_base


def write_probe(source: AdapterSource, to: Path, facts: dict[str, Any], say: Say) -> dict[str, Any]:
    """Write probe.json; return what export.json records of it, or why there is none. facts: what it has by now."""
    kind = facts["kind"]
    is_trained_base = facts["base_digest"] == read_recorded_base(source.folder).get("base_digest")
    probe = find_probe(source.run_folder if is_trained_base else None, source.folder)
    try:
        if not probe:
            probe = _compute(source, to, say)
    except UserError as error:
        why = error.problems[0].problem
        say(f"probe     none, so a server can't be compared with this export: {why}")
        return {"probe": None, "no_probe": why}
    if kind == MERGED:
        probe["dtype"] = read_coarsest_dtype(read_base(to))
        for row in probe["rows"]:
            row.pop(ROUNDED)  # nothing is added to a rounded product
    write_atomic(to / PROBE, json.dumps(probe))
    say(f"probe     {describe_probe(probe)}")
    kept = describe_served(probe["kept"], probe.get("kept_error", 0.0)) if kind != MERGED else ""
    if kept:
        say(f"note      {kept}")
        add_note(to, kept)
    files = {} if kind == MERGED else describe_files(to)
    return {"probe": hash_probe(to / PROBE), **files}


def _compute(source: AdapterSource, to: Path, say: Say) -> dict[str, Any]:
    """Compute the probe in float32 if the model fits, else as `windlass generate` computes."""
    base = require_local_base(source)
    tokenizer = _open_tokenizer(to, base)
    rows, rows_from = _read_rows(source, base, tokenizer, say)
    trains_biases = source.config.get("bias", "none") != "none"
    biases = []
    dtype = "float32"
    if 4 * base.total <= FLOAT32_SHARE * read_free_memory():
        say(f"probe     loading {base.name} in float32")
        whole = Layout("resident", "probed", 1, 1, shard=1)
        model, certificate = load_base(base, whole, dtype=torch.float32)
        source.require_same_base(base, certificate["base_digest"], say)
        if trains_biases:
            biases = [(p, p.detach().clone()) for name, p in model.named_parameters() if name.endswith(".bias")]
        model = open_adapter(model.eval(), source.folder)
    elif trains_biases:
        problem = "biases were trained, and the base without them is computed only where it fits into memory in float32"
        raise UserError(problem, code="trained-biases")
    else:
        trained_in = read_recorded_base(source.folder).get("base_quantisation", {}).get("format", "")
        dtype = choose_base_dtype(base, to, trained_in)
        model = load_model(base, source, dtype, say)
    return compute_probe(
        model,
        rows,
        tokenizer,
        base=base,
        adapter=source.folder,
        computed_in=dtype,
        rows_from=rows_from,
        say=say,
        biases=biases,
        rounding=partial(as_served, next(model.parameters()).device),
    )


def _open_tokenizer(to: Path, base: Base) -> Any:
    folder = next((path for path in (to, base.path) if path and (path / "tokenizer_config.json").is_file()), None)
    return AutoTokenizer.from_pretrained(folder, mistral_format=False) if folder else None


def _read_rows(source: AdapterSource, base: Base, tokenizer: Any, say: Say) -> tuple[list[dict[str, Any]], str]:
    """Return the rows, and where they are from: held out by the run, trained on, or random."""
    file = find_rows(source.run_folder)
    vocabulary = base.dims["vocab"]
    if file:
        rows = choose_rows(open_rows(file))
        if rows and max(token for row in rows for token in row["ids"]) < vocabulary:
            try:
                tree = source.manifest["run"]
                run = RunFile.model_validate({**tree, "data": read_recorded_data(tree["data"])})
                add_chats(rows, run, str, tokenizer)
            except (UserError, KeyError, ValueError) as error:
                say(f"probe     the chats of its rows can't be read here: {str(error).splitlines()[0]}")
            return rows, f"the run's {file.stem} rows"
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (ROWS, TOKENS // 4), generator=generator).tolist()
    return [{"ids": ids, "start": len(ids) // 2} for ids in drawn], "random tokens"
