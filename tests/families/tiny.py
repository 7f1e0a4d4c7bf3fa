"""Tiny random Hugging Face models, one per family and variant, scaled so that logits tell right from wrong.

Default initialisation gives logits with a standard deviation near 0.16, where a wrong rope factor moves them by 1e-3 only;
these weights are larger, and norm weights are not 1.
"""

import importlib
import json
from pathlib import Path

import torch

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=1003,
             max_position_embeddings=128, rms_norm_eps=1e-3, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
ROPE = dict(rope_type="default", rope_theta=10000.0)
LENGTH, PROMPT, GREEDY = 96, 44, 16  # of all prompts, one after which no two best logits are within 1e-3


LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24)
EXPERTS = dict(n_routed_experts=12, n_shared_experts=2, moe_intermediate_size=32, first_k_dense_replace=1)


DELTA = dict(head_dim=32, full_attention_interval=4, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8,
             linear_value_head_dim=16)
SHARED = dict(moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
MROPE = dict(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)


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
    "qwen3_next": ("Qwen3NextConfig", dict(DELTA, **SHARED)),
    "qwen3_5": ("Qwen3_5TextConfig", dict(DELTA, rope_parameters=dict(ROPE, **MROPE))),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", dict(DELTA, **SHARED, **_scaled("yarn", factor=4.0, original_max_position_embeddings=32,
                                                                            **MROPE))),
    "phi3": ("Phi3Config", dict(sliding_window=24, rope_parameters=dict(ROPE, partial_rotary_factor=0.75))),
    "glm": ("GlmConfig", dict(head_dim=16, attention_bias=True)),
    "starcoder2": ("Starcoder2Config", dict(norm_epsilon=1e-3, sliding_window=24, initializer_range=0.02)),
    "glm4": ("Glm4Config", dict(head_dim=16, attention_bias=True)),
    "gemma": ("GemmaConfig", dict(head_dim=32, tie_word_embeddings=True)),
    "gemma2": ("Gemma2Config", dict(head_dim=16, sliding_window=24, query_pre_attn_scalar=32, tie_word_embeddings=True,
                                    attn_logit_softcapping=4.0, final_logit_softcapping=8.0)),
    "gemma3": ("Gemma3TextConfig", dict(
        head_dim=16, sliding_window=24, query_pre_attn_scalar=32, tie_word_embeddings=True, sliding_window_pattern=2,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=2.0, rope_theta=10000.0),
                             sliding_attention=dict(rope_type="default", rope_theta=500.0)))),
    "phi3_long": ("Phi3Config", dict(original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[1.0 + i / 2 for i in range(8)]))),
    "phi4_mini": ("Phi3Config", dict(original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75, short_factor=[1.0] * 6,
        long_factor=[1.0 + i / 2 for i in range(6)]))),
    "olmo2": ("Olmo2Config", {}),
    "olmoe": ("OlmoeConfig", dict(intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False)),
    "bloom": ("BloomConfig", dict(num_attention_heads=6, hidden_size=96, layer_norm_epsilon=1e-3, tie_word_embeddings=True)),
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
        rope_parameters=dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=32, mscale=1.0,
                             mscale_all_dim=1.0))),
    "moonlight": ("DeepseekV3Config", dict(LATENT, **EXPERTS, q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=3,
                                           routed_scaling_factor=2.446, rope_parameters=dict(ROPE, rope_theta=5000.0))),
    "glm4_moe": ("Glm4MoeConfig", dict(EXPERTS, head_dim=32, n_group=2, topk_group=1, num_experts_per_tok=2, use_qk_norm=True,
                                       attention_bias=True, rope_parameters=dict(ROPE, partial_rotary_factor=0.5))),
    "baichuan": ("Baichuan", {}),
    "baichuan_13b": ("Baichuan13B", {}),
    "baichuan2": ("Baichuan2", {}),
    "baichuan2_13b": ("Baichuan2With13B", {}),
    "qwen": ("Qwen1", {}),
    "qwen_beyond": ("Qwen1", dict(seq_length=40)),
    "chatglm2": ("ChatGLM2", dict(rope_ratio=4, _name_or_path="THUDM/chatglm2-6b-32k")),
    "chatglm3": ("ChatGLM3", dict(_name_or_path="THUDM/chatglm3-6b-32k")),
    "internlm2": ("InternLM2", {}),
    "chatglm": ("ChatGLM", {}),
    "glm_130b": ("GLM130B", {}),
    "gpt_oss": ("GptOssConfig", dict(
        head_dim=16, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=24, swiglu_limit=1.0,
        **_scaled("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=2.0, beta_slow=1.0, truncate=False))),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=None)),
}
FIRST = ("llama", "llama_tied", "llama_bias", "llama3", "llama_linear", "llama_yarn", "llama_dynamic", "mistral", "qwen2", "qwen2_tied",
         "qwen2_window", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3", "mixtral")  # of upstream's own layers; in more layouts
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
AROUND_ZERO = DELTA_NETS  # norm weights for which scales near 2 would make rounding errors grow beyond 1e-4
PREFIX = ("chatglm", "glm_130b")  # a context that sees itself in both directions
IN_INFERENCE_ONLY = ("qwen_beyond",)  # what they do at this length they do not do in training
REFERENCES = {"Baichuan": "baichuan:Baichuan", "Baichuan13B": "baichuan:Baichuan13B", "Baichuan2": "baichuan:Baichuan2",
              "Baichuan2With13B": "baichuan:Baichuan2With13B", "Qwen1": "qwen1:Qwen1", "ChatGLM2": "chatglm2:ChatGLM2",
              "ChatGLM3": "chatglm2:ChatGLM3", "InternLM2": "internlm2:InternLM2",
              "ChatGLM": "chatglm:ChatGLM", "GLM130B": "glm130b:GLM130B"}
HF_CASES = [case for case in CASES if CASES[case][0] not in REFERENCES]
MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "moonlight", "glm4_moe", "olmoe",
       "qwen3_next", "qwen3_5_moe", "gpt_oss")


def config(case: str, **overrides):
    """The HF config object of ``case``."""
    import transformers

    name, more = CASES[case]
    if name in REFERENCES:
        return build(case, **overrides).config
    return getattr(transformers, name)(**{**SIZES, **more, **overrides})


def raw_config(case: str) -> dict:
    """config.json of ``case``."""
    found = config(case)
    return {**vars(found), "dtype": "float32"} if CASES[case][0] in REFERENCES else found.to_dict()


def written_config(folder, names) -> dict:
    """config.json of ``folder`` as it is right beside tensors ``names``: with the prediction layers among them. Transformers writes 1 for
    every DeepSeek-V3 and GLM-4.5, and no such layer (B21)."""
    found, key = json.loads((Path(folder) / "config.json").read_text()), "num_nextn_predict_layers"
    return {**found, key: sum(name.endswith(".eh_proj.weight") for name in names)} if key in found else found


def build(case: str, seed: int = 0, **overrides):
    """A random HF model of ``case`` in fp32, eval mode, or a reference model of tests/references.

    Attention is eager, but SDPA for Falcon with ALiBi, whose biases Transformers 5.24 adds twice in its eager attention (once in the
    mask, once to the scores)."""
    import transformers

    if CASES[case][0] in REFERENCES:
        module, name = REFERENCES[CASES[case][0]].split(":")
        return getattr(importlib.import_module(f"tests.references.{module}"), name).tiny(seed, **CASES[case][1], **overrides)
    torch.manual_seed(seed)
    attention = "sdpa" if case == "falcon_rw" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config(case, **overrides), attn_implementation=attention, dtype=torch.float32)
    model.eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter_name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        usual = float(case not in AROUND_ZERO or ".linear_attn." in parameter_name)
        p.data = usual + 0.3 * noise if p.dim() == 1 and parameter_name.endswith(".weight") else 0.12 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model


def save(case: str, folder, seed: int = 0, **overrides):
    """Save ``case`` to ``folder``; returns the model."""
    model = build(case, seed, **overrides)
    model.save_pretrained(folder)
    return model


def continuation(model, ids):
    """(GREEDY best tokens after the first PROMPT of ``ids``' first row, gaps between the two best logits), both [1, GREEDY]."""
    row, gaps = ids[:1, :PROMPT], []
    for _ in range(GREEDY):
        best = model(row).logits[:, -1].topk(2)
        row, gaps = torch.cat([row, best.indices[:, :1]], 1), [*gaps, best.values[:, 0] - best.values[:, 1]]
    return row[:, PROMPT:], torch.stack(gaps, 1)


def save_with_answers(case: str, folder, **overrides) -> str:
    """Save ``case`` to ``folder``, and Transformers' logits, loss, gradients and text beside it; returns the folder."""
    model, labels = save(case, folder, **overrides), tokens(seed=6)
    ids = inputs(case, model)
    with torch.no_grad():
        logits = model(ids).logits
        text, gaps = continuation(model, ids)
    loss = save_gradients(model, folder / "gradients", ids, labels)
    torch.save({"tokens": ids, "labels": labels, "logits": logits, "loss": loss, "continuation": text, "gaps": gaps},
               folder / "expected.pt")
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


def inputs(case: str, model):
    """[2, LENGTH] token ids for ``case``: with contexts of 30 and 40 tokens where the model wants them."""
    if case not in PREFIX:
        return tokens()
    from tests.references.common import with_prompts

    return with_prompts(tokens(), model.config, [30, 40])
