"""The model as it is trained: its forward, its losses, and what replaces its layers' code meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from peft import PeftModel
from torch import Tensor

from windlass.plan import Plan
from windlass.train.collate import Batch
from windlass.train.fsdp import get_device, list_fsdp_modules
from windlass.train.head import Head
from windlass.train.kernels.compiled import Compiled
from windlass.train.kernels.lora_linear import FusedAdapters
from windlass.train.long_rows import RowGroup, balance_over
from windlass.train.loss import SourceLosses, balance_router, router_loss_weight
from windlass.train.patches import ModelPatches
from windlass.train.precision import in_float32
from windlass.train.preference import Preference
from windlass.train.recompute import recompute_layers
from windlass.train.sync import WaitTimer

ROUTED: Final = {"output_router_logits": True}  # what a forward returns for the balancing loss
SharedForward = Callable[["TrainedModel", Batch, Tensor | None], tuple[Tensor, Tensor | None]]


class TrainedModel:
    """The model as it is trained: its head computes the loss, its layers are fused or compiled."""

    def __init__(
        self,
        plan: Plan,
        model: PeftModel,
        sources: Sequence[str],
        now: Callable[[], Any],
        group: RowGroup | None = None,
    ) -> None:
        train = plan.run.train
        layout = plan.layout
        self.peft = model
        self.causal_lm = model.get_base_model()
        self.head = Head(self.causal_lm)
        self.device = get_device()
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=train.in_bf16)
        self.router_weight = router_loss_weight(self.causal_lm, train.router_aux_loss_coef)
        # Weights can stay gathered through a step's micro-batches. Collected once: walking all modules takes
        # milliseconds.
        gather_once = layout.is_sharded and not layout.reshard_after_forward
        self.kept_gathered = list_fsdp_modules(model) if gather_once else []
        self.waits = WaitTimer(model, now, split_experts=layout.expert_parallel > 1)
        self.group = group
        if group:
            group.waiting = self.waits.measure
        self.sources = SourceLosses(sources, self.device)  # per data set of a mix
        self.preference = Preference(plan.run, self.sources) if plan.run.objective.of_pairs else None
        self.shared: SharedForward | None = None  # computes the loss instead, with that of other models
        self.patches = ModelPatches(
            self.causal_lm,
            dtype=torch.bfloat16 if train.in_bf16 else None,
            compiles=train.compile,
            noise_alpha=train.neftune_noise_alpha,
            group=group,
            by_document=plan.by_document,
        )
        recompute_layers(self.causal_lm, plan, compiled=bool(self.compiled))

    @property
    def compiled(self) -> Compiled | None:
        """The compiled parts of layers, if they are compiled."""
        return self.patches.compiled

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within this, compiled layers run eagerly."""
        compiled = self.compiled
        if compiled:
            compiled.on = False
        try:
            yield
        finally:
            if compiled:
                compiled.on = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this, evaluations are computed: of pairs in float32, which compiled layers aren't compiled for."""
        with ExitStack() as stack:
            if self.preference is None:
                stack.enter_context(self.autocast)
            else:
                stack.enter_context(self.eager())
                stack.enter_context(in_float32(self.causal_lm))
            yield

    @property
    def adapters(self) -> FusedAdapters:
        return self.patches.adapters

    @property
    def figures(self) -> SourceLosses | Preference:
        """What is added up along with the loss, and recorded."""
        return self.preference or self.sources

    def compute_loss(self, batch: Batch, balance_share: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the summed loss of a micro-batch, and the router's balancing loss in it if there is one."""
        if self.shared is not None:
            return self.shared(self, batch, balance_share)
        with self.autocast:
            outputs = self.causal_lm(**batch.inputs, **({} if balance_share is None else ROUTED))
            loss = self.sum_losses(outputs.last_hidden_state, batch)
            if balance_share is None:
                return loss, None
            balance = self.balance_router(outputs.router_logits.layers, batch.mask)
        return loss + balance_share * balance, balance.detach()

    def sum_losses(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of a micro-batch, and add up what is recorded of it."""
        if self.preference is not None:
            return self.preference.compute(self.head.log_probs(hidden, batch.targets), batch)
        loss, losses = self.head.loss(hidden, batch.targets)
        if batch.sources is not None:
            self.sources.add(batch.sources, losses)
        return loss

    def balance_router(self, router_logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return the router's balancing loss of a micro-batch, or this rank's part of rows that ranks share."""
        config = self.causal_lm.config.get_text_config()
        if self.group is None:
            return balance_router(router_logits, config, mask)
        assert mask is not None
        return balance_over(self.group, router_logits, config.num_experts_per_tok, mask)
