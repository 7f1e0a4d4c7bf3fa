"""Hand-made checkpoints without Transformers' models: config.json and tensors as plain dicts."""

import json
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import save_file

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=40, max_position_embeddings=32, rms_norm_eps=1e-5,
             hidden_act="silu", rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False, torch_dtype="float32",
             attention_bias=False, mlp_bias=False)
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2,
           "sliding_window": None}


def tensors(config, dtype=torch.float32, seed=0):
    """{name: random tensor} as save_pretrained would write them."""
    h, f, v, d = config["hidden_size"], config["intermediate_size"], config["vocab_size"], config["head_dim"]
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,),
                   at + "self_attn.q_proj.weight": (config["num_attention_heads"] * d, h),
                   at + "self_attn.k_proj.weight": (config["num_key_value_heads"] * d, h),
                   at + "self_attn.v_proj.weight": (config["num_key_value_heads"] * d, h),
                   at + "self_attn.o_proj.weight": (h, config["num_attention_heads"] * d)}
        if config["model_type"] == "mixtral":
            shapes[at + "block_sparse_moe.gate.weight"] = (config["num_local_experts"], h)
            for e in range(config["num_local_experts"]):
                shapes |= {f"{at}block_sparse_moe.experts.{e}.{w}.weight": (h, f) if w == "w2" else (f, h) for w in ("w1", "w2", "w3")}
        else:
            shapes |= {at + "mlp.gate_proj.weight": (f, h), at + "mlp.up_proj.weight": (f, h), at + "mlp.down_proj.weight": (h, f)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder, config, weights):
    """One model.safetensors and config.json; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_sharded(folder, config, weights, kind="safetensors", shards=3):
    """Shards with an index, tensors dealt out in turn so that one layer spans several."""
    folder = write(folder, config, None)
    stem, index = ("model", "model.safetensors.index.json") if kind == "safetensors" else ("pytorch_model", "pytorch_model.bin.index.json")
    names = [f"{stem}-{i + 1:05d}-of-{shards:05d}.{kind}" for i in range(shards)]
    where = {name: names[i % shards] for i, name in enumerate(weights)}
    for file in names:
        part = {n: weights[n] for n in weights if where[n] == file}
        save_file(part, folder / file) if kind == "safetensors" else torch.save(part, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def edit(path, change):
    """Let ``change`` act on what torch.save wrote to ``path``."""
    with torch.serialization.safe_globals([Namespace]):
        found = torch.load(path, weights_only=True)
    change(found)
    torch.save(found, path)


def argue(root, **changes):
    """Change arguments in the torch_dist checkpoint; ... takes one out."""
    def change(common):
        args = vars(common["args"]) | changes
        common["args"] = Namespace(**{name: value for name, value in args.items() if value is not ...})

    edit(root / "release" / "common.pt", change)
