"""Views that the figures read, and exactly the columns that they read of each."""

SHAPE = "shape text, batch integer, n_context integer, n_target integer"
SWITCHES = "variant text, checkpoint boolean, cuda_graph boolean"
OUTCOME = "status text, reason text"
CELLS = ("plain", "checkpoint", "cuda_graph", "checkpoint_cuda_graph")

# View → its columns; `test_views.py` holds workflow/sql to them.
VIEWS = {
    "environments": "device text, device_name text, memory_bytes bigint, recorded_at timestamptz",
    "recording_days": "view_name text, device text, comparison_key text, origin text,"
    " first_day date, last_day date",
    "step_summary": f"device text, {SWITCHES}, dtype text, n_runs bigint, status text",
    "speedup": f"device text, comparison_key text, {SHAPE}, {SWITCHES}, role text, {OUTCOME},"
    " valid boolean, why_not text, dtype text, step_ms double, tokens_per_s double, verdict text,"
    " verdict_best text,"
    " baseline_step_ms double, speedup double, speedup_low double, speedup_high double,"
    " best_pytorch_step_ms double, speedup_best double, speedup_best_low double,"
    " speedup_best_high double, why_no_speedup text, fastest boolean, leads boolean,"
    " winner boolean, varies boolean, precision text,"
    " products_in text",
    "memory": f"device text, {SHAPE}, {SWITCHES}, role text, optimizer boolean, {OUTCOME},"
    " valid boolean, why_not text, peak_memory_gib double, varies boolean, precision text,"
    " products_in text",
    "stage_share": f"device text, {SHAPE}, dtype text, {SWITCHES}, role text, stage text,"
    " pass text, valid boolean, time_ms double, n_kernels bigint, step_ms double, share double,"
    " fastest boolean",
    "training_curves": "device text, run text, variant text, source text, batch integer,"
    " n_context integer, n_target integer, dtype text, seed integer, step integer, loss double,"
    " heldout_log_likelihood double, heldout_log_likelihood_shuffled double,"
    " heldout_log_likelihood_stderr double, exact_log_likelihood double,"
    " prior_log_likelihood double, gap_closed double, nats_from_context double, study varchar,"
    " recipe varchar",
    "training_seeds": "device text, recipe varchar, source text, batch integer, n_context integer,"
    " n_target integer, steps integer, variant text, products varchar, last_in_16_bits integer,"
    " baseline_variant text, n_seeds bigint, n_pairs bigint, difference_8_bits double,"
    " mean_difference double, difference_low double,"
    " difference_high double, margin double, less_accurate boolean, verdict text,"
    " variant_verdict text",
    "training_differences": "device text, run text, variant text, step integer, difference double",
    "training_equivalence": "device text, run text, variant text, baseline_run text,"
    " baseline_variant text, first_step integer, last_step integer, mean_difference double,"
    " difference_low double, difference_high double, is_null_pair boolean, margin double,"
    " equivalent boolean",
    "roofline": f"device text, comparison_key text, op text, pass text, implementation text,"
    " role text, own boolean, valid boolean, shape text, batch integer, dtype text,"
    " time_ms double, tflops double, gb_per_s double, intensity double, ceiling_tflops double,"
    " ceiling_gb_per_s double, bound text, roofline_tflops double, flops double,"
    " bytes double,"
    f" share_of_roofline double, share_low double, share_high double, {OUTCOME}, why_not text",
    "operator_speedup": "device text, comparison_key text, op text, pass text, implementation text,"
    " own boolean, shape text, config_id text, dtype text, batch integer, problem text,"
    " time_ms double, share_of_roofline double, best_peer_implementation text,"
    " speedup_best double, speedup_best_low double, speedup_best_high double, verdict_best text",
    "host": "device text, op text, problem text, pass text, implementation text,"
    " with_launches boolean, host_us double, times_base double, n_runs bigint",
    "step_host": f"device text, processor text, cpu_count integer, cpu_limit double, {SHAPE},"
    f" dtype text, variant text, cuda_graph boolean, role text, {OUTCOME}, host_ms double,"
    " step_ms double, pytorch_variant text, over_pytorch double, over_graph double, n_runs bigint",
    "profiled_passes": f"device text, op text, shape text, problem text, implementation text,"
    f" pass text, own boolean, {OUTCOME}, kernel text, n_kernels bigint, duration_us double,"
    " dominant_share double, sm_percent double, dram_percent double, l2_percent double,"
    " occupancy_percent double, registers integer, shared_bytes integer, stall_1 text,"
    " stall_1_percent double, stall_2 text, stall_2_percent double, stall_3 text,"
    " stall_3_percent double",
    "language_models": "device text, model text, weights text, batch integer, n_prompt integer,"
    f" form text, role text, {OUTCOME}, valid boolean, why_not text, tokens_per_s double,"
    " limit_tokens_per_s double, share_of_limit double, own_speedup double, own_verdict text",
    "literature": "system text, model text, weights text, batch integer, n_prompt integer,"
    " hardware text, tokens_per_s double, basis text, source text, published text",
    "implementations": "op text, implementation text, provider text, rank integer",
    "equal_things": "device text, kind text, part text, shape text, name text,"
    " n_pairs bigint, ratio double, low double, high double, verdict text, contains_1 boolean",
    "noise": "device text, kind text, part text, of_equals double",
    "ablation": f"device text, {SHAPE}, component text, dtype text, {OUTCOME}, base_variant text,"
    " full_variant text, base_ms double, only_ms double, full_ms double, without_ms double,"
    " gain_alone_ms double, gain_alone_low_ms double, gain_alone_high_ms double,"
    " speedup_alone double, gain_last_ms double, gain_last_low_ms double,"
    " gain_last_high_ms double, speedup_last double, verdict_last text, verdict_alone text,"
    " valid boolean, why_not text",
    "matrix": f"device text, {SHAPE}, variant text, role text, precision text, products_in text, "
    + ", ".join(
        f"{cell}_step_ms double, {cell}_tokens_per_s double, {cell}_peak_memory_gib double,"
        f" {cell}_speedup double,"
        f" {cell}_status text, {cell}_valid boolean, {cell}_fastest boolean, {cell}_winner boolean,"
        f" {cell}_why_no_speedup text"
        for cell in CELLS
    ),
}
