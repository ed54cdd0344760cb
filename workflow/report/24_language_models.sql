-- topic: decoding
-- # Language models
-- New tokens a second of all sequences, after prompts of `prompt` tokens. A token's time is that of
-- a call with 128 new tokens less that of a call with one, over the tokens between. `limit` is the
-- rate at which the device could read the weights and the cache of each step. `kernels` are those
-- of one token. `ours is faster by` compares this project's form with the row's, both in one
-- process. Models have random weights; int8 and int4 have a scale for each group of 128, but
-- `compiled_decoder` in int8 one for each row.
select
    device,
    model,
    weights,
    batch,
    n_prompt as prompt,
    form,
    prompt_ms_p50 as prompt_ms,
    token_ms,
    tokens_per_s,
    format('{:.0f} %', 100 * share_of_limit) as share_of_limit,
    n_kernels as kernels,
    bare_ms,
    peak_memory_bytes / pow(2, 30) as peak_gib,
    ratio_cell(own_speedup, own_speedup_low, own_speedup_high) as ours_is_faster_by,
    own_verdict as verdict,
    case when status = 'ok' then evidence_cell(valid, why_not) else coalesce(reason, status) end
        as evidence
from language_models
order by device, model, weights, batch, n_prompt, tokens_per_s, form;
