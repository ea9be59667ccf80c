"""The run file's `lora` section held against the model's parameters: which modules match, how many parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One pattern of `lora.target_modules` (or `lora.experts`) and what it really matched."""

    pattern: str  # as the user wrote it: q_proj
    names: tuple[str, ...]  # what it stands for in this family: q_a_proj, q_b_proj
    part: str
    modules: tuple[str, ...]  # full module names: model.layers.0.self_attn.q_a_proj
    parameters: int  # trainable parameters that it adds
    note: str = ""  # the translation and its reason, when there was one


@dataclass(frozen=True, slots=True)
class Adapter:
    """What PEFT is asked for, and what must come out of it."""

    r: int
    alpha: float
    targets: tuple[Target, ...]
    target_modules: tuple[str, ...]  # exact full module names, for peft.LoraConfig
    target_parameters: tuple[str, ...]  # exact names of fused expert parameters, for peft.LoraConfig
    trainable: int
    dtype_bytes: int  # 4 or 2
    notes: tuple[str, ...] = ()
