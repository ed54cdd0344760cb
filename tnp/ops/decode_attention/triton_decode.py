"""Computes decode attention in portable Triton, with an equal share of the work for every program.

A pair is a sequence and a kv head. A unit of work is a block of keys of one pair. To begin a pair
costs START units more, in which no block is read. The units of all pairs form a row, and each
program takes an equal, contiguous part of it. It computes its part from `lengths` on the device. No
shape of a launch depends on lengths, so a captured launch serves any lengths. All queries that read
a kv head's keys, heads of a group times tokens, are one tile of rows.

A pair in one program is finished there. If several programs share a pair, each leaves a part in a
workspace: rows not yet divided, their maxima and their sums. A program has at most two parts: of
the pair in which it begins, and of the pair in which it ends. A second kernel computes in the same
way which programs have parts of a pair, and adds them up in their order. If pairs are many and
short (`Config.whole`), each program takes one pair instead, and there is no second launch.

On Hopper and newer GPUs both launch while the kernel before them runs (`tnp.ops._shared.few_rows`).
The second does its arithmetic and then waits. It may read `lengths` before, because the first
kernel lets it begin when all earlier kernels have ended.

Products accumulate in float32. Softmax is to base 2, with a running maximum, as in
`tnp.ops.attention.portable.forward`. (Even shares: Osama et al., Stream-K, arXiv 2301.03598; parts
along the keys: Dao et al., Flash-Decoding, 2023; pages: Kwon et al., arXiv 2309.06180.)
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.few_rows import chained, follow
from tnp.ops._shared.operands import near
from tnp.ops._shared.primitives import FLOAT32_PRECISION, INTERPRETED, add_dot, cast, dot, widened
from tnp.ops._shared.ranges import asserting, between
from tnp.ops.attention.primitives import LOG2_E, flat, rows_layout
from tnp.ops.decode_attention.configs import Config, configs, tile_rows
from tnp.ops.decode_attention.definition import OPTIONS, rows_of

# The cost of beginning a pair, in blocks. 64 sequences with log-uniform lengths up to 32,768 take
# 278 µs with 0, 255 with 1, 247 with 2 and 250 with 4 (H200).
START = 2
# The precision of float32 products from 64 rows on. Products in three tf32 parts, by matmuls of a
# warpgroup, gave wrong numbers there (Triton 3.6.0, H200).
EXACTLY = "ieee"
LEAST_BATCH = 64  # up to so many sequences share a compiled kernel, which reads as many lengths
# Numbers of a row's parts that are read at once, and that a warp reads: 64 for each thread.
PARTS_AT_ONCE, PARTS_A_WARP = 8192, 2048


@triton.jit
def _n_keys(length, capacity):
    """Returns a length, clamped to the cache's capacity."""
    return tl.minimum(tl.maximum(length, 0), capacity)


@triton.jit
def _n_blocks(n_keys, BLOCK_N: tl.constexpr):
    """Returns the blocks of a pair. An empty sequence has one block without keys: zeros."""
    return tl.maximum(tl.cdiv(n_keys, BLOCK_N), 1)


@triton.jit
def _units(lengths_ptr, stride_l, batch, capacity, BATCH: tl.constexpr, KV_HEADS: tl.constexpr,
           BLOCK_N: tl.constexpr, START: tl.constexpr):  # fmt: skip
    """Returns the sequences' numbers, and the units of each."""
    sequence = tl.arange(0, BATCH)
    length = tl.load(lengths_ptr + sequence * stride_l, mask=sequence < batch, other=0)
    units = START + _n_blocks(_n_keys(length, capacity), BLOCK_N)
    return sequence, tl.where(sequence < batch, units * KV_HEADS, 0)


@triton.jit
def _holder(unit, total, programs):
    """Returns the program that takes a unit; see `_share`."""
    each, more = total // programs, total % programs
    of_longer = unit // (each + 1)
    of_others = more + (unit - more * (each + 1)) // tl.maximum(each, 1)
    return tl.where(unit < more * (each + 1), of_longer, of_others)


@triton.jit
def _share(program, total, programs):
    """Returns the first unit of a program, and of the next. The first ones have one unit more."""
    each, more = total // programs, total % programs
    begin = program * each + tl.minimum(program, more)
    return begin, begin + each + (program < more).to(tl.int32)


@triton.jit
def _pages(table_ptr, stride_tn, key, n_keys, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the pages of the keys from `key` on: one if a block lies in one page, else one a key.

    They are the table's numbers without a sign, so that a negative one is larger than any page.
    """
    if PAGE % BLOCK_N != 0:
        key += tl.arange(0, BLOCK_N)
    page = tl.load(table_ptr + key // PAGE * stride_tn, mask=key < n_keys, other=0)
    return page.to(tl.uint32, bitcast=True)


@triton.jit
def _cache_tile(
    ptr, page, slot, stride_b, stride_n, there, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Loads keys or values of a block [BLOCK_N, WIDTH] as an operand in `dtype`; 0 past the end."""
    offs_d = tl.arange(0, WIDTH)
    rows = page.to(tl.int64) * stride_b + slot.to(tl.int64) * stride_n
    mask = there[:, None]
    if HEAD_DIM < WIDTH:
        mask &= offs_d[None, :] < HEAD_DIM
    x = tl.load(ptr + rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
    if INTERPRETED:
        return widened(x)
    # The cast goes through float32. From e4m3 straight to bfloat16 it would be an F2F conversion
    # for each element on sm_90a.
    return x.to(tl.float32).to(dtype) if x.dtype != dtype else x


@triton.jit
def _descale(ptr, b, h, stride_b, stride_h, GIVEN: tl.constexpr):
    """Returns the factor of a pair's cache."""
    return tl.load(ptr + b * stride_b + h * stride_h) if GIVEN else 1.0


@triton.jit(do_not_specialize=["batch", "capacity", "n_pages"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, parts_ptr, lengths_ptr, table_ptr, k_descale_ptr, v_descale_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_ot, stride_l, stride_tb, stride_tn,
    stride_kdb, stride_kdh, stride_vdb, stride_vdh, batch, capacity, n_pages, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BATCH: tl.constexpr, PAGE: tl.constexpr,
    PAGED: tl.constexpr, K_DESCALE: tl.constexpr, V_DESCALE: tl.constexpr, BLOCK_N: tl.constexpr,
    START: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes o of the pairs that lie in one program, and parts of the other pairs.

    In a contiguous cache each sequence is its own page. WIDTH: HEAD_DIM with padding. WHOLE: each
    program has one pair.

    Reads stay within bounds with any lengths and pages. A number out of range is taken as the
    nearest valid one, and the sum by which its sequence's results are divided becomes NaN.
    """
    follow(CHAINED)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    n_rows: tl.constexpr = GROUP * TOKENS
    program, programs = tl.program_id(0), tl.num_programs(0)
    if WHOLE:
        b = program // KV_HEADS
        length = tl.load(lengths_ptr + b * stride_l)
        n_units = START + _n_blocks(_n_keys(length, capacity), BLOCK_N)
        at = program % KV_HEADS * n_units  # among the sequence's units
        unit, end = at, at + n_units
    else:
        sequence, units = _units(
            lengths_ptr, stride_l, batch, capacity, BATCH, KV_HEADS, BLOCK_N, START
        )
        unit, end = _share(program, tl.sum(units, 0), programs)
        b = tl.sum((tl.cumsum(units, 0) <= unit).to(tl.int32), 0)
        at = unit - tl.sum(tl.where(sequence < b, units, 0), 0)

    last_page = (n_pages - 1).to(tl.uint32)
    row, offs_n, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    token = row % TOKENS
    in_rows = (row < n_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    while unit < end:
        length = tl.load(lengths_ptr + b * stride_l)
        n_keys = _n_keys(length, capacity)
        n_blocks = _n_blocks(n_keys, BLOCK_N)
        n_units = START + n_blocks
        h, of_pair = at // n_units, at % n_units
        taken = tl.minimum(n_units - of_pair, end - unit)
        first, stop = tl.maximum(of_pair - START, 0), of_pair + taken - START
        head = h * GROUP + row // TOKENS
        offs_q = head * stride_qh + token * stride_qt
        q_of = q_ptr + b.to(tl.int64) * stride_qb
        q = tl.load(q_of + offs_q[:, None] + offs_d[None, :], mask=in_rows, other=0.0)
        k_of, v_of = k_ptr + h.to(tl.int64) * stride_kh, v_ptr + h.to(tl.int64) * stride_vh
        table_of = table_ptr + b.to(tl.int64) * stride_tb
        scale = scale_log2 * _descale(k_descale_ptr, b, h, stride_kdb, stride_kdh, K_DESCALE)
        # The queries are the sequence's last tokens. Each sees tokens up to itself, or all if FULL.
        seen = n_keys + 0 * token if FULL else n_keys - TOKENS + 1 + token

        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        weights = tl.zeros([ROWS, BLOCK_N], tl.float32)  # added up at the end, across warps
        m_i = tl.full([ROWS], float("-inf"), tl.float32)
        page, wrong = b, length != n_keys
        if PAGED:
            named = _pages(table_of, stride_tn, first * BLOCK_N, n_keys, PAGE, BLOCK_N)
            wrong |= named > last_page
            page = tl.minimum(named, last_page).to(tl.int32)
        for block in tl.range(first, stop):
            key = block * BLOCK_N + offs_n
            slot, there = key, key < n_keys
            next_page = page
            if PAGED:
                slot = key % PAGE
                # It is read a block ahead for Triton's pipeline: with 4 stages three blocks of keys
                # are then loaded ahead. Read where it is used, it would be one (Triton 3.7.1).
                next_key = (block + 1) * BLOCK_N
                named = _pages(table_of, stride_tn, next_key, n_keys, PAGE, BLOCK_N)
                wrong |= named > last_page
                next_page = tl.minimum(named, last_page).to(tl.int32)
            k = _cache_tile(k_of, page, slot, stride_kb, stride_kn, there, HEAD_DIM, WIDTH, dtype)
            s = dot(q, tl.trans(k), PRECISION) * scale
            s = tl.where(key[None, :] < seen[:, None], s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
            # A row that has seen no key yet may take any finite number.
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s - reference[:, None])
            alpha = tl.math.exp2(m_i - reference)
            weights = weights * alpha[:, None] + p
            v = _cache_tile(v_of, page, slot, stride_vb, stride_vn, there, HEAD_DIM, WIDTH, dtype)
            acc = add_dot(cast(p, dtype), v, acc * alpha[:, None], PRECISION)
            m_i, page = m_new, next_page

        l_i = tl.sum(weights, 1)
        if PAGED and PAGE % BLOCK_N != 0:
            wrong = tl.max(wrong.to(tl.int32), 0) > 0
        l_i = tl.where(wrong, float("nan"), l_i)
        acc *= _descale(v_descale_ptr, b, h, stride_vdb, stride_vdh, V_DESCALE)
        if (first == 0) & (stop == n_blocks):
            o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # without a key acc is 0
            offs_o = head * stride_oh + token * stride_ot
            o_of = o_ptr + b.to(tl.int64) * stride_ob
            tl.store(o_of + offs_o[:, None] + offs_d[None, :], cast(o, dtype), mask=in_rows)
        elif first < stop:
            # A program's first part belongs to the pair in which it begins, its second part to the
            # pair in which it ends.
            part_row = (2 * program + (first == 0).to(tl.int32)) * n_rows + row
            part = parts_ptr + (part_row * HEAD_DIM)[:, None] + offs_d[None, :]
            tl.store(part, acc, mask=in_rows)
            beside = parts_ptr + 2 * programs * n_rows * HEAD_DIM + 2 * part_row
            tl.store(beside, m_i, mask=row < n_rows)
            tl.store(beside + 1, l_i, mask=row < n_rows)
        unit += taken
        at += taken
        if at == n_units * KV_HEADS:
            at, b = 0, b + 1


@triton.jit(do_not_specialize=["batch", "capacity", "programs"])
def _add_parts_kernel(
    parts_ptr, o_ptr, lengths_ptr, stride_ob, stride_oh, stride_ot, stride_l, batch, capacity,
    programs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, BATCH: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    START: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes a row of a pair in several programs: Σ 2^(m − max m)·acc over Σ 2^(m − max m)·l.

    Programs with nothing to add wait too, because the next launch waits only for this kernel.
    """
    n_rows: tl.constexpr = GROUP * TOKENS
    row, pair = tl.program_id(0) % n_rows, tl.program_id(0) // n_rows
    b, h = pair // KV_HEADS, pair % KV_HEADS
    sequence, units = _units(
        lengths_ptr, stride_l, batch, capacity, BATCH, KV_HEADS, BLOCK_N, START
    )
    total = tl.sum(units, 0)
    n_units = tl.sum(tl.where(sequence == b, units, 0), 0) // KV_HEADS
    begin = tl.sum(tl.where(sequence < b, units, 0), 0) + h * n_units
    first = _holder(begin + START, total, programs)
    last = _holder(begin + n_units - 1, total, programs)
    follow(CHAINED)
    if first < last:
        offs_d = tl.arange(0, WIDTH)
        acc = tl.zeros([WIDTH], tl.float32)
        l_i, m_i = 0.0, float("-inf")
        for some in tl.range(first, last + 1, PARTS):
            program = some + tl.arange(0, PARTS)
            there = program <= last
            part_row = (2 * program + (program == first).to(tl.int32)) * n_rows + row
            beside = parts_ptr + 2 * programs * n_rows * HEAD_DIM + 2 * part_row
            m = tl.load(beside, mask=there, other=float("-inf"))
            l = tl.load(beside + 1, mask=there, other=0.0)  # noqa: E741
            part = tl.load(
                parts_ptr + (part_row * HEAD_DIM)[:, None] + offs_d[None, :],
                mask=there[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m_i, tl.max(m, 0))
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight, alpha = tl.math.exp2(m - reference), tl.math.exp2(m_i - reference)
            acc = acc * alpha + tl.sum(part * weight[:, None], 0)
            l_i = l_i * alpha + tl.sum(l * weight, 0)
            m_i = m_new
        o = acc / tl.where(l_i == 0.0, 1.0, l_i)
        offs_o = (h * GROUP + row // TOKENS) * stride_oh + row % TOKENS * stride_ot
        o_of = o_ptr + b.to(tl.int64) * stride_ob + offs_o
        tl.store(o_of + offs_d, cast(o, o_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


def empty(wanted: tuple[str, ...], inputs: tuple) -> tuple[tuple, tuple]:
    """Returns o [B, H, T, D], in memory [B, T, H, D]."""
    q = inputs[0]
    return (q.new_empty_strided(*rows_layout(q)),), ()


def _descale_strides(descale: torch.Tensor | None) -> tuple[int, int]:
    """Returns the strides of sequence and kv head of [H_kv] or [B, H_kv]."""
    if descale is None:
        return 0, 0
    return descale.stride() if descale.dim() == 2 else (0, descale.stride(0))


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    """Prepares the kernel, and the sum of parts if a pair may have several blocks."""
    of_descales = [() if x is None else tuple(range(x.dim())) for x in inputs[5:]]
    read = near(inputs, ((1, 2), (), (), (), (1,), *of_descales))
    q, k, v, lengths, table, k_descale, v_descale = read(inputs)
    p = call.problem
    batch, kv_heads, head_dim, capacity = p["batch"], p["kv_heads"], p["head_dim"], p["n_keys"]
    pairs = batch * kv_heads
    programs = pairs if config.whole else config.programs * call.target.multiprocessors
    width, n_rows = triton.next_power_of_2(head_dim), rows_of(p)
    of_o = rows_layout(q)
    of_parts = flat(2 * programs * n_rows * (head_dim + 2))
    of_pairs = dict(
        KV_HEADS=kv_heads, GROUP=p["heads"] // kv_heads, TOKENS=p["n_queries"], HEAD_DIM=head_dim,
        WIDTH=width, BATCH=max(LEAST_BATCH, triton.next_power_of_2(batch)), BLOCK_N=config.block_n,
        START=START,
    )  # fmt: skip
    # Whether several programs may share a pair.
    split = capacity > config.block_n and not config.whole
    kernel = Bound(
        _decode_kernel, (programs,),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *of_o[1][:3], lengths.stride(0),
        *((0, 0) if table is None else table.stride()),
        *_descale_strides(k_descale), *_descale_strides(v_descale), batch, capacity, len(k),
        ROWS=tile_rows(p), PAGED=table is not None, PAGE=0 if table is None else p["page"],
        K_DESCALE=k_descale is not None, V_DESCALE=v_descale is not None,
        WHOLE=config.whole,
        PRECISION=EXACTLY if p.itemsize == 4 and tile_rows(p) >= 64 else FLOAT32_PRECISION.value,
        FULL=p["full"],
        **of_pairs, **chained(call.target), num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    add_parts = None
    if split:
        # A row reads as many parts at once as a pair has if all lengths are equal. It reads more
        # parts in turns.
        alike = triton.next_power_of_2(triton.cdiv(programs, pairs) + 1)
        at_once = max(4, min(alike, PARTS_AT_ONCE // width))
        add_parts = Bound(
            _add_parts_kernel, (pairs * n_rows,),
            *of_o[1][:3], lengths.stride(0), batch, capacity, programs, PARTS=at_once,
            **of_pairs, **chained(call.target),
            num_warps=max(1, at_once * width // PARTS_A_WARP),
        )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v, lengths, table, k_descale, v_descale = read(inputs)
        o = q.new_empty_strided(*of_o)
        parts = q.new_empty_strided(*of_parts, dtype=torch.float32) if add_parts else o
        kernel(
            q, k, v, o, parts, lengths, lengths if table is None else table,
            lengths if k_descale is None else k_descale,
            lengths if v_descale is None else v_descale, scalars[0] * LOG2_E,
        )  # fmt: skip
        if add_parts:
            add_parts(parts, o, lengths)
        return (o,), ()

    return asserting(launch, partial(_in_range, capacity, p["page"]))


def _in_range(capacity: int, page: int, inputs: tuple) -> Iterator[tuple[torch.Tensor, str]]:
    """Yields conditions on lengths and on the pages that they reach, for `asserting`."""
    _q, k, _v, lengths, table, *_ = inputs
    yield between("n_keys", lengths, 0, capacity, "the cache's ")
    if table is not None:
        used = torch.arange(table.shape[1], device=table.device) * page < lengths[:, None]
        yield between("pages", torch.where(used, table, 0), 0, len(k) - 1)


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=OPTIONS)
