-- Which system serves this model fastest at this batch, here and in others' publications?
select model, weights, batch, n_prompt, hardware, max_by(system, tokens_per_s) as fastest,
    round(max(tokens_per_s)) as tokens_per_s, max_by(source, tokens_per_s) as source
from (
    select *, form as system, device as hardware from language_models
    where valid is distinct from false and tokens_per_s is not null
    union all by name
    select * from literature
) as rates
group by model, weights, batch, n_prompt, hardware
order by model, weights, batch, n_prompt, tokens_per_s;
