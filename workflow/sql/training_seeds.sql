-- Grain: device × recipe × variant × products × last_in_16_bits × baseline. Compares the final
-- held-out likelihoods of paired seeds.
--
-- A pair has the same recipe, seed, tasks and first weights. Its difference is that of the last
-- held-out log-likelihoods, in nats a target. `equivalent`: both one-sided t-tests at 5 % reject a
-- difference of `margin` or more, so the 90 % interval of the mean lies within ± margin.
-- `calibrated` says the same of the share of targets inside 90 % intervals. Both are null with
-- fewer than five pairs, and where a seed has one run alone. With five pairs, both are false if a
-- run diverged or stopped early. Weights trained in 8 bits predict in 16. `difference_8_bits` is
-- `mean_difference` if they predict in 8. It is null for variants in 16 bits, and where a pair
-- lacks it. `less_accurate`: gate `batch_noise` fails for an operator of the variant.
-- `variant_verdict` counts the comparisons in which the variant is equal in training. Without any
-- it is the worst verdict, and null if nothing is judged.
create or replace view training_seeds as
with ends as (
    select
        *,
        {
            'products': coalesce(products, ''), 'last_in_16_bits': coalesce(last_in_16_bits, 0)
        } as way,
        way = { 'products': '', 'last_in_16_bits': 0 } as is_plain,
        cast(recipe ->> 'steps' as integer) as steps,
        step = steps and bool_and(
            coalesce(isfinite(heldout_log_likelihood), false) and coalesce(isfinite(loss), true)
        ) over (partition by device, run) as ended_well
    from stg_training
    where recipe is not null
    qualify
        row_number() over (
            partition by device, recipe, variant, way, seed
            order by recorded_at desc, run asc, step desc
        ) = 1
),

compared as (
    select
        device,
        recipe,
        variant,
        way,
        baseline,
        any_value(operators) as operators
    from ends
    where baseline != ''
    group by device, recipe, variant, way, baseline
),

seeds as (
    select distinct
        compared.*,
        ends.seed
    from compared
    inner join ends using (device, recipe)
    where
        (ends.variant = compared.variant and ends.way = compared.way)
        or (ends.variant = compared.baseline and ends.is_plain)
),

paired as (
    select
        seeds.*,
        own.run is not null and base.run is not null as is_pair,
        is_pair and own.ended_well and base.ended_well as is_whole,
        own.heldout_log_likelihood as own_likelihood,
        base.heldout_log_likelihood as base_likelihood,
        own.heldout_log_likelihood_8_bits as own_likelihood_8_bits,
        own.heldout_coverage as own_coverage,
        base.heldout_coverage as base_coverage
    from seeds
    left join ends as own
        on
            seeds.device = own.device
            and seeds.recipe = own.recipe
            and seeds.seed = own.seed
            and seeds.variant = own.variant
            and seeds.way = own.way
    left join ends as base
        on
            seeds.device = base.device
            and seeds.recipe = base.recipe
            and seeds.seed = base.seed
            and seeds.baseline = base.variant
            and base.is_plain
),

means as (
    select
        device,
        variant,
        way['products'] as products,
        way['last_in_16_bits'] as last_in_16_bits,
        baseline as baseline_variant,
        recipe ->> 'source' as source,
        cast(recipe ->> 'batch' as integer) as batch,
        cast(recipe ->> 'n_context' as integer) as n_context,
        cast(recipe ->> 'n_target' as integer) as n_target,
        cast(recipe ->> 'steps' as integer) as steps,
        recipe,
        any_value(operators) as operators,
        count(*) as n_seeds,
        count(*) filter (where is_pair) as n_pairs,
        count(*) filter (where is_pair and not is_whole) as n_diverged,
        avg(own_likelihood) filter (where is_whole) as heldout_log_likelihood,
        avg(base_likelihood) filter (where is_whole) as baseline_log_likelihood,
        avg(own_coverage) filter (where is_whole) as coverage,
        avg(base_coverage) filter (where is_whole) as baseline_coverage,
        heldout_log_likelihood - baseline_log_likelihood as mean_difference,
        student_quantile_95(n_pairs - n_diverged - 1) / sqrt(n_pairs - n_diverged) as scale,
        scale * stddev_samp(own_likelihood - base_likelihood) filter (where is_whole) as half_width,
        case
            when count(own_likelihood_8_bits) filter (where is_whole) = n_pairs - n_diverged
                then avg(own_likelihood_8_bits - base_likelihood) filter (where is_whole)
        end as difference_8_bits,
        scale * stddev_samp(own_likelihood_8_bits - base_likelihood) filter (where is_whole)
            as half_width_8_bits,
        scale * stddev_samp(own_coverage - base_coverage) filter (where is_whole) as half_coverage
    from paired
    group by all
),

judged as (
    select
        * exclude (operators, scale, half_width, half_width_8_bits, half_coverage),
        mean_difference - half_width as difference_low,
        mean_difference + half_width as difference_high,
        difference_8_bits - half_width_8_bits as difference_8_bits_low,
        difference_8_bits + half_width_8_bits as difference_8_bits_high,
        coverage - baseline_coverage - half_coverage as coverage_low,
        coverage - baseline_coverage + half_coverage as coverage_high,
        cast(0.01 as double) as margin,
        n_pairs >= 5 and n_pairs = n_seeds as is_judged,
        case
            when is_judged
                then n_diverged = 0 and difference_low > -margin and difference_high < margin
        end as equivalent,
        case
            when is_judged
                then n_diverged = 0 and coverage_low > -margin and coverage_high < margin
        end as calibrated,
        exists(
            select 1
            from current_gates
            inner join implementations using (op, implementation)
            where
                current_gates.device = means.device
                and current_gates.gate = 'batch_noise'
                and not current_gates.passed
                and means.operators ->> family = implementation
        ) as less_accurate
    from means
),

worded as (
    select
        * exclude (is_judged),
        case
            when not is_judged then 'not known'
            when n_diverged > 0 then 'diverged'
            when not equivalent then 'not shown to be equal in training'
            when not calibrated then 'not shown to be as well calibrated'
            when less_accurate then 'less accurate a step, equal in training'
            else 'equal in training'
        end as verdict,
        coalesce(equivalent and calibrated, false) as is_equal
    from judged
)

select
    * exclude (is_equal),
    coalesce(
        case when bool_or(verdict = 'diverged') over of_variant then 'diverged' end,
        case
            when bool_and(is_equal) over of_variant then 'equal in training'
            when bool_or(is_equal) over of_variant
                then
                    format(
                        'equal in training in {} of {} comparisons',
                        count_if(is_equal) over of_variant,
                        count(*) over of_variant
                    )
        end,
        max(verdict) filter (where starts_with(verdict, 'not shown')) over of_variant
    ) as variant_verdict
from worded
window of_variant as (partition by device, variant, products);
