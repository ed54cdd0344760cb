-- Macro: the sizes of a problem's JSON, and its options that are on, as "rows=128 width=4096".
create or replace macro in_words(problem) as array_to_string(
    list_transform(
        json_keys(problem, '$.sizes') || coalesce(json_keys(problem, '$.options'), []),
        lambda name: concat(
            name, '=', coalesce(problem -> 'sizes' ->> name, problem -> 'options' ->> name)
        )
    ),
    ' '
);
