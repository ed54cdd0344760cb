"""Declares the tables of the result store and all their columns, as Arrow schemas.

Units are in the names. Every table of measurements starts with the columns of `PROVENANCE`. A new
column goes to the end of its table, and is null for older files. Renaming or removing one raises
`SCHEMA_VERSION`, which every Parquet file has in its metadata.
"""

from collections.abc import Mapping

from tnp.util.extras import require

pa = require("pyarrow", "measurements", "workflow")

SCHEMA_VERSION = 1

STATISTICS = ("mean", "std", "min", "max", "p50", "p95", "p99")
STATUSES = ("ok", "oom", "unsupported", "gate_failed", "timeout", "killed", "error")

PROVENANCE = [
    ("device", pa.string()),  # slug of the measured device: "nvidia-h200", "cpu"
    ("environment_id", pa.string()),
    ("recorded_at", pa.timestamp("us", tz="UTC")),
]


def _statistics(prefix: str) -> list[tuple[str, pa.DataType]]:
    return [(f"{prefix}_{name}", pa.float64()) for name in STATISTICS]


# Conditions while a timing ran (NVML), and time spent outside it.
CONDITIONS = [
    ("n_samples", pa.int32()),
    ("n_warmup", pa.int32()),
    ("setup_s", pa.float64()),  # imports, model, inputs
    ("compile_s", pa.float64()),  # first call: Triton, torch.compile, graph capture
    ("measure_s", pa.float64()),  # warm-up and timing loop
    ("sm_clock_mhz_mean", pa.float64()),
    ("sm_clock_mhz_min", pa.float64()),
    ("power_w_mean", pa.float64()),
    ("temperature_c_max", pa.float64()),
    ("throttle_reasons", pa.string()),  # NVML reasons other than idle, joined by "|"; "" is none
    ("throttled", pa.bool_()),  # a thermal or hardware slow-down was active
]

OUTCOME = [("status", pa.string()), ("reason", pa.string())]

STEP_KEY = [
    ("config_id", pa.string()),  # without the replicate
    ("study", pa.string()),
    ("shape", pa.string()),
    ("variant", pa.string()),
    ("batch", pa.int32()),
    ("n_context", pa.int32()),
    ("n_target", pa.int32()),
    ("dtype", pa.string()),  # compute dtype; parameters are float32 in every variant
    ("checkpoint", pa.bool_()),
    ("cuda_graph", pa.bool_()),
    ("optimizer", pa.bool_()),  # false: forward and backward only (memory feasibility)
    ("replicate", pa.int32()),
]

PREDICTION_KEY = [
    ("config_id", pa.string()),  # names the form, not the replicate
    ("study", pa.string()),
    ("shape", pa.string()),
    ("variant", pa.string()),
    ("batch", pa.int32()),
    ("n_context", pa.int32()),
    ("n_target", pa.int32()),  # targets of one prediction
    ("dtype", pa.string()),
    # "anew" | "encode" | "kept" | "replayed" | "bare" (`tnp/bench/predictions.py`), "drawn" |
    # "drawn_anew" | "trained" | "trained_plain" (`tnp/bench/joint.py`)
    ("form", pa.string()),
    ("replicate", pa.int32()),
]

# A language model that reads prompts and writes new tokens: `tnp/bench/language.py`.
GENERATION_KEY = [
    ("config_id", pa.string()),  # names the form, not the replicate
    ("study", pa.string()),
    ("shape", pa.string()),  # the run's name in config.yaml
    ("model", pa.string()),
    ("form", pa.string()),  # a key of `tnp.bench.language_forms.FORMS`
    ("weights", pa.string()),  # "bf16" | "int8" | "int4": of linear layers
    ("batch", pa.int32()),
    ("n_prompt", pa.int32()),  # tokens of each prompt
    ("n_new", pa.int32()),  # tokens that a call writes for each prompt
    ("dtype", pa.string()),  # of activations and the cache
    ("replicate", pa.int32()),
]

PROFILE_KEY = [
    ("config_id", pa.string()),
    ("op", pa.string()),
    ("shape", pa.string()),
    ("problem", pa.string()),  # JSON: op, dtype, sizes and options that are on
    ("implementation", pa.string()),
    ("pass", pa.string()),  # "forward" | "backward"
    ("with_forward", pa.bool_()),  # the backward pass has its forward in it
    ("sections", pa.string()),  # "quick" | "full": how much Nsight Compute was asked for
]

HOST_STEP_KEY = [
    ("shape", pa.string()),
    ("variant", pa.string()),
    ("batch", pa.int32()),
    ("n_context", pa.int32()),
    ("n_target", pa.int32()),
    ("dtype", pa.string()),
    ("cuda_graph", pa.bool_()),
]

OP_KEY = [
    ("config_id", pa.string()),
    ("op", pa.string()),
    ("pass", pa.string()),  # "forward" | "backward" (of mixture_nll with its forward)
    ("implementation", pa.string()),
    ("shape", pa.string()),
    ("batch", pa.int32()),
    ("n_q", pa.int32()),  # rows of a task
    ("n_k", pa.int32()),
    ("n_heads", pa.int32()),
    ("head_dim", pa.int32()),
    ("dtype", pa.string()),
    ("replicate", pa.int32()),
]

# The variant of a step, or a language model's form; null in rows from before there were several
# operators.
VARIANT = [
    ("operators", pa.string()),  # JSON: operator → implementation
    ("gates", pa.string()),  # gates that the step waits for, joined by "|"
]

# Sizes of operators other than attention. An operator has the sizes that it depends on.
OP_SIZES = [
    ("d_model", pa.int32()),
    ("d_ff", pa.int32()),
    ("d_ff_storage", pa.int32()),  # d_ff after zero-padding
    ("n_components", pa.int32()),
]

# The problem of an operator that declares it (`tnp/dispatch/spec.py`); null in rows from before.
CONTRACT = [
    ("problem", pa.string()),  # JSON: op, dtype, sizes and options that are on
    ("draw", pa.string()),  # JSON: how values were drawn; "{}" where nothing is said
    ("provider", pa.string()),  # "own", "torch", or the package that the implementation is of
    ("packages", pa.string()),  # JSON: name → version of the packages that it needs
    ("rank", pa.int32()),  # its place among the operator's implementations; 0 is PyTorch's form
    ("precision", pa.string()),  # number format of products if not the dtype; else ""
    ("with_forward", pa.bool_()),  # the backward pass was timed with its forward
    ("forced", pa.string()),  # JSON: operation → kernel and configuration of a tuning trial
    ("peak_memory_bytes", pa.int64()),  # one call's, beyond its inputs; null on a CPU
]

# `run_id` is drawn for each process that measures. It is null in early rows: there, rows of one
# device and `recorded_at` are a run.
RUN = [("run_id", pa.string())]

# Rows of one code version agree in these hashes (`tnp/bench/evidence.py`). Early rows have null in
# all columns.
EVIDENCE = [
    ("spec_hash", pa.string()),  # model, sizes, and what the variant's name means
    ("kernels_hash", pa.string()),  # rows of table `code` with part "kernel" or "package"
    ("source_hash", pa.string()),  # rows of table `code` with part "module" or "definition"
    ("timing_hash", pa.string()),  # the timing policy
    ("role", pa.string()),  # one of ROLES
    ("settled", pa.bool_()),  # medians of the first and the last third of the samples agree
]

# "baseline": the specification's step, an operator's plain form. "peer": PyTorch's other ways, and
# other packages. "own": any operator of ours is in it.
ROLES = ("baseline", "peer", "own")

# Formats of products that controls of training emulate.
EMULATED = ("e4m3", "e5m2", "e4m3_unscaled")

# Their rows measure the best rates of the device itself.
CEILINGS = ("ceiling_matmul", "ceiling_copy", "ceiling_read")
# `ceiling_matmul` has a row for each of these number formats, as the row's dtype.
FORMATS = ("bfloat16", "float16", "tf32", "int8", "e4m3")

TABLES: dict[str, pa.Schema] = {
    name: pa.schema(PROVENANCE + columns)
    for name, columns in {
        "environments": [
            ("device_name", pa.string()),
            ("sm_count", pa.int32()),
            ("compute_capability", pa.string()),
            ("memory_bytes", pa.int64()),
            ("driver", pa.string()),
            ("cuda", pa.string()),
            ("cudnn", pa.string()),
            ("torch", pa.string()),
            ("triton", pa.string()),
            ("python", pa.string()),
            ("platform", pa.string()),
            ("cpu_count", pa.int32()),
            ("git_commit", pa.string()),
            ("git_dirty", pa.bool_()),
            ("torch_threads", pa.int32()),
            ("gpu_uuid", pa.string()),
            ("power_limit_w", pa.float64()),
            ("packages", pa.string()),  # JSON: name → version
            ("processor", pa.string()),  # the host's model name; null in earlier rows
            # Cores' worth of time that the control group allows; null where it sets no limit.
            ("cpu_limit", pa.float64()),
        ],
        "gates": [
            ("gate", pa.string()),  # "attention_forward"
            ("phase", pa.int32()),
            ("implementation", pa.string()),  # "" where the check is not about one
            ("check", pa.string()),  # what was compared, with sizes
            ("metric", pa.string()),  # "max_abs_error", "error_ratio", "cosine", …
            ("value", pa.float64()),
            ("bound", pa.float64()),
            ("passed", pa.bool_()),
            ("mode", pa.string()),  # "gpu" | "interpreter" | "cpu"
            *OUTCOME,  # "ok" | "unsupported" (skipped, with the reason) | "error"
            ("op", pa.string()),  # operator of the implementation; null is attention
            *RUN,
            ("problem", pa.string()),  # JSON of the operator's problem; "" without an operator
            ("kernel", pa.string()),  # our kernels that ran: "forward, backward"; else ""
        ],
        "steps": [
            *STEP_KEY,
            *OUTCOME,
            *_statistics("step_ms"),
            ("tokens_per_s", pa.float64()),
            ("peak_memory_bytes", pa.int64()),
            ("flops", pa.float64()),  # the model's, whatever a variant leaves out
            ("tflops", pa.float64()),  # TFLOP/s at the median, for the variant's own FLOPs
            ("mfu", pa.float64()),  # tflops over the device's measured matmul ceiling; null if none
            *CONDITIONS,
            *VARIANT,
            ("choices", pa.string()),  # JSON: what "auto" chose, per operator and sizes; else null
            *RUN,
            *EVIDENCE,
            ("energy_j", pa.float64()),  # one step's; null if sampling took less than a second
            ("launch_config", pa.string()),  # JSON: kernels and configurations by problem
            ("varies", pa.bool_()),  # a stream of tasks whose sizes vary; sizes are its means
            ("padded_share", pa.float64()),  # padding's share of rows outside attention
            ("precision", pa.string()),  # a narrower number format of products, "e4m3"; else ""
            # Wall time of a step: sampling on the host's clock, between two waits for the device,
            # over its steps. Null in early rows.
            ("step_ms_wall", pa.float64()),
        ],
        "ops": [
            *OP_KEY,
            *OUTCOME,
            *_statistics("time_ms"),
            ("flops", pa.float64()),
            ("bytes", pa.float64()),  # fewest through device memory: each operand once
            ("tflops", pa.float64()),  # TFLOP/s at the median
            ("gb_per_s", pa.float64()),
            ("launch_config", pa.string()),
            ("max_abs_error", pa.float64()),  # the output's, checked again after timing
            *CONDITIONS,
            *OP_SIZES,
            *RUN,
            *EVIDENCE,
            ("gates", pa.string()),  # gates that the implementation waits for, joined by "|"
            ("twin", pa.bool_()),  # a second contender of the same implementation: view `noise`
            *CONTRACT,
            # "throughput" | "latency" (`tnp/bench/policy.py`), which are never compared with each
            # other; null in rows that are older than "latency".
            ("timing", pa.string()),
            ("bytes_written", pa.float64()),  # written part of `bytes`; null in early rows
            # The host's time of planning once, which no other time includes; null without a plan.
            ("plan_ms", pa.float64()),
        ],
        "predictions": [  # predictions in a row over one context, and its encoding
            *PREDICTION_KEY,
            *OUTCOME,
            *_statistics("time_ms"),  # of one prediction; "drawn" forms: of one target
            # Compares with a prediction made anew in float32 with the same weights, relative to the
            # largest mixture parameter. Null without an encoding or if kernels take no float32.
            ("max_relative_error", pa.float64()),
            *CONDITIONS,
            *VARIANT,
            *RUN,
            *EVIDENCE,
        ],
        "generations": [  # calls that write new tokens after random prompts
            *GENERATION_KEY,
            *OUTCOME,
            *_statistics("prompt_ms"),  # a call that writes one token
            # The longer call of a round, less the one of one token, over the tokens between.
            *_statistics("token_ms"),
            ("tokens_per_s", pa.float64()),  # of all sequences, at the median of token_ms
            ("bare_ms", pa.float64()),  # a step without the loop around it; null if none is apart
            ("n_kernels", pa.int32()),  # kernels and copies of one token; null on a CPU
            ("bytes", pa.float64()),  # counted: weights and cache that a step must read
            ("peak_memory_bytes", pa.int64()),  # weights, and what a call adds; null on a CPU
            ("packages", pa.string()),  # JSON: name → version
            *CONDITIONS,
            *VARIANT,
            *RUN,
            *EVIDENCE,
        ],
        "samples": [
            ("config_id", pa.string()),
            ("replicate", pa.int32()),
            # "step" | "forward" | "backward" | "prediction"; of a language model
            # "generation FORM" | "prompt FORM"
            ("pass", pa.string()),
            ("sample", pa.int32()),
            ("time_ms", pa.float64()),
            *RUN,
            ("t_s", pa.float64()),  # when the sample ended, since sampling began
            ("sm_clock_mhz", pa.float64()),  # the last reading before it ended
            ("n_launches", pa.int32()),  # the sample is the mean of so many launches
        ],
        "stages": [
            *STEP_KEY,
            ("stage", pa.string()),  # embed attention mlp heads loss optimizer other
            *_statistics("time_ms"),
            *RUN,
            ("pass", pa.string()),  # "forward" | "backward" | "optimizer"
            ("n_kernels", pa.int32()),  # kernels and copies of one step
            # "profiler": kernels' time on the device. Null in early rows: they time an eager step
            # from event to event, which includes the host's time, and "backward" was a stage.
            ("source", pa.string()),
        ],
        "training": [
            ("config_id", pa.string()),
            ("run", pa.string()),  # name in config.yaml
            ("variant", pa.string()),
            ("source", pa.string()),  # "gaussian_process", "images"
            ("batch", pa.int32()),
            ("n_context", pa.int32()),
            ("n_target", pa.int32()),
            ("dtype", pa.string()),
            ("seed", pa.int32()),
            ("step", pa.int32()),
            ("elapsed_s", pa.float64()),
            ("learning_rate", pa.float64()),
            ("loss", pa.float64()),  # mean since the last logged row, nats per target value
            ("heldout_log_likelihood", pa.float64()),  # nats per target value, higher is better
            ("heldout_log_likelihood_shuffled", pa.float64()),  # context y permuted: the control
            ("heldout_log_likelihood_stderr", pa.float64()),  # over held-out tasks
            ("exact_log_likelihood", pa.float64()),  # Gaussian-process posterior; null for images
            ("prior_log_likelihood", pa.float64()),  # knowing nothing
            *RUN,
            ("study", pa.string()),  # that compares the run with others; "" or null where none does
            # With a buffer, log p of all targets together: nats per target value, of the
            # first held-out batch, and the standard error of the difference over its tasks. Anew:
            # of the same model, the context encoded again for each target.
            ("joint_log_likelihood", pa.float64()),
            ("joint_log_likelihood_anew", pa.float64()),
            ("joint_difference_stderr", pa.float64()),
            # Share of held-out targets inside the central 90 % interval of their prediction.
            ("heldout_coverage", pa.float64()),
            ("recipe", pa.string()),  # JSON: all that a run and its baseline have in common
            ("baseline", pa.string()),  # variant that the run is compared with; "" where with none
            ("operators", pa.string()),  # JSON: operator → implementation
            # Format of emulated products in a control: `tnp/train/emulated_products.py`; else "".
            ("products", pa.string()),
            # `heldout_log_likelihood` if weights of 8 bits predict in 8; null in other runs.
            ("heldout_log_likelihood_8_bits", pa.float64()),
            # How many of the last steps of a run in 8 bits were in 16; 0 or null: none.
            ("last_in_16_bits", pa.int32()),
        ],
        "kernels": [
            ("kernel", pa.string()),
            ("target", pa.string()),  # "sm_80", "sm_86", …, "sm_100a"
            ("dtype", pa.string()),
            ("launch_config", pa.string()),
            ("registers", pa.int32()),
            ("spill_bytes", pa.int32()),
            ("shared_bytes", pa.int32()),
            ("shared_limit_bytes", pa.int32()),
            ("num_warps", pa.int32()),
            ("num_stages", pa.int32()),
            ("compile_s", pa.float64()),
            ("warnings", pa.string()),  # of ptxas, one a line; "" means none
            *RUN,
        ],
        "host_calls": [  # what an eager call costs the host
            ("op", pa.string()),
            ("problem", pa.string()),
            ("pass", pa.string()),  # "forward" | "recorded" | "training" | "chain"
            ("implementation", pa.string()),  # "bare_function": an autograd.Function of nothing
            ("with_launches", pa.bool_()),  # false: every launch of ours was replaced by nothing
            *OUTCOME,
            *_statistics("host_us"),
            ("n_samples", pa.int32()),  # rounds of some calls each
            *RUN,
        ],
        "host_steps": [  # what a training step costs the host: `tnp/bench/host_steps.py`
            *HOST_STEP_KEY,
            ("spec_hash", pa.string()),  # model, sizes, and what the variant's name means
            ("role", pa.string()),  # one of ROLES
            *OUTCOME,
            *_statistics("host_ms"),  # time until a step's call returns, on an idle device
            *_statistics("step_ms"),  # time of one of several steps back to back
            ("n_samples", pa.int32()),  # turns of some steps each
            ("compile_s", pa.float64()),  # first steps: Triton, torch.compile, graph capture
            *RUN,
        ],
        "trials": [  # a row is one candidate of one problem in tuning
            ("operation", pa.string()),  # "forward" | "separate" | "fused"
            ("shape", pa.string()),
            ("batch", pa.int32()),
            ("n_q", pa.int32()),
            ("n_k", pa.int32()),
            ("n_heads", pa.int32()),
            ("head_dim", pa.int32()),
            ("dtype", pa.string()),
            ("capability", pa.int32()),  # 90 is 9.0
            ("kernel", pa.string()),
            ("launch_config", pa.string()),
            ("is_default", pa.bool_()),  # this runs where the tuned table has no entry
            *OUTCOME,
            *_statistics("time_ms"),
            ("max_relative_error", pa.float64()),  # compared with the first candidate's results
            *CONDITIONS,
            *RUN,
            *EVIDENCE,
        ],
        # A row is one kernel of one launch of an implementation, as Nsight Compute saw it. If there
        # is nothing to see, a row without a kernel says why in `status` and `reason`.
        "profiles": [
            *PROFILE_KEY,
            *OUTCOME,
            ("ncu", pa.string()),  # version of Nsight Compute
            ("launch", pa.int32()),  # its place among the kernels of the pass, from 0
            ("kernel", pa.string()),  # demangled, without parameters, shortened
            ("duration_us", pa.float64()),  # caches are cold, clocks are the GPU's own choice
            ("occupancy_percent", pa.float64()),  # active warps over the most that an SM holds
            ("theoretical_occupancy_percent", pa.float64()),  # what the launch leaves room for
            ("sm_percent", pa.float64()),  # the busiest SM unit's share of its peak
            ("memory_percent", pa.float64()),  # the same for units between SMs and memory
            ("dram_percent", pa.float64()),
            ("l2_percent", pa.float64()),
            ("l2_hit_percent", pa.float64()),  # hits over requested sectors
            ("registers", pa.int32()),  # a thread
            ("shared_bytes", pa.int32()),  # a block
            # The three longest reasons why warps wait, each with its share of a warp's time between
            # two instructions; null for `quick` sections.
            ("stall_1", pa.string()),
            ("stall_1_percent", pa.float64()),
            ("stall_2", pa.string()),
            ("stall_2_percent", pa.float64()),
            ("stall_3", pa.string()),
            ("stall_3_percent", pa.float64()),
            *RUN,
        ],
        "code": [  # the code that a gate or a measurement ran
            *RUN,
            ("implementation", pa.string()),  # "" for a gate or a step
            # Early layouts have a row for each part of each run, with the columns of `code_parts`.
            ("part", pa.string()),
            ("name", pa.string()),
            ("hash", pa.string()),
            ("code_set", pa.string()),  # names rows of `code_parts`; null in earlier layouts
        ],
    }.items()
} | {
    "code_parts": pa.schema(  # each set of code once, whoever ran it
        [
            ("code_set", pa.string()),  # a digest of the set's rows: `tnp.store.code_sets`
            # "kernel" | "package" (its version is the hash) | "definition"; earlier rows: "module"
            ("part", pa.string()),
            ("name", pa.string()),
            ("hash", pa.string()),
        ]
    )
}

# Rows of data/literature: how fast others say that language models decode.
LITERATURE = pa.schema(
    [
        ("system", pa.string()),
        ("model", pa.string()),
        ("weights", pa.string()),  # null where the source does not say it
        ("batch", pa.int32()),
        ("n_prompt", pa.int32()),
        ("n_new", pa.int32()),
        ("hardware", pa.string()),
        ("tokens_per_s", pa.float64()),  # of all sequences
        ("basis", pa.string()),  # "stated", or "counted" from another figure of the source
        ("source", pa.string()),
        ("published", pa.string()),  # a date, as exact as it is known
    ]
)


def check_fits(table: str, values: Mapping[str, object]) -> None:
    """Raises ValueError for one of `values` that a column of its name in `table` cannot hold."""
    for column in TABLES[table]:
        try:
            pa.scalar(values.get(column.name), column.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            raise ValueError(
                f"{column.name}: {values[column.name]!r} is more than table {table} can hold, "
                f"whose column is of type {column.type}"
            ) from None
