-- # Whether it trains as well
-- Each row has runs in pairs that start from the same weights and see the same tasks, a pair for
-- each seed. "Held out" is the mean log-likelihood of a target in nats, on tasks that the runs were
-- not trained on; higher is better. "Inside" is the share of those targets that lie in their
-- prediction's interval of 90 %, in percent. Differences are from the variant that is compared
-- with, and their intervals are of 90 %. Weights trained in 8 bits predict in 16; "in 8 bits" is
-- the difference if they predict in 8. "Last in 16 bits" counts final steps in 16 bits. "Equal in
-- training" means that the intervals of "difference" and "difference inside" lie within ± 0.01 nats
-- and ± 1 %, and that no run diverged. "Less accurate a step" means that gate `batch_noise` is red.
-- Rows that emulate a format of products are controls.
select
    device,
    concat(replace(source, '_', ' '), ', ', batch, ' × (', n_context, ', ', n_target, ')') as tasks,
    steps,
    variant,
    nullif(products, '') as emulates,
    nullif(last_in_16_bits, 0) as last_in_16_bits,
    baseline_variant as compared_with,
    format('{} of {}', n_pairs, n_seeds) as seeds_in_pairs,
    n_diverged as diverged,
    format('{:.4f}', heldout_log_likelihood) as held_out,
    format('{:.4f} ({:.4f} to {:.4f})', mean_difference, difference_low, difference_high)
        as difference,
    format(
        '{:.4f} ({:.4f} to {:.4f})',
        difference_8_bits,
        difference_8_bits_low,
        difference_8_bits_high
    ) as in_8_bits,
    format('{:.2f}', 100 * coverage) as inside,
    format('{:.2f} to {:.2f}', 100 * coverage_low, 100 * coverage_high) as difference_inside,
    verdict
from training_seeds
where n_seeds > 1
order by
    device asc,
    source asc,
    batch desc,
    steps desc,
    products asc,
    last_in_16_bits asc,
    variant asc;
