"""The adapter: PEFT's inputs and result, that it trains, and that its replicas stay equal."""

import json
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_experts import BOTH, E, R, apart, base, batch, live, plan_of, section, stacks, step
from torch import Tensor, nn
from transformers.models.minimax_m2 import modeling_minimax_m2
from transformers.models.mistral4.modeling_mistral4 import get_llama_4_attn_scale
from transformers.models.olmo2 import modeling_olmo2

from windlass.errors import RunError, UserError
from windlass.model.files import read_header
from windlass.model.wrapped import outer_name, rename_config, rename_keys
from windlass.ranks.rank import Rank
from windlass.run_folder import ADAPTER
from windlass.train import lora, sync
from windlass.train.base_alone import BaseAlone
from windlass.train.checkpoint.snapshot import save_adapter
from windlass.train.console import make_console
from windlass.train.initial import FixedHalves, init_from_weights
from windlass.train.kernels import family_layers
from windlass.train.kernels.lora_linear import LoraLinears
from windlass.train.liveness import Liveness
from windlass.train.patches import Patches
from windlass.train.step import StepSums
from windlass.train.sync import ReplicaGroups, compute_fingerprints

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
PATTERNS = ("o_proj", "q_a_proj")


def adapted(*, experts: int = 0, patterns: tuple[str, ...] = PATTERNS, seed: int = 1, **keys: Any) -> PeftModel:
    model = base()
    if experts:
        keys["experts"] = {"r": experts, "lora_alpha": 2 * experts}
    plan = plan_of(model, stacks(model, *BOTH) if experts else (), patterns, experts)
    in_full = [f"{'' if name == 'lm_head' else 'model.'}{name}.weight" for name in keys.get("modules_to_save", ())]
    sizes = {name: model.get_parameter(name).numel() for name in in_full}
    plan = replace(plan, in_full=sizes, trainable=plan.trainable + sum(sizes.values()))
    return lora.attach_adapter(model, section(**keys), plan, seed)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# --- attached as planned ---


def test_an_adapter_that_is_not_the_plans_is_refused() -> None:
    model = base()
    plan = plan_of(model, (), PATTERNS)
    first, more = plan.targets[0], (*plan.target_modules, "model.layers.1.self_attn.kv_b_proj")
    for fault, message in (
        (replace(plan, target_modules=plan.target_modules[1:]), "the model has no adapter there"),
        (replace(plan, target_modules=more), "the plan has none"),
        (replace(plan, targets=(replace(first, parameters=7), *plan.targets[1:])), "the plan says 7"),
        (replace(plan, trainable=plan.trainable + 1), "trainable parameters, the plan says"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            lora.attach_adapter(base(), section(), fault, seed=1)
        assert {problem.where for problem in caught.value.problems} == {"lora.target_modules"}
        assert all("a bug in windlass" in problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("experts", "keys"),
    [
        (0, {}),
        (2, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ],
)
def test_saved_adapter_opens_in_peft_and_continues_here(tmp_path: Path, experts: int, keys: dict[str, Any]) -> None:
    model = live(adapted(experts=experts, **keys))
    save_adapter(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    opened = PeftModel.from_pretrained(base(), str(tmp_path)).eval()
    ours, theirs = model.eval()(**batch()).logits, opened(**batch()).logits
    # An expert's W x + B A x here is (W + B A) x there.
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5) if experts else torch.equal(ours, theirs)
    assert not torch.allclose(ours, base()(**batch()).logits, atol=1e-4)
    again = adapted(experts=experts, adapter=str(tmp_path), **keys)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert trained(again).keys() == trained(model).keys()
    with pytest.raises(UserError, match="is not a complete adapter of this model"):
        adapted(experts=experts, adapter=str(tmp_path), **keys | {"patterns": ("o_proj", "up_proj", "q_b_proj")})
    # Named for the multimodal model around it, as `windlass export` does
    file, settings = tmp_path / ADAPTER, json.loads((tmp_path / "adapter_config.json").read_text())
    settings |= rename_config(settings, read_header(file), outer_name)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(rename_keys(load_file(file), outer_name), file)
    again = adapted(experts=experts, adapter=str(tmp_path), **keys)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights:UserWarning")
def test_weight_initialised_adapters_equal_pefts(tmp_path: Path) -> None:
    """PEFT subtracts the part from the base; here a fixed half of the adapter does. Equal losses and saved adapter."""
    keys = {"r": R, "lora_alpha": 2 * R, "target_modules": list(PATTERNS), "init_lora_weights": "pissa"}
    keys["use_rslora"] = True
    ours, theirs = started(**keys), get_peft_model(base(), LoraConfig(**keys))
    theirs.save_pretrained(tmp_path / "start")
    halves = FixedHalves(ours)
    fixed = [value.clone() for value in halves.values]
    losses: list[list[float]] = [[], []]
    for own, model in zip(losses, (ours, theirs), strict=True):
        optimizer = torch.optim.AdamW(trained(model.train()).values(), lr=0.01, weight_decay=0.1)
        for seed in range(5):
            loss = model(**batch(seed)).loss
            loss.backward()
            if model is ours:
                halves.clear_gradients()
            nn.utils.clip_grad_norm_(trained(model).values(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if model is ours:
                halves.restore()
            own.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][0] == pytest.approx(base()(**batch(0)).loss.item(), abs=1e-5)
    assert losses[0][4] < losses[0][0]
    assert all(torch.equal(a, b) for a, b in zip(FixedHalves(ours).values, fixed, strict=True))
    # Saved, it is the LoRA of the base as it is that PEFT makes of its own.
    save_adapter(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    one, other = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert one.keys() == other.keys()
    assert all(apart(one[name], other[name]) < 1e-3 for name in one)
    one, other = (json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("ours", "theirs"))
    assert all(one[key] == pytest.approx(other[key]) for key in ("r", "lora_alpha", "init_lora_weights"))
    opened = PeftModel.from_pretrained(base(), str(tmp_path / "ours")).eval()
    assert apart(opened(**batch()).logits, ours.eval()(**batch()).logits) < 1e-6  # summed in another order
    # The search for the largest values finds nearly as much; a rank that a weight doesn't have is refused.
    full, found = (started(init_lora_weights=each) for each in ("pissa", "pissa_niter_16"))
    for a, b in zip(FixedHalves(full).parts[::2], FixedHalves(found).parts[::2], strict=True):
        assert b[0].norm().item() == pytest.approx(a[0].norm().item(), rel=0.02)
    with pytest.raises(UserError, match=r"lora\.r: .*has only rank"):
        init_from_weights(get_peft_model(base(), LoraConfig(r=8192, target_modules=["o_proj"])), "pissa")


def started(**keys: Any) -> PeftModel:
    """Attach it as planned: with twice the rank."""
    plan = plan_of(base(), (), PATTERNS)
    targets = tuple(replace(target, parameters=2 * target.parameters) for target in plan.targets)
    plan = replace(plan, r=2 * R, targets=targets, trainable=2 * plan.trainable)
    return lora.attach_adapter(base(), section(**{"target_modules": list(PATTERNS), **keys}), plan, 1)


# --- it trains ---


def skip_the_update(model: PeftModel) -> None: ...


class Steps:
    """A plain training loop around the checks, with a learning rate per step."""

    def __init__(self, model: PeftModel, fault: Callable[[PeftModel], None] | None = None) -> None:
        self.model, self.fault = model.train(), fault
        self.liveness = Liveness(model, ReplicaGroups(model), "runs/one")
        self.optimizer = torch.optim.AdamW(trained(model).values(), weight_decay=0.1)

    def step(self, rate: float, seed: int = 0, share: float = 1.0) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        self.model(**batch(seed)).loss.backward()
        if self.fault:
            self.fault(self.model)
        self.liveness.before_update(rate)
        if self.fault != skip_the_update:
            self.optimizer.step()
        self.liveness.after_update(share)


def test_liveness_proof_takes_two_steps_or_one_when_continued() -> None:
    steps = Steps(adapted())
    phases = []
    for rate in (0.0, 0.0, 1e-3, 0.0, 1e-3):  # nothing moves at rate 0: nothing is proven
        steps.step(rate)
        phases.append(len(steps.liveness.phases))
    assert phases == [2, 2, 1, 1, 0]
    continued = Steps(live(adapted()))
    continued.step(1e-3)
    assert continued.liveness.is_done


def gradient_of(model: PeftModel, part: str) -> Tensor:
    gradient = next(p.grad for name, p in trained(model).items() if part in name)
    assert gradient is not None
    return gradient


def unused(model: PeftModel) -> None:
    next(p for name, p in trained(model).items() if "q_a_proj.lora_B" in name).grad = None


def poison(model: PeftModel) -> None:
    gradient_of(model, "o_proj.lora_B")[0, 0] = math.nan


def one_expert(model: PeftModel) -> None:
    """Mask an expert that had tokens; experts vary fastest: column i x E + expert."""
    by_expert = gradient_of(model, "experts.lora_B").reshape(-1, E)
    used = by_expert.ne(0).any(dim=0).nonzero()
    assert len(used) >= 2
    by_expert[:, used[0]] = 0


DEAD: dict[str, tuple[Callable[[PeftModel], Any], int, int, str]] = {
    "B cut off": (
        lambda model: gradient_of(model, "0.self_attn.o_proj.lora_B").zero_(),
        0,
        1,
        "1 adapter tensor is not training: their gradient is exactly zero.*0.self_attn.o_proj.lora_B",
    ),
    "B unused": (unused, 0, 1, "have no gradient.*q_a_proj.lora_B"),
    "B not finite": (poison, 0, 1, "gradient is not finite.*o_proj.lora_B"),
    "never updated": (skip_the_update, 0, 1, "did not change"),
    "A cut off": (
        lambda model: gradient_of(model, "1.self_attn.q_a_proj.lora_A").zero_(),
        0,
        2,
        "gradient is exactly zero.*1.self_attn.q_a_proj.lora_A",
    ),
    "an expert": (one_expert, 2, 1, r"had tokens and no gradient: .*experts.*lora_B.default.weight\[\d\]"),
}


@pytest.mark.parametrize("case", DEAD)
def test_dead_adapter_stops_the_run_and_is_named(case: str) -> None:
    fault, experts, at_step, message = DEAD[case]
    steps = Steps(adapted(experts=experts), fault)
    for _ in range(at_step - 1):
        steps.step(1e-3)
    with pytest.raises(RunError, match=message) as caught:
        steps.step(1e-3)
    assert str(caught.value).startswith("runs/one: ")


def test_an_update_too_small_for_bfloat16_is_caught() -> None:
    model = adapted(dtype="bfloat16")
    for parameter in trained(model).values():
        parameter.data.fill_(1.0)
    steps = Steps(model)
    steps.step(1e-6, share=0.01)  # of a warm-up, or where a resumed run's schedule ends
    assert not steps.liveness.is_done
    with pytest.raises(RunError, match="did not change"):
        steps.step(1e-6)


def test_updates_that_are_rounded_away_later_are_seen() -> None:
    model = adapted(dtype="bfloat16")
    parameters = list(trained(model).values())
    for parameter in parameters:
        parameter.data.fill_(1.0)
    for update, share, expected in ((1e-4, 1.0, [50, 100]), (1e-4, 0.05, []), (0.1, 1.0, [])):
        liveness, found = Liveness(model, ReplicaGroups(model), "runs/one"), []
        for _ in range(102):
            for parameter in parameters:
                parameter.data.add_(update)
            found.append(liveness.find_unchanged(share))
        assert [step for step, text in enumerate(found) if text] == expected, (update, share)
        for text in filter(None, found):
            assert text.startswith(f"{len(parameters)} of the adapter's {len(parameters)} tensors: base_model.")


def test_experts_without_useful_tokens_are_excused() -> None:
    steps = Steps(adapted(experts=2))
    steps.step(1e-3)
    steps.step(1e-3, seed=1)
    assert steps.liveness.is_done
    # Neither padding nor a step that was left out makes an expert due: one position reaches the loss, and so do 2 of
    # the last layer's experts.
    steps = Steps(adapted(experts=2))
    ids = batch()["input_ids"]
    one_label = torch.full_like(ids, -100)
    one_label[0, 2] = ids[0, 2]
    for left_out in (True, False):
        steps.model(**(batch() if left_out else {"input_ids": ids, "labels": one_label})).loss.backward()
        if left_out:
            steps.optimizer.zero_grad()
            steps.liveness.skip_update()
    steps.liveness.before_update(1e-3)
    (useful,) = (counts for place, counts in steps.liveness.tokens.moved.items() if "layers.1" in place)
    assert int(useful.eq(0).sum()) == E - 2


def test_experts_of_what_both_answers_of_a_pair_begin_with_are_excused() -> None:
    """Their gradients cancel in the last layer, as those of the loss of a pair do."""
    steps = Steps(adapted(experts=2))
    chosen = batch()["input_ids"][:1]
    rejected = chosen.clone()
    rejected[0, -1] += 1
    losses = [steps.model(input_ids=ids, labels=ids).loss for ids in (chosen, rejected)]
    (losses[0] - losses[1]).backward()
    last = next(pulls for place, pulls in steps.liveness.tokens.pulls.items() if "layers.1" in place)
    cancelled = last[1].gt(0) & last[0].abs().le(1e-6 * last[1])
    assert cancelled.any()
    assert not cancelled.all()
    steps.liveness.before_update(1e-3)


# --- the same on all ranks (on several: load_ranks.py) ---


def test_fingerprints_see_every_bit_and_every_place() -> None:
    tensor = torch.randn(3, 50)
    for other in (tensor.flip(0), tensor.roll(1, 1), tensor.neg(), torch.nextafter(tensor, torch.tensor(9.0))):
        assert compute_fingerprints([other]) != compute_fingerprints([tensor])
    half = tensor.bfloat16()
    assert compute_fingerprints([half.roll(1)]) != compute_fingerprints([half])
    row = torch.randn(64)
    seen = {int(compute_fingerprints([row.clone()])) for _ in range(2)}
    for i in range(63):
        swapped = row.clone()
        swapped[[i, i + 1]] = row[[i + 1, i]]
        seen.add(int(compute_fingerprints([swapped])))
    assert len(seen) == 64


def test_the_adapter_is_on_again_where_the_bases_weights_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"], bias="all"))
    base_alone = BaseAlone(model, ["base_model.model.0.base_layer.bias"])
    write = BaseAlone._write
    written: list[Any] = []

    def fail_once(self: BaseAlone, values: list[Tensor]) -> None:
        written.append(values)
        if len(written) == 1:
            raise OSError("no memory")
        write(self, values)

    (trained,) = base_alone.trained
    trained.data += 1
    value = trained.detach().clone()
    monkeypatch.setattr(BaseAlone, "_write", fail_once)
    with pytest.raises(OSError, match="no memory"), base_alone.active():
        pytest.fail("the body ran")
    assert torch.equal(trained, value)
    assert not any(getattr(module, "_disable_adapters", False) for module in model.modules())


@pytest.mark.parametrize("tokens", [0, 4095, 16_777_217, 33_554_431])
def test_tokens_of_a_step_are_counted_exactly(tokens: int) -> None:
    """Beyond what float32 counts to, over ranks."""
    zero = torch.zeros(())
    sums = StepSums(zero, zero, 7, tokens, True, 2, False, torch.tensor(True), torch.tensor([0.5]))
    packed = sums.pack(1, 3)
    assert packed.dtype == torch.float32
    found = StepSums.unpack((packed * 512).tolist(), 3)
    assert int(found.tokens) == 512 * tokens
    assert (found.supervised, found.requested, found.not_compiled) == (7 * 512, 2 * 512, 0)
    assert (found.non_finite, found.figures) == ([0, 512, 0], [256])


def test_norm_of_no_gradients_is_on_the_right_device() -> None:
    """Adapters on split experts only: a norm on the CPU can't be stacked with a GPU's."""
    assert sync._norm([], torch.device("meta")).device.type == "meta"
    assert float(sync._norm([nn.Parameter(torch.ones(3))], torch.device("cpu"))) == 0  # without a gradient


# --- fewer kernels ---

SHARED = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")


def peft_alone(family: str, **keys: Any) -> PeftModel:
    """Adapt all linear layers of attention and dense parts, with norms and biases that aren't 1 and 0."""
    model: Any = base(family)
    model.config._experts_implementation = "eager"
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.linspace(-0.3, 0.4, parameter.numel())
    names = [name for name, each in model.named_modules() if type(each) is nn.Linear and name.endswith(SHARED)]
    return live(get_peft_model(model, LoraConfig(r=R, lora_alpha=2 * R, target_modules=names, **keys)))


@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias:UserWarning")
@pytest.mark.parametrize(
    ("family", "keys", "checkpointing"),
    [
        ("mistral4", {}, True),
        ("mixtral", {"use_rslora": True}, False),
        ("llama", {"bias": "all", "lora_dropout": 0.3}, True),
        ("llama", {"use_dora": True}, False),
        ("gemma3_text", {}, False),
        ("olmo2", {}, False),
        ("minimax_m2", {}, False),
    ],
)
def test_fused_layers_have_pefts_values_and_gradients(family: str, keys: dict[str, Any], checkpointing: bool) -> None:
    """Compared with PEFT in float64: within 1e-5, or within PEFT's own float32 error if that is larger."""
    ours, theirs, exact = (peft_alone(family, **keys) for _ in range(3))
    exact.double()

    def two_steps(model: PeftModel, unchanged: Callable[[], Any]) -> list[dict[str, Tensor]]:
        """Return logits and gradients of two steps, the second with other weights."""
        found = []
        for turn in range(2):
            torch.manual_seed(turn)
            model.zero_grad()
            with unchanged():
                logits, gradients = step(model, checkpointing=checkpointing)
            found.append({"logits": logits, **{name: grad.clone() for name, grad in gradients.items()}})
            for parameter in trained(model).values():
                parameter.data *= 0.9
        return found

    def logits_of(model: PeftModel) -> Tensor:
        with torch.no_grad():
            output: Tensor = model.eval()(**batch()).logits
            return output

    # PEFT first: some replacements are the family's functions, for every model of it.
    by_peft = two_steps(theirs, nullcontext)
    truths = two_steps(exact, nullcontext)
    adapted_truth = logits_of(exact)
    with exact.disable_adapter():
        bare_truth = logits_of(exact)
    with Patches() as patches:
        assert not patches.fuse_layers(ours).groups  # on a CPU, where they are not faster
        adapters = patches.fuse_layers(ours, always=True)
        assert bool(adapters.groups) != bool(keys.get("use_dora"))
        for by_us, by_theirs, true in zip(two_steps(ours, adapters.unchanged), by_peft, truths, strict=True):
            assert by_us.keys() == true.keys()
            for name, truth in true.items():
                assert apart(by_us[name], truth) < max(1e-5, 2 * apart(by_theirs[name], truth)), name
        adapted = logits_of(ours)
        assert apart(adapted, adapted_truth) < 1e-4
        with ours.disable_adapter():
            bare = logits_of(ours)
        assert apart(bare, bare_truth) < 1e-4
        assert apart(bare, adapted) > 0.01
        ours.merge_adapter()
        assert apart(logits_of(ours), adapted) < 1e-3
        assert not any(group.waiting for group in adapters.groups)


def test_cached_casts_of_adapters_are_never_stale() -> None:
    model = peft_alone("llama").to(torch.bfloat16)
    for parameter in trained(model).values():
        parameter.data = parameter.data.float()

    def logits() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            output: Tensor = model.eval()(**batch()).logits
            return output

    with Patches() as patches:
        adapters = patches.fuse_layers(model, torch.bfloat16, always=True)
        for _ in range(2):
            with adapters.unchanged():
                cast_once = logits()
            torch.testing.assert_close(cast_once, logits(), rtol=0, atol=0)
            for parameter in trained(model).values():
                parameter.data = parameter.data * 1.5  # new memory, and no version that counts it
            assert apart(logits(), cast_once) > 0.01


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("length", [4, 5, 9])
def test_unscaled_positions_skip_the_multiplication(length: int, *, graded: bool) -> None:
    asked, query = family_layers.cache_last(get_llama_4_attn_scale), torch.randn(1, 2, length, 3, requires_grad=True)
    positions = torch.arange(length)[None]
    with torch.set_grad_enabled(graded):
        scale = asked(positions, 0.1, 4)
        scaled = query * scale.to(torch.float32)
        assert torch.equal(scaled, query * get_llama_4_attn_scale(positions, 0.1, 4))
        assert (scaled is query) == (graded and length == 4)
        assert asked(positions, 0.1, 4) is scale or scaled is query


@pytest.mark.fault("a device that computes fused adapters differently", "`windlass train`", "layers are not fused")
def test_fused_layers_are_disabled_on_a_device_with_other_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the run says so, while it says nothing of libraries' warnings."""
    original = LoraLinears.backward

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The planted fault: a missing scaling."""
        ctx.scalings = [1.0] * len(ctx.scalings)
        return original(ctx, *gradients)

    monkeypatch.setattr(LoraLinears, "backward", staticmethod(backward))
    model = peft_alone("llama")
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "DATASETS_VERBOSITY"):
        monkeypatch.setenv(name, "")  # set there, and to be gone after this test
    with warnings.catch_warnings():
        make_console(Rank())
        warnings.warn("of a library", UserWarning, stacklevel=1)
        assert not Patches().fuse_layers(model, always=True).groups
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.startswith("warning: layers are not fused, which takes longer: ")
    assert "library" not in printed


def test_unsupported_norms_and_rotations_are_not_fused() -> None:
    class OnePlus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, (8,), 1 + self.weight, self.eps)

    here = torch.device("cpu")
    assert family_layers.fuse_norm(OnePlus(), here) is None
    assert not family_layers.check_rotation(
        lambda q, k, cos, sin: (q * cos, k * sin), family_layers.rotate_halves, here
    )
    assert not family_layers.check_rotation(None, family_layers.rotate_halves, here)
    rotate = modeling_olmo2.apply_rotary_pos_emb  # back into the queries' dtype, beside positions in float32
    assert not family_layers.check_rotation(rotate, family_layers.rotate_halves, here)
    rotate = modeling_minimax_m2.apply_rotary_pos_emb
    assert family_layers.check_rotation(rotate, family_layers.rotate_halves, here)
