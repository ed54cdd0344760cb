"""Tests a block as one operator beside its layers. The generic gate does the rest."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.ops.problems import DEVICE, assert_within_budget, results, setting
from tnp.dispatch import devices
from tnp.dispatch.call import forget
from tnp.dispatch.plans import launch_configs
from tnp.dispatch.registry import catalog
from tnp.gates.results import Setting
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.ops.transformer_block import OPERATOR, reference, sdpa
from tnp.tasks.task import Task

CONFIG = TNPConfig(d_x=2, d_model=32, n_layers=2, n_heads=2, d_ff=48, n_components=3)
FUSED = Variant.named("fused")
VARIANTS = {
    "fused": FUSED,
    "centred": Variant.named("fused_centred"),
    "automatic": replace(FUSED, mlp="auto"),
    "8 bits": replace(FUSED, attention="e4m3"),
}
WIDE = replace(CONFIG, d_model=64, n_heads=1)  # of attention in 8 bits: head_dim 64


def task(seed: int = 0) -> Task:
    drawn = torch.Generator().manual_seed(seed)
    shapes = (2, 7, 2), (2, 7, 1), (2, 5, 2), (2, 5, 1)
    points = (torch.randn(shape, generator=drawn).to(DEVICE) for shape in shapes)
    return Task(*points, torch.tensor([7, 4], dtype=torch.int32, device=DEVICE))


def model(variant: Variant) -> TransformerNP:
    torch.manual_seed(0)
    if variant.attention == "e4m3":
        return TransformerNP(WIDE, variant, torch.bfloat16).to(DEVICE)
    return TransformerNP(CONFIG, variant).to(DEVICE)


def one_by_one(net: TransformerNP) -> TransformerNP:
    """Returns the model with an empty hook at each MLP."""
    for block in net.blocks:
        block.mlp.register_forward_hook(lambda *_: None)
    return net


def functions(loss: torch.Tensor) -> list[str]:
    """Returns the names of our autograd functions in the graph of a loss."""
    found, nodes, seen = [], [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        plan = getattr(node, "plan", None)
        found += [] if plan is None else [plan.operator.name]
        nodes += [one for one, _ in node.next_functions]
    return sorted(found)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_block_gives_the_bits_of_its_layers(variant):
    found = []
    for net in (model(variant), one_by_one(model(variant))):
        loss = net.loss(task())
        count = functions(loss).count("transformer_block")
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in net.parameters()]
        loss.backward()  # the first pass must have left the graph whole
        twice = [p.grad for p in net.parameters()]
        assert all(map(torch.equal, [2 * x for x in once], twice))
        found.append((count, loss, once))
    (whole, loss, gradients), (apart, other_loss, others) = found
    automatic = variant.mlp == "auto"  # where no GPU is, it takes PyTorch's form
    assert (whole, apart) == (0 if automatic and DEVICE.type == "cpu" else CONFIG.n_layers, 0)
    assert torch.equal(loss, other_loss) and all(map(torch.equal, gradients, others))


@pytest.mark.parametrize("n_keys", [False, True])
def test_sdpa_computes_the_formula(n_keys):
    sizes = {"batch": 2, "rows": 9, "d_model": 32, "d_ff": 48, "n_heads": 2, "n_q": 6, "n_k": 5}
    of = setting(OPERATOR, "fused", "float32", update=True, n_keys=n_keys, **sizes)
    assert_within_budget(of, results(of, lambda *given: sdpa(*given, **of.options)))


def test_variants_with_a_layer_of_pytorch_have_no_whole_block():
    assert replace(FUSED, mlp="torch").block is None
    assert replace(FUSED, skip_unread=False).block is None


@pytest.mark.parametrize("frozen", ["blocks.1.mlp", "blocks"])
def test_gradients_stop_where_nothing_asks_for_one(frozen):
    gradients = []
    for net in (model(FUSED), one_by_one(model(FUSED))):
        net.get_submodule(frozen).requires_grad_(False)
        net.loss(task()).backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    for name, one in gradients[0].items():
        other = gradients[1][name]
        assert (one is None) == (other is None) == name.startswith(frozen), name
        assert one is None or torch.equal(one, other), name


class Doubled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: torch.Tensor, update: torch.Tensor) -> tuple:
        h, update = self.layer(h, update)
        return h, 2 * update


def replaced(net: TransformerNP) -> None:
    for block in net.blocks:
        block.mlp = Doubled(block.mlp)


def hooked(net: TransformerNP) -> None:
    for block in net.blocks:
        block.mlp.register_forward_hook(lambda _module, _given, found: (found[0], 2 * found[1]))


def overridden(net: TransformerNP) -> None:
    for block in net.blocks:
        block.mlp.forward = Doubled(block.mlp.forward).forward


@pytest.mark.parametrize("change", [replaced, hooked, overridden])
def test_changes_of_a_layer_take_effect(change: Callable):
    net, other = model(FUSED), model(FUSED)
    with torch.no_grad():
        for block in other.blocks:
            block.mlp.down.mul_(2)
    change(net)
    assert torch.equal(net.loss(task()), other.loss(task()))


def test_a_method_of_a_layer_may_be_replaced():
    net, other = model(FUSED), model(FUSED)
    with torch.no_grad():
        for block in other.blocks:
            block.attention.output.mul_(2)
    for block in net.blocks:
        attend = block.attention.attend
        block.attention.attend = lambda *given, attend=attend: 2 * attend(*given)
    assert torch.equal(net.loss(task()), other.loss(task()))


def padded(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy whose rows lie further apart."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), 7, dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x)


def test_saved_tensors_may_come_back_as_copies():
    gradients = []
    for unpack in (lambda x: x, lambda x: padded(x) if x.dim() > 1 else x):
        net = model(FUSED)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            net.loss(task()).backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_plan_names_the_kernels_of_its_layers():
    forget()
    model(FUSED).loss(task()).backward()
    blocks = [one for one in launch_configs() if one["problem"].count("transformer_block")]
    assert blocks and all("attention.fused" in one and "mlp.forward" in one for one in blocks)


def test_the_bounds_of_an_mlp_in_8_bits_find_each_control():
    found = catalog().load("transformer_block", "fused")
    cases = OPERATOR.cases(devices.of_device(DEVICE))
    case = next(case for case in cases if case.problem["mlp"] == "e4m3" and case.problem["update"])
    setting = Setting.of(OPERATOR, found, case, DEVICE)
    for broken in (reference, *OPERATOR.controls.values()):
        got = setting.results(broken, setting.inputs, setting.upstream)
        is_red = any(ratio > bound for _, ratio, bound in setting.judged(got))
        assert is_red == (broken is not reference)
