"""Core attention against the formula written out: the cases, the oracle, and a stand-in for flash-attn's kernels."""

import math

import torch

SCALE = 0.3
DOCUMENTS = (0, 5, 17, 24)  # packed bounds; the row has 28 tokens, the last 4 are padding
PACKED_LENGTH = 28

# name: (queries, keys, heads, groups, head dim, window, bounds or None, causal)
CASES = {
    "causal": (24, 24, 4, 4, 16, None, None, True),
    "groups": (24, 24, 4, 2, 16, None, None, True),
    "window": (24, 24, 4, 2, 16, (6, 0), None, True),
    "bidirectional": (24, 24, 4, 2, 16, None, None, False),
    "decoding": (3, 24, 4, 2, 16, None, None, True),
    "decoding_window": (3, 24, 4, 2, 16, (6, 0), None, True),
    "packed": (PACKED_LENGTH, PACKED_LENGTH, 4, 2, 16, None, DOCUMENTS, True),
    "packed_window": (PACKED_LENGTH, PACKED_LENGTH, 4, 2, 16, (3, 0), DOCUMENTS, True),
    "ids": (24, 24, 4, 2, 16, None, DOCUMENTS, True),
    "ids_window": (24, 24, 4, 2, 16, (3, 0), DOCUMENTS, True),
}


def tensors(case: str, dtype=torch.float32, device="cpu"):
    """query [s, 2, n, d], key and value [k, 2, g, d] that want gradients; packed cases: [t, n, d]."""
    s, k, n, g, d, *_ = CASES[case]
    batch = () if case.startswith("packed") else (2,)
    generator = torch.Generator().manual_seed(3)
    shapes = ((s, *batch, n, d), (k, *batch, g, d), (k, *batch, g, d))
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def core_attention(case: str, **fields):
    """Our CoreAttention for ``case``; ``fields`` go to upstream's TransformerConfig."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch.layers.attention import CoreAttention

    _, _, n, g, d, window, _, causal = CASES[case]
    config = TransformerConfig(num_layers=1, hidden_size=n * d, num_attention_heads=n, num_query_groups=g, window_size=window,
                               attention_dropout=0.0, **fields)
    return CoreAttention(config, 1, AttnMaskType.causal if causal else AttnMaskType.no_mask, softmax_scale=SCALE)


def run(module, case: str, q, k, v):
    """[s, b, n * d] (packed: [t, n * d]) from CoreAttention."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = CASES[case][6]
    if case.startswith("packed"):
        cu = torch.tensor(bounds, dtype=torch.int32, device=q.device)
        return module(q, k, v, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu))
    ids = None
    if bounds:
        ids = torch.bucketize(torch.arange(q.shape[0]), torch.tensor(bounds[1:]), right=True).expand(q.shape[1], -1).to(q.device)
    return module(q, k, v, attention_mask=ids)


def formula(case: str, q, k, v):
    """The same in fp32 on the CPU, one query, head and key range at a time: no mask tensor, no library attention."""
    bounds, window, causal = CASES[case][6], CASES[case][5], CASES[case][7]
    q, k, v = (t.detach().float().cpu() for t in (q, k, v))
    if not case.startswith("packed"):
        return torch.stack([_rows(*(t[:, b] for t in (q, k, v)), bounds or (0, k.shape[0]), window, causal)
                            for b in range(q.shape[1])], dim=1)
    out = torch.zeros(q.shape[0], q.shape[1] * v.shape[-1])
    end = bounds[-1]
    out[:end] = _rows(q[:end], k[:end], v[:end], bounds, window, causal)
    return out


def _rows(q_SND, k_KGD, v_KGD, bounds, window, causal):
    shift, per_group = k_KGD.shape[0] - q_SND.shape[0], q_SND.shape[1] // k_KGD.shape[1]
    out = torch.zeros(q_SND.shape[0], q_SND.shape[1], v_KGD.shape[-1])
    for i in range(q_SND.shape[0]):
        at = i + shift
        low = max(bound for bound in bounds if bound <= at)
        high = at + 1 if causal else k_KGD.shape[0]
        low = max(low, at - window[0]) if window else low
        for head in range(q_SND.shape[1]):
            group = head // per_group
            weights = torch.softmax(k_KGD[low:high, group] @ q_SND[i, head] * SCALE, dim=0)
            out[i, head] = weights @ v_KGD[low:high, group]
    return out.flatten(1)


class Kernels:
    """A module in place of flash_attn: the documented meaning of both functions, in plain torch; ``calls`` counts them."""

    def __init__(self):
        self.calls = []

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
        """q [b, s, n, d], k and v [b, k, g, d] -> [b, s, n, d]; the window and causality count from the last key back."""
        self.calls.append(("dense", deterministic))
        shift = k.shape[1] - q.shape[1]
        gap = torch.arange(q.shape[1])[:, None] + shift - torch.arange(k.shape[1])[None]
        left, right = window_size[0], 0 if causal else window_size[1]
        hidden = torch.zeros_like(gap, dtype=torch.bool)
        hidden |= (gap > left) if left >= 0 else False
        hidden |= (-gap > right) if right >= 0 else False
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bsnd,bknd->bnsk", q.float(), k.float()) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("bnsk,bknd->bsnd", weights, v.float()).to(q.dtype)

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        """q [t, n, d], k and v [t, g, d], int32 bounds -> [t, n, d]."""
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and int(cu_seqlens_q[-1]) == q.shape[0]
        assert max_seqlen_q == max_seqlen_k == int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
        bounds = cu_seqlens_q.tolist()
        parts = [self.flash_attn_func(*(t[None, a:b] for t in (q, k, v)), **options)[0] for a, b in zip(bounds, bounds[1:])]
        self.calls = [*self.calls[: -len(parts)], ("packed", options["deterministic"])]
        return torch.cat(parts)
