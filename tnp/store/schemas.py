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
    ("config_id", pa.string()),  # with the form, without the replicate
    ("study", pa.string()),
    ("shape", pa.string()),
    ("variant", pa.string()),
    ("batch", pa.int32()),
    ("n_context", pa.int32()),
    ("n_target", pa.int32()),  # of one prediction
    ("dtype", pa.string()),
    # "anew" | "encode" | "kept" | "replayed" | "bare" (`tnp/bench/predictions.py`), "drawn" |
    # "drawn_anew" | "trained" | "trained_plain" (`tnp/bench/joint.py`)
    ("form", pa.string()),
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

# The variant of a step; null in rows from before there were several operators.
VARIANT = [
    ("operators", pa.string()),  # JSON: operator → implementation
    ("gates", pa.string()),  # those the step waits for, joined by "|"
]

# Sizes of operators other than attention; each has those it depends on.
OP_SIZES = [
    ("d_model", pa.int32()),
    ("d_ff", pa.int32()),
    ("d_ff_storage", pa.int32()),  # zero-padded to
    ("n_components", pa.int32()),
]

# The problem of an operator that declares it (`tnp/dispatch/spec.py`); null in rows from before.
CONTRACT = [
    ("problem", pa.string()),  # JSON: op, dtype, sizes and options that are on
    ("draw", pa.string()),  # JSON: how values were drawn; "{}" where nothing is said
    ("provider", pa.string()),  # "own", "torch", or the package that the implementation is of
    ("packages", pa.string()),  # JSON: name → version of the packages that it needs
    ("rank", pa.int32()),  # its place among the operator's implementations; 0 is PyTorch's form
    ("precision", pa.string()),  # of its products, where below the problem's dtype; else ""
    ("with_forward", pa.bool_()),  # the backward pass was timed with its forward
    ("forced", pa.string()),  # JSON: operation → kernel and configuration of a tuning trial
    ("peak_memory_bytes", pa.int64()),  # of one call, beyond its inputs; null on a CPU
]

# The process that measured the row, a number drawn for each. In rows from before there was one it
# is null, and those of one device and `recorded_at` are a run.
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

# The best that the device itself reaches, by the names of their rows' operators.
CEILINGS = ("ceiling_matmul", "ceiling_copy", "ceiling_read")
# Number formats of products that there is a ceiling of: the dtype of its row.
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
            ("processor", pa.string()),  # model name of the host's; null in earlier rows
            # Cores' worth of time that its control group allows; null where it sets no limit.
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
            ("op", pa.string()),  # whose implementation is named; null is attention
            *RUN,
            ("problem", pa.string()),  # JSON of what was computed; "" where it is no operator's
            ("kernel", pa.string()),  # that computed it: "forward, backward"; "" where not ours
        ],
        "steps": [
            *STEP_KEY,
            *OUTCOME,
            *_statistics("step_ms"),
            ("tokens_per_s", pa.float64()),
            ("peak_memory_bytes", pa.int64()),
            ("flops", pa.float64()),  # of the model, whatever a variant leaves out
            ("tflops", pa.float64()),  # TFLOP/s at the median, of what the variant computes
            ("mfu", pa.float64()),  # tflops over the device's measured matmul ceiling; null if none
            *CONDITIONS,
            *VARIANT,
            ("choices", pa.string()),  # JSON: what "auto" chose, per operator and sizes; else null
            *RUN,
            *EVIDENCE,
            ("energy_j", pa.float64()),  # of a step; null where sampling took less than a second
            ("launch_config", pa.string()),  # JSON: kernels and configurations by problem
            ("varies", pa.bool_()),  # a stream of tasks whose sizes vary; sizes are its means
            ("padded_share", pa.float64()),  # of rows computed outside attention, those of padding
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
            ("max_abs_error", pa.float64()),  # of the output, checked again after timing
            *CONDITIONS,
            *OP_SIZES,
            *RUN,
            *EVIDENCE,
            ("gates", pa.string()),  # those the implementation waits for, joined by "|"
            ("twin", pa.bool_()),  # a second contender of the same implementation: view `noise`
            *CONTRACT,
            # "throughput" | "latency" (`tnp/bench/policy.py`), which are never compared with each
            # other; null in rows from before the second was asked for.
            ("timing", pa.string()),
            ("bytes_written", pa.float64()),  # of `bytes`; null in rows from before
            # The host's, of what is planned once and no time has; null where nothing is.
            ("plan_ms", pa.float64()),
        ],
        "predictions": [  # many in a row over one context, and what encodes it
            *PREDICTION_KEY,
            *OUTCOME,
            *_statistics("time_ms"),  # of one; of "drawn" forms of one target
            # To a prediction made anew, in float32 with the same weights, of the largest mixture
            # parameter; null of forms without an encoding, and where kernels take no float32.
            ("max_relative_error", pa.float64()),
            *CONDITIONS,
            *VARIANT,
            *RUN,
            *EVIDENCE,
        ],
        "samples": [
            ("config_id", pa.string()),
            ("replicate", pa.int32()),
            ("pass", pa.string()),  # "step" | "forward" | "backward" | "prediction"
            ("sample", pa.int32()),
            ("time_ms", pa.float64()),
            *RUN,
            ("t_s", pa.float64()),  # when the sample ended, since sampling began
            ("sm_clock_mhz", pa.float64()),  # the last reading before it ended
            ("n_launches", pa.int32()),  # that the sample is the mean of
        ],
        "stages": [
            *STEP_KEY,
            ("stage", pa.string()),  # embed attention mlp heads loss optimizer other
            *_statistics("time_ms"),
            *RUN,
            ("pass", pa.string()),  # "forward" | "backward" | "optimizer"
            ("n_kernels", pa.int32()),  # and copies, of one step
            # "profiler": kernels' time on the device. Null, of earlier rows: from event to event of
            # an eager step, which holds the host's time too; "backward" was a stage.
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
        ],
        "kernels": [
            ("kernel", pa.string()),
            ("target", pa.string()),  # "sm_80", "sm_90a", "sm_100a"
            ("dtype", pa.string()),
            ("launch_config", pa.string()),
            ("registers", pa.int32()),
            ("spill_bytes", pa.int32()),
            ("shared_bytes", pa.int32()),
            ("shared_limit_bytes", pa.int32()),
            ("num_warps", pa.int32()),
            ("num_stages", pa.int32()),
            ("compile_s", pa.float64()),
            ("warnings", pa.string()),  # ptxas's, one a line; "" is none
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
            *_statistics("host_ms"),  # until its call returns, on an idle device
            *_statistics("step_ms"),  # of one of several back to back
            ("n_samples", pa.int32()),  # turns of some steps each
            ("compile_s", pa.float64()),  # first steps: Triton, torch.compile, graph capture
            *RUN,
        ],
        "trials": [  # of tuning: one candidate of one problem
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
            ("is_default", pa.bool_()),  # what runs where the tuned table has nothing
            *OUTCOME,
            *_statistics("time_ms"),
            ("max_relative_error", pa.float64()),  # of a result's largest value, to the first's
            *CONDITIONS,
            *RUN,
            *EVIDENCE,
        ],
        # A row a kernel that one launch of an implementation consists of, as Nsight Compute saw it;
        # one without a kernel where there is nothing to see, and `status` and `reason` say why.
        "profiles": [
            *PROFILE_KEY,
            *OUTCOME,
            ("ncu", pa.string()),  # version of Nsight Compute
            ("launch", pa.int32()),  # its place among the kernels of the pass, from 0
            ("kernel", pa.string()),  # demangled, without parameters, shortened
            ("duration_us", pa.float64()),  # with cold caches, at the clocks that the GPU chooses
            ("occupancy_percent", pa.float64()),  # warps that were active, of the most an SM holds
            ("theoretical_occupancy_percent", pa.float64()),  # what the launch leaves room for
            ("sm_percent", pa.float64()),  # of the peak of the busiest unit of the SMs
            ("memory_percent", pa.float64()),  # the same of all units between SMs and memory
            ("dram_percent", pa.float64()),
            ("l2_percent", pa.float64()),
            ("l2_hit_percent", pa.float64()),  # of sectors that were asked for
            ("registers", pa.int32()),  # a thread
            ("shared_bytes", pa.int32()),  # a block
            # Why warps wait, the three that take most, each with its share of a warp's time between
            # two instructions; null of `quick` sections.
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
            # As in `code_parts`, in rows of earlier layouts: a row for each part of each run.
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
