"""Tokens and seconds -> tokens per second, FLOP/s, and the share of the GPU's peak."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass import hardware
from windlass.errors import UserError
from windlass.observe.meter.flops import count


class Rates:
    def __init__(self, seq_len: int | None, flops_per_token: float | None, recompute: float | None) -> None:
        self.seq_len = seq_len
        self.given = (flops_per_token, recompute)
        self.model: nn.Module | None = None
        self.recomputes = False
        self.peak_tflops: float | None = None
        self.why_no_peak = ""
        self.counted: dict[int, tuple[float, float]] = {}
        self.formula = "given by the plan"

    def measure(self, model: nn.Module | None, device: torch.device, *, recomputes: bool) -> None:
        self.model, self.recomputes = model, recomputes
        self.counted.clear()
        if device.type != "cuda":
            self.why_no_peak = f"no peak is known for {device.type}"
            return
        try:
            self.peak_tflops = hardware.gpu(torch.cuda.get_device_name(device)).bf16_tflops
        except UserError as error:
            self.why_no_peak = error.problems[0].problem

    def per_token(self, length: int) -> tuple[float, float]:
        """Model FLOPs and recomputed FLOPs of one token. Counted once: it is linear in the sequence's length."""
        given, recompute = self.given
        if given is not None:
            return given, recompute or 0.0
        if self.model is None:
            return 0.0, 0.0
        for at in (0, 1024):
            if at not in self.counted:
                flops = count(self.model, at, recomputes=self.recomputes)
                self.counted[at] = (flops.model, flops.recompute)
                self.formula = flops.formula
        none, some = self.counted[0], self.counted[1024]
        share = length / 1024
        return tuple(a + (b - a) * share for a, b in zip(none, some, strict=True))  # type: ignore[return-value]

    def of(self, record: dict[str, Any]) -> dict[str, float]:
        seconds, tokens = record.get("step_seconds"), record.get("tokens")
        if not seconds or not tokens:
            return {}
        rates = {"tokens_per_second": tokens / seconds}
        model, recompute = self.per_token(self.seq_len or record.get("longest") or 0)
        if model:
            rates["model_tflops"] = model * tokens / seconds / 1e12
            if self.peak_tflops:
                rates["mfu"] = rates["model_tflops"] / self.peak_tflops
                rates["hfu"] = rates["mfu"] * (model + recompute) / model
        return rates

    def as_dict(self) -> dict[str, Any]:
        length = self.seq_len or 0
        model, recompute = self.per_token(length)
        return {
            "sequence": length,
            "flops_per_token": model,
            "recompute_flops_per_token": recompute,
            "formula": self.formula,
            "peak_tflops": self.peak_tflops,
            "why_no_peak": self.why_no_peak,
        }
