"""Tests that a tensor whose elements lie far apart gives the same results: offsets are 64-bit.

The catalog says which operators there are, so a new one is tested without a word here. Each kernel
of ours that Triton's interpreter runs gets each input and each arriving gradient from memory that
nobody else touches, one dimension at a time. The offsets of half of that dimension do not fit in 32
bits.

An offset that wraps around at 32 bits stays inside the same memory, at most 2³¹ elements ahead of
the tensor. The kernel then reads zeros there: a fault shows in numbers and kills no process.
"""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.ops.problems import HERE, unexpected
from tnp.dispatch import devices
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call, Case, Operator
from tnp.gates.forced import Forced, Pair, pairs_of
from tnp.gates.results import Results, Setting
from tnp.ops._shared.random_values import Random
from tnp.ops.attention import attention

pytestmark = pytest.mark.skipif(
    HERE is not devices.INTERPRETER,
    reason="pages that nobody touches cost nothing on a CPU alone: a GPU would need 17 GB a tensor",
)

FAR = 2**31
LEAST = 3  # with 2 in a dimension its offset is the stride, which Triton passes in 64 bits
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python knows the name from 3.13 on
# Cases with as many in each dimension, where the gate's have fewer.
_WIDE_CACHE = {"k_descale": True, "v_descale": True, "cache": "e4m3", "descale_each": True}
WIDER = {
    "attention": [
        ("float32", 3, 1, 5, 6, 16, {"n_keys": True, "lengths": "1,4,6"}),
        ("float32", 1, 3, 5, 6, 16, {"lse": True}),
    ],
    "buffered_attention": [
        ("float32", 3, 1, 7, 4, 16, 1, {"n_keys": True, "lengths": "2,3,1", "n_groups": 1}),
        ("float32", 1, 3, 7, 4, 16, 1, {"n_groups": 1}),
    ],
    "decode_attention": [
        ("float32", 3, 6, 3, 3, 48, 16, 16, {"page_table": True, "lengths": "5,17,48"}),
        ("bfloat16", 3, 6, 3, 3, 48, 16, 48, {"lengths": "5,17,48", **_WIDE_CACHE}),
    ],
    "embedding": [
        ("float32", 18, 7, 16, {"x_context": True, "y_context": True, "x_target": True,
                                "batch": 3, "n_context": 3, "d_x": 3}),
    ],
    "linear": [("float32", 9, 32, 16, {"batch": 3})],
    "rms_norm_linear": [("float32", 9, 48, 16, {"batch": 3, "start": 1})],
    "rope": [("float32", 3, 3, 3, 5, 16, {"positions": True})],
    "qk_norm_rope": [("float32", 3, 3, 3, 5, 16, {"positions": True})],
}  # fmt: skip


class ProductsOfCopies(TorchDispatchMode):
    """Gives PyTorch's products a copy of each operand that reaches 2³¹ elements or more.

    On a CPU its own offsets may wrap around: it depends on the processor and the dtype whether a
    product of far columns is right, wrong or kills the process.
    """

    PRODUCTS = frozenset(
        getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm", "linear")
    )

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.overloadpacket in self.PRODUCTS:
            arguments = tree_map_only(torch.Tensor, self.near, arguments)
        return function(*arguments, **named or {})

    @staticmethod
    def near(x: torch.Tensor) -> torch.Tensor:
        reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return x.contiguous() if reach >= FAR else x


def far(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Returns a copy of x in which `dims` reach 2³¹ elements or more, the last ones first."""
    strides, span = [0] * x.dim(), 1
    for dim in reversed(range(x.dim())):
        if dim not in dims:
            strides[dim], span = span, span * x.shape[dim]
    for dim in reversed(dims):
        each = min(2 * FAR // (x.shape[dim] - 1), 3 * FAR // 4)  # fits in 32 bits
        strides[dim] = -(-max(each, span) // 16) * 16  # Triton and TMA like multiples of 16
        span += strides[dim] * (x.shape[dim] - 1)
    ahead = FAR * len(dims)
    n_bytes = (ahead + span + FAR) * x.element_size()
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError as error:
        pytest.skip(f"this machine gives no {n_bytes / 2**30:.0f} GB of addresses: {error}")
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # 4 KB for an element, not 2 MB
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype)
    return whole.as_strided(x.shape, strides, ahead).copy_(x)


def cases(operator: Operator) -> list[Case]:
    """Returns cases of the gate and wider ones, the smallest first."""
    wider = [operator.case(*sizes, **named) for *sizes, named in WIDER.get(operator.name, ())]

    def n_elements(case: Case) -> int:
        drawn = operator.draw(case, Random(case, torch.device("meta")))
        return sum(x.numel() for x in drawn.values() if x is not None)

    return sorted([*operator.cases(HERE), *wider], key=n_elements)


def results(setting: Setting, pair: Pair, moved: dict[str, torch.Tensor]) -> Results:
    """Returns outputs and gradients; `moved` stand in for inputs and arriving gradients."""
    inputs = {name: moved.get(name, x) for name, x in setting.inputs.items()}

    def upstream(name: str, like: torch.Tensor) -> torch.Tensor:
        return moved.get(f"d{name}", setting.upstream(name, like))

    run = Forced(replace(setting, inputs=inputs), pair, setting.wanted)
    with ProductsOfCopies():
        found = run.results(upstream=upstream)
    return {name: x for name, x in found.items() if x is not None}


def arriving(setting: Setting, pair: Pair) -> dict[str, torch.Tensor]:
    """Returns gradients of the outputs by "d" + name."""
    if not setting.wanted:
        return {}
    operator = setting.operator
    named = operator.of_results(setting.options)
    inputs = tuple(setting.inputs.values())
    outputs, _ = pair.forward.kernel.empty(setting.wanted, inputs, **named)
    names = operator.outputs_of(setting.case.problem)
    return {f"d{n}": setting.upstream(n, x) for n, x in zip(names, outputs, strict=True)}


def each_taken(setting: Setting, pair: Pair, moved: dict[str, torch.Tensor]) -> Iterator[Results]:
    """Yields results of tensors together, or one by one where one is refused."""
    try:
        yield results(setting, pair, moved)
    except ValueError:  # no tensor of these strides is taken, and a sentence says so
        for name, x in moved.items() if len(moved) > 1 else ():
            yield from each_taken(setting, pair, {name: x})


def layouts(tensors: dict[str, torch.Tensor | None]) -> dict[tuple[int, ...], list[str]]:
    """Returns dimensions to put far, and of which tensors.

    They are each that is large enough, and all of a tensor's but its last.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name, x in tensors.items():
        dims = [] if x is None else [dim for dim in range(x.dim()) if x.shape[dim] >= LEAST]
        leading = tuple(dim for dim in dims if dim < x.dim() - 1) if dims else ()
        for some in dict.fromkeys([*((dim,) for dim in dims), *([leading] if leading else [])]):
            found.setdefault(some, []).append(name)
    return found


def runs(pair: Pair, name: str, operator: Operator) -> list[str]:
    """Returns the kernels that read a tensor, with the switches of their configurations."""
    forms = [f"{at} {form.name}" for at, form in enumerate(pair.forms)]
    return forms if name in operator.tensors else forms[1:]


def near_enough(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Returns whether x is at most a rounding from y: products sum by operands' layout."""
    if torch.equal(x, y):
        return True
    x, y, eps = x.double(), y.double(), torch.finfo(y.dtype).eps
    return (x - y).norm().item() <= 2 * eps * y.norm().item()


@pytest.mark.parametrize("route", ["eager", "compiled"])
def test_lengths_may_be_a_column(route):
    """The column is one of a table [B, 2], so it has a stride, which kernels do not take."""
    function = partial(attention, implementation="own")
    if route == "compiled":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    q, k, v = (torch.randn(3, 1, n, 16, requires_grad=True) for n in (4, 9, 9))
    column = torch.tensor([[2, 9], [9, 1], [5, 9]], dtype=torch.int32)[:, 0]
    found, expected = (
        torch.autograd.grad(function(q, k, v, n_keys=n_keys).square().sum(), (q, k, v))
        for n_keys in (column, column.contiguous())
    )
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("op", list(catalog().operators))
def test_no_offset_wraps_around(op):
    operator = catalog().operator(op)
    tried: set[tuple] = set()  # kernel, tensor, dimensions
    given: set[str] = set()
    ours = [own for own in operator.implementations if own.forward is not None]
    for case, own in product(cases(operator), ours):
        setting = unexpected(operator, own, case)
        given |= {name for name, x in setting.inputs.items() if x is not None and x.numel()}
        what = Call(case.problem, HERE, setting.wanted)
        for pair in pairs_of(own, what) if own.refuses(what) is None else ():
            near = None
            tensors = setting.inputs | arriving(setting, pair)
            for dims, names in layouts(tensors).items():
                new = {
                    name: {(part, name, dims) for part in runs(pair, name, operator)} - tried
                    for name in names
                }
                moved = {name: far(tensors[name], dims) for name in names if new[name]}
                if not moved:
                    continue
                tried.update(*new.values())
                near = near or results(setting, pair, {})
                for found in each_taken(setting, pair, moved):
                    for result, x in near.items():
                        assert near_enough(found[result], x), (result, dims, [*moved], pair.name)
    assert given <= {name for *_, name, _ in tried}, "give WIDER a case that has more of these"
