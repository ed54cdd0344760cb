"""Translates names of configurations for a reader who does not know config.yaml.

A name that is not listed, such as a user's own variant, is shown as it is.
"""

from tnp.dispatch.registry import catalog

WORDS = {
    # Variants of a training step; the operators' implementations have some of the same names.
    "sdpa_flash": "plain PyTorch",
    "sdpa_cudnn": "PyTorch with cuDNN attention",
    "sdpa_cudnn_padded": "PyTorch with padded cuDNN",
    "sdpa_cudnn_padded_compiled": "compiled PyTorch with padded cuDNN",
    "pytorch_best": "PyTorch's best",
    "pytorch_best_autotuned": "PyTorch's best with autotuning",
    "separate": "our deterministic attention",
    "separate_compiled": "our attention in a compiled step",
    "fused_attention": "our fused attention",
    "fused": "ours",
    "fused_centred": "ours with centred keys",
    "fused_packed": "ours with packing",
    "pytorch_best_packed": "PyTorch's best with packing",
    "fused_compiled": "ours in a compiled step",
    "fp8": "our step in 8 bits",
    "fp8_packed": "our step in 8 bits with packing",
    "fp8_attention": "our step with attention in 8 bits too",
    "pytorch_best_fp8": "PyTorch's best in 8 bits",
    "auto": "ours chosen by size",
    # Implementations of one operator.
    "torch": "PyTorch",
    "compiled": "compiled PyTorch",
    "compiled_autotuned": "compiled PyTorch with autotuning",
    "eager": "PyTorch's single operations",
    "sdpa_efficient": "PyTorch with memory-efficient attention",
    "bmm": "PyTorch in one batched matmul",
    "grouped_mm": "PyTorch in one grouped matmul",
    "loop": "PyTorch in a loop",
    "flex": "PyTorch FlexAttention",
    "fa3": "FlashAttention 3",
    "fa3_e4m3": "FlashAttention 3 in 8 bits",
    "fa4": "FlashAttention 4",
    "fa4_deterministic": "deterministic FlashAttention 4",
    "flashinfer": "FlashInfer",
    "sdpa": "PyTorch SDPA",
    "e4m3": "ours in 8 bits",
    "single": "ours in one kernel",
    "triton": "ours in Triton",
    "two_kernels": "ours in two kernels",
    "liger": "Liger",
    "quack": "QuACK",
    "cce": "cut cross-entropy",
    "torchao": "torchao in 8 bits",
    "gemlite": "GemLite",
    "humming": "Humming",
    "marlin": "Marlin",
    "machete": "Machete",
    "addmm_activation": "cuBLAS with GELU",
    "dequantized": "cuBLAS on the whole weight",
    "tinygemm": "PyTorch's tinygemm",
    "int8pack": "PyTorch's int8 product",
    # Operators and components.
    "rms_norm": "RMSNorm",
    "add_rms_norm": "sum and RMSNorm",
    "layer_norm": "LayerNorm",
    "rms_norm_swiglu": "RMSNorm with SwiGLU",
    "swiglu": "SwiGLU",
    "rms_norm_linear": "RMSNorm with linear layer",
    "gelu_linear": "linear with GELU",
    "quantized_linear": "linear in 8 and 4 bits",
    "decode_attention": "decoding",
    "buffered_attention": "attention around a buffer",
    "rope": "rotary embedding",
    "qk_norm_rope": "QK-norm and rotary embedding",
    "cross_entropy": "cross-entropy",
    "linear_cross_entropy": "cross-entropy of a linear layer",
    "mlp": "MLP",
    "transformer_block": "transformer block",
    "mixture_heads": "mixture heads",
    "mixture_nll": "mixture loss",
    "projection": "projections",
    "skip_unread": "leaving out what is not read",
    # Language models, and forms of them.
    "gpt2": "GPT-2 124M",
    "llama3_1b": "Llama 3.2 1B",
    "llama3_8b": "Llama 3 8B",
    "qwen3_0_6b": "Qwen3 0.6B",
    "hf": "Hugging Face",
    "hf_static": "Hugging Face, compiled",
    "hf_autotuned": "Hugging Face, autotuned",
    "hf_batched": "Hugging Face, continuous batching",
    "compiled_decoder": "compiled plain decoder",
    "vllm": "vLLM",
    # Stages of a training step.
    "embed": "embedding",
}

# Longer titles.
EXPLAINED = {
    "sdpa_cudnn_padded": "PyTorch with cuDNN's attention and a padded hidden width, uncompiled",
    "fused": "our step with all components",
}

# Columns that hold such names.
NAMED = {
    "op",
    "component",
    "implementation",
    "variant",
    "baseline_variant",
    "pytorch_variant",
    "best_peer_implementation",
    "stage",
    "model",
    "form",
}

# Sizes of an operator's problem.
SIZES = {
    "n_q": "queries",
    "n_k": "keys",
    "n_heads": "heads",
    "head_dim": "head width",
    "d_model": "model width",
    "d_ff": "hidden width",
    "n_in": "inputs",
    "n_out": "outputs",
}


def words(name: str) -> str:
    """Returns the title of `name`: from WORDS above, or from its declaration."""
    return WORDS.get(name) or catalog().titles().get(name, name)


def explained(name: str) -> str:
    """Returns `name` in as many words as it needs."""
    return EXPLAINED.get(name, words(name))
