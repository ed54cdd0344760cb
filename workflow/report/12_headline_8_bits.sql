-- # The training step in 8 bits
-- Variant `fp8` multiplies in e4m3, which is less accurate. Column "products in" says whether
-- training on this GPU was equal to training in 16 bits. PyTorch's best is in 16 bits or, if that
-- is faster, in 8 bits by package torchao.
select
    device,
    shape,
    of_peer(best_pytorch_role, best_pytorch_step_ms) as "PyTorch's_best,_ms",
    step_ms as "ours,_ms",
    tokens_per_s / 1e3 as "ours,_thousand_tokens/s",
    variant,
    products_in,
    ratio_cell(speedup, speedup_low, speedup_high) as against_plain,
    of_peer(best_pytorch_role, ratio_cell(speedup_best, speedup_best_low, speedup_best_high))
        as against_best,
    of_peer(best_pytorch_role, verdict_best) as verdict_against_best
from speedup
where leads and valid and not varies and precision != ''
order by device asc, n_context asc, n_target asc, batch desc;
