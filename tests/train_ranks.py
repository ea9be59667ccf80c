"""Runs in every rank of tests/test_train.py: many runs in one start of the processes, outcomes as JSON."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Sampler
from transformers import Trainer, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from windlass import plan as planning
from windlass import runfile
from windlass.best import rank_checkpoints as evaluate_all
from windlass.data.audit import PACKED
from windlass.data.prepare import prepare_data
from windlass.errors import RunError, UserError
from windlass.model import find_base
from windlass.observe.background import BackgroundReport
from windlass.ranks import collectives
from windlass.ranks.rank import Rank, read_rank
from windlass.train import connect, run
from windlass.train.load import describe_precision, load_base, open_base_tokenizer
from windlass.train.loop import Loop
from windlass.train.lora import attach_adapter, make_peft_config
from windlass.train.patches import Patches


class At:
    """Acts on the loop before a step, on one rank: the faults that the run has to notice."""

    def __init__(self, step: int, rank: int, act: Callable[[Loop], None]) -> None:
        self.step, self.rank, self.act = step, rank, act

    def plant(self, loop: Loop) -> None:
        if loop.updater.replicas.world > self.rank == rank():
            before(loop, "train_step", lambda: self.act(loop) if loop.step + 1 == self.step else None)


def before(owner: Any, method: str, act: Callable[[], object]) -> None:
    """Call `act` before each call of one method."""
    original = getattr(owner, method)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        act()
        return original(*arguments, **named)

    setattr(owner, method, wrapped)


def rank() -> int:
    return int(os.environ["RANK"])


def not_a_number(loop: Loop) -> None:
    """Return NaN once, in the next forward of this rank."""
    head = loop.model.causal_lm.model.norm

    def poison(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * float("nan")

    handle = head.register_forward_hook(poison)


def overflow(loop: Loop) -> None:
    """A gradient that is finite on each rank, and infinite once the ranks' are summed."""
    average = loop.updater.replicas.reduce

    def averaged(sums: torch.Tensor) -> torch.Tensor:
        loop.updater.replicas.reduce = average  # type: ignore[method-assign]
        loop.updater.replicas.gradients()[0].fill_(3e38)
        return average(sums)

    loop.updater.replicas.reduce = averaged  # type: ignore[method-assign]


def drift(loop: Loop) -> None:
    loop.updater.replicas.parameters[3].data[0, 0] += 1e-7


def terminate(_loop: Loop) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def detach(loop: Loop) -> None:
    """A frozen path: layer 0's shared expert no longer reaches the loss."""
    module = loop.model.causal_lm.model.layers[0].mlp.shared_experts
    module.register_forward_hook(lambda _module, _args, output: output.detach())


def slow(loop: Loop) -> None:
    """Slow down this rank's attention; the others wait for its weights, or its experts' tokens."""
    loop.model.causal_lm.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: time.sleep(0.15))


def average_with_none(loop: Loop) -> None:
    """Average the gradient of a rank's own experts with nobody's."""
    average, alike = loop.updater.replicas.reduce, loop.updater.replicas.alike

    def averaged(sums: torch.Tensor) -> torch.Tensor:
        loop.updater.replicas.alike = []
        found = average(sums)
        loop.updater.replicas.alike = alike
        return found

    loop.updater.replicas.reduce = averaged  # type: ignore[method-assign]


def a_wait_for_each(loop: Loop) -> None:
    """Read a value from the device after every micro-batch."""
    original = loop.model.causal_lm.forward

    def forward(**inputs: Any) -> Any:
        outputs = original(**inputs)
        float(outputs.last_hidden_state.sum())
        return outputs

    loop.model.causal_lm.forward = forward


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the collectives of one optimizer step, bytes gathered, and where the loop reads the device's values."""

    WAITS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
    HERE = (
        *("loop.py", "model.py", "forward.py", "head.py", "loss.py", "step.py", "updater.py", "sync.py", "liveness.py"),
        "train_ranks.py",
    )

    def __init__(self, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.names, self.gathered, self.waits = step, list[str](), list[int](), list[str]()

    def plant(self, loop: Loop) -> None:
        original = loop.train_step

        def seen(micro_batches: Any) -> Any:
            if loop.step + 1 != self.step:
                return original(micro_batches)
            with pytest.MonkeyPatch.context() as patch, self:
                for name in self.WAITS:
                    patch.setattr(torch.Tensor, name, self.counted(name, getattr(torch.Tensor, name)))
                return original(micro_batches)

        loop.train_step = seen  # type: ignore[method-assign]

    def counted(self, name: str, original: Any) -> Any:
        def method(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            caller = sys._getframe(1)
            if Path(caller.f_code.co_filename).name in self.HERE:
                self.waits.append(f"{caller.f_code.co_name}: {name}")
            return original(tensor, *arguments, **named)

        return method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if "c10d" in func.namespace:
            self.names.append(name)
            if "allgather_base" in func.__name__:  # of weights; one number of each rank goes by way of lists
                self.gathered.append(args[0].nbytes)
        return func(*args, **kwargs or {})


class InReference:
    """Sends one rank a signal while the reference of pairs is computed, before its fourth micro-batch."""

    def plant(self, loop: Loop) -> None:
        original = loop.batches.in_order

        def in_order(*arguments: Any) -> Iterator[Any]:
            for number, batch in enumerate(original(*arguments)):
                if number == 3 and rank() == 1:
                    terminate(loop)
                yield batch

        loop.batches.in_order = in_order  # type: ignore[method-assign, assignment]


FAULTS: dict[str, Any] = {
    "terminate in the reference": InReference(),
    **{f"alone {rank}": At(1, rank, average_with_none) for rank in range(4)},
    "nan": At(3, 1, not_a_number),
    **{f"overflow {rank}": At(3, rank, overflow) for rank in range(2)},
    "slow": At(1, 1, slow),
    "drift": At(4, 1, drift),
    "wait 0": At(1, 0, a_wait_for_each),
    "terminate 5": At(5, 1, terminate),
    "stop 3": At(3, 0, terminate),
    "detach 0": At(1, 0, detach),
    "detach 1": At(1, 1, detach),
}


def placements(model: nn.Module) -> dict[str, int]:
    """Return how many parameters have each placement."""
    base = [p for name, p in model.named_parameters() if "lora_" not in name]
    adapter = [p for name, p in model.named_parameters() if "lora_" in name]
    return {
        "sharded": sum(isinstance(p, DTensor) for p in base),
        "whole": sum(not isinstance(p, DTensor) for p in base),
        "adapter of experts": sum(
            p.numel() for name, p in model.named_parameters() if ".experts." in name and "lora_" in name
        ),
        "adapter sharded": sum(isinstance(p, DTensor) for p in adapter),
    }


def ours(case: dict[str, Any], file: Path, here: Rank) -> dict[str, Any]:
    """Run once through `windlass train`'s entry point, with the case's planted fault."""
    seen: dict[str, Any] = {}
    fusing = Patches()
    watched = Seen(case.get("count", 0))

    def loop_of(*arguments: Any, **others: Any) -> Loop:
        seen["placements"] = placements(arguments[2])
        loop = seen["loop"] = original(*arguments, **others)
        if case.get("fused"):  # as on a GPU
            dtype = torch.bfloat16 if loop.train.bf16 else None
            loop.model.patches.adapters = fusing.fuse_layers(loop.model.causal_lm, dtype, always=True)
            assert loop.model.adapters.groups
        watched.plant(loop)
        for name in case.get("faults", []):
            FAULTS[name].plant(loop)
        return loop

    original, run.make_loop, libraries = run.make_loop, loop_of, vars(connect)["read_versions"]
    write_probe = vars(run)["write_probe"]
    folder = Path.cwd()
    try:
        if here.rank == 1 and "folder_of_rank_1" in case:
            os.chdir(case["folder_of_rank_1"])
        os.environ["TZ"] = case.get("time_zones", ["UTC", "UTC"])[here.rank % 2]
        time.tzset()
        overrides = [*case["overrides"], *case.get("on_rank_1", []) * here.rank]

        def make_plan() -> planning.Plan:
            return planning.make_plan(runfile.read_run_file(Path(case.get("file", file)), overrides))

        apart = {"on_rank_1", "folder_of_rank_1", "model_of_rank_1"} & case.keys()  # as nodes plan
        plan = make_plan() if apart else collectives.run_on_rank_0(make_plan)
        if here.rank == 1 and "model_of_rank_1" in case:  # another node's files under the same name
            plan = replace(plan, base=find_base(case["model_of_rank_1"], "model"))
        if here.rank == 1:  # another image on another node
            vars(connect)["read_versions"] = lambda names: libraries(names) | case.get("versions_of_rank_1", {})
        allowed = {"allow_other_base": case.get("allow_other_base", False)}
        if case.get("best"):
            folder_of_run = plan.folder
            bases = case.get("base_dtypes", ())
            seen["code"] = evaluate_all(plan, here, folder_of_run, lambda _: None, base_dtypes=bases, **allowed)
        else:
            if not case.get("probed"):  # as many passes as a run of the tests has
                vars(run)["write_probe"] = lambda *_: None
            seen["code"] = run.train_rank(plan, here, resume=case.get("resume", False), **allowed)
    except UserError as error:
        seen["error"] = str(error)
        seen["kind"] = type(error).__name__
        seen["where"] = error.problems[0].where
    finally:
        fusing.close()
        os.chdir(folder)
        run.make_loop, vars(connect)["read_versions"], vars(run)["write_probe"] = original, libraries, write_probe
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    loop = seen.pop("loop", None)  # it is compiled still if no layer had to run eagerly
    seen |= {
        "compiled": bool(loop and loop.model.compiled),
        "collectives": watched.names,
        "gathered": watched.gathered,
        "waits": watched.waits,
    }
    return seen


class Plain(SFTTrainer):  # type: ignore[misc]
    """TRL unchanged, except for the order of the rows and the loss of models whose backbone TRL's fused head can't
    find, or whose cap of the logits it doesn't know."""

    rows: Any = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.config.model_type.startswith(("llama4", "mllama", "recurrent_gemma")):
            return Trainer.compute_loss(self, model, inputs, *args, **kwargs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.rows


class PlainDpo(DPOTrainer):  # type: ignore[misc]
    """TRL's, given tokens and the order of the rows. The reference is TRL's own copy of the initial adapter."""

    rows: Any = None

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.rows


class PlainOrpo(Trainer):  # type: ignore[misc]
    """The paper's loss, of full logits: the chosen answer's own loss, and TRL's penalty."""

    rows: Any = None
    beta: float

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        from trl.experimental.orpo import ORPOTrainer

        asked = inputs.pop("completion_mask")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        picked = logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None]).squeeze(2)
        chosen, rejected = ((picked * asked).sum(1) / asked.sum(1)).chunk(2)
        penalty = ORPOTrainer.odds_ratio_loss(self, chosen, rejected)[0]
        return (-chosen - penalty).mean()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.rows


def split_pairs(table: Any) -> Dataset:
    """Return rows of pairs as TRL's own tokenizing returns them."""
    rows = []
    for row in table.to_pylist():
        middle, _ = row["seq_lengths"]
        sides = [(row["input_ids"][part], row["labels"][part]) for part in (slice(middle), slice(middle, None))]
        # Behind an answer a template may write what is not trained on.
        ends = [max(place for place, label in enumerate(marks) if label != -100) + 1 for _, marks in sides]
        (chosen, marks), (rejected, _) = ((ids[:end], marks) for (ids, marks), end in zip(sides, ends, strict=True))
        prompt = next(place for place, label in enumerate(marks) if label != -100)
        assert chosen[:prompt] == rejected[:prompt]
        rows.append({"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:], "rejected_ids": rejected[prompt:]})
    return Dataset.from_list(rows)


def plain_pairs(plan: Any, model: Any, data: Any, tokenizer: Any) -> Any:
    """Return TRL's trainer for the run's objective."""
    objective = plan.run.dpo
    settings = {**common_settings(plan), "max_length": None, "beta": objective.beta, "padding_free": False}
    kinds = {"sigmoid": "sigmoid_norm" if objective.length_normalized else "sigmoid", "ipo": "ipo"}
    kind = "robust" if objective.label_smoothing else kinds[objective.loss]
    weights = {"loss_type": [kind, "sft"], "loss_weights": [1.0, objective.sft_weight]}
    settings |= weights if objective.sft_weight else {"loss_type": [kind]}
    settings["label_smoothing"] = objective.label_smoothing
    if hasattr(model.config, "output_router_logits"):  # TRL adds this loss whatever config.json says
        settings["router_aux_loss_coef"] = 0.0
    arguments = DPOConfig(**settings, precompute_ref_log_probs=True, remove_unused_columns=False)
    pairs = split_pairs(data.train)
    if plan.run.train.objective == "dpo":
        return PlainDpo(model=model, args=arguments, train_dataset=pairs, processing_class=tokenizer)
    collator = DataCollatorForPreference(tokenizer.pad_token_id)
    trainer = PlainOrpo(model=model, args=arguments, train_dataset=pairs, data_collator=collator)
    trainer.beta = plan.run.orpo.beta
    return trainer


class Rows(Sampler[int]):
    """windlass's order of the rows."""

    def __init__(self, plan: Any, data: Any) -> None:
        self.epoch, self.count = 0, len(data.lengths)
        seed, sequences = plan.run.train.order_seed, plan.schedule.global_sequences
        self.rows: Callable[[int], Any] = lambda epoch: data.order(seed=seed, epoch=epoch, global_batch=sequences)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.rows(self.epoch).tolist()

    def __len__(self) -> int:
        return self.count


SAME = (
    *("num_train_epochs", "max_steps", "optim", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "seed"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16"),
)


KNOWN = {each.name for each in fields(SFTConfig)}
RECOMPUTES = "activation_checkpointing" if "activation_checkpointing" in KNOWN else "gradient_checkpointing"


def common_settings(plan: Any) -> dict[str, Any]:
    """Translate the run file to TRL."""
    train = plan.run.train
    return dict(
        **{name: getattr(train, name) for name in SAME},
        output_dir=train.output_dir,
        per_device_train_batch_size=plan.batch.micro,
        gradient_accumulation_steps=plan.batch.accumulation,
        warmup_steps=train.warmup(train.max_steps),
        **{RECOMPUTES: train.gradient_checkpointing},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )


def sft_config(plan: Any, data: Any) -> SFTConfig:
    return SFTConfig(
        **common_settings(plan),
        packing=data.batching == PACKED,
        padding_free=data.batching == PACKED,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        router_aux_loss_coef=0.0,
    )


def plain(case: dict[str, Any], file: Path) -> dict[str, Any]:
    """Train with TRL + PEFT, without windlass's loop. On several ranks, with the Trainer's own averaging."""
    plan = planning.make_plan(runfile.read_run_file(file, case["overrides"]))
    job = plan.run
    how = {**describe_precision(plan), "dtype": torch.float32}
    model, _ = load_base(plan.base, replace(plan.layout, base_dtype="bf16"), **how)
    with mock.patch.object(Patches, "patch_experts"):  # PEFT's own forward of experts' adapters
        if not (job.lora.modules_to_save or job.lora.starts_from_weights):
            model = attach_adapter(model, job.lora, plan.adapter, job.train.seed)
    if job.lora.starts_from_weights:  # PEFT's own, which changes the base
        keys = {"r": job.lora.r, "lora_alpha": job.lora.lora_alpha, "target_modules": list(plan.adapter.target_modules)}
        model = get_peft_model(model, LoraConfig(init_lora_weights=job.lora.init_lora_weights, **keys))
    if job.lora.modules_to_save:  # PEFT's own copies
        set_seed(job.train.seed)
        config = make_peft_config(job.lora, plan.adapter)
        config.modules_to_save = job.lora.modules_to_save
        model = get_peft_model(model, config)
    tokenizer = open_base_tokenizer(plan)
    data = prepare_data(job, tokenizer, say=print)
    trainer: Any
    if job.objective.of_pairs:
        trainer = plain_pairs(plan, model, data, tokenizer)
    else:
        arguments = sft_config(plan, data)
        trainer = Plain(model=model, args=arguments, train_dataset=Dataset(data.train), processing_class=tokenizer)
    trainer.rows = Rows(plan, data)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return {"steps": [{"loss": line["loss"], "grad_norm": line["grad_norm"]} for line in steps]}


def main() -> None:
    file, cases, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    here = read_rank(os.environ)
    assert here is not None
    torch.set_num_threads(1)
    connect.create_process_group(here, 60)
    for name in ("start", "finish"):
        setattr(BackgroundReport, name, lambda _: None)  # it would take half the time
    outcomes = {}
    for name, case in cases.items():
        print(f"--- {name}", file=sys.stderr, flush=True)
        outcomes[name] = plain(case, file) if case.get("plain") else ours(case, file, here)
    out.with_name(f"{out.name}-{here.rank}").write_text(json.dumps(outcomes))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(str(error))
