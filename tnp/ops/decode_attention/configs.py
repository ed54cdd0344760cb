"""Chooses how decode attention's kernel divides the work, and how much it loads ahead."""

import math
from dataclasses import dataclass

import triton

from tnp.dispatch.spec import Call, Problem
from tnp.ops._shared.primitives import KernelConfig
from tnp.ops.decode_attention.definition import cache_itemsize, rows_of

LEAST = 16  # the fewest rows, and keys, of a tensor core's tile
MOST_KEYS = 128  # keys of a block
# The most bytes of keys and values of a block, and its most keys times head_dim or rows.
BLOCK_BYTES, BLOCK_NUMBERS = 32 * 1024, 64 * 128
MOST_STAGES = 8
# Each program has one pair of a sequence and a kv head if pairs fill this share of their waves, and
# if a pair's keys and values have room for at most so many bytes. With more room, a few programs
# could be left with a long sequence. With an e4m3 cache the kernel would spill on Hopper.
FILLED, MOST_WHOLE_BYTES = 0.75, 384 * 1024


@dataclass(frozen=True)
class Config(KernelConfig):
    """Configures the launch.

    block_n: keys of a block.
    programs: programs that a multiprocessor holds at once.
    num_warps: warps of a program.
    num_stages: blocks that are loaded ahead or in use.
    whole: each program has one pair. Otherwise programs have equal shares of all blocks.
    """

    block_n: int
    programs: int
    num_warps: int
    num_stages: int
    whole: bool = False


def tile_rows(problem: Problem) -> int:
    """Returns the rows of the tile of queries that read the same keys."""
    return max(LEAST, triton.next_power_of_2(rows_of(problem)))


def configs(call: Call) -> tuple[Config, ...]:
    """Returns the candidates, the default first. A multiprocessor holds all of its programs."""
    p, target = call.problem, call.target
    width = triton.next_power_of_2(p["head_dim"])
    row_bytes, rows = width * cache_itemsize(p), tile_rows(p)
    most = min(MOST_KEYS, BLOCK_BYTES // (2 * row_bytes), BLOCK_NUMBERS // max(width, rows))
    if p.itemsize == 4:  # products in three parts, whose operands fill the registers
        most = LEAST
    keys, fewer = max(LEAST, most), max(LEAST, most // 2)
    # With four warps 32 rows of D = 128 spill (triton 3.6).
    warps = 4 if rows * width <= (4096 if rows == LEAST else 2048) and row_bytes < 1024 else 8
    # A block is free once it is in registers. From 64 rows on, products read it in shared memory.
    in_use = 0 if rows >= 64 else 1

    def config(block_n: int, programs: int, num_warps: int, kib: int, whole=False) -> Config:
        """Returns the configuration with `kib` KiB of keys and values for each program."""
        blocks = kib * 1024 // (2 * block_n * row_bytes)
        stages = min(max(2, blocks + in_use), MOST_STAGES)
        return Config(block_n, programs, num_warps, stages, whole)

    found = (
        config(keys, 2, warps, 64),
        config(keys, 2, warps, 96),
        config(fewer, 3, warps, 64),
        config(fewer, 2, warps, 96),
        config(keys, 1, warps, 192),
        config(keys, 1, warps, 96),
        config(keys, 1, warps, 64),
    )

    def fits(config: Config) -> bool:
        """Returns whether a multiprocessor holds the programs."""
        blocks = (config.num_stages - in_use) * 2 * config.block_n * row_bytes
        # Operands or results also take memory. Operands are q and weights, in float32 three times.
        operands = rows * (width + config.block_n) * p.itemsize * (1 if p.itemsize == 2 else 3)
        beside = max(operands, rows * width * 4)
        shared = config.programs * (blocks + beside) <= target.shared_bytes
        return shared and config.programs <= max(1, 64 // rows)  # registers hold no more

    if not target.shared_bytes:  # the interpreter
        return found
    whole = config(fewer, 4, warps, 32, whole=True)
    waves = p["batch"] * p["kv_heads"] / (whole.programs * target.multiprocessors)
    is_short = cache_itemsize(p) == 2 and 2 * row_bytes * p["n_keys"] <= MOST_WHOLE_BYTES
    if is_short and waves >= FILLED * max(1, math.ceil(waves)):
        found = whole, *found
    return tuple(filter(fits, dict.fromkeys(found))) or (config(LEAST, 1, 8, 0),)
