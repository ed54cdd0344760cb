-- Grain: op × implementation: what `auto` chooses from, PyTorch's plain form first (`rank` 1), as
-- CANDIDATES in tnp/ops/registry.py says.
create or replace view auto_candidates as
select
    known.op,
    unnest(known.implementations) as implementation,
    generate_subscripts(known.implementations, 1) as rank
from (
    values
    ('attention', ['sdpa_flash', 'sdpa_cudnn', 'separate', 'fused']),
    ('embedding', ['torch', 'fused']),
    ('rms_norm', ['torch', 'fused']),
    ('projection', ['torch', 'fused']),
    ('mlp', ['torch', 'single', 'fused']),
    ('mixture_heads', ['torch', 'bmm', 'fused']),
    ('mixture_nll', ['torch', 'fused'])
) as known (op, implementations);
