-- Grain: device × run × config_id: a form of predictions or of joint samples, with its evidence.
create or replace view judged_predictions as
select
    predictions.*,
    evidence.status as outcome,
    evidence.run,
    evidence.is_current,
    evidence.counts,
    evidence.why_not
from predictions
inner join evidence
    on
        predictions.device = evidence.device
        and predictions.config_id = evidence.config_id
        and evidence.pass = 'prediction'
        and run_of(predictions.run_id, predictions.device, predictions.recorded_at)
        = evidence.run
qualify
    row_number()
        over (
            partition by predictions.device, evidence.run, predictions.config_id
            order by predictions.origin
        )
    = 1;
