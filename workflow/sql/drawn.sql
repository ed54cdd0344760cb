-- Macro: how the values of an operator's problem were drawn, null where its sizes alone say it.
-- How many hidden units are real, `d_ff` says in all rows and `draw` in later ones.
create or replace macro drawn(draw, d_ff) as nullif(
    case
        when d_ff is null then draw
        else json_merge_patch(coalesce(draw, '{}'), '{"d_ff_real": null}')
    end,
    '{}'
);
