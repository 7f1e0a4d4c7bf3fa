"""flash-attn's kernels where they apply: installed, on CUDA, fp16 or bf16, one head size of at most 256, no mask tensor.

They align the last query with the last key and limit the window from there, as CoreAttention's own masks do.
Source of the interface: flash_attn/flash_attn_interface.py (flash-attn 2.4.1 and later).
"""

import torch
from torch import Tensor

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
BACKENDS = ("auto", "flash")  # of --attention-backend; any other value asks for something else


def kernels(config):
    """(flash_attn_func, flash_attn_varlen_func); None when the package is absent or broken, or another backend is asked for."""
    backend = getattr(config, "attention_backend", "auto")
    if getattr(backend, "name", backend) not in BACKENDS:
        return None
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_func, flash_attn_varlen_func


def usable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    size = query.shape[-1]
    return (query.device.type in DEVICES and query.dtype in DTYPES and query.dtype == key.dtype == value.dtype
            and size <= MAX_HEAD_DIM and size == value.shape[-1])


def dense(kernel, q_SBND: Tensor, k_KBGD: Tensor, v_KBGD: Tensor, **options) -> Tensor:
    """[s, b, n, d] of whole sequences; ``options`` as :func:`options` gives them."""
    q, k, v = (t.transpose(0, 1) for t in (q_SBND, k_KBGD, v_KBGD))
    return kernel(q, k, v, **options).transpose(0, 1)


def packed(kernel, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds: list[int], **options) -> Tensor:
    """[t, n, d] of documents that begin and end at ``bounds``; tokens past the last bound give 0."""
    total, longest = bounds[-1], max(high - low for low, high in zip(bounds[:-1], bounds[1:]))
    cu = torch.tensor(bounds, dtype=torch.int32, device=q_TND.device)
    out = kernel(q_TND[:total], k_TGD[:total], v_TGD[:total], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
                 max_seqlen_k=longest, **options)
    return torch.cat([out, out.new_zeros(q_TND.shape[0] - total, *out.shape[1:])])


def options(*, causal: bool, window, scale, dropout: float, deterministic: bool) -> dict:
    """The kernels' keyword arguments; ``window`` = (left, right), -1 for no limit, or None."""
    return dict(dropout_p=dropout, softmax_scale=scale, causal=causal, window_size=window or (-1, -1), deterministic=deterministic)
