"""Every replacement of other libraries' code that windlass makes while it runs, in the order in which it is made.

While PEFT builds the adapter, by `patch_peft`:

1.  `LoraLayer._get_in_out_features` and `ParamWrapper._get_in_out_features`
    why    PEFT 0.21.2 (tuners_utils) takes a weight on any mesh not named "fsdp" for tensor parallel and uses the
           rank's part: under hybrid sharding, with a mesh of (dp_replicate, fsdp), too small. It takes bytes of 4-bit
           weights for values.
    until  PEFT checks for a "tp" dimension of the mesh, and asks layers for their features
2.  `ParamWrapper._move_adapter_to_device_of_base_layer`: `experts.cut_adapter` before, `experts.cast_adapter` after
    why    adapters of experts that are split over ranks would be those of all experts; of quantized ones, bytes
    until  PEFT adapts experts under transformers' expert parallelism

Then, on the adapted model, by methods of `Patches`:

3.  the class of each `ParamWrapper`: `experts.UnmergedExpertLora`
    why    PEFT merges every expert's adapter into its weight, with a full gradient and without dropout
    until  PEFT computes adapters of experts unmerged
4.  the class of each adapted linear layer: `lora_linear.LoraLinear`
    why    PEFT rounds the base's output to 16 bits and then adds the adapter's, most of which that swallows
    until  PEFT rounds once

On the model that trains, by `ModelPatches`:

5.  attention with torch's SDPA: `on_cpu.attend` on a CPU, `documents.attend` on a GPU
    why    torch's kernels compute the full square of packed rows
    until  they skip what a mask of documents excludes
6.  `masking_utils.find_packed_sequence_indices` of transformers: `forward.DocumentSearch`
    why    the host waits for the GPU in every forward, for what the batch knows
    until  transformers takes the answer as an argument
7.  the model's forward: `forward.make_forward`
    why    the logits of a batch would exist at once, and the loss be a mean: see head.py
    until  transformers has a summed loss in chunks
8.  the embedding's output, by a hook: `noise.add_noise`
    why    NEFTune; transformers has it in its Trainer only
9.  either the forwards of layers' parts: `compiled.CompiledPart`
    why    train.compile, with a way back to eager layers on all ranks together
    or norms, routers, `expand_kv` of modules, and the functions for rotations and scales in the family's module: see
    kernels/family_layers.py; and the forwards of adapted linear layers: see kernels/lora_linear.py
    why    on a GPU with a small micro-batch the host can't launch as many small kernels as fast
    until  the families' code and PEFT need as few kernels
10. the forwards of shared experts: `shared.SharedExperts`
    why    under expert parallelism they run while tokens are exchanged
    until  transformers overlaps them

A later one calls what an earlier one put there: shared experts run compiled, or with fused adapters. The exchange of
tokens, the products of experts, attention by document and attention of rows that ranks share are registered in
transformers' own registries, under names that begin with "windlass". `compiled.dora_weight` stands in for a function of
PEFT in compiled graphs alone.
"""

import types
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel, masking_utils

from windlass.errors import SlowerWarning
from windlass.train.experts import experts
from windlass.train.experts.shared import SharedExperts, find_shared_experts
from windlass.train.forward import DocumentSearch, make_forward
from windlass.train.fsdp import get_device
from windlass.train.kernels import documents, family_layers, on_cpu
from windlass.train.kernels.compiled import Compiled
from windlass.train.kernels.lora_linear import FusedAdapters, LoraLinear, check_lora_linears
from windlass.train.long_rows import RowGroup
from windlass.train.noise import add_noise
from windlass.weights.quantized import get_formats

ADAPTERS: Final = "adapted linear layers"
SHARED_INPUTS: Final = "adapters with one input"
PARTS: Final = (ADAPTERS, SHARED_INPUTS, *family_layers.PARTS)  # what is fused, each by its name


class Patches(ExitStack):
    """Replacements in force. `close` undoes them, the latest first."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module, a class or an instance."""
        if name == "__class__":
            self.callback(setattr, owner, name, type(owner))
        elif name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def patch_experts(self, model: PeftModel) -> None:
        """Make the experts' forward compute the adapters that PEFT has wrapped around them."""
        for wrapper in [module for module in model.modules() if isinstance(module, ParamWrapper)]:
            layer = wrapper.get_base_layer()
            if experts.is_unsupported(layer):
                raise AssertionError(f"the plan adapts {type(layer).__name__}, which no adapter is written for")
            self.replace(wrapper, "__class__", experts.UnmergedExpertLora)
            self.callback(setattr, layer.config, "_experts_implementation", layer.config._experts_implementation)
            layer.config._experts_implementation = experts.NAME
            adapters = {**getattr(layer, "adapters", {}), wrapper.parameter_name: wrapper}
            self.replace(layer, "adapters", adapters)

    def patch_adapted_linears(self, model: PeftModel) -> None:
        """Make adapted linear layers round their output once."""
        for layer in [module for module in model.modules() if type(module) is Linear]:
            self.replace(layer, "__class__", LoraLinear)

    def patch_attention(self, model: PreTrainedModel, name: str = on_cpu.NAME) -> None:
        """Use attention by document in a model that uses torch's SDPA."""
        implementation = model.config._attn_implementation
        if implementation == "sdpa":
            model.set_attn_implementation(name)
            self.callback(model.set_attn_implementation, implementation)

    def patch_forward(self, model: PreTrainedModel, group: RowGroup | None = None) -> None:
        """Give a causal LM a forward that stops before its head: see `forward.make_forward`.

        `forward` is replaced, and the model not wrapped: the hooks by which FSDP2 gathers weights stay in place.
        """
        search = masking_utils.find_packed_sequence_indices
        if not isinstance(search, DocumentSearch):
            search = DocumentSearch(search)
            self.replace(masking_utils, "find_packed_sequence_indices", search)
        if group:  # its forward changes it
            self.callback(model.set_attn_implementation, model.config._attn_implementation)
        self.replace(model, "forward", types.MethodType(make_forward(search, group), model))

    def add_embedding_noise(self, embeddings: nn.Module, alpha: float, ranks_per_row: int = 1) -> None:
        self.callback(embeddings.register_forward_hook(add_noise(alpha, ranks_per_row)).remove)

    def compile_layers(self, model: nn.Module) -> Compiled:
        """Compile what can be compiled of the layers."""
        compiled = Compiled(model)
        for part in compiled.parts:
            self.replace(part.module, "forward", part)
        return compiled

    def fuse_layers(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        parts: Collection[str] = PARTS,
        always: bool = False,
    ) -> FusedAdapters:
        """Fuse what can be fused and return the fused adapters, whose products run in `dtype` or their own dtype.

        Only on a GPU, or if `always`: a CPU runs each operation as it comes, so fewer operations are no faster.
        """
        trained = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if trained is None or not (always or trained.is_cuda):
            return FusedAdapters([], dtype)
        if not check_lora_linears(trained.device):
            text = "layers are not fused, which takes longer: this device computes fused adapters differently"
            warnings.warn(f"{text}; `windlass check --self-test` says how", SlowerWarning, stacklevel=2)
            return FusedAdapters([], dtype)
        for owner, name, value in list(family_layers.find_replacements(model, trained.device, parts)):
            self.replace(owner, name, value)
        modules = model.modules() if ADAPTERS in parts else ()
        adapters = FusedAdapters(modules, dtype, share_inputs=SHARED_INPUTS in parts)
        self.patch_adapters(adapters)
        return adapters

    def patch_adapters(self, adapters: FusedAdapters) -> None:
        for layer, forward in adapters.forwards():
            self.replace(layer, "forward", forward)

    def overlap_shared_experts(self, model: nn.Module) -> list[SharedExperts]:
        """Let the shared experts of all layers run during their exchanges."""
        overlapped = []
        for exchange, layer in find_shared_experts(model):
            shared = SharedExperts(layer.forward)
            self.replace(exchange, "shared", shared)
            self.replace(layer, "forward", shared.take)
            overlapped.append(shared)
        return overlapped


class ModelPatches:
    """A model's replacements for training, made in this order, and undone in the opposite one."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None,
        compiles: bool = False,
        noise_alpha: float | None = None,
        parts: Collection[str] = PARTS,
        group: RowGroup | None = None,
        by_document: bool = False,
    ) -> None:
        """`dtype`: what adapters compute in, if not in their own dtype; `parts`: what to fuse on a GPU; `group`: the
        ranks that share rows; `by_document`: attention of packed rows needs no mask on a GPU."""
        self.model = model
        self.dtype = dtype
        self.parts = parts
        self.patches = Patches()
        self.of_layers = Patches()
        device = get_device()
        if device.type == "cpu":
            self.patches.patch_attention(model)
        elif by_document:
            if documents.check_documents(device):
                self.patches.patch_attention(model, documents.NAME)
            else:
                text = "packed rows are masked, which takes longer: this device has no flash attention"
                warnings.warn(text, SlowerWarning, stacklevel=2)
        self.patches.patch_forward(model, group)
        if noise_alpha:
            self.patches.add_embedding_noise(model.get_input_embeddings(), noise_alpha, group.ranks if group else 1)
        self.compiled: Compiled | None = None
        if compiles:
            self.compiled = self.of_layers.compile_layers(model)
            self.adapters = FusedAdapters([], dtype)  # a compiler fuses by itself
            self.of_layers.overlap_shared_experts(model)
        else:
            self.fuse()

    def fuse(self) -> None:
        self.adapters = self.of_layers.fuse_layers(self.model, self.dtype, parts=self.parts)
        self.of_layers.overlap_shared_experts(self.model)

    def disable_compiled(self) -> None:
        """Run layers eagerly, with fused operations instead."""
        if self.compiled:
            self.compiled.on = False
            self.compiled = None
            self.of_layers.close()
            self.fuse()

    def undo(self) -> None:
        self.of_layers.close()
        self.patches.close()


@contextmanager
def patch_peft() -> Iterator[None]:
    """While PEFT creates adapters, size them by layers' full weights, not by a rank's part nor by bytes of 4-bit
    weights, and keep only this rank's part of split experts' adapters."""
    original: Callable[..., Any] = LoraLayer._get_in_out_features
    original_of_stack: Callable[..., Any] = ParamWrapper._get_in_out_features
    move: Callable[..., None] = ParamWrapper._move_adapter_to_device_of_base_layer

    def sizes(self: LoraLayer, module: nn.Module) -> Any:
        return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else original(self, module)

    def stack_sizes(self: ParamWrapper, module: nn.Module) -> Any:
        stored = original_of_stack(self, module)
        coding = get_formats(self.get_base_layer()).get(self.parameter_name)
        return coding.shape(stored) if coding else stored

    def cut_and_move(self: ParamWrapper, adapter_name: str, device: torch.device | None = None) -> None:
        experts.cut_adapter(self, adapter_name)
        move(self, adapter_name, device)
        experts.cast_adapter(self, adapter_name)

    with Patches() as patches:
        patches.replace(LoraLayer, "_get_in_out_features", sizes)
        patches.replace(ParamWrapper, "_get_in_out_features", stack_sizes)
        patches.replace(ParamWrapper, "_move_adapter_to_device_of_base_layer", cut_and_move)
        yield


# --- a base without everything that a run did to it ---

Attribute = tuple[str, Any, Any]  # name, value, and a copy of what it contains
CONTAINERS: Final = (dict, list, set)  # of a module: hooks, children, buffers; changed in place


def list_attributes(owner: Any) -> Iterator[Attribute]:
    """Yield the attributes of a module or a configuration, except parameters: FSDP2 exchanges them itself."""
    for name, value in vars(owner).items():
        if name != "_parameters":
            yield name, value, value.copy() if isinstance(value, CONTAINERS) else None


def restore_attributes(owner: Any, cls: type, attributes: Collection[Attribute]) -> None:
    """Give a module or a configuration back its class and attributes, and take away all others."""
    owner.__class__ = cls
    known = {name for name, _, _ in attributes} | {"_parameters"}
    for name in [name for name in vars(owner) if name not in known]:
        del vars(owner)[name]
    for name, value, content in attributes:
        vars(owner)[name] = value
        if content is not None:
            value.clear()
            extend = value.extend if isinstance(value, list) else value.update
            extend(content)
