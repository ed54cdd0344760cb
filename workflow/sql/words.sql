-- Macro: whether an operator is one of the device's own ceilings, which no implementation competes
-- with.
create or replace macro is_ceiling(op) as starts_with(op, 'ceiling_');

-- Macro: the sizes of a problem's JSON and its active options, such as "rows=128 width=4096".
create or replace macro in_words(problem) as array_to_string(
    list_transform(
        json_keys(problem, '$.sizes') || coalesce(json_keys(problem, '$.options'), []),
        lambda name: concat(
            name, '=', coalesce(problem -> 'sizes' ->> name, problem -> 'options' ->> name)
        )
    ),
    ' '
);

-- Macro: a ratio for a table of text, such as "1.23 (1.21–1.25)", or "1.23" without an interval.
create or replace macro ratio_cell(ratio, low, high) as
format('{:.2f}', ratio) || coalesce(format(' ({:.2f}–{:.2f})', low, high), '');

-- Macro: a value about PyTorch's best step, or null where its `role` says that only the plain step
-- was timed.
create or replace macro of_peer(role, x) as case when role = 'peer' then x end;

-- Macro: the evidence behind a timed row, for a table of text.
create or replace macro evidence_cell(valid, why_not) as case
    when valid then 'complete'
    when valid is null then 'none: ' || coalesce(why_not, 'recorded before evidence was kept')
    else 'not valid: ' || why_not
end;

-- Macro: the number format of a step's products, for a table of text. `trains` is the verdict on
-- training with it, or null where there is none.
create or replace macro format_cell(dtype, narrower, trains) as case coalesce(narrower, '')
    when '' then dtype
    else concat('8 bits: less accurate a step, ', coalesce(trains, 'training not judged here'))
end;

-- Macro: how good the evidence of a timed row is: 2 valid, 1 without evidence, 0 invalid, and null
-- where nothing was timed.
create or replace macro evidence_rank(status, valid) as case
    when status != 'ok' then null
    when valid then 2
    when valid is null then 1
    else 0
end;
