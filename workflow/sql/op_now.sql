-- Macro: an operator's name today. Rows from before there was a column `problem` called the norm
-- behind the residual addition "rms_norm" and the device's ceilings by what was run.
create or replace macro op_now(op, problem) as case
    when problem is not null then op
    when op = 'rms_norm' then 'add_rms_norm'
    when op in ('matmul', 'copy') then 'ceiling_' || op
    else op
end;
