"""The adapter: what PEFT is asked for, what came of it, that it lives, and that replicas of it stay one."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Mistral4Config, Mistral4ForCausalLM

from windlass.errors import RunError, UserError
from windlass.model.targets import Adapter, Target
from windlass.runfile import Lora
from windlass.train import checkpoint, lora
from windlass.train.liveness import Liveness
from windlass.train.sync import Replicas, fingerprints

# PEFT and TRL still use names of transformers that its next major version drops.
# PEFT does not look for rank_pattern among expert parameters when it warns, only when it applies it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]

R = 4
CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": 2**20,
}  # fmt: skip


def base(**config: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Mistral4ForCausalLM(Mistral4Config(**{**CONFIG, **config})).requires_grad_(False)
    return model


def planned(model: nn.Module, patterns: tuple[str, ...], r: int = R, experts: int = 0) -> Adapter:
    """What the plan would say, counted from the shapes here."""
    targets = []
    for pattern in patterns:
        found = {name: m for name, m in model.named_modules() if name.endswith(f".{pattern}")}
        count = sum(r * sum(m.weight.shape) for m in found.values())
        targets.append(Target(pattern, (pattern,), "attention", tuple(found), count))
    names = tuple(name for name, _ in model.named_parameters() if ".experts." in name) if experts else ()
    if names:
        shapes = [model.get_parameter(name).shape for name in names]
        count = sum(shape[0] * experts * (shape[1] + shape[2]) for shape in shapes)
        targets.append(Target("experts", ("experts",), "experts", names, count))
    modules = tuple(name for target in targets if target.pattern != "experts" for name in target.modules)
    return Adapter(r, 2.0 * r, tuple(targets), modules, names, sum(t.parameters for t in targets), 4)


def section(**keys: Any) -> Lora:
    return Lora.model_validate({"r": R, "lora_alpha": 2 * R, "lora_dropout": 0, "target_modules": ["o_proj"], **keys})


def adapted(*, experts: int = 0, patterns: tuple[str, ...] = ("o_proj", "q_a_proj"), **keys: Any) -> PeftModel:
    model = base()
    if experts:
        keys["experts"] = {"r": experts, "lora_alpha": 2 * experts}
    return lora.attach(model, section(**keys), planned(model, patterns, experts=experts), seed=1)


def batch(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


# --- attached as planned ---


def test_only_the_adapter_is_trainable_and_is_float32() -> None:
    model = adapted()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 2 * 2
    assert all("lora_" in name for name in trainable)
    assert {p.dtype for p in trainable.values()} == {torch.float32}


def test_adapter_may_be_bfloat16_beside_a_float32_base() -> None:
    model = adapted(dtype="bfloat16")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    assert model(**batch()).loss.isfinite()


def test_the_seed_alone_decides_the_values() -> None:
    torch.manual_seed(99)
    one, other = adapted(), adapted()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    model = base()
    third = lora.attach(model, section(), planned(model, ("o_proj", "q_a_proj")), seed=2)
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), third.parameters(), strict=True))


@pytest.mark.parametrize("r", [2, R])
def test_experts_have_their_own_rank(r: int) -> None:
    model = adapted(experts=r)
    found = lora.adapter_sizes(model)
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == 4 * r * (32 + 32)
    assert found["model.layers.0.mlp.experts.down_proj"] == 4 * r * (16 + 32)
    assert found["model.layers.0.self_attn.o_proj"] == R * (16 + 32)


FAULTS: dict[str, tuple[Any, str]] = {
    "a module fewer": (lambda a: replace(a, target_modules=a.target_modules[1:]), "the model has no adapter there"),
    "a module more": (
        lambda a: replace(a, target_modules=(*a.target_modules, "model.layers.1.self_attn.kv_b_proj")),
        "the plan has none",
    ),
    "another count": (
        lambda a: replace(a, targets=(replace(a.targets[0], parameters=7), *a.targets[1:])),
        "the plan says 7",
    ),
    "another total": (lambda a: replace(a, trainable=a.trainable + 1), "trainable parameters, the plan says"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_is_not_the_plans_is_refused(fault: str) -> None:
    change, message = FAULTS[fault]
    model = base()
    with pytest.raises(UserError, match=message) as caught:
        lora.attach(model, section(), change(planned(model, ("o_proj", "q_a_proj"))), seed=1)
    assert {problem.where for problem in caught.value.problems} == {"lora.target_modules"}
    assert all("a bug in windlass" in problem.hint for problem in caught.value.problems)


REFUSED = {
    "norms": (section(use_dora=True), False, {"sharded": True}, "lora.use_dora"),
    "biases beside split experts": (section(experts=True, bias="all"), True, {"split": True}, "lora.bias"),
    "dropout merged": (section(experts=True, lora_dropout=0.1), True, {"merged": True}, "lora.lora_dropout"),
    "no such adapter": (section(adapter="/nowhere"), False, {}, "lora.adapter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_cannot_do_here_is_refused_before_it_fails(case: str) -> None:
    keys, experts, where, key = REFUSED[case]
    plan = planned(base(), ("o_proj",), experts=R if experts else 0)
    spread = {"sharded": False, "split": False, "merged": False, **where}
    assert [problem.where for problem in lora.unsupported(keys, plan, **spread)] == [key]
    assert not list(lora.unsupported(section(), planned(base(), ("o_proj",)), sharded=True, split=True, merged=False))


def test_dora_works_where_weights_are_whole() -> None:
    model = base()
    plan = planned(model, ("o_proj",))
    extra = 32 * 2  # a magnitude per output of each of the two layers
    plan = replace(
        plan,
        trainable=plan.trainable + extra,
        targets=(replace(plan.targets[0], parameters=plan.targets[0].parameters + extra),),
    )
    assert lora.attach(model, section(use_dora=True), plan, seed=1)(**batch()).loss.isfinite()


@pytest.mark.parametrize("experts", [0, 2])
def test_the_saved_adapter_opens_in_plain_peft(tmp_path: Path, experts: int) -> None:
    model = adapted(experts=experts)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.1)
    checkpoint.save_adapter(model, tmp_path)
    again = PeftModel.from_pretrained(base(), str(tmp_path))
    plain = base()(**batch()).loss
    assert not torch.allclose(again(**batch()).loss, plain, atol=1e-4)
    ours, theirs = (each.eval()(**batch()).logits for each in (model, again))
    # An expert's W x + B A x here is (W + B A) x there.
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6) if experts else torch.equal(ours, theirs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_training_goes_on_from_an_adapter(tmp_path: Path) -> None:
    model = adapted()
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_()
    checkpoint.save_adapter(model, tmp_path)
    again = adapted(adapter=str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert sum(p.requires_grad for p in again.parameters()) == 8
    with pytest.raises(UserError, match="no adapter there"):
        adapted(adapter=str(tmp_path), patterns=("o_proj", "q_b_proj"))


# --- alive ---


class Steps:
    """A plain training loop around the checks, with a learning rate per step."""

    def __init__(self, model: PeftModel, fault: Any = None) -> None:
        self.model, self.fault = model.train(), fault
        self.liveness = Liveness(model, Replicas(model), "runs/one")
        self.optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), weight_decay=0.1)

    def step(self, rate: float, seed: int = 0) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        self.model(**batch(seed)).loss.backward()
        if self.fault:
            self.fault(self.model)
        self.liveness.before_update(rate)
        if self.fault != skip_the_update:
            self.optimizer.step()
        self.liveness.after_update(rate)


def skip_the_update(model: PeftModel) -> None: ...


def named(model: PeftModel, part: str) -> nn.Parameter:
    found: nn.Parameter = next(p for name, p in model.named_parameters() if part in name and p.requires_grad)
    return found


def test_a_living_adapter_passes_in_two_steps_after_the_warm_up() -> None:
    steps = Steps(adapted())
    for rate in (0.0, 0.0):  # nothing moves at rate 0: nothing is proven
        steps.step(rate)
    assert len(steps.liveness.phases) == 2
    steps.step(1e-3)
    assert not steps.liveness.done
    steps.step(1e-3)
    assert steps.liveness.done


def test_a_continued_adapter_passes_in_one_step() -> None:
    model = adapted()
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.1)
    steps = Steps(model)
    steps.step(1e-3)
    assert steps.liveness.done


def zero(part: str) -> Any:
    def fault(model: PeftModel) -> None:
        gradient = named(model, part).grad
        assert gradient is not None
        gradient.zero_()

    return fault


def nothing(part: str) -> Any:
    def fault(model: PeftModel) -> None:
        named(model, part).grad = None

    return fault


def poison(model: PeftModel) -> None:
    gradient = named(model, "o_proj.lora_B").grad
    assert gradient is not None
    gradient[0, 0] = math.nan


DEAD = {
    "B cut off": (zero("0.self_attn.o_proj.lora_B"), 1, "gradient is exactly zero.*0.self_attn.o_proj.lora_B"),
    "B unused": (nothing("q_a_proj.lora_B"), 1, "have no gradient.*q_a_proj.lora_B"),
    "B not finite": (poison, 1, "gradient is not finite.*o_proj.lora_B"),
    "never updated": (skip_the_update, 1, "did not change"),
    "A cut off": (zero("1.self_attn.q_a_proj.lora_A"), 2, "gradient is exactly zero.*1.self_attn.q_a_proj.lora_A"),
}


@pytest.mark.parametrize("case", DEAD)
def test_a_dead_adapter_stops_the_run_with_its_names(case: str) -> None:
    fault, at_step, message = DEAD[case]
    steps = Steps(adapted(), fault)
    for _ in range(at_step - 1):
        steps.step(1e-3)
    with pytest.raises(RunError, match=message) as caught:
        steps.step(1e-3)
    assert str(caught.value).startswith("runs/one: ")


def test_an_update_too_small_for_bfloat16_is_caught() -> None:
    model = adapted(dtype="bfloat16")
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.fill_(1.0)
    with pytest.raises(RunError, match="did not change"):
        Steps(model).step(1e-6)


def test_experts_without_tokens_are_excused_by_name_and_others_not() -> None:
    def cut(model: PeftModel) -> None:
        gradient = named(model, "experts.lora_B").grad  # experts fastest: column i x 4 + expert
        assert gradient is not None
        used = gradient.reshape(-1, 4).ne(0).any(dim=0)
        assert used.sum() >= 2
        self_dead.append(int(used.nonzero()[0]))
        gradient.reshape(-1, 4)[:, self_dead[0]] = 0

    self_dead: list[int] = []
    steps = Steps(adapted(experts=2))
    steps.step(1e-3)
    steps.step(1e-3, seed=1)
    assert steps.liveness.done
    with pytest.raises(RunError, match=r"had tokens and no gradient: .*experts.*lora_B.default.weight\[\d\]"):
        Steps(adapted(experts=2), cut).step(1e-3)


def test_padding_alone_does_not_make_an_expert_due() -> None:
    model = adapted(experts=2)
    steps = Steps(model)
    ids = batch()["input_ids"]
    one_label = torch.full_like(ids, -100)
    one_label[0, 2] = ids[0, 2]  # one position reaches the loss: in the last layer 2 of 4 experts
    model(input_ids=ids, labels=one_label).loss.backward()
    steps.liveness.before_update(1e-3)
    excused = {name for name in steps.liveness.tokens.excused if "layers.1" in name}
    assert len(excused) == 2


def test_gradient_checkpointing_counts_the_same_tokens() -> None:
    counts = []
    for checkpointing in (False, True):
        model = adapted(experts=2)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        steps = Steps(model)
        model(**batch()).loss.backward()
        counts.append({name: count.tolist() for name, count in steps.liveness.tokens.counts.items()})
    assert counts[0] == counts[1]
    assert sum(map(sum, counts[0].values())) > 0


# --- one and the same on all ranks ---


def test_fingerprints_see_every_bit_and_every_place() -> None:
    tensor = torch.randn(3, 50)
    for other in (tensor.flip(0), tensor.roll(1, 1), tensor.neg(), torch.nextafter(tensor, torch.tensor(9.0))):
        assert fingerprints([other]) != fingerprints([tensor])
    assert fingerprints([tensor.clone()]) == fingerprints([tensor])
    half = tensor.bfloat16()
    assert fingerprints([half.roll(1)]) != fingerprints([half])


def test_swapping_any_two_values_shows() -> None:
    tensor = torch.randn(64)
    seen = {int(fingerprints([tensor]))}
    for i in range(63):
        swapped = tensor.clone()
        swapped[[i, i + 1]] = tensor[[i + 1, i]]
        seen.add(int(fingerprints([swapped])))
    assert len(seen) == 64


def test_one_rank_has_nothing_to_average() -> None:
    model = adapted()
    model(**batch()).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    before = copy.deepcopy(gradients)
    sums = torch.tensor([3.0])
    assert Replicas(model).average(sums) is sums
    assert len(before) == 8
    assert all(torch.equal(a, b) for a, b in zip(before, gradients, strict=True))
