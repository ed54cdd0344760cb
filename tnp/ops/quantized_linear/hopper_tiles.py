"""Multiplies by weights of 8 and 4 bits on Hopper, with tensor cores that read codes in registers.

    yᵀ = Σ_g scale_g ∘ ((codes_g − zeros_g) x_gᵀ) + bias

A program keeps one multiprocessor. A producer warp brings codes and x by TMA, and two warpgroups
multiply. Each has its own outputs. A thread reads the words of its outputs from shared memory,
makes its numbers of the left operand from them, and multiplies from these registers. The order of
codes in memory and the instruction's order agree: of a word of eight 4-bit codes, each of the four
threads that share a row needs one neighbouring pair; of 8-bit codes, half a word.

While a warpgroup makes the next numbers, the tensor cores multiply the numbers before. Integers
are exact in 16 bits. The float32 sum of a group is multiplied by the group's scales, while the
other warpgroup multiplies.

Steps of all tiles are shared out equally, so a tile may belong to several programs (Stream-K, Osama
et al., arXiv 2301.03598). Each of them leaves a part. The last to finish adds up all parts, in the
order of inputs, so that results are equal from run to run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason
from tnp.ops._shared.counters import zeros_for
from tnp.ops._shared.hopper_primitives import barriers, structure, thread_barrier
from tnp.ops._shared.primitives import KernelConfig
from tnp.ops.quantized_linear.definition import OPTIONS
from tnp.ops.quantized_linear.triton_tiles import empty

CAPABILITY = 90
CONSUMERS = gl.constexpr(2)
REGISTERS = gl.constexpr(240)
ALIGNED = 16  # bytes, of which rows are multiples that TMA reads
MOST_SUB = 64  # inputs whose numbers are made at a time, at most
# Steps of a program, at least, if a tile has as many. More programs would leave more parts.
LEAST_STEPS = 4


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets the rows of x and the outputs of a tile, the inputs of a stage, and stages in flight."""

    rows: int
    outputs: int
    inputs: int
    stages: int


CONFIGS = Config(32, 128, 128, 6), Config(64, 128, 128, 5), Config(128, 128, 128, 4)


@structure
class Steps:
    """Holds shared memory, barriers, and a program's share of the steps."""

    codes: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    begin: gl.tensor
    end: gl.tensor
    n_steps: gl.tensor  # of a tile
    n_row_tiles: gl.tensor
    STAGES: gl.constexpr


@gluon.constexpr_function
def operand_ptx(bits, dtype, zeros):
    """Returns PTX that makes two pairs of numbers from two words.

    $2, $3: words. $4, $5: for 4 bits how far the pair is shifted, for 8 bits the bytes of the pair
    as an operand of `prmt`. $6, $7: if `zeros`, what is added.
    """
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    high = dtype != gl.bfloat16
    lines = [".reg .b32 a, s, one, c;"]
    lines += [f"mov.b32 one, {'0x3C003C00' if high else '0x3F803F80'};"]
    for i in range(2):
        out, word, place = f"${i}", f"${2 + i}", f"${4 + i}"
        added = f"${6 + i}" if zeros else "c"
        if bits == 4:
            # 128 + code in bfloat16, 1,024 + code in float16
            base = "0x64006400" if high else "0x43004300"
            lines += [f"shr.u32 s, {word}, {place};"]
            lines += [f"lop3.b32 a, s, 0x000F000F, {base}, 0xEA;"]
            lines += [f"mov.b32 c, {'0xE408E408' if high else '0xC308C308'};"]
            lines += [f"fma.rn.{kind} {out}, a, one, {added};"]
        elif high:
            # The byte less its sign becomes 1,024 + code; 1,152 is subtracted.
            lines += [f"prmt.b32 a, {word}, 0x64646464, {place};", "xor.b32 a, a, 0x00800080;"]
            lines += ["mov.b32 c, 0xE480E480;"]
            lines += [f"fma.rn.{kind} {out}, a, one, {added};"]
        else:
            # The low seven bits become 128 + bits. The sign makes 256 of the 128 to subtract.
            lines += [f"prmt.b32 a, {word}, 0x43434343, {place};"]
            lines += ["and.b32 s, a, 0xFF80FF80;", "and.b32 a, a, 0xFF7FFF7F;"]
            lines += ["mov.b32 c, 0xBF80BF80;"]
            lines += [f"fma.rn.{kind} {out}, s, c, a;"]
            if zeros:
                lines += [f"fma.rn.{kind} {out}, {out}, one, {added};"]
    return "{" + "\n".join(lines) + "}"


@gluon.constexpr_function
def word_layout(bits, rows, words):
    """Returns the layout of words [rows, words, parts]. Threads of a row have a part each.

    `rows` is 64 or 128, and a thread has rows g, g + 8 (and g + 64, g + 72).
    """
    k = [[0, 1 << i, 0] for i in range(words.bit_length() - 1)]
    if bits == 4:
        lanes = [[0, 0, 1], [0, 0, 2]]
    else:
        lanes = [[0, 0, 1], [0, 1, 0]]
        k = k[1:]
    lanes += [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    high = [[8, 0, 0]] + ([[64, 0, 0]] if rows == 128 else [])
    return gl.DistributedLinearLayout(
        reg_bases=k + high, lane_bases=lanes, warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[],
        shape=[rows, words, 4 if bits == 4 else 2],
    )  # fmt: skip


@gluon.constexpr_function
def sums_layout(rows):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def twice(bits16):
    """Returns int16 in both halves of int32."""
    wide = bits16.to(gl.int32) & 0xFFFF
    return wide | (wide << 16)


@gluon.jit
def zero_points(zeros, dtype: gl.constexpr, BITS: gl.constexpr):
    """Returns what is added to raised codes, in both halves of a word, for uint8 zero points."""
    if BITS == 8 and dtype == gl.bfloat16:
        return twice((128 - zeros.to(gl.int32)).to(dtype).to(gl.int16, bitcast=True))
    else:
        base: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
        return twice((-base - zeros.to(gl.int32)).to(dtype).to(gl.int16, bitcast=True))


@gluon.jit
def group_of(
    step, sub: gl.constexpr, n_groups, GROUP: gl.constexpr, INPUTS: gl.constexpr, SUB: gl.constexpr
):  # fmt: skip
    """Returns the group of numbers that are made together; the last for numbers past the end."""
    if GROUP == 0:
        return 0
    else:
        return gl.minimum((step * INPUTS + sub * SUB) // GROUP, n_groups - 1)


@gluon.jit
def operand(
    steps, step, sub: gl.constexpr, WARPGROUP: gl.constexpr, of_group, zeros_ptr, in_outputs,
    dtype: gl.constexpr, BITS: gl.constexpr, HAS_ZEROS: gl.constexpr, N: gl.constexpr,
    SUB: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Returns SUB of a step's inputs as the left operand [N, SUB]."""
    W: gl.constexpr = SUB * BITS // 32
    LAYOUT: gl.constexpr = word_layout(BITS, N, W)
    PARTS: gl.constexpr = 4 if BITS == 4 else 2
    codes = steps.codes.index(step % steps.STAGES).slice(WARPGROUP * N, N, dim=0)
    words = codes.slice(sub * W, W, dim=1).load(gl.SliceLayout(2, LAYOUT))
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    part = gl.expand_dims(gl.expand_dims(part, 0), 0)
    # For 8 bits `prmt` takes bytes 0, 1 or 2, 3 of the word.
    place = part * 4 if BITS == 4 else 0x4140 + part * 0x0202
    args = [gl.expand_dims(words, 2), place]
    if HAS_ZEROS:
        zeros = gl.load(zeros_ptr + of_group, mask=in_outputs, other=0)
        added = zero_points(zeros, dtype, BITS)
        args = args + [gl.expand_dims(gl.expand_dims(added, 1), 2)]
    CONSTRAINTS: gl.constexpr = "=r,=r" + ",r,r" * (2 + HAS_ZEROS)
    one, two = gl.inline_asm_elementwise(
        operand_ptx(BITS, dtype, HAS_ZEROS), CONSTRAINTS, args,
        dtype=(gl.int16, gl.int16), is_pure=True, pack=2,
    )  # fmt: skip
    if BITS == 4:
        SHAPE: gl.constexpr = [N, W // 2, 2, 4]
        both = gl.join(gl.reshape(one, SHAPE), gl.reshape(two, SHAPE))
        both = gl.permute(both, (0, 1, 4, 3, 2))
    else:
        SHAPE: gl.constexpr = [N, W // 4, 2, 2, 2]
        both = gl.join(gl.reshape(one, SHAPE), gl.reshape(two, SHAPE))
        both = gl.permute(both, (0, 1, 5, 3, 4, 2))
    numbers = gl.reshape(both, [N, W * 32 // BITS]).to(dtype, bitcast=True)
    return gl.convert_layout(numbers, OPERAND, assert_trivial=True)


@gluon.jit
def follow_gluon():
    """Does the same as `tnp.ops._shared.few_rows.follow`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def produce(steps, codes_desc, x_desc, INPUTS: gl.constexpr, WORDS: gl.constexpr):
    """Loads codes and x of all steps, in the producer."""
    N: gl.constexpr = codes_desc.block_type.shape[0]
    M: gl.constexpr = x_desc.block_type.shape[0]
    BYTES: gl.constexpr = codes_desc.block_type.nbytes + x_desc.block_type.nbytes
    for i in range(steps.end - steps.begin):
        at = steps.begin + i
        tile = at // steps.n_steps
        step = at % steps.n_steps
        stage = i % steps.STAGES
        full = steps.full.index(stage)
        mbarrier.wait(steps.empty.index(stage), ((i // steps.STAGES) & 1) ^ 1)
        mbarrier.expect(full, BYTES)
        row = tile % steps.n_row_tiles * M
        output = tile // steps.n_row_tiles * N
        tma.async_copy_global_to_shared(
            codes_desc, [output, step * WORDS], full, steps.codes.index(stage)
        )
        tma.async_copy_global_to_shared(x_desc, [row, step * INPUTS], full, steps.x.index(stage))


@gluon.jit
def part_at(parts_ptr, slot, WARPGROUP: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    return parts_ptr + (slot * CONSUMERS + WARPGROUP).to(gl.int64) * (M * N)


@gluon.jit
def consume(
    steps, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr, counts_ptr, n_rows, n_out, n_groups,
    each, dtype: gl.constexpr, WARPGROUP: gl.constexpr, BITS: gl.constexpr,
    HAS_ZEROS: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, INPUTS: gl.constexpr,
    SUB: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Multiplies N outputs of each tile. GROUP is 0 if a row has one scale."""
    SUMS: gl.constexpr = sums_layout(M)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LAYOUT: gl.constexpr = word_layout(BITS, N, SUB * BITS // 32)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    OF_WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    SUBS: gl.constexpr = INPUTS // SUB
    AT_END: gl.constexpr = GROUP == 0  # all products are added in one sum
    AHEAD: gl.constexpr = 4 if M <= 64 else 2  # parts that are loaded at a time
    at = steps.begin
    done = at * 0
    while at < steps.end:
        tile = at // steps.n_steps
        first = at % steps.n_steps
        n = gl.minimum(steps.n_steps - first, steps.end - at)
        output = tile // steps.n_row_tiles * (CONSUMERS * N) + WARPGROUP * N
        outputs = output + gl.arange(0, N, layout=OF_SUMS)
        of_words = output + gl.arange(0, N, layout=OF_WORDS)
        in_outputs = outputs < n_out
        in_words = of_words < n_out
        of_sums = outputs.to(gl.int64) * n_groups
        of_words = of_words.to(gl.int64) * n_groups

        sums = gl.zeros([N, M], gl.float32, SUMS)
        some = gl.zeros([N, M], gl.float32, SUMS)
        mbarrier.wait(steps.full.index(done % steps.STAGES), (done // steps.STAGES) & 1)
        left = operand(
            steps, done, 0, WARPGROUP, of_words + group_of(first, 0, n_groups, GROUP, INPUTS, SUB),
            zeros_ptr, in_words, dtype, BITS, HAS_ZEROS, N, SUB, OPERAND,
        )  # fmt: skip
        before = left
        for i in range(n):
            x = steps.x.index(done % steps.STAGES)
            # The numbers of the next step are made before this step's last product is complete. The
            # last step reads its own codes again.
            following = done + (i + 1 < n).to(gl.int32)
            for j in gl.static_range(SUBS):
                right = x.slice(j * SUB, SUB, dim=1).permute((1, 0))
                if AT_END:
                    sums = warpgroup_mma(left, right, sums, is_async=True)
                    if j > 0:
                        sums, _ = warpgroup_mma_wait(1, deps=[sums, before])
                else:
                    if j * SUB % GROUP == 0:
                        group = group_of(first + i, j, n_groups, GROUP, INPUTS, SUB)
                        scale = gl.load(scales_ptr + of_sums + group, mask=in_outputs, other=0.0)
                    some = warpgroup_mma(
                        left, right, some, use_acc=j * SUB % GROUP > 0, is_async=True
                    )
                    if j * SUB % GROUP > 0:
                        some, _ = warpgroup_mma_wait(1, deps=[some, before])
                before = left
                if j + 1 < SUBS:
                    group = group_of(first + i, j + 1, n_groups, GROUP, INPUTS, SUB)
                    left = operand(
                        steps, done, j + 1, WARPGROUP, of_words + group, zeros_ptr, in_words,
                        dtype, BITS, HAS_ZEROS, N, SUB, OPERAND,
                    )  # fmt: skip
                else:
                    mbarrier.wait(
                        steps.full.index(following % steps.STAGES), (following // steps.STAGES) & 1
                    )
                    group = group_of(first + i + 1, 0, n_groups, GROUP, INPUTS, SUB)
                    left = operand(
                        steps, following, 0, WARPGROUP, of_words + group, zeros_ptr, in_words,
                        dtype, BITS, HAS_ZEROS, N, SUB, OPERAND,
                    )  # fmt: skip
                if not AT_END and (j + 1) * SUB % GROUP == 0:
                    some, _ = warpgroup_mma_wait(0, deps=[some, before])
                    sums += some * scale.to(gl.float32)[:, None]
                    # The sums are complete before the next product takes their place.
                    sums, left = warpgroup_mma_wait(0, deps=[sums, left])
            if AT_END:
                sums, _ = warpgroup_mma_wait(0, deps=[sums, before])
            mbarrier.arrive(steps.empty.index(done % steps.STAGES), count=1)
            done += 1
        if AT_END:
            scale = gl.load(scales_ptr + of_sums, mask=in_outputs, other=0.0)
            sums *= scale.to(gl.float32)[:, None]
        complete = n == steps.n_steps
        if n < steps.n_steps:
            # A program has a part of the tile in which it begins, and of the one in which it ends.
            within = gl.arange(0, N, layout=OF_SUMS)[:, None] * M
            within += gl.arange(0, M, layout=gl.SliceLayout(0, SUMS))[None, :]
            own = gl.program_id(0) * 2 + (at > steps.begin).to(gl.int32)
            gl.store(part_at(parts_ptr, own, WARPGROUP, M, N) + within, sums)
            thread_barrier()  # all of the part is written before it counts
            count = counts_ptr + tile * CONSUMERS + WARPGROUP
            program = tile * steps.n_steps // each
            last = ((tile + 1) * steps.n_steps - 1) // each
            complete = gl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == last - program
            if complete:
                # The first program may have begun in an earlier tile.
                slot = 2 * program + (program * each < tile * steps.n_steps).to(gl.int32)
                part = part_at(parts_ptr, slot, WARPGROUP, M, N) + within
                sums = gl.load(part, cache_modifier=".cg")
                while program < last:
                    for _ in gl.static_range(AHEAD):
                        program += 1
                        part = part_at(parts_ptr, 2 * program, WARPGROUP, M, N) + within
                        there = within * 0 + program <= last
                        sums += gl.load(part, mask=there, other=0.0, cache_modifier=".cg")
                gl.store(count, 0)
        if complete:
            if HAS_BIAS:
                bias = gl.load(bias_ptr + outputs, mask=in_outputs, other=0.0)
                sums += bias.to(gl.float32)[:, None]
            STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
            y = gl.convert_layout(sums.to(dtype), STORED)
            rows = tile % steps.n_row_tiles * M + gl.arange(0, M, layout=gl.SliceLayout(0, STORED))
            columns = output + gl.arange(0, N, layout=gl.SliceLayout(1, STORED))
            to = rows.to(gl.int64)[None, :] * n_out + columns[:, None]
            gl.store(y_ptr + to, y, mask=(rows < n_rows)[None, :] & (columns < n_out)[:, None])
        at += n


@gluon.jit(do_not_specialize=["n_rows", "n_steps", "n_row_tiles", "n_tiles", "each"])
def hopper_tiles_kernel(
    codes_desc, x_desc, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr, counts_ptr,
    n_rows, n_out, n_groups, n_steps, n_row_tiles, n_tiles, each,
    BITS: gl.constexpr, HAS_ZEROS: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, SUB: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Computes `each` steps of all tiles' steps.

    Pointers: parts are float32 [programs, 2, OUTPUTS, ROWS]; counts are int32 zeros, two for each
    tile, and zeros again at the end. Both are read only if a tile has parts.
    """
    dtype: gl.constexpr = x_desc.dtype
    begin = gl.program_id(0) * each
    follow_gluon()
    steps = Steps(
        gl.allocate_shared_memory(
            codes_desc.dtype, [STAGES] + codes_desc.block_type.shape, codes_desc.layout
        ),
        gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout),
        barriers(STAGES, 1), barriers(STAGES, CONSUMERS), begin,
        gl.minimum(begin + each, n_tiles * n_steps), n_steps, n_row_tiles, STAGES,
    )  # fmt: skip
    N: gl.constexpr = OUTPUTS // CONSUMERS
    gl.warp_specialize(
        [
            (consume, (
                steps, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr, counts_ptr, n_rows, n_out,
                n_groups, each, dtype, 0, BITS, HAS_ZEROS, HAS_BIAS, GROUP, INPUTS, SUB, ROWS, N,
            )),
            (consume, (
                steps, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr, counts_ptr, n_rows, n_out,
                n_groups, each, dtype, 1, BITS, HAS_ZEROS, HAS_BIAS, GROUP, INPUTS, SUB, ROWS, N,
            )),
            (produce, (steps, codes_desc, x_desc, INPUTS, INPUTS * BITS // 32)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


IN_MEMORY = {"bfloat16": gl.bfloat16, "float16": gl.float16, "int32": gl.int32}


def described(rows: int, columns: int) -> Callable[[Tensor], TensorDescriptor]:
    """Returns a function that describes tiles [rows, columns] of a matrix."""

    def descriptor(x: Tensor) -> TensorDescriptor:
        dtype = IN_MEMORY[str(x.dtype).removeprefix("torch.")]
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return TensorDescriptor.from_tensor(x, [rows, columns], layout)

    return descriptor


def supported(call: Call) -> Reason:
    p, target = call.problem, call.target
    if target.kind != "cuda" or target.capability != CAPABILITY:
        return f"it is written for compute capability {CAPABILITY / 10}"
    each = 8 * ALIGNED // p["bits"]
    if p["n_in"] % each:
        return f"it takes n_in that {each} divides with bits={p['bits']}, not {p['n_in']}"
    return None


def configs(call: Call) -> tuple[Config, ...]:
    """Returns the lowest tile that holds all rows, or the highest."""
    rows = call.problem["rows"]
    return (next((one for one in CONFIGS if one.rows >= rows), CONFIGS[-1]),)


def shares(call: Call, config: Config) -> tuple[int, int, int, int, int]:
    """Returns steps of a tile, tiles along the rows, all tiles, steps of a program, programs."""
    p = call.problem
    n_steps = triton.cdiv(p["n_in"], config.inputs)
    n_row_tiles = triton.cdiv(p["rows"], config.rows)
    n_tiles = n_row_tiles * triton.cdiv(p["n_out"], config.outputs)
    each = triton.cdiv(n_tiles * n_steps, call.target.multiprocessors)
    each = max(each, min(LEAST_STEPS, n_steps))
    return n_steps, n_row_tiles, n_tiles, each, triton.cdiv(n_tiles * n_steps, each)


def as_rows(x: Tensor) -> Tensor:
    """Returns [..., D] as TMA reads it, a matrix from an aligned address: a view if possible."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows if rows.is_meta or rows.data_ptr() % ALIGNED == 0 else rows.clone()


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, weight, scales, _zeros, _bias = inputs
    p, shape = call.problem, (*x.shape[:-1], len(weight))
    n_steps, n_row_tiles, n_tiles, each, programs = shares(call, config)
    words = config.inputs * p["bits"] // 32
    group = 0 if scales.shape[1] == 1 else p["group"]
    kernel = Bound(
        hopper_tiles_kernel, (programs,), p["rows"], p["n_out"], scales.shape[1], n_steps,
        n_row_tiles, n_tiles, each,
        maps=(described(config.outputs, words), described(config.rows, config.inputs)),
        BITS=p["bits"], HAS_ZEROS=p["zeros"], HAS_BIAS=p["bias"], GROUP=group, ROWS=config.rows,
        OUTPUTS=config.outputs, INPUTS=config.inputs, SUB=min(group or MOST_SUB, MOST_SUB),
        STAGES=config.stages, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    has_parts = each % n_steps != 0
    of_parts = programs * has_parts, 2, config.outputs, config.rows

    def launch(inputs, scalars):
        x, weight, scales, zeros, bias = inputs
        y = x.new_empty(shape)
        scales = scales.contiguous()
        zeros = scales if zeros is None else zeros.contiguous()
        bias = scales if bias is None else bias.contiguous()
        words = as_rows(weight).view(torch.int32)
        parts = x.new_empty(of_parts, dtype=torch.float32)
        counts = zeros_for(x, n_tiles * CONSUMERS.value) if has_parts else words
        kernel(words, as_rows(x), scales, zeros, bias, y, parts, counts)
        return (y,), ()

    return launch


FORWARD = Kernel(
    "hopper_tiles", empty, prepare, supported, configs, options=OPTIONS, compiled_for=(CAPABILITY,)
)
