"""Tiny random Hugging Face models, one per family and variant, scaled so that logits tell right from wrong.

Default initialisation gives logits with a standard deviation near 0.16, where a wrong rope factor moves them by 1e-3 only;
these weights are larger, and norm weights are not 1.
"""

import torch

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=1003,
             max_position_embeddings=128, rms_norm_eps=1e-3, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
ROPE = dict(rope_type="default", rope_theta=10000.0)
LENGTH = 96


LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24)
EXPERTS = dict(n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=32, first_k_dense_replace=1)


def _scaled(kind, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **more))


CASES = {
    "llama": ("LlamaConfig", dict(rope_parameters=dict(ROPE, rope_theta=5000.0))),
    "llama_tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "llama_bias": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True)),
    "llama3": ("LlamaConfig", _scaled("llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0,
                                      original_max_position_embeddings=32)),
    "llama_linear": ("LlamaConfig", _scaled("linear", factor=4.0)),
    "llama_yarn": ("LlamaConfig", _scaled("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama_dynamic": ("LlamaConfig", _scaled("dynamic", factor=2.0)),
    "mistral": ("MistralConfig", dict(sliding_window=24, head_dim=16)),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_tied": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "qwen2_window": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=24, max_window_layers=2)),
    "qwen3": ("Qwen3Config", dict(head_dim=32)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=4, num_experts_per_tok=2,
                                         norm_topk_prob=False, mlp_only_layers=[1])),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)),
    "phi3": ("Phi3Config", dict(sliding_window=24, rope_parameters=dict(ROPE, partial_rotary_factor=0.75))),
    "glm": ("GlmConfig", dict(head_dim=16, attention_bias=True)),
    "starcoder2": ("Starcoder2Config", dict(norm_epsilon=1e-3, sliding_window=24, initializer_range=0.02)),
    "glm4": ("Glm4Config", dict(head_dim=16, attention_bias=True)),
    "gemma": ("GemmaConfig", dict(head_dim=32, tie_word_embeddings=True)),
    "gemma2": ("Gemma2Config", dict(head_dim=16, sliding_window=24, query_pre_attn_scalar=32, tie_word_embeddings=True,
                                    attn_logit_softcapping=4.0, final_logit_softcapping=8.0)),
    "olmo2": ("Olmo2Config", {}),
    "bloom": ("BloomConfig", dict(n_layer=4, n_head=6, hidden_size=96, layer_norm_epsilon=1e-3, tie_word_embeddings=True, seq_length=128)),
    "falcon": ("FalconConfig", dict(layer_norm_epsilon=1e-3, num_kv_heads=4, tie_word_embeddings=True)),
    "falcon_40b": ("FalconConfig", dict(layer_norm_epsilon=1e-3, new_decoder_architecture=True, tie_word_embeddings=True)),
    "falcon_11b": ("FalconConfig", dict(layer_norm_epsilon=1e-3, new_decoder_architecture=True, num_ln_in_parallel_attn=1)),
    "falcon_rw": ("FalconConfig", dict(layer_norm_epsilon=1e-3, alibi=True, multi_query=False, parallel_attn=False, bias=True,
                                       tie_word_embeddings=True)),
    "gpt_bigcode": ("GPTBigCodeConfig", dict(n_layer=4, n_head=4, n_embd=64, n_positions=128, layer_norm_epsilon=1e-3, resid_pdrop=0.0,
                                             embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu", tie_word_embeddings=True)),
    "gpt_bigcode_mha": ("GPTBigCodeConfig", dict(n_layer=4, n_head=4, n_embd=64, n_positions=128, layer_norm_epsilon=1e-3, resid_pdrop=0.0,
                                                 embd_pdrop=0.0, attn_pdrop=0.0, multi_query=False, tie_word_embeddings=True)),
    "opt": ("OPTConfig", dict(ffn_dim=128, word_embed_proj_dim=64, dropout=0.0, tie_word_embeddings=True)),
    "deepseek_v2": ("DeepseekV2Config", dict(
        LATENT, **EXPERTS, q_lora_rank=32, topk_method="group_limited_greedy", n_group=4, topk_group=2, num_experts_per_tok=4,
        routed_scaling_factor=4.0, **_scaled("yarn", factor=40.0, original_max_position_embeddings=64, beta_fast=2.0, beta_slow=1.0,
                                             mscale=1.0, mscale_all_dim=0.707))),
    "deepseek_v2_lite": ("DeepseekV2Config", dict(LATENT, **EXPERTS, q_lora_rank=None, topk_method="greedy", num_experts_per_tok=3)),
    "deepseek_v3": ("DeepseekV3Config", dict(
        LATENT, **EXPERTS, q_lora_rank=32, n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=2.5,
        **_scaled("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0))),
    "moonlight": ("DeepseekV3Config", dict(LATENT, **EXPERTS, q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=3,
                                           routed_scaling_factor=2.446, rope_parameters=dict(ROPE, rope_theta=5000.0))),
    "glm4_moe": ("Glm4MoeConfig", dict(EXPERTS, head_dim=32, n_group=2, topk_group=1, num_experts_per_tok=2, use_qk_norm=True,
                                       attention_bias=True, rope_parameters=dict(ROPE, partial_rotary_factor=0.5))),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=None)),
}
MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "moonlight", "glm4_moe")


def build(case: str, seed: int = 0, **overrides):
    """A random HF model of ``case`` in fp32, eval mode, eager attention."""
    import transformers

    name, more = CASES[case]
    config = getattr(transformers, name)(**{**SIZES, **more, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter_name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = 1 + 0.3 * noise if parameter_name.endswith("norm.weight") else 0.12 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model


def save(case: str, folder, seed: int = 0, **overrides):
    """Save ``case`` to ``folder``; returns the model."""
    model = build(case, seed, **overrides)
    model.save_pretrained(folder)
    return model


def save_with_answers(case: str, folder, **overrides) -> str:
    """Save ``case`` to ``folder``, Transformers' logits, loss and gradients of one batch beside it; returns the folder."""
    model, ids, labels = save(case, folder, **overrides), tokens(), tokens(seed=6)
    with torch.no_grad():
        logits = model(ids).logits
    loss = save_gradients(model, folder / "gradients", ids, labels)
    torch.save({"tokens": ids, "labels": labels, "logits": logits, "loss": loss}, folder / "expected.pt")
    return str(folder)


def save_gradients(model, folder, ids, labels, mask=None):
    """Save d(mean cross-entropy)/d(parameter) of ``model`` under the names that its weights have on disk; returns the loss.
    ``mask`` [b, s]: 1 where the label counts; all count without it. Nothing but cross-entropy is in the loss (B134)."""
    model.zero_grad()
    logits = model(ids).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weight = torch.ones_like(each) if mask is None else mask.flatten()
    loss = (each * weight).sum() / weight.sum()
    loss.backward()
    kept = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.grad.clone()
    model.save_pretrained(folder)
    for name, p in model.named_parameters():
        p.data = kept[name]
    return loss.item()


def tokens(batch: int = 2, length: int = LENGTH, vocab: int = 1003, seed: int = 5):
    """[batch, length] random token ids."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
