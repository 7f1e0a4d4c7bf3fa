"""StarCoder, SantaCoder (gpt_bigcode): learned positions, one key/value head. Source: transformers/models/gpt_bigcode."""

from megatron_patch.family import Family, Field
from model_zoo import bloom
from model_zoo.bloom import with_biases
from model_zoo.llama import activation, dropout, must_be

H = "transformer.h.{layer}."

GPT_BIGCODE = Family(
    "gpt_bigcode", ("gpt_bigcode",), ("GPTBigCodeForCausalLM",), tied=True, positions="learned_absolute",
    config={**bloom.CONFIG, **bloom.heads("n_head"), **dropout("resid_pdrop", "embd_pdrop"),
            "num_layers": Field("n_layer"), "hidden_size": Field("n_embd"),
            "ffn_hidden_size": Field("n_inner", default=lambda hf: 4 * hf.n_embd), "activation_func": activation("activation_function"),
            "num_query_groups": Field("multi_query", lambda on, hf: 1 if on else hf.n_head, lambda groups: groups == 1),
            "attention_dropout": Field("attn_pdrop", default=0.0)},
    weights=dict(
        embed=("transformer.wte.weight",), positions=("transformer.wpe.weight",), head=("lm_head.weight",),
        **with_biases(final_norm="transformer.ln_f.", attn_norm=H + "ln_1.", qkv=H + "attn.c_attn.", attn_out=H + "attn.c_proj.",
                      mlp_norm=H + "ln_2.", mlp_in=H + "mlp.c_fc.", mlp_out=H + "mlp.c_proj.")),
    packings=bloom.PLAIN_GPT, names=dict(max_position_embeddings="n_positions"), checks=(must_be("scale_attn_weights", True),),
    ignored=("attn.bias", "attn.masked_bias"))
