"""Saves and loads a model: a folder with its sizes, dtype, units and weights.

Weights are stored at the model's own width, without a variant's zero padding. So any variant can
load them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from tnp.model.config import TNPConfig
from tnp.model.layers import HiddenLayer
from tnp.model.network import Network
from tnp.model.variants import Variant
from tnp.tasks.normalization import Normalization
from tnp.util import tensor_archive
from tnp.util.checks import visible_device

Model = TypeVar("Model", bound=Network)

FILE = "model.pt"
KEYS = frozenset({"config", "compute_dtype", "normalization", "weights"})
REMEDY = "name a folder that TransformerNP.save has written"


def save(model: Network, folder: Path | str) -> None:
    """Writes the model to `folder`. If that fails, an earlier model there stays."""
    normalization, dtype = model.normalization, model.asked_dtype
    weights = unpadded_weights(model)
    state = {
        "config": asdict(model.config),
        "compute_dtype": dtype and str(dtype).removeprefix("torch."),
        "normalization": None if normalization is None else normalization.numbers(),
        "weights": {name: x.cpu().contiguous() for name, x in weights.items()},
    }
    tensor_archive.save(Path(folder) / FILE, state)


def load(
    kind: type[Model],
    folder: Path | str,
    variant: Variant | str,
    device: torch.device | str,
    compute_dtype: torch.dtype | None,
) -> Model:
    device = visible_device(device)
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {FILE}: {REMEDY}")
    state = tensor_archive.load(path, "cpu", KEYS, "model", REMEDY)
    try:
        config = TNPConfig(**state["config"])
        normalization = state["normalization"] and Normalization(**state["normalization"])
        saved_dtype = state["compute_dtype"] and getattr(torch, state["compute_dtype"])
    except (AttributeError, TypeError):
        raise ValueError(
            f"model {path} is of another version of tnp: load it there, or save it again here"
        ) from None
    model = kind(config, variant, compute_dtype or saved_dtype, normalization=normalization)
    set_weights(model, state["weights"])
    return model.to(device)


def unpadded_weights(model: Network) -> dict[str, torch.Tensor]:
    """Returns the model's state as views, with hidden layers at their own width.

    Raises:
        ValueError: padding holds a weight, or the state has unknown or missing names.
    """
    shapes, state = _shapes(model, model.config), model.state_dict()
    others = sorted(state.keys() ^ shapes.keys())
    if others:
        raise ValueError(
            f"the model's weights have unexpected names ({', '.join(others[:3])}), such as those "
            "of a parametrized layer: remove that, or keep the state_dict() yourself"
        )
    require_no_weight_in_padding(model)
    return {name: x[tuple(map(slice, shapes[name]))] for name, x in state.items()}


def require_no_weight_in_padding(model: Network) -> None:
    """Raises ValueError naming a hidden layer whose padding is nonzero or parametrized.

    Variants drop the padding, so nonzero padding would change predictions.
    """
    remedy = "build the model with a variant whose d_ff_storage is None first"
    for prefix, layer in model.named_modules():
        if not isinstance(layer, HiddenLayer) or layer.width == layer.d_ff:
            continue
        units = f"units {layer.d_ff} to {layer.width - 1}"
        if not {"up", "down"} <= layer._parameters.keys():
            raise ValueError(
                f"{prefix} is parametrized, and its padding ({units}) has norm 0: {remedy}"
            )
        for name, part in layer.padding().items():
            if not part.is_meta and part.any():
                raise ValueError(
                    f"{prefix}.{name} holds weights in its padding ({units}): set them to 0, or "
                    f"{remedy}"
                )


@torch.no_grad()
def set_weights(model: Network, weights: dict[str, torch.Tensor]) -> None:
    """Sets the weights that `unpadded_weights` returned. The model takes their dtype.

    Hidden layers of this model may have padding that the weights lack.

    Raises ValueError if the weights belong to a model of other sizes.
    """
    shapes = _shapes(model, model.config)
    found = {name: x.shape for name, x in weights.items()}
    if found != shapes:
        names = sorted(
            name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name)
        )
        raise ValueError(f"the weights do not fit {model.config}: {', '.join(names[:3])} differ")
    model.to(weights["heads.up"].dtype)
    for name, x in model.state_dict().items():
        x.zero_()
        x[tuple(map(slice, shapes[name]))] = weights[name].to(x.device)


def _shapes(model: Network, config: TNPConfig) -> dict[str, torch.Size]:
    """Returns the shapes of all weights, without padding."""
    with torch.device("meta"):
        plain = type(model)(config, Variant("unpadded"))
    return {name: x.shape for name, x in plain.state_dict().items()}
