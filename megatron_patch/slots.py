"""Every GPT parameter Megatron-core can hold, once: its names, packing, shape, tensor-parallel axis and when it exists.

A slot has a name per dialect: ``local`` (module names of the native spec), ``te`` (Transformer Engine spec) and ``disk``
(the torch_dist key, where layers and experts are axes of one tensor). Sizes are read from the config: hidden_size,
kv_channels, num_query_groups, ffn_hidden_size and so on, as TransformerConfig calls them.
Source: megatron/core/models/gpt/gpt_layer_specs.py and the sharded_state_dict of each module.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_patch.packing import DELTA_CONV, DELTA_IN, GLU, PLAIN, QKV, Packing

LAYER = "decoder.layers.{layer}."
ATTENTION = LAYER + "self_attention."


@dataclass(frozen=True)
class Slot:
    """One parameter. ``shape(config)`` is its full shape without vocabulary padding; ``tp_dim`` the sharded axis."""

    local: str
    shape: Callable[[object], tuple[int, ...]]
    te: str = ""
    disk: str = ""
    packing: Packing = PLAIN
    tp_dim: int | None = None
    when: Callable[[object, int | None], bool] = lambda config, layer: True
    vocab: bool = False
    buffer: bool = False  # of fp32 in a model of any dtype, and not trained

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.local

    @property
    def first(self) -> bool:
        """True for what belongs to the first pipeline stage."""
        return self.local.startswith("embedding.")

    @property
    def expert(self) -> bool:
        """True for a routed expert's parameter: sharded over expert-TP and owned by one expert-parallel rank."""
        return "{expert}" in self.local

    def name(self, backend: str) -> str:
        """Module name template under ``backend`` ('native' or 'te'), with {layer} and {expert} open."""
        return self.te or self.local if backend == "te" else self.local

    def disk_key(self, backend: str) -> str:
        """torch_dist key template of a model built with ``backend``; {layer} stays open, experts are an axis."""
        if self.expert or backend == "native":
            return self.disk or self.te or self.local
        return self.te or self.local


def is_moe(config, layer: int) -> bool:
    """True when ``layer`` routes to experts. Source: core gpt_layer_specs.py, moe_layer_freq."""
    freq = config.get("moe_layer_freq", 1)
    if not config.get("num_moe_experts"):
        return False
    return bool(freq[layer]) if isinstance(freq, (list, tuple)) else layer % freq == 0


def is_dense(config, layer: int) -> bool:
    return not is_moe(config, layer)


def has_shared_expert(config, layer: int) -> bool:
    return is_moe(config, layer) and bool(config.get("moe_shared_expert_intermediate_size"))


def has_shared_gate(config, layer: int) -> bool:
    return has_shared_expert(config, layer) and bool(config.get("moe_shared_expert_gate"))


def is_delta(config, layer: int) -> bool:
    """True when ``layer`` is a gated delta net in attention's place. Source: core experimental_attention_variant_module_specs.py."""
    if config.get("experimental_attention_variant") != "gated_delta_net":
        return False
    freq = config.get("linear_attention_freq")
    return bool(freq[layer]) if isinstance(freq, (list, tuple)) else (layer + 1) % freq != 0


def attends(config, layer: int) -> bool:
    return not is_delta(config, layer)


def has_qkv_bias(config, layer: int) -> bool:
    return attends(config, layer) and bool(config.get("add_qkv_bias") or config.get("add_bias_linear"))


def has_linear_bias(config, layer: int) -> bool:
    return bool(config.get("add_bias_linear"))


def has_norm_bias(config, layer: int | None) -> bool:
    return config.get("normalization") == "LayerNorm"


def has_qk_norm(config, layer: int) -> bool:
    return bool(config.get("qk_layernorm")) and is_whole(config, layer)


def has_head(config, layer=None) -> bool:
    return not config.tied


def has_input_norm(config, layer) -> bool:
    return config.get("sublayer_input_norm", True) and not is_latent(config, layer)


def has_mlp_norm(config, layer) -> bool:
    return is_dense(config, layer) and has_input_norm(config, layer) and config.get("parallel_attention") != "one"


def is_latent(config, layer=None) -> bool:
    """True for multi-latent attention."""
    return bool(config.get("multi_latent_attention"))


def is_whole(config, layer: int) -> bool:
    return not is_latent(config) and attends(config, layer)


def has_q_lora(config, layer=None) -> bool:
    return is_latent(config) and config.get("q_lora_rank") is not None


def has_q_proj(config, layer=None) -> bool:
    return is_latent(config) and config.get("q_lora_rank") is None


def has_sinks(config, layer: int) -> bool:
    return attends(config, layer) and config.get("softmax_type") == "learnable"


def has_router_bias(config, layer: int) -> bool:
    return is_moe(config, layer) and bool(config.get("moe_router_enable_expert_bias"))


def has_field(name: str):
    """Whether the config's field ``name`` is on."""
    return lambda config, layer: bool(config.get(name))


def has_learned_positions(config, layer) -> bool:
    return config.position_embedding_type == "learned_absolute"


def _hidden(c):
    return (c.hidden_size,)


def _heads(c):
    return c.num_attention_heads * (c.v_head_dim if is_latent(c) else c.kv_channels)


def _latent_q(c):
    return c.num_attention_heads * (c.qk_head_dim + c.qk_pos_emb_head_dim)


def _qkv(c):
    queries = c.num_attention_heads * (2 if c.get("attention_output_gate") else 1)
    return (queries + 2 * c.num_query_groups) * c.kv_channels


def _delta_key(c):
    return c.linear_num_key_heads * c.linear_key_head_dim


def _delta_value(c):
    return c.linear_num_value_heads * c.linear_value_head_dim


def _mlp_rows(c, size):
    return size * (2 if c.get("gated_linear_unit") else 1)


def _moe_ffn(c):
    return c.get("moe_ffn_hidden_size") or c.ffn_hidden_size


def _both(dense, gate):
    """``dense`` and ``gate``: a bias vector of a plain MLP or of its norm."""
    return lambda config, layer: dense(config, layer) and gate(config, layer)


def _vocab(c):
    return (c.vocab_size, c.hidden_size)


SLOTS = {
    "embed": Slot("embedding.word_embeddings.weight", _vocab, tp_dim=0, vocab=True),
    "embed_norm": Slot("embedding.norm.weight", _hidden, when=has_field("embedding_norm")),
    "embed_norm_bias": Slot("embedding.norm.bias", _hidden, when=_both(has_field("embedding_norm"), has_norm_bias)),
    "positions": Slot("embedding.position_embeddings.weight",
                      lambda c: (c.max_position_embeddings + c.get("position_offset", 0), c.hidden_size), when=has_learned_positions),
    "attn_norm": Slot(LAYER + "input_layernorm.weight", _hidden, te=LAYER + "self_attention.linear_qkv.layer_norm_weight",
                      when=has_input_norm),
    "attn_norm_bias": Slot(LAYER + "input_layernorm.bias", _hidden, te=LAYER + "self_attention.linear_qkv.layer_norm_bias",
                           when=_both(has_input_norm, has_norm_bias)),
    "qkv": Slot(LAYER + "self_attention.linear_qkv.weight", lambda c: (_qkv(c), c.hidden_size), packing=QKV, tp_dim=0,
                when=is_whole),
    "qkv_bias": Slot(LAYER + "self_attention.linear_qkv.bias", lambda c: (_qkv(c),), packing=QKV, tp_dim=0, when=has_qkv_bias),
    "q_norm": Slot(LAYER + "self_attention.q_layernorm.weight", lambda c: (c.kv_channels,), when=has_qk_norm),
    "k_norm": Slot(LAYER + "self_attention.k_layernorm.weight", lambda c: (c.kv_channels,), when=has_qk_norm),
    "q_norm_wide": Slot(LAYER + "self_attention.q_norm.weight", lambda c: (_heads(c),), tp_dim=0, when=has_field("wide_qk_norm")),
    "k_norm_wide": Slot(LAYER + "self_attention.k_norm.weight", lambda c: (c.num_query_groups * c.kv_channels,), tp_dim=0,
                        when=has_field("wide_qk_norm")),
    "attn_out": Slot(LAYER + "self_attention.linear_proj.weight", lambda c: (c.hidden_size, _heads(c)), tp_dim=1, when=attends),
    "attn_out_bias": Slot(LAYER + "self_attention.linear_proj.bias", _hidden, when=has_linear_bias),
    "sinks": Slot(ATTENTION + "core_attention.softmax_offset", lambda c: (c.num_attention_heads,), tp_dim=0, when=has_sinks),
    "attn_sum_norm": Slot(LAYER + "self_attn_bda.norm.weight", _hidden, when=has_field("sublayer_output_norm")),
    "mlp_norm": Slot(LAYER + "pre_mlp_layernorm.weight", _hidden, te=LAYER + "mlp.linear_fc1.layer_norm_weight", when=has_mlp_norm),
    "mlp_norm_bias": Slot(LAYER + "pre_mlp_layernorm.bias", _hidden, te=LAYER + "mlp.linear_fc1.layer_norm_bias",
                          when=_both(has_mlp_norm, has_norm_bias)),
    "mlp_in": Slot(LAYER + "mlp.linear_fc1.weight", lambda c: (_mlp_rows(c, c.ffn_hidden_size), c.hidden_size),
                   packing=GLU, tp_dim=0, when=is_dense),
    "mlp_in_bias": Slot(LAYER + "mlp.linear_fc1.bias", lambda c: (_mlp_rows(c, c.ffn_hidden_size),),
                        packing=GLU, tp_dim=0, when=_both(is_dense, has_linear_bias)),
    "mlp_out": Slot(LAYER + "mlp.linear_fc2.weight", lambda c: (c.hidden_size, c.ffn_hidden_size), tp_dim=1, when=is_dense),
    "mlp_out_bias": Slot(LAYER + "mlp.linear_fc2.bias", _hidden, when=_both(is_dense, has_linear_bias)),
    "mlp_sum_norm": Slot(LAYER + "mlp_bda.norm.weight", _hidden, when=has_field("sublayer_output_norm")),
    "moe_norm": Slot(LAYER + "pre_mlp_layernorm.weight", _hidden, disk=LAYER + "mlp.linear_fc1.layer_norm_weight",
                     when=_both(is_moe, has_input_norm)),
    "router": Slot(LAYER + "mlp.router.weight", lambda c: (c.num_moe_experts, c.hidden_size), when=is_moe),
    "router_linear_bias": Slot(LAYER + "mlp.router.bias", lambda c: (c.num_moe_experts,), when=_both(is_moe, has_linear_bias)),
    "expert_in": Slot(LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
                      lambda c: (_mlp_rows(c, _moe_ffn(c)), c.hidden_size),
                      te=LAYER + "mlp.experts.linear_fc1.weight{expert}", disk=LAYER + "mlp.experts.experts.linear_fc1.weight",
                      packing=GLU, tp_dim=0, when=is_moe),
    "expert_out": Slot(LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight", lambda c: (c.hidden_size, _moe_ffn(c)),
                       te=LAYER + "mlp.experts.linear_fc2.weight{expert}", disk=LAYER + "mlp.experts.experts.linear_fc2.weight",
                       tp_dim=1, when=is_moe),
    "expert_in_bias": Slot(LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.bias", lambda c: (_mlp_rows(c, _moe_ffn(c)),),
                           te=LAYER + "mlp.experts.linear_fc1.bias{expert}", disk=LAYER + "mlp.experts.experts.linear_fc1.bias",
                           packing=GLU, tp_dim=0, when=_both(is_moe, has_linear_bias)),
    "expert_out_bias": Slot(LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.bias", _hidden,
                            te=LAYER + "mlp.experts.linear_fc2.bias{expert}", disk=LAYER + "mlp.experts.experts.linear_fc2.bias",
                            when=_both(is_moe, has_linear_bias)),
    "shared_in": Slot(LAYER + "mlp.shared_experts.linear_fc1.weight",
                      lambda c: (_mlp_rows(c, c.moe_shared_expert_intermediate_size), c.hidden_size),
                      packing=GLU, tp_dim=0, when=has_shared_expert),
    "shared_out": Slot(LAYER + "mlp.shared_experts.linear_fc2.weight",
                       lambda c: (c.hidden_size, c.moe_shared_expert_intermediate_size), tp_dim=1, when=has_shared_expert),
    "shared_gate": Slot(LAYER + "mlp.shared_experts.gate_weight", lambda c: (1, c.hidden_size), when=has_shared_gate),
    "final_norm": Slot("decoder.final_layernorm.weight", _hidden),
    "final_norm_bias": Slot("decoder.final_layernorm.bias", _hidden, when=has_norm_bias),
    "head": Slot("output_layer.weight", _vocab, tp_dim=0, vocab=True, when=has_head),
    # Multi-latent attention: on disk, the native spec has no other key for a norm than its own name.
    "latent_attn_norm": Slot(LAYER + "input_layernorm.weight", _hidden, when=is_latent),
    "latent_mlp_norm": Slot(LAYER + "pre_mlp_layernorm.weight", _hidden, te=LAYER + "mlp.linear_fc1.layer_norm_weight",
                            disk=LAYER + "pre_mlp_layernorm.weight", when=_both(is_dense, is_latent)),
    "latent_moe_norm": Slot(LAYER + "pre_mlp_layernorm.weight", _hidden, when=_both(is_moe, is_latent)),
    "q_proj": Slot(ATTENTION + "linear_q_proj.weight", lambda c: (_latent_q(c), c.hidden_size), tp_dim=0, when=has_q_proj),
    "q_down": Slot(ATTENTION + "linear_q_down_proj.weight", lambda c: (c.q_lora_rank, c.hidden_size), when=has_q_lora),
    "q_down_norm": Slot(ATTENTION + "q_layernorm.weight", lambda c: (c.q_lora_rank,), te=ATTENTION + "linear_q_up_proj.layer_norm_weight",
                        disk=ATTENTION + "q_layernorm.weight", when=has_q_lora),
    "q_up": Slot(ATTENTION + "linear_q_up_proj.weight", lambda c: (_latent_q(c), c.q_lora_rank), tp_dim=0, when=has_q_lora),
    "kv_down": Slot(ATTENTION + "linear_kv_down_proj.weight", lambda c: (c.kv_lora_rank + c.qk_pos_emb_head_dim, c.hidden_size),
                    when=is_latent),
    "kv_down_norm": Slot(ATTENTION + "kv_layernorm.weight", lambda c: (c.kv_lora_rank,),
                         te=ATTENTION + "linear_kv_up_proj.layer_norm_weight", disk=ATTENTION + "kv_layernorm.weight", when=is_latent),
    "kv_up": Slot(ATTENTION + "linear_kv_up_proj.weight",
                  lambda c: (c.num_attention_heads * (c.qk_head_dim + c.v_head_dim), c.kv_lora_rank), tp_dim=0, when=is_latent),
    "router_bias": Slot(LAYER + "mlp.router.expert_bias", lambda c: (c.num_moe_experts,), when=has_router_bias, buffer=True),
    # Gated delta nets, in place of attention.
    "delta_in": Slot(ATTENTION + "in_proj.weight",
                     lambda c: (2 * (_delta_key(c) + _delta_value(c) + c.linear_num_value_heads), c.hidden_size),
                     packing=DELTA_IN, tp_dim=0, when=is_delta),
    "delta_conv": Slot(ATTENTION + "conv1d.weight", lambda c: (2 * _delta_key(c) + _delta_value(c), 1, c.linear_conv_kernel_dim),
                       packing=DELTA_CONV, tp_dim=0, when=is_delta),
    "delta_dt": Slot(ATTENTION + "dt_bias", lambda c: (c.linear_num_value_heads,), tp_dim=0, when=is_delta),
    "delta_decay": Slot(ATTENTION + "A_log", lambda c: (c.linear_num_value_heads,), tp_dim=0, when=is_delta),
    "delta_norm": Slot(ATTENTION + "out_norm.weight", lambda c: (c.linear_value_head_dim,), when=is_delta),
    "delta_out": Slot(ATTENTION + "out_proj.weight", lambda c: (c.hidden_size, _delta_value(c)), tp_dim=1, when=is_delta),
}
