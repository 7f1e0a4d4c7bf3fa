"""Released models too large to have here: their config.json, and a safetensors file with every tensor's header and no data.

Names and shapes are those of the original: Transformers' class, or the reference of tests/references, built without memory.
"""

import json
import struct
from types import SimpleNamespace

import torch

# config.json under the hub's keys, as far as it says something about sizes.
CONFIGS = {
    "llama-70b": dict(
        model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu", rope_theta=500000.0),
    "llama-405b": dict(
        model_type="llama", hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, hidden_act="silu",
        rope_theta=500000.0, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                              original_max_position_embeddings=8192)),
    "falcon-40b": dict(
        model_type="falcon", hidden_size=8192, num_hidden_layers=60, num_attention_heads=128, num_kv_heads=8, vocab_size=65024, alibi=False,
        bias=False, multi_query=True, new_decoder_architecture=True, parallel_attn=True, layer_norm_epsilon=1e-5),
    "falcon-180b": dict(
        model_type="falcon", hidden_size=14848, num_hidden_layers=80, num_attention_heads=232, num_kv_heads=8, vocab_size=65024,
        alibi=False, bias=False, multi_query=True, new_decoder_architecture=True, parallel_attn=True, layer_norm_epsilon=1e-5),
    "bloom-176b": dict(model_type="bloom", n_embed=14336, n_layer=70, num_attention_heads=112, vocab_size=250880, seq_length=2048,
                       layer_norm_epsilon=1e-5, apply_residual_connection_post_layernorm=False),
    "galactica-120b": dict(
        model_type="opt", hidden_size=10240, ffn_dim=40960, num_hidden_layers=96, num_attention_heads=80, vocab_size=50000,
        max_position_embeddings=2048, word_embed_proj_dim=10240, activation_function="gelu", do_layer_norm_before=True,
        enable_bias=False),
    "gemma-2-27b": dict(
        model_type="gemma2", hidden_size=4608, intermediate_size=36864, num_hidden_layers=46, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, vocab_size=256000, max_position_embeddings=8192, query_pre_attn_scalar=144,
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rms_norm_eps=1e-6),
    "baichuan2-13b": dict(
        model_type="baichuan", hidden_size=5120, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=40, vocab_size=125696,
        model_max_length=4096, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, z_loss_weight=0),
    "deepseek-v3": dict(
        model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=256, n_shared_experts=1, first_k_dense_replace=3, num_experts_per_tok=8, n_group=8, topk_group=4,
        routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
        vocab_size=129280, max_position_embeddings=163840, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=10000,
        tie_word_embeddings=False, rope_scaling=dict(
            type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)),
    "gpt-oss-120b": dict(
        model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088, max_position_embeddings=131072, rms_norm_eps=1e-5,
        hidden_act="silu", sliding_window=128, swiglu_limit=7.0, attention_bias=True, tie_word_embeddings=False, rope_theta=150000,
        layer_types=["sliding_attention", "full_attention"] * 18, rope_scaling=dict(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, truncate=False)),
    "glm-130b": dict(
        model_type="glm130b", hidden_size=12288, inner_hidden_size=32768, num_layers=70, num_attention_heads=96, vocab_size=150528,
        max_sequence_length=2048, layernorm_epsilon=1e-5, bos_token_id=150004, gmask_token_id=150001, mask_token_id=150000,
        position_encoding_2d=True),
}
REFERENCES = {"baichuan2-13b": ("baichuan", "Baichuan2With13B"), "glm-130b": ("glm130b", "GLM130B")}


def write(name: str, folder) -> int:
    """Write config.json and a sparse model.safetensors of the model ``name`` to ``folder``; returns its number of parameters."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], "torch_dtype": "bfloat16"}))
    header, end, count = {}, 0, 0
    for key, shape in original(name).items():
        size = torch.Size(shape).numel()
        header[key] = dict(dtype="BF16", shape=shape, data_offsets=[end, end + 2 * size])
        end, count = end + 2 * size, count + size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return count


def original(name: str) -> dict[str, list[int]]:
    """Tensor name -> shape, of a checkpoint of the model ``name``; tied weights once."""
    import importlib

    import transformers

    with torch.device("meta"):
        if name in REFERENCES:
            module, kind = REFERENCES[name]
            model = torch.nn.Module.__new__(getattr(importlib.import_module(f"tests.references.{module}"), kind))
            torch.nn.Module.__init__(model)
            model.config = SimpleNamespace(**CONFIGS[name])
            model.build(model.config)
        else:
            raw = dict(CONFIGS[name])
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(raw.pop("model_type"), **raw))
            model.tie_weights()
    buffers = [(key, b) for key, b in model.named_buffers() if key.endswith("e_score_correction_bias")]
    return {key: list(p.shape) for key, p in [*model.named_parameters(), *buffers]}
