"""Galactica and OPT: learned positions from row 2. Source: transformers/models/opt."""

from megatron_patch.family import Family, Field, fixed
from megatron_patch.packing import PLAIN
from model_zoo import bloom
from model_zoo.bloom import with_biases
from model_zoo.llama import activation, dropout, must_be

D = "model.decoder."
H = D + "layers.{layer}."


def no_projection(hf) -> None:
    if hf.word_embed_proj_dim not in (None, hf.hidden_size):
        raise ValueError(f"word_embed_proj_dim={hf.word_embed_proj_dim} with hidden_size={hf.hidden_size} is not supported: Megatron-core "
                         f"has no projection between embeddings and layers (OPT-350m).")


OPT = Family(
    "opt", ("opt",), ("OPTForCausalLM",), positions="learned_absolute", tied=True,
    config={**bloom.CONFIG, **bloom.heads("num_attention_heads"), **dropout("dropout"),
            "num_layers": Field("num_hidden_layers"), "ffn_hidden_size": Field("ffn_dim"), "layernorm_epsilon": fixed(1e-5),
            "init_method_std": Field("init_std", default=0.02), "activation_func": activation("activation_function"),
            "add_bias_linear": Field("enable_bias"), "position_offset": fixed(2)},
    weights=dict(
        embed=(D + "embed_tokens.weight",), positions=(D + "embed_positions.weight",), head=("lm_head.weight",),
        qkv=tuple(H + f"self_attn.{p}_proj.weight" for p in "qkv"), qkv_bias=tuple(H + f"self_attn.{p}_proj.bias" for p in "qkv"),
        **with_biases(attn_norm=H + "self_attn_layer_norm.", attn_out=H + "self_attn.out_proj.", mlp_norm=H + "final_layer_norm.",
                      mlp_in=H + "fc1.", mlp_out=H + "fc2.", final_norm=D + "final_layer_norm.")),
    packings=dict(mlp_in=PLAIN, mlp_in_bias=PLAIN),
    checks=(no_projection, must_be("do_layer_norm_before", True), must_be("layer_norm_elementwise_affine", True),
            must_be("_remove_final_layer_norm", False), must_be("layerdrop", 0.0)))
