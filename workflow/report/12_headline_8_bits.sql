-- # The training step in 8 bits
-- Variant `fp8` multiplies in e4m3. It is named here with what that costs. PyTorch's best is in 16
-- bits or, if it is faster, in 8 bits by package torchao. Training is judged on each GPU.
select
    device,
    shape,
    best_pytorch_step_ms as "PyTorch's_best,_ms",
    step_ms as "ours,_ms",
    tokens_per_s / 1e3 as "ours,_thousand_tokens/s",
    variant,
    products_in as accuracy,
    ratio_cell(speedup, speedup_low, speedup_high) as against_plain,
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_best,
    verdict_best as verdict
from speedup
where leads and valid and not varies and precision != ''
order by device desc, n_context asc, n_target asc, batch desc;
