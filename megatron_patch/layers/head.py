"""GPTModel whose loss never holds all logits: its output layer hands over the hidden states, and loss.py does the rest."""

import contextlib

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_patch.layers.config import own
from megatron_patch.layers.loss import Shard, chunked_cross_entropy


class OutputLayer(ColumnParallelLinear):
    """Upstream's output layer, called as ever (its hooks gather parameters), that can return (hidden, weight) for logits.

    With head_norm the rows of the weight [v / TP, h] count with length 1. Source: Baichuan2's NormHead.
    """

    handing_over = False

    def forward(self, input_, weight=None, runtime_gather_output=None):
        """((hidden, weight), None) while handing over, else upstream's (logits, bias)."""
        if own(self.config, "head_norm"):
            weight = F.normalize(self.weight if weight is None else weight)
        if self.handing_over:
            return (input_, self.weight if weight is None else weight), None
        return super().forward(input_, weight=weight, runtime_gather_output=runtime_gather_output)

    @contextlib.contextmanager
    def hand_over(self):
        """Inside the block, calls return what logits are made of."""
        self.handing_over = True
        try:
            yield
        finally:
            self.handing_over = False


class ChunkedLossModel(GPTModel):
    """GPTModel with the chunked loss of layers/loss.py in place of logits and upstream's loss, wherever that is the same thing.

    Off with ``chunked_loss = False`` on the model, with cross_entropy_loss_fusion (a wish for upstream's own), multi-token
    prediction, muP, deferred embedding gradients, and when someone hooks the output layer's logits.
    """

    chunked_loss = True
    shard = None  # of the vocabulary, where there is an output layer of ours

    def adopt_output_layer(self, vocab_size: int) -> None:
        """Call once, after the padding hook is on. GPTModel builds this layer itself and no spec names it: hence the class change."""
        layer = self.output_layer
        if type(layer) is not ColumnParallelLinear:
            return
        layer.__class__ = OutputLayer
        group, width = self.tp_group, layer.output_size_per_partition
        first = group.rank() * width
        self.shard = Shard(first, min(max(vocab_size - first, 0), width), group if group.size() > 1 else None)
        self.real_vocab_size, self.known_hooks = vocab_size, set(layer._forward_hooks)

    def _postprocess(self, hidden_states, labels=None, loss_mask=None, **more):
        """Loss [b, s] from the last hidden states. Source: GPTModel._postprocess, always called by keyword (0.16 to 0.19)."""
        if labels is None or not self._can_chunk(more):
            return super()._postprocess(hidden_states=hidden_states, labels=labels, loss_mask=loss_mask, **more)
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        with self.output_layer.hand_over():
            (hidden_SBH, weight_VH), _ = self.output_layer(hidden_states, weight=tied)
        if self.output_layer.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=self.tp_group)
        else:
            hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=self.tp_group)
        labels_T = labels.t().reshape(-1)
        mask_T = torch.ones_like(labels_T, dtype=torch.float32) if loss_mask is None else loss_mask.t().reshape(-1).float()
        loss_T = chunked_cross_entropy(hidden_SBH.flatten(0, 1), weight_VH, labels_T, mask_T, self.shard)
        loss_T = loss_T.masked_fill(labels_T >= self.real_vocab_size, float("inf"))  # no such token: not to be overlooked
        return loss_T.view(labels.shape[1], -1).t().contiguous()

    def _can_chunk(self, more) -> bool:
        config, layer = self.config, getattr(self, "output_layer", None)
        return (self.chunked_loss and self.post_process and isinstance(layer, OutputLayer)
                and set(layer._forward_hooks) <= self.known_hooks
                and more.get("inference_context") is None and more.get("output_processor") is None
                and not (config.mtp_num_layers or config.cross_entropy_loss_fusion or config.defer_embedding_wgrad_compute
                         or getattr(config, "use_mup", False)))


def cap_logits(output_layer, cap: float | None) -> None:
    """Make the logits cap * tanh(logits / cap). Call before padded rows are hidden. Source: transformers models/gemma2."""
    if cap:
        output_layer.register_forward_hook(lambda module, inputs, output: (cap * torch.tanh(output[0] / cap), *output[1:]))
