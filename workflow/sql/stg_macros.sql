-- Macro: the run that a row belongs to. Early rows have no `run_id`: equal devices and times of
-- recording make a run.
create or replace macro run_of(run_id, device, recorded_at) as
coalesce(run_id, concat(device, ' ', strftime(recorded_at, '%Y-%m-%dT%H:%M:%S.%fZ')));

-- Macro: the role of an early row, which has no `role`. `name` is the step's variant or the
-- operator's implementation, and `used` lists the implementations in it.
create or replace macro earlier_role(name, used) as case
    when list_has_any(used, ['separate', 'fused', 'single', 'auto']) then 'own'
    when name in ('sdpa_flash', 'torch') then 'baseline'
    else 'peer'
end;

-- Macro: true for two steps of ours that differ in attention's backward pass alone: one launch
-- against two passes.
create or replace macro fuses_backward(own_name, base_name) as
own_name = 'fused_attention' and base_name = 'separate';

-- Macro: an operator's present name. Early rows have no `problem`: they say "rms_norm" for
-- "add_rms_norm", and name a ceiling by what was run.
create or replace macro op_now(op, problem) as case
    when problem is not null then op
    when op = 'rms_norm' then 'add_rms_norm'
    when op in ('matmul', 'copy') then 'ceiling_' || op
    else op
end;

-- Macro: true if a gate must have run this part of the timed code: a kernel, or a definition or
-- whole module of the operators or the model. Early rows name the modules before they moved into
-- packages.
--
-- Code that only chooses or describes kernels is left out, because the chosen kernels are compared.
-- PyTorch's forms are left out, because `auto` may choose them and no gate covers them alone.
create or replace macro needs_a_gate(part, name) as
part = 'kernel'
or (
    part in ('definition', 'module')
    and regexp_matches(
        name,
        '^(tnp_lab|tnp\.(ops|llm|cuda_graphs|train\.(step|step_graphs)|model'
        || '|buffer|captures|decode_graphs|drawing|joint|layers|packing|prediction|step'
        || '|step_graphs))(\.|:|$)'
    )
    and not regexp_matches(
        name,
        '^tnp\.(ops\.((auto|registry)(:|$)|\w+\.torch_forms:)|model\.variants:)|:describe_launch$'
    )
);
