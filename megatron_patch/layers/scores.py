"""Core attention whose scores are more than q k^T * scale: linear position biases (ALiBi), soft caps, sinks.

Shape suffixes: S query length, K key length, B batch, N heads, G key/value groups, D head dim.
"""

import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn

from megatron_patch.layers.attention import CoreAttention
from megatron_patch.layers.masks import visible
from megatron_patch.layers.sharded import Sharded


def slopes(heads: int) -> Tensor:
    """[heads] ALiBi slopes: 2^(-8 i / n) for a power of two n; other counts take every second slope of 2 n for the rest.

    Source: Press, Smith and Lewis, Train Short, Test Long (2022), and its released code.
    """
    n = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8.0 / n * torch.arange(1, n + 1))
    rest = 2.0 ** (-4.0 / n * torch.arange(1, 2 * (heads - n) + 1, 2))
    return torch.cat([first, rest])


class _Masked(CoreAttention):
    """Attention that needs its mask written out; flash-attn is left aside."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.flash = None

    def _seen(self, q_SBND, k_KBGD, mask, is_causal) -> Tensor:
        """[b or 1, 1, s, k]."""
        s, k = q_SBND.shape[0], k_KBGD.shape[0]
        if mask is None:
            at = torch.arange(k, device=q_SBND.device)
            mask = visible(at[k - s:], at, causal=is_causal, window=None)
        return mask.reshape(-1, 1, *mask.shape[-2:])


class AlibiAttention(_Masked):
    """Scores plus slope * (key - query), so that in 16 bits what is near keeps its bits; Transformers leaves the query out, which softmax
    drops, and rounds by the position in the sequence.

    ``alibi`` 'bf16': slopes * key rounded to bf16 and scaled with the scores, as Falcon does.
    Source: transformers models/bloom and models/falcon, build_alibi_tensor.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        mine = slopes(config.num_attention_heads).chunk(config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
        self.slopes_N11 = mine[:, None, None].to(torch.cuda.current_device())

    def _sdpa(self, q_SBND, k_KBGD, v_KBGD, mask, is_causal):
        at_K, seen = torch.arange(k_KBGD.shape[0], device=q_SBND.device), self._seen(q_SBND, k_KBGD, mask, is_causal)
        if self.config.alibi == "bf16":
            bias = (self.slopes_N11.bfloat16() * at_K.bfloat16()).float() / math.sqrt(q_SBND.shape[-1])
        else:
            last = (seen * at_K).amax(-1, keepdim=True)  # the query itself is the last that it sees
            bias = self.slopes_N11 * (at_K - last)
        return super()._sdpa(q_SBND, k_KBGD, v_KBGD, bias.to(q_SBND.dtype).masked_fill(~seen, float("-inf")), False)


class SoftcapAttention(_Masked):
    """softmax(cap * tanh(scores / cap)) v. Source: transformers models/gemma2, eager_attention_forward."""

    def _sdpa(self, q_SBND, k_KBGD, v_KBGD, mask, is_causal):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_KBGD, v_KBGD))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        cap, scale = self.config.attn_logit_softcap, self.softmax_scale or q.shape[-1] ** -0.5
        scores = cap * torch.tanh(q @ k.transpose(-1, -2) * (scale / cap))
        scores = scores.masked_fill(~self._seen(q_SBND, k_KBGD, mask, is_causal), float("-inf"))
        share = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        out = self._dropping(lambda: F.dropout(share, self.dropout, self.training)) @ v
        return out.permute(2, 0, 1, 3)


class SinkAttention(Sharded, _Masked):
    """Each head's softmax has one more score, ``softmax_offset``, learnable or 0 as softmax_type says: a key that every query sees and
    whose value is 0. Source: core fusions/fused_softmax.py, SoftmaxOne; transformers models/gpt_oss, eager_attention_forward."""

    tp_axes = {"softmax_offset": 0}

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(config.init_method(self.softmax_offset))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _sdpa(self, q_SBND, k_KBGD, v_KBGD, mask, is_causal):
        hidden, (k, v) = ~self._seen(q_SBND, k_KBGD, mask, is_causal), (F.pad(t, (0, 0, 0, 0, 0, 0, 0, 1)) for t in (k_KBGD, v_KBGD))
        bias = torch.zeros_like(hidden, dtype=q_SBND.dtype).masked_fill_(hidden, float("-inf")).expand(-1, q_SBND.shape[2], -1, -1)
        sinks = self.softmax_offset.to(bias.dtype).view(1, -1, 1, 1).expand(*bias.shape[:-1], 1)
        return super()._sdpa(q_SBND, k, v, torch.cat([bias, sinks], -1), False)
