"""A model as a thing one keeps: a folder with its sizes, its units and its weights.

Weights are stored at the model's own width, without a variant's zero padding, so that whoever loads
them may run them as another variant does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tnp import archive
from tnp.inputs import visible_device
from tnp.normalization import Normalization
from tnp.variants import Variant

if TYPE_CHECKING:
    from tnp.model import TNPConfig, TransformerNP

FILE = "model.pt"
KEYS = frozenset({"config", "compute_dtype", "normalization", "weights"})
REMEDY = "name a folder that TransformerNP.save has written"


def save(model: TransformerNP, folder: Path | str) -> None:
    """Replaces what an earlier call has written there, whole or not at all."""
    normalization = model.normalization
    weights = unpadded_weights(model)
    state = {
        "config": asdict(model.config),
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "normalization": None if normalization is None else normalization.numbers(),
        "weights": {name: x.cpu().contiguous() for name, x in weights.items()},
    }
    archive.save(Path(folder) / FILE, state)


def load(
    kind: type[TransformerNP],
    folder: Path | str,
    variant: Variant | str,
    device: torch.device | str,
    compute_dtype: torch.dtype | None,
) -> TransformerNP:
    from tnp.model import TNPConfig

    device = visible_device(device)
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {FILE}: {REMEDY}")
    state = archive.load(path, "cpu", KEYS, "model", REMEDY)
    try:
        config = TNPConfig(**state["config"])
        normalization = state["normalization"] and Normalization(**state["normalization"])
        saved_dtype = getattr(torch, state["compute_dtype"])
    except (AttributeError, TypeError):
        raise ValueError(
            f"model {path} was not written by this version of the code: {REMEDY}"
        ) from None
    model = kind(
        config,
        Variant.named(variant, config.d_ff) if isinstance(variant, str) else variant,
        compute_dtype or saved_dtype,
        normalization=normalization,
    )
    set_weights(model, state["weights"])
    return model.to(device)


def unpadded_weights(model: TransformerNP) -> dict[str, torch.Tensor]:
    """The model's state, hidden layers at their own width: views of it."""
    shapes = _shapes(model, model.config)
    return {name: x[tuple(map(slice, shapes[name]))] for name, x in model.state_dict().items()}


@torch.no_grad()
def set_weights(model: TransformerNP, weights: dict[str, torch.Tensor]) -> None:
    """What `unpadded_weights` gave, into a model that may store hidden layers wider.

    Raises ValueError where they are not a model's of these sizes.
    """
    shapes = _shapes(model, model.config)
    found = {name: x.shape for name, x in weights.items()}
    if found != shapes:
        names = sorted(
            name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name)
        )
        raise ValueError(
            f"weights are not of a model with {model.config}: {', '.join(names[:3])} differ"
        )
    for name, x in model.state_dict().items():
        x.zero_()
        x[tuple(map(slice, shapes[name]))] = weights[name].to(x.device)


def _shapes(model: TransformerNP, config: TNPConfig) -> dict[str, torch.Size]:
    """Of all weights, without padding."""
    with torch.device("meta"):
        plain = type(model)(config, Variant("unpadded"))
    return {name: x.shape for name, x in plain.state_dict().items()}
