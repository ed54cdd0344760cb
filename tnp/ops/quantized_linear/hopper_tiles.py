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
et al., arXiv 2301.03598). Each of them leaves a part, in the order of its registers. A second
launch adds up parts in the order of inputs, so that results are equal from run to run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
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
from tnp.ops._shared.few_rows import chained, follow
from tnp.ops._shared.hopper_primitives import barriers, structure
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops.quantized_linear.definition import OPTIONS
from tnp.ops.quantized_linear.triton_tiles import empty

CAPABILITY = 90
CONSUMERS = gl.constexpr(2)
PRODUCER_REGISTERS = gl.constexpr(24)
ALIGNED = 16  # bytes, of which rows are multiples that TMA reads
MOST_SUB = 64  # inputs whose numbers are made at a time, at most
# Steps of a program, at least, if a tile has as many. More programs would leave more parts.
LEAST_STEPS = 4
PIECE = 16  # rows of 64 outputs whose parts a program adds
MOST_AHEAD = 8  # parts that it loads at a time
# Without a bound, ptxas aims at 32 registers, and a sum waits for one part after another.
ADDING_REGISTERS = 80


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets a tile.

    rows: of x in a tile. outputs: of a tile. inputs: of a stage. stages: in flight. registers: of a
    consumer's thread. What is left of a multiprocessor's registers lets the launch that adds parts
    begin early.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    registers: int


CONFIGS = (
    Config(32, 128, 128, 6, 120), Config(64, 128, 128, 5, 168), Config(128, 128, 128, 4, 240),
)  # fmt: skip


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


@gluon.constexpr_function
def part_layout(rows):
    """Returns the layout of 64 outputs of a part as a vector: threads store 16 bytes together."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2]] + [[512 << i] for i in range((rows // 8).bit_length() - 1)],
        lane_bases=[[4], [8], [16], [32], [64]], warp_bases=[[128], [256]], block_bases=[],
        shape=[64 * rows],
    )  # fmt: skip


@gluon.jit
def store_part(parts_ptr, sums, slot, WARPGROUP: gl.constexpr, M: gl.constexpr):
    """Writes sums [64, M] as a thread has them. `in_rows` restores their order."""
    FLAT: gl.constexpr = part_layout(M)
    # Warps, halves, lanes; eight rows, lanes, pairs
    part = gl.reshape(sums, [4, 2, 8, M // 8, 4, 2])
    part = gl.reshape(gl.permute(part, (3, 0, 2, 4, 1, 5)), [64 * M])
    part = gl.convert_layout(part, FLAT, assert_trivial=True)
    to = parts_ptr + (slot * CONSUMERS + WARPGROUP).to(gl.int64) * (64 * M)
    gl.store(to + gl.arange(0, 64 * M, layout=FLAT), part)


@gluon.jit
def consume(
    steps, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr, n_rows, n_out, n_groups,
    dtype: gl.constexpr, WARPGROUP: gl.constexpr, BITS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, INPUTS: gl.constexpr, SUB: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Multiplies N outputs of each tile. GROUP is 0 if a row has one scale."""
    SUMS: gl.constexpr = sums_layout(M)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LAYOUT: gl.constexpr = word_layout(BITS, N, SUB * BITS // 32)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    OF_WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    SUBS: gl.constexpr = INPUTS // SUB
    AT_END: gl.constexpr = GROUP == 0  # all products are added in one sum
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
        if n == steps.n_steps:
            if HAS_BIAS:
                bias = gl.load(bias_ptr + outputs, mask=in_outputs, other=0.0)
                sums += bias.to(gl.float32)[:, None]
            STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
            y = gl.convert_layout(sums.to(dtype), STORED)
            rows = tile % steps.n_row_tiles * M + gl.arange(0, M, layout=gl.SliceLayout(0, STORED))
            columns = output + gl.arange(0, N, layout=gl.SliceLayout(1, STORED))
            to = rows.to(gl.int64)[None, :] * n_out + columns[:, None]
            gl.store(y_ptr + to, y, mask=(rows < n_rows)[None, :] & (columns < n_out)[:, None])
        else:
            # A program has a part of the tile in which it begins, and of the one in which it ends.
            slot = gl.program_id(0) * 2 + (at > steps.begin).to(gl.int32)
            store_part(parts_ptr, sums, slot, WARPGROUP, M)
        at += n


@gluon.jit(do_not_specialize=["n_rows", "n_steps", "n_row_tiles", "n_tiles", "each"])
def hopper_tiles_kernel(
    codes_desc, x_desc, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr,
    n_rows, n_out, n_groups, n_steps, n_row_tiles, n_tiles, each,
    BITS: gl.constexpr, HAS_ZEROS: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, SUB: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes `each` steps of all tiles. Parts are float32 [programs, 2, OUTPUTS · ROWS]."""
    dtype: gl.constexpr = x_desc.dtype
    begin = gl.program_id(0) * each
    follow(True)
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
                steps, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr, n_rows, n_out, n_groups,
                dtype, 0, BITS, HAS_ZEROS, HAS_BIAS, GROUP, INPUTS, SUB, ROWS, N,
            )),
            (consume, (
                steps, scales_ptr, zeros_ptr, bias_ptr, y_ptr, parts_ptr, n_rows, n_out, n_groups,
                dtype, 1, BITS, HAS_ZEROS, HAS_BIAS, GROUP, INPUTS, SUB, ROWS, N,
            )),
            (produce, (steps, codes_desc, x_desc, INPUTS, INPUTS * BITS // 32)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@triton.jit
def in_rows(part, ROWS: tl.constexpr):
    """Returns [ROWS, 64 outputs] from ROWS of a part that `store_part` writes."""
    split = tl.reshape(part, [ROWS // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(split, (0, 3, 5, 1, 4, 2)), [ROWS, 64])


@triton.jit(do_not_specialize=["n_rows", "n_steps", "n_row_tiles", "each", "apart"])
def add_tile_parts_kernel(
    parts_ptr, bias_ptr, y_ptr, n_rows, n_out, n_steps, n_row_tiles, each, apart,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PIECE: tl.constexpr,
    AHEAD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of 64 outputs of PIECE rows of a tile. AHEAD parts are loaded at a time.

    Tiles with parts are `apart` steps from one another, at least.
    """
    PIECES: tl.constexpr = OUTPUTS // 64 * (ROWS // PIECE)
    SIZE: tl.constexpr = 64 * PIECE
    piece = tl.program_id(0) % PIECES
    tile = tl.program_id(0) // PIECES * apart // n_steps
    first, last = tile * n_steps // each, ((tile + 1) * n_steps - 1) // each
    begin = tile % n_row_tiles * ROWS + piece % (ROWS // PIECE) * PIECE
    outputs = tile // n_row_tiles * OUTPUTS + piece // (ROWS // PIECE) * 64 + tl.arange(0, 64)
    part = parts_ptr + piece * SIZE + tl.arange(0, SIZE)
    # The first program may have begun in an earlier tile.
    before = (first * each < tile * n_steps).to(tl.int32)
    follow(CHAINED)
    if (first < last) & (begin < n_rows):
        acc = tl.zeros([SIZE], tl.float32)
        for some in tl.range(first, last + 1, AHEAD):
            program = some + tl.arange(0, AHEAD)
            slot = 2 * program + tl.where(program == first, before, 0)
            at = slot.to(tl.int64) * (OUTPUTS * ROWS)
            parts = tl.load(part[None, :] + at[:, None], mask=(program <= last)[:, None], other=0.0)
            acc += tl.sum(parts, 0)
        rows = begin + tl.arange(0, PIECE)
        y = in_rows(acc, PIECE)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + outputs, mask=outputs < n_out, other=0.0)
            y += bias.to(tl.float32)[None, :]
        at = rows.to(tl.int64)[:, None] * n_out + outputs[None, :]
        mask = (rows < n_rows)[:, None] & (outputs < n_out)[None, :]
        tl.store(y_ptr + at, cast(y, y_ptr.dtype.element_ty), mask=mask)


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


def adding(call: Call, config: Config) -> Bound:
    """Returns the launch that writes y from parts float32 [programs, 2, outputs, rows], bias, y."""
    p = call.problem
    n_steps, n_row_tiles, n_tiles, each, _ = shares(call, config)
    # Every tile may have parts, or only those in which a program begins.
    apart = max(each, n_steps)
    programs = triton.cdiv(n_tiles * n_steps, apart)
    programs *= config.outputs // 64 * (config.rows // PIECE)
    # Parts of a tile, at most: tiles begin anywhere in a share, or all with one.
    most = triton.cdiv(n_steps - 1, each) + 1 if n_steps % each else n_steps // each
    return Bound(
        add_tile_parts_kernel, (programs,), p["rows"], p["n_out"], n_steps, n_row_tiles, each,
        apart, HAS_BIAS=p["bias"], ROWS=config.rows, OUTPUTS=config.outputs, PIECE=PIECE,
        AHEAD=min(MOST_AHEAD, triton.next_power_of_2(most)), num_warps=4, maxnreg=ADDING_REGISTERS,
        **chained(call.target),
    )  # fmt: skip


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, weight, scales, _zeros, _bias = inputs
    p, shape = call.problem, (*x.shape[:-1], len(weight))
    n_steps, n_row_tiles, n_tiles, each, programs = shares(call, config)
    words = config.inputs * p["bits"] // 32
    group = 0 if scales.shape[1] == 1 else p["group"]
    # A launch gives every thread the mean, in eights, and the kernel moves registers to consumers.
    maxnreg = 8 * triton.cdiv(
        CONSUMERS.value * config.registers + PRODUCER_REGISTERS.value, 8 * (CONSUMERS.value + 1)
    )
    kernel = Bound(
        hopper_tiles_kernel, (programs,), p["rows"], p["n_out"], scales.shape[1], n_steps,
        n_row_tiles, n_tiles, each,
        maps=(described(config.outputs, words), described(config.rows, config.inputs)),
        BITS=p["bits"], HAS_ZEROS=p["zeros"], HAS_BIAS=p["bias"], GROUP=group, ROWS=config.rows,
        OUTPUTS=config.outputs, INPUTS=config.inputs, SUB=min(group or MOST_SUB, MOST_SUB),
        STAGES=config.stages, REGISTERS=config.registers, num_warps=4, launch_pdl=True,
        maxnreg=maxnreg,
    )  # fmt: skip
    add = adding(call, config) if each % n_steps else None
    of_parts = programs if add else 0, 2, config.outputs, config.rows

    def launch(inputs, scalars):
        x, weight, scales, zeros, bias = inputs
        y = x.new_empty(shape)
        scales = scales.contiguous()
        zeros = scales if zeros is None else zeros.contiguous()
        bias = scales if bias is None else bias.contiguous()
        words = as_rows(weight).view(torch.int32)
        parts = x.new_empty(of_parts, dtype=torch.float32)
        kernel(words, as_rows(x), scales, zeros, bias, y, parts)
        if add:
            add(parts, bias, y)
        return (y,), ()

    return launch


FORWARD = Kernel(
    "hopper_tiles", empty, prepare, supported, configs, options=OPTIONS, compiled_for=(CAPABILITY,)
)
