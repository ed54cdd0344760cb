-- Grain: device × config_id: whether every check that concerns a training step is green.
--
-- Of the gates that the step waits for (column `gates`): checks about all implementations ('') or
-- about the one that the step uses of the gate's operator, or that `auto` may choose there. Rows
-- from before that column say it by the attention that gives their variant its name. No row where
-- no such gate has run.
create or replace view step_gates as
with steps as (
    select
        *,
        string_split(gates, '|') as awaited
    from step_summary
)

select
    steps.device,
    steps.config_id,
    bool_and(coalesce(current_gates.passed, current_gates.status != 'error')) as gate_passed
from steps
inner join current_gates
    on
        steps.device = current_gates.device
        and case
            when steps.awaited is not null
                then
                    list_contains(steps.awaited, current_gates.gate)
                    and (
                        current_gates.implementation in (
                            '', steps.operators ->> coalesce(current_gates.op, 'attention')
                        )
                        or (
                            steps.operators ->> coalesce(current_gates.op, 'attention') = 'auto'
                            and exists (
                                from auto_candidates
                                where
                                    op = coalesce(current_gates.op, 'attention')
                                    and auto_candidates.implementation
                                    = current_gates.implementation
                            )
                        )
                    )
            else
                starts_with(steps.variant, current_gates.implementation)
                and case current_gates.gate
                    when 'baseline' then true
                    when 'checkpointing' then steps.checkpoint
                    when 'cuda_graphs' then steps.cuda_graph
                    when 'attention_backward' then starts_with(steps.variant, 'separate')
                    when 'attention_fused' then starts_with(steps.variant, 'fused')
                    when 'attention_forward' then not starts_with(steps.variant, 'sdpa_')
                    when 'kernels' then not starts_with(steps.variant, 'sdpa_')
                    else false
                end
        end
group by steps.device, steps.config_id;
