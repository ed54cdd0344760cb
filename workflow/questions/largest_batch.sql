-- Which batch at small fits this GPU, and does checkpointing pay for a larger one?
select device, variant, checkpoint, batch, status,
    round(tokens_per_s / 1e6, 2) as million_tokens_per_s,
    round(peak_memory_bytes / pow(2, 30), 1) as peak_memory_gib, valid
from speedup
where n_context = 64 and n_target = 500 and not cuda_graph and not varies
order by device asc, variant asc, checkpoint asc, batch asc;
