"""Packages that need a GPU: hidden, so that upstream's `except ImportError` takes the torch paths."""

from megatron_patch.platform.ledger import StandIn

GPU_ONLY = {
    "transformer_engine": "its kernels fail at every optimizer step without a driver, and a half-installed one raises RuntimeError",
    "transformer_engine_torch": "compiled part of transformer_engine",
    "apex": "its fused kernels are CUDA only",
    "amp_C": "multi-tensor kernels of apex, CUDA only",
    "grouped_gemm": "CUDA only",
    "flash_attn": "CUDA only",
    "flash_attn_2_cuda": "compiled part of flash_attn",
    "flash_attn_3": "CUDA only",
    "deep_ep": "NVLink/RDMA token dispatch, CUDA only",
    "fla": "flash-linear-attention: Triton kernels, CUDA only",
    "causal_conv1d": "CUDA only",
    "fused_weight_gradient_mlp_cuda": "gradient accumulation kernel of apex, CUDA only",
}


def rows():
    """sys.modules[NAME] = None makes `import NAME` raise ImportError and importlib.util.find_spec(NAME) answer None."""
    return [
        StandIn(f"sys.modules:{name}", lambda original: None, "megatron/core/**: try/except ImportError", f"hidden: {reason}")
        for name, reason in GPU_ONLY.items()
    ]
