"""torchvision's RetinaNet (ResNet-50 with a feature pyramid), from a file or fresh."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import vision_operators
from torch import Tensor, nn

from windlass.errors import UserError

vision_operators.provide()

from torchvision.models.detection import RetinaNet  # noqa: E402
from torchvision.models.detection.anchor_utils import AnchorGenerator  # noqa: E402
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone  # noqa: E402
from torchvision.models.detection.image_list import ImageList  # noqa: E402
from torchvision.ops import FrozenBatchNorm2d  # noqa: E402
from torchvision.ops.feature_pyramid_network import LastLevelP6P7  # noqa: E402

HEAD = "head.classification_head."  # the part that depends on the number of classes
COUNTER = "num_batches_tracked"
LONGEST = 1333 / 800  # limit of the longer side, in lengths of the shorter one: torchvision's own
TUNED_STAGES, FRESH_STAGES = 3, 5  # trained stages of the backbone's five


SIZES = tuple((size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))) for size in (32, 64, 128, 256, 512))
RATIOS = ((0.5, 1.0, 2.0),) * len(SIZES)


class ExactAnchors(AnchorGenerator):  # type: ignore[misc]
    """Anchors in float32. torchvision's own have the features' dtype: in bfloat16 a corner at pixel 700 may be 2
    off."""

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        shapes = [feature.new_zeros((), dtype=torch.float32).expand(feature.shape) for feature in feature_maps]
        anchors: list[Tensor] = super().forward(image_list, shapes)
        return anchors


def in_float32(_head: nn.Module, _inputs: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return losses and boxes in float32, for the same reason."""
    return {name: output.float() for name, output in outputs.items()}


def group_norm(channels: int) -> nn.GroupNorm:
    """Trains from scratch with any batch size, and equally on any number of ranks: it doesn't mix images."""
    return nn.GroupNorm(32, channels)


def keep_counter(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    """Keep a file's batch counter, which frozen batch norms lack: it shows that they were ordinary ones, with an
    epsilon."""
    state[prefix + COUNTER] = torch.zeros((), dtype=torch.int64)


def build(classes: int, image_size: int, weights: Path | None) -> tuple[RetinaNet, list[str]]:
    """Return the model and, for the log, where its weights come from.

    Files have batch norms, whose statistics stay fixed. A model trained from scratch, and a file of one, has group
    norms instead.
    """
    if weights is None:
        return empty(classes, image_size, group_norm, FRESH_STAGES), ["weights: fresh, with group norm"]
    state = _read(weights)
    frozen = any(name.endswith("running_mean") for name in state)
    model = empty(classes, image_size, FrozenBatchNorm2d if frozen else group_norm, TUNED_STAGES)
    notes = [f"weights: {weights}, {'frozen batch norm' if frozen else 'group norm'}"]
    counted = any(name.endswith(COUNTER) for name in state)
    for module in model.modules() if frozen else ():
        if isinstance(module, FrozenBatchNorm2d) and counted:
            module.register_state_dict_post_hook(keep_counter)
        elif isinstance(module, FrozenBatchNorm2d):
            # Trained with torchvision's own, which added no epsilon: so does torchvision for its COCO file.
            module.eps = 0.0
    notes += _fill(model, state, weights)
    learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return model, [*notes, f"{learned:,} parameters learn; the backbone's first stages stay as they are"]


def empty(classes: int, image_size: int, norm: Any, stages: int) -> RetinaNet:
    backbone = resnet_fpn_backbone(
        backbone_name="resnet50",
        weights=None,
        norm_layer=norm,
        trainable_layers=stages,
        returned_layers=[2, 3, 4],  # RetinaNet skips the finest level: too many anchors
        extra_blocks=LastLevelP6P7(256, 256),
    )
    # The data loader has resized the images already; _skip_resize is how torchvision's own training says so.
    longest = round(image_size * LONGEST)
    anchors = ExactAnchors(SIZES, RATIOS)
    model = RetinaNet(backbone, classes, image_size, longest, anchor_generator=anchors, _skip_resize=True)
    model.head.register_forward_hook(in_float32)
    return model


def _read(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"cannot be read: {str(error).splitlines()[0]}", str(path)) from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError("is not a state dict: names and tensors", str(path), "torch.save(model.state_dict(), …)")
    return state


def _fill(model: RetinaNet, state: dict[str, Tensor], path: Path) -> list[str]:
    """Fill the model: every tensor of the file must have a place and every place a tensor, except a head of other
    classes."""
    wanted = model.head.classification_head.cls_logits.weight.shape[0]
    logits = state.get(f"{HEAD}cls_logits.weight")
    fresh = logits is not None and logits.shape[0] != wanted
    if logits is not None and fresh:
        for name in [name for name in state if name.startswith(HEAD)]:
            del state[name]
    try:
        outcome = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # shapes
        raise UserError(str(error), str(path)) from None
    missing = [name for name in outcome.missing_keys if not (fresh and name.startswith(HEAD))]
    for what, names in (("lacks", missing), ("has what no RetinaNet has:", outcome.unexpected_keys)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{what} {', '.join(names[:3])}{more}", str(path), "retinanet_resnet50_fpn's state dict")
    if logits is None or not fresh:
        return []
    anchors = wanted // model.head.classification_head.num_classes
    classes = f"{logits.shape[0] // anchors} classes, this data has {wanted // anchors}"
    return [f"the classification head is fresh: the file is for {classes}; all else is from the file"]
