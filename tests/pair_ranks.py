"""Runs in every rank of tests/test_pairs.py: each case by TRL and PEFT, by windlass, and resumed by windlass.

TRL and PEFT get their settings from the run file's keys, not by way of windlass's adapter: what the two have in common
are the rows, their order, and the weights of a base in 4 bits. Neither TRL nor PEFT knows those; they are decoded.
"""

import copy
import dataclasses
import itertools
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset, arrow_dataset
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from train_ranks import SAME, Plain, Rows, before, plain_pairs
from transformers import AutoModelForCausalLM, set_seed
from transformers.models.mixtral import modeling_mixtral
from trl import SFTConfig

from windlass import plan as planning
from windlass import runfile
from windlass.data.audit import PACKED
from windlass.data.prepare import PreparedData, prepare_data
from windlass.errors import RunError, UserError
from windlass.files import write_json
from windlass.observe.background import BackgroundReport
from windlass.plan import Plan
from windlass.plan.layout import Layout
from windlass.ranks.rank import Rank, read_rank
from windlass.run_folder import CHECKPOINTS, FINAL, MANIFEST, read_manifest
from windlass.sweep.trials import train_sweep
from windlass.train import connect, run
from windlass.train.load import describe_precision, load_base, open_base_tokenizer
from windlass.train.loop import Loop
from windlass.weights.quantized import dequantize, list_quantized_params

PROBE = [[5, 99, 300, 41, 7, 230, 18, 400], [44, 3, 12, 371, 160, 92, 8, 270]]  # tokens


def open_base(plan: Plan) -> nn.Module:
    """Open the base by transformers alone, unless it can't: inside a wrapper in FP8, or in 4 bits."""
    dtype = getattr(torch, plan.run.model.torch_dtype)
    if plan.layout.base_dtype == "bf16" and not plan.base.quantization:
        return AutoModelForCausalLM.from_pretrained(plan.base.path, dtype=dtype)  # type: ignore[no-any-return]
    four_bits = plan.layout.base_dtype not in ("bf16", "fp8")
    world = torch.distributed.get_world_size()
    how = plan.layout.base_dtype if four_bits else "bf16"
    layout = Layout("resident", "", 1, world, shard=1, replicate=world, base_dtype=how, precision=plan.layout.precision)
    precision = {**describe_precision(plan), "dtypes": {}}
    model: Any = load_base(plan.base, layout, **precision)[0]
    if four_bits:
        plain: Any = load_base(plan.base, Layout("resident", "", 1, world, 1, world), **precision)[0]
        for name, quantized in list_quantized_params(model).items():
            coding = quantized.format
            values = dequantize(*coding.parts(model.get_parameter(name), quantized.scale), coding, dtype)
            plain.get_parameter(name).data = (values.transpose(-1, -2) if coding.transposed else values).contiguous()
        model = plain
    model.config._experts_implementation = "eager"
    if not hasattr(model.config, "num_experts") and "experts" in plan.base.dims:
        model.config.num_experts = plan.base.dims["experts"]  # as TRL looks it up
    opened: nn.Module = model
    return opened


def adapt(model: nn.Module, plan: Plan) -> PeftModel:
    """Attach the adapter by PEFT alone."""
    lora = plan.run.lora
    named = lora.target_modules
    fused = dict.fromkeys(name.rpartition(".")[2] for name in plan.adapter.target_parameters)
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if named == "all":
        named = "all-linear"
    if named == "all-linear" and lora.layers_to_transform:
        named = sorted(linear - {"lm_head"})  # PEFT wants a list
    elif plan.base.name == "published" and isinstance(named, list):
        named = list(plan.adapter.target_modules)  # Mistral 4 has no q_proj; the plan names what stands for it
    elif isinstance(named, list):
        named = [name for name in named if name in linear]  # the others are fused in experts
    ranks: dict[str, Any] = dict(lora.rank_pattern)
    alphas: dict[str, Any] = dict(lora.alpha_pattern)
    if lora.experts and lora.experts.r != lora.r:
        ranks |= {f"mlp.experts.{name}": lora.experts.r for name in fused}
        alphas |= {f"mlp.experts.{name}": lora.experts.lora_alpha for name in fused}
    narrow = lora.dtype != "float32"
    set_seed(plan.run.train.seed)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=0.0 if fused else lora.lora_dropout,
        target_modules=named,
        target_parameters=list(plan.adapter.target_parameters) or None,
        layers_to_transform=lora.layers_to_transform,
        layers_pattern="layers" if lora.layers_to_transform else None,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        bias=lora.bias,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=lora.init_lora_weights,
        modules_to_save=lora.modules_to_save,
        task_type="CAUSAL_LM",
    )
    adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=not narrow)
    own = {parameter for name, parameter in adapted.named_parameters() if "lora_" in name}
    for parameter in adapted.parameters():
        if parameter.requires_grad and (plan.run.train.in_bf16 or parameter in own):
            parameter.data = parameter.data.to(torch.bfloat16 if narrow else torch.float32)
    return adapted


class Oracle(Plain):
    """TRL, drawing the random numbers that the run draws."""

    def training_step(self, model: Any, inputs: dict[str, Any], *others: Any) -> Any:
        if not getattr(self, "begun", False):
            self.begun = True
            torch.manual_seed(99)
        if "attention_mask" in inputs:
            return super().training_step(model, inputs, *others)
        # Rows end to end have no mask, and padding would be balanced too: it is behind the last token with a position.
        real = inputs["position_ids"].flip(1).cumsum(1).flip(1) > 0
        balance = modeling_mixtral.load_balancing_loss_func

        def balance_real(logits: Any, experts: int, top_k: int, _: None = None) -> Any:
            return balance(logits, experts, top_k, real)

        with patch.object(modeling_mixtral, "load_balancing_loss_func", balance_real):
            return super().training_step(model, inputs, *others)


def add_reference(model: PeftModel, name: str, config: LoraConfig, add: Any = PeftModel.add_adapter) -> None:
    """Add the adapter that TRL copies the first one into. PiSSA's and OLoRA's start would change the base once more."""
    add(model, name, dataclasses.replace(config, init_lora_weights=True))


def train_by_trl(plan: Plan, out: Path) -> dict[str, Any]:
    """Train with TRL and PEFT; save the adapter and what the adapted model computes."""
    job = plan.run
    train = job.train
    model = open_base(plan)
    fresh = copy.deepcopy(model)
    adapted = adapt(model, plan)
    tokenizer = open_base_tokenizer(plan)
    data = prepare_data(job, tokenizer, vocabulary=plan.base.dims["vocab"], batch=plan.batch.micro, say=lambda _: None)
    packed = data.batching == PACKED
    config = SFTConfig(
        **{name: getattr(train, name) for name in SAME if name not in ("max_grad_norm", "bf16")},
        bf16=train.in_bf16,
        max_grad_norm=train.max_grad_norm or 1e9,
        output_dir=str(out / "trl"),
        per_device_train_batch_size=plan.batch.micro // (job.layout.context_parallel or 1),
        gradient_accumulation_steps=plan.batch.accumulation,
        warmup_steps=train.warmup(train.max_steps),
        activation_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        packing=packed,
        padding_free=packed,
        pad_to_multiple_of=16,  # as windlass pads on a CPU: noise and dropout depend on it
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        router_aux_loss_coef=train.router_aux_loss_coef or 0.0,
        neftune_noise_alpha=train.neftune_noise_alpha,
    )
    if job.data.streaming:
        count = train.max_steps * plan.schedule.global_sequences
        rows: Any = Dataset.from_list([dict(row) for row in itertools.islice(data.train, count)])
    else:
        rows = Dataset(data.train)
    trainer: Any
    if job.objective.of_pairs:
        changed = train.model_copy(
            update={"max_grad_norm": train.max_grad_norm or 1e9, "bf16": train.in_bf16, "gradient_checkpointing": False}
        )
        settings = SimpleNamespace(run=job.model_copy(update={"train": changed}), batch=plan.batch)
        # TRL writes the reference's log-probabilities on rank 0 and reads them on all.
        shared = patch.object(arrow_dataset, "get_temporary_cache_files_directory", lambda: str(out))
        with shared, patch.object(PeftModel, "add_adapter", add_reference):
            trainer = plain_pairs(settings, adapted, data, tokenizer)
    else:
        trainer = Oracle(model=adapted, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.rows = range(len(rows)) if job.data.streaming else Rows(plan, data)
    trainer.train()
    adapted = trainer.accelerator.unwrap_model(trainer.model)
    adapted.eval()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=train.in_bf16)
    with torch.no_grad(), autocast:
        logits = adapted(torch.tensor(PROBE)).logits.float()
        evaluated = None
        if data.validation is not None and not job.objective.of_pairs:
            evaluated = evaluate(adapted, data)
    trained = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    outcome = {
        "eval_loss": evaluated,
        "steps": [
            {"loss": line["loss"], "grad_norm": line["grad_norm"]}
            for line in trainer.state.log_history
            if "loss" in line
        ],
    }
    if torch.distributed.get_rank() == 0:
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in trained.items()}, out / "trl.tensors")
        save_file({"logits": logits}, out / "trl.logits")
        torch.save(fresh, out / "base.pt")
    torch.distributed.barrier()
    return outcome


def evaluate(model: nn.Module, data: PreparedData) -> float:
    """Return the mean loss of each document by itself."""
    losses = torch.zeros((), dtype=torch.float64)
    count = 0
    for row in Dataset(data.validation):
        first = 0
        for length in row.get("seq_lengths", [len(row["input_ids"])]):
            part = slice(first, first + length)
            first += length
            ids = torch.tensor([row["input_ids"][part]])
            labels = torch.tensor(row.get("labels", row["input_ids"])[part])[1:]
            logits = model(ids).logits[0, :-1].float()
            losses += cross_entropy(logits, labels, reduction="sum", ignore_index=-100).double()
            count += int((labels != -100).sum())
    return float(losses) / count


def probe_saved(plan: Plan, base: nn.Module, adapter: Path, out: Path) -> None:
    """Save what plain PEFT computes with the adapter that windlass saved."""
    opened = PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=plan.run.lora.dtype == "float32")
    opened.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=plan.run.train.in_bf16):
        save_file({"logits": opened(torch.tensor(PROBE)).logits.float()}, out / "peft.logits")


def train_by_windlass(plan: Plan, here: Rank, *, resume: bool = False) -> int:
    """Run once through `windlass train`'s entry point."""

    def loop_of(*arguments: Any, **others: Any) -> Loop:
        loop = original(*arguments, **others)
        before(loop, "train_step", lambda: torch.manual_seed(99) if loop.step == 0 else None)
        return loop

    original, run.make_loop = run.make_loop, loop_of
    try:
        return (train_sweep if plan.trials else run.train_rank)(plan, here, resume=resume)
    finally:
        run.make_loop = original
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def interrupt(folder: Path) -> None:
    """Leave what a kill after step 2's checkpoint leaves."""
    for path in (folder / FINAL, folder / CHECKPOINTS / "step-3"):
        shutil.rmtree(path)
    write_json(folder / MANIFEST, {**read_manifest(folder), "state": "running"})


def run_case(overrides: list[str], parts: list[str], file: Path, out: Path, here: Rank) -> dict[str, Any]:
    """Run the parts of a case: `trl`, `windlass`, `resumed`, `recomputed`, which is instead of `trl`, and `swept`."""
    outcome: dict[str, Any] = {}
    sweep = [text for text in overrides if text.startswith("sweep=")]
    overrides = [text for text in overrides if text not in sweep]
    out.mkdir(exist_ok=True)
    where = f"train.output_dir={out / 'run'}"
    try:
        plan = planning.make_plan(runfile.read_run_file(file, [*overrides, where]))
        if "trl" in parts:
            outcome["trl"] = train_by_trl(plan, out)
        if "windlass" in parts:
            outcome["code"] = train_by_windlass(plan, here)
            if here.rank == 0 and (out / "base.pt").exists():
                base = torch.load(out / "base.pt", weights_only=False)
                probe_saved(plan, base, out / "run" / CHECKPOINTS / "step-3", out)
                (out / "base.pt").unlink()
        if "recomputed" in parts:
            recompute = json.dumps(not plan.layout.activation_checkpointing)
            more = [f"train.output_dir={out / 'recomputed'}", f"train.gradient_checkpointing={recompute}"]
            more.append("train.offload_activations=false")
            plan = planning.make_plan(runfile.read_run_file(file, [*overrides, *more]))
            outcome["recomputed"] = train_by_windlass(plan, here)
        if "resumed" in parts:
            if here.rank == 0:
                shutil.copytree(out / "run", out / "resumed", symlinks=True)
                interrupt(out / "resumed")
            torch.distributed.barrier()
            where = f"train.output_dir={out / 'resumed'}"
            plan = planning.make_plan(runfile.read_run_file(file, [*overrides, where]))
            outcome["resumed"] = train_by_windlass(plan, here, resume=True)
        if "swept" in parts:
            more = [*sweep, f"train.output_dir={out / 'swept'}"]
            plan = planning.make_plan(runfile.read_run_file(file, [*overrides, *more]))
            outcome["swept"] = train_by_windlass(plan, here)
    except UserError as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    except Exception:
        outcome["error"] = traceback.format_exc()
    return outcome


def main() -> None:
    file, cases, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    here = read_rank(os.environ)
    assert here is not None
    torch.set_num_threads(1)
    connect.create_process_group(here, 60)
    for name in ("start", "finish"):
        setattr(BackgroundReport, name, lambda _: None)  # it would take half the time
    end = time.time() + float(sys.argv[4])
    for name, case in cases.items():
        late = torch.tensor(time.time() > end)
        torch.distributed.broadcast(late, 0)
        if late:
            break
        print(f"--- {name}", file=sys.stderr, flush=True)
        outcome = run_case(case["overrides"], case["parts"], file, out / name, here)
        write_json(out / name / f"outcome-{here.rank}.json", outcome)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(str(error))
