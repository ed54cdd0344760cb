-- What serves this model fastest at this batch? Measured forms that are not invalid, and others'
-- published figures; `source` is null for what was measured here.
select model, weights, batch, n_prompt, hardware, max_by(system, tokens_per_s) as fastest,
    round(max(tokens_per_s)) as tokens_per_s, max_by(source, tokens_per_s) as source
from (
    select *, form as system, device as hardware, null as source from language_models
    where valid is distinct from false and status = 'ok'
    union all by name from literature
)
group by all order by model, weights, batch, n_prompt, tokens_per_s desc;
