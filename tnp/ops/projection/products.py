"""Computes projections by PyTorch's own products, with as few calls as possible, reading only
needed rows.

Gradients of weights are accumulated in float32. Shapes, strides and the list of products are
decided once a plan, so a call costs the host only its calls of PyTorch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.casting import cast_weight
from tnp.ops._shared.operands import dense
from tnp.ops._shared.ranges import asserting, between
from tnp.ops._shared.weight_gradient import product, transposed
from tnp.ops.projection.qkv import query_factor

OPTIONS = ("base2", "centred", "n_keys")  # options of attention's projections
Read = Callable[[torch.Tensor], torch.Tensor]


def empty_gradients(wanted, inputs):
    """Allocates the gradients of x and weight."""
    named = zip(("x", "weight"), inputs[1], strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


# ------------------------------------------------------------------------------- linear


def empty_linear(wanted, inputs):
    x, weight = inputs
    return (x.new_empty((*x.shape[:-1], weight.shape[0])),), ()


def prepare_linear(call: Call, config, inputs):
    x, weight = inputs
    dtype = x.dtype
    if _is_matrix(x):

        def launch(inputs, scalars):
            x, weight = inputs
            return (F.linear(x, cast_weight(weight, dtype)),), ()

        return launch
    shape, rows = (*x.shape[:-1], weight.shape[0]), (call.problem["rows"], x.shape[-1])

    def launch_copied(inputs, scalars):
        x, weight = inputs
        return (F.linear(x.reshape(rows), cast_weight(weight, dtype)).view(shape),), ()

    return launch_copied


def _is_matrix(x: torch.Tensor) -> bool:
    """Returns whether PyTorch multiplies x [..., n_in] as one matrix of rows, without a copy."""
    apart = zip(x.stride()[:-2], x.stride()[1:-1], x.shape[1:-1], strict=True)
    return x.dim() >= 2 and all(outer == inner * size for outer, inner, size in apart)


def prepare_linear_backward(call: Call, config, inputs):
    (dy,), (x, weight), _saved = inputs
    dtype, n_rows, (n_out, n_in) = x.dtype, call.problem["rows"], weight.shape
    strided, flat = not dy.is_contiguous(), x.dim() == 2
    x_wanted, weight_wanted = (name in call.wanted for name in ("x", "weight"))
    multiply = torch.mm if flat else torch.matmul
    times, dy_t, rows = product(x), transposed(n_rows, n_out), (n_rows, n_in)
    cast_back = weight.dtype != torch.float32

    def launch(inputs, scalars):
        (dy,), (x, weight), _saved = inputs
        dx = dweight = None
        if strided:
            dy = dy.contiguous()
        if x_wanted:
            dx = multiply(dy, cast_weight(weight, dtype))
        if weight_wanted:
            dweight = times(dy_t(dy), x if flat else x.reshape(rows))
            if cast_back:
                dweight = dweight.to(weight.dtype)
        return dx, dweight

    return launch


# -------------------------------------------------------------------------- project_qkv


def empty_qkv(wanted, inputs, n_heads, n_q=None, n_k=None):
    batch, n_rows, d_model = inputs[0].shape

    def rows(n):
        n = n_rows if n is None else n
        return inputs[0].new_empty(batch, n, n_heads, d_model // n_heads).transpose(1, 2)

    return (rows(n_q), rows(n_k), rows(n_k)), ()


def prepare_qkv(call: Call, config, inputs):
    return launch_of(call, inputs[0])


def _factor(call: Call) -> float:
    problem = call.problem
    return query_factor(problem["d_model"], problem["n_heads"], problem["base2"])


def are_halves(call: Call) -> bool:
    """Returns whether a call returns k and v as halves of the same rows [B, n_k, 2 · d_model]."""
    return not (call.apart or call.problem["centred"])


def launch_of(
    call: Call, x: torch.Tensor, project_keys: Callable[..., torch.Tensor] | None = None
) -> Callable:
    """Returns the launch of a forward pass on x.

    Keys and values are one product, with k and v as halves of its rows [B, n_k, 2 · D]. They are
    two products if results must lie apart, or if `project_keys` is given. `project_keys` takes
    (rows [B, n_k, D], w_k, n_keys) and returns keys.
    """
    dtype, (batch, n_rows, d_model), n_heads = x.dtype, x.shape, call.problem["n_heads"]
    n_q, n_k = call.problem["n_q"], call.problem["n_k"]
    first, head_dim = n_rows - n_q, d_model // n_heads

    def of_heads(n: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns shape and strides of [B, n, width] as [B, n_heads, n, D]."""
        return (batch, n_heads, n, head_dim), (n * width, head_dim, width, 1)

    of_q, of_one, of_half = (
        of_heads(n_q, d_model),
        of_heads(n_k, d_model),
        of_heads(n_k, 2 * d_model),
    )
    times_q, times_v = _times(n_q, d_model, x, _factor(call)), _times(n_k, d_model, x)
    times_both, widths = _times(n_k, 2 * d_model, x), (d_model, 2 * d_model)

    def as_one(keys, w_keys, n_keys):
        both = times_both(keys, w_keys)
        return both.as_strided(*of_half), both.as_strided(*of_half, d_model)

    def as_two(keys, w_keys, n_keys):
        w_k, w_v = w_keys.chunk(2)
        k = project_keys(keys, w_k, n_keys) if project_keys else times_v(keys, w_k)
        return k.as_strided(*of_one), times_v(keys, w_v).as_strided(*of_one)

    project = as_two if project_keys or call.apart else as_one  # see `are_halves`

    def launch(inputs, scalars):
        x, weight, n_keys = inputs
        w_q, w_keys = cast_weight(weight, dtype).contiguous().split_with_sizes(widths)
        rows = x.narrow(1, first, n_q) if first else x
        keys = x if n_k == n_rows else x.narrow(1, 0, n_k)
        return (times_q(rows, w_q).as_strided(*of_q), *project(keys, w_keys, n_keys)), ()

    if not call.problem["n_keys"]:
        return launch
    return asserting(launch, lambda inputs: [between("n_keys", inputs[2], 1, n_k, "n_k = ")])


def _times(
    n: int, width: int, x: torch.Tensor, factor: float = 1.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function that multiplies `n` rows of every sample of x [B, L, D], the transpose of
    w [width, D] and `factor`, and rounds once. It returns contiguous rows.

    PyTorch reads all rows as one matrix. For some rows it finds out that it cannot, which costs
    twice as much as the call that it then makes.
    """
    batch, n_rows, d_model = x.shape
    if n == n_rows and factor == 1.0:
        return F.linear
    if n == n_rows:
        matrix, of_out = (batch * n, d_model), dense(batch * n, width)

        def all_rows(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out = rows.new_empty_strided(*of_out)
            return _multiply(rows.reshape(matrix), w.t(), out, factor)

        return all_rows
    size, strides = (batch, d_model, width), (0, 1, d_model)
    if factor == 1.0:
        return lambda rows, w: torch.bmm(rows, w.as_strided(size, strides))
    of_rows = dense(batch, n, width)
    return lambda rows, w: _multiply(
        rows, w.as_strided(size, strides), rows.new_empty_strided(*of_rows), factor
    )


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, factor: float) -> torch.Tensor:
    """Writes factor · a b to `out`, for matrices or batches of matrices. It does not read `out`."""
    multiply = torch.addmm if a.dim() == 2 else torch.baddbmm
    return multiply(out, a, b, beta=0, alpha=factor, out=out)


def prepare_qkv_backward(call: Call, config, inputs):
    """Prepares the backward pass. Each of the three gradients may be missing.

    If dk and dv are halves of rows [B, n_k, 2 · D], as our attention writes them, they are
    multiplied as one. Strides decide whether this is possible, and addresses at every call whether
    it is so.
    """
    (dq, dk, dv), kept, _saved = inputs
    d_model = call.problem["d_model"]
    of_three = _gradients(call, kept, (dq, dk, dv), (d_model, d_model, d_model))
    if dk is None or dv is None or not _can_be_halves(dk, dv):
        return lambda inputs, scalars: of_three(inputs[0], inputs[1])
    of_two = _gradients(call, kept, (dq, dk), (d_model, 2 * d_model))
    half = d_model * dk.element_size()

    def launch(inputs, scalars):
        (dq, dk, dv), kept, _saved = inputs
        if dv.data_ptr() - dk.data_ptr() == half:
            return of_two((dq, dk), kept)
        return of_three((dq, dk, dv), kept)

    return launch


def _can_be_halves(dk: torch.Tensor, dv: torch.Tensor) -> bool:
    """Returns whether dk and dv can be halves of the same rows.

    A single row cannot, because the memory behind it may belong to another tensor.
    """
    batch, n_heads, n_k, head_dim = dk.shape
    width = 2 * n_heads * head_dim
    return batch * n_k > 1 and _lies_as_rows(dk, width) and _lies_as_rows(dv, width)


def _lies_as_rows(dy: torch.Tensor, width: int) -> bool:
    """Returns whether [B, n_heads, rows, D] is a view of contiguous [B, rows, width]."""
    _, _, n, head_dim = dy.shape
    steps = zip(dy.stride(), (n * width, head_dim, width, 1), dy.shape, strict=True)
    return all(step == right for step, right, size in steps if size > 1)


def _gradients(
    call: Call, kept: tuple, gradients: tuple, widths: tuple[int, ...]
) -> Callable[[tuple, tuple], tuple]:
    """Returns a function that computes dx and dweight from such gradients.

    Each gradient belongs to the given number of rows of the weight.
    """
    x, weight = kept
    lie_right = [
        dy is None or _lies_as_rows(dy, width) for dy, width in zip(gradients, widths, strict=True)
    ]
    all_right = all(lie_right)
    given = [dy is not None for dy in gradients]
    gradient_of_x = _of_x(call, x, given, widths) if "x" in call.wanted else None
    gradient_of_weight = None
    if "weight" in call.wanted:
        gradient_of_weight = _of_weight(call, x, weight, given, widths)

    def run(gradients, kept):
        x, weight = kept
        if not all_right:
            pairs = zip(gradients, lie_right, strict=True)
            gradients = [dy if right else dy.transpose(1, 2).contiguous() for dy, right in pairs]
        dx = dweight = None
        if gradient_of_x:
            dx = gradient_of_x(gradients, x, weight)
        if gradient_of_weight:
            dweight = gradient_of_weight(gradients, x)
        return dx, dweight

    return run


def _of_x(
    call: Call, x: torch.Tensor, given: list[bool], widths: tuple[int, ...]
) -> Callable[..., torch.Tensor]:
    """Returns a function for dx = dq w_q of rows from `first` on, plus dk w_k + dv w_v."""
    of_dx, dtype, (batch, n_rows, d_model) = dense(*x.shape), x.dtype, x.shape
    n_q, n_k = call.problem["n_q"], call.problem["n_k"]
    first, factor, has_q, has_keys = n_rows - n_q, _factor(call), given[0], any(given[1:])
    of_q = (batch, n_q, d_model), (n_q * d_model, d_model, 1)
    matrix, of_rows = (batch * n_q, d_model), (d_model, 1)
    each = [(batch, width, d_model) for width in widths]
    of_keys = [((batch, n_k, width), (n_k * width, width, 1)) for width in widths[1:]]

    def add_keys(head, gradients, weights, begun):
        """Adds the keys' part to the rows of dx that are keys, or overwrites these rows."""
        for dy, w, as_rows, size in zip(gradients, weights, of_keys, each[1:], strict=True):
            if dy is not None and begun:
                head.baddbmm_(dy.as_strided(*as_rows), w.expand(size))
            elif dy is not None:
                torch.bmm(dy.as_strided(*as_rows), w.expand(size), out=head)
                begun = True

    def of_all_queries(gradients, x, weight):
        dq, *rest = gradients
        w_q, *weights = cast_weight(weight, dtype).split_with_sizes(widths)
        dx = x.new_empty_strided(*of_dx)
        _multiply(dq.as_strided(matrix, of_rows), w_q, dx.view(matrix), factor)
        if has_keys:
            add_keys(dx if n_k == n_rows else dx.narrow(1, 0, n_k), rest, weights, True)
        return dx

    if has_q and first == 0:
        return of_all_queries

    # Rows before `start` have no queries. Keys come first if they share no rows with queries.
    start = first if has_q else n_rows
    keys_begin = has_keys and n_k <= start
    zeros_from = n_k if keys_begin else 0
    n_zeros = start - zeros_from

    def of_parts(gradients, x, weight):
        dq, *rest = gradients
        w_q, *weights = cast_weight(weight, dtype).split_with_sizes(widths)
        dx = x.new_empty_strided(*of_dx)
        if n_zeros:
            dx.narrow(1, zeros_from, n_zeros).zero_()
        if has_q:
            out = dx.narrow(1, first, n_q)
            _multiply(dq.as_strided(*of_q), w_q.expand(each[0]), out, factor)
        if has_keys:
            add_keys(dx.narrow(1, 0, n_k), rest, weights, not keys_begin)
        return dx

    return of_parts


def _of_weight(
    call: Call, x: torch.Tensor, weight: torch.Tensor, given: list[bool], widths: tuple[int, ...]
) -> Callable[..., torch.Tensor]:
    of_dweight, dtype, (batch, n_rows, d_model) = dense(*weight.shape), weight.dtype, x.shape
    n_q, n_k = call.problem["n_q"], call.problem["n_k"]
    queries, keys = _rows(x, n_rows - n_q, n_q), _rows(x, 0, n_k)
    times, times_q = product(x), product(x, _factor(call))
    has_q, has_keys = given[0], any(given[1:])
    of_q = transposed(batch * n_q, d_model)
    of_keys = [(times, transposed(batch * n_k, width)) for width in widths[1:]]
    same = n_q == n_k == n_rows

    def gradient(gradients, x):
        dweight = x.new_empty_strided(*of_dweight, dtype=torch.float32)
        of_queries = queries(x) if has_q else None
        rows = None
        if has_keys:
            rows = of_queries if same and has_q else keys(x)
        reads = (times_q, of_q, of_queries), *((*one, rows) for one in of_keys)
        parts = zip(dweight.split_with_sizes(widths), gradients, reads, strict=True)
        for out, dy, (multiply, dy_t, read) in parts:
            if dy is None:
                out.zero_()
            else:
                multiply(dy_t(dy), read, out=out)
        return dweight if dtype == torch.float32 else dweight.to(dtype)

    return gradient


def _rows(x: torch.Tensor, start: int, n: int) -> Read:
    """Returns a function that reads rows `start` to `start + n` of x [B, L, D] as a matrix [B · n,
    D].

    PyTorch's copy of strided rows moves one element a thread. So elements of 16 bytes are copied if
    possible.
    """
    shape, dtype = (x.shape[0] * n, x.shape[-1]), x.dtype
    if n == x.shape[1]:
        return lambda x: x.reshape(shape)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, start, n).reshape(shape)

    part = x.narrow(1, start, n)
    wide = 16 // x.element_size()
    by_wide = all(size % wide == 0 for size in (x.shape[2], *x.stride()[:2]))
    if part.is_contiguous() or x.stride(2) != 1 or x.data_ptr() % 16 or not by_wide:
        return plain
    wide_shape = shape[0], shape[1] // wide

    def in_wide_elements(x: torch.Tensor) -> torch.Tensor:
        if x.storage_offset() % wide:  # the offset is no multiple of an element
            return plain(x)
        rows = x.view(torch.complex128).narrow(1, start, n)
        return rows.reshape(wide_shape).view(dtype)

    return in_wide_elements


LINEAR = Kernel("cublas", empty_linear, prepare_linear)
LINEAR_BACKWARD = Kernel("cublas", empty_gradients, prepare_linear_backward)
QKV = Kernel("cublas", empty_qkv, prepare_qkv, options=("base2",))
QKV_BACKWARD = Kernel("cublas", empty_gradients, prepare_qkv_backward, options=OPTIONS)
