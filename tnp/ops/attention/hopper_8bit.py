"""Attention forward in 8 bits for Hopper: what runs around `hopper_8bit_kernel`.

One launch quantizes, one attends, and where tiles were split along the keys a third adds them up.
"""

from collections.abc import Callable

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason
from tnp.ops.attention import hopper_forward, hopper_primitives
from tnp.ops.attention.definition import OPTIONS
from tnp.ops.attention.hopper_8bit_kernel import attention_fwd_hopper_8bit_kernel
from tnp.ops.attention.hopper_forward import ForwardConfig
from tnp.ops.attention.hopper_forward_pipeline import ROWS
from tnp.ops.attention.hopper_primitives import head_map
from tnp.ops.attention.primitives import LOG2_E, forward, rows_layout
from tnp.ops.attention.quantize import BLOCK, empty, quantizer


def supported(call: Call) -> Reason:
    """As the kernels for 16 bits, but the quantizer reads what TMA cannot."""
    if call.target.kind != "cuda" or call.target.capability != 90:
        return hopper_primitives.supported(call)
    return None


def configs(call: Call) -> tuple[ForwardConfig, ...]:
    """Candidates, the default first: 1.730 and 1.771 ms at mid, 143.0 and 144.2 at large (H200)."""
    return ForwardConfig(BLOCK.value, 2, 160, 3), ForwardConfig(BLOCK.value, 4, 160, 3)


def prepare(call: Call, config: ForwardConfig, inputs: tuple) -> Callable:
    """Quantization, the kernel, and the sum of parts where tiles are split."""
    q, k, _, n_keys = inputs[:4]
    _, n_heads, n_q, _ = q.shape
    of_o, rows = rows_layout(q), ROWS.value
    quantize = quantizer(call, inputs)
    n_tiles, _, (n_whole, n_split, share) = hopper_forward.tiles(call, config)
    kernel = Bound(
        attention_fwd_hopper_8bit_kernel, (call.target.multiprocessors,),
        n_tiles, n_heads, n_q, k.shape[2], n_whole, share,
        maps=(head_map(rows), head_map(config.block_n), head_map(config.block_n), head_map(rows)),
        STAGES=config.num_stages, REGISTERS=config.registers, CONSUMERS=config.consumers,
        HAS_N_KEYS=n_keys is not None, num_warps=4,
    )  # fmt: skip
    of_parts, combine = hopper_forward.parts(call, config, of_o, centred=True)

    def launch(inputs, scalars):
        q, _, _, n_keys = inputs[:4]
        o = q.new_empty_strided(*of_o)
        x = quantize(inputs)
        of_split = x.vector.new_empty_strided(*of_parts) if combine else x.vector
        kernel(
            x.q, x.k, x.v, o, x.q_scale, x.scales, x.vector, of_split,
            x.vector if n_keys is None else n_keys, scalars[0] * LOG2_E,
        )  # fmt: skip
        if combine:
            combine(of_split, o, x.vector)
        return (o,), ()

    return forward(launch, call)


FORWARD = Kernel("hopper_8bit", empty, prepare, supported, configs, OPTIONS)
