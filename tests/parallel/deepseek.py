"""Run on ranks: numbers inside DeepSeek models that logits alone would not name, and the selection bias in 16 bits."""

import math
from pathlib import Path

import torch


def scales(folders: dict) -> dict:
    """{case: [factor on cos and sin, factor on the softmax scale]} of the first layer's attention."""
    from megatron_patch import load_config, parallel
    from megatron_patch.model import build_chunks

    out = {}
    for case, folder in folders.items():
        config = load_config(folder)
        parallel.initialize(config)
        (chunk,) = build_chunks(config)
        attention = chunk.decoder.layers[0].self_attention
        out[case] = [attention.rotary_pos_emb.get_emb(2)[1], attention.softmax_scale * math.sqrt(attention.q_head_dim)]
    return out


def biases_in_half(folder: str, out: str) -> dict:
    """{'loaded then wrapped', 'wrapped then loaded', 'exported': names of selection biases that are not the folder's, bitwise and in fp32;
    'count': how many there are; 'others': dtypes of all other exported tensors}."""
    from megatron.core.transformer.module import Float16Module
    from safetensors.torch import load_file

    from megatron_patch import load_config, load_hf, parallel, save_hf
    from megatron_patch.generation.forward import full_logits
    from megatron_patch.model import build_chunks
    from tests.families import tiny

    config = load_config(folder, bf16=True, params_dtype=torch.bfloat16)
    parallel.initialize(config)
    disk = {k: v for k, v in load_file(f"{folder}/model.safetensors").items() if k.endswith("e_score_correction_bias")}
    found = {"count": len(disk)}

    def wrong(chunk):
        own = {f"model.layers.{i}.mlp.gate.e_score_correction_bias": layer.mlp.router.expert_bias
               for i, layer in enumerate(chunk.decoder.layers) if hasattr(layer.mlp, "router")}
        return [k for k in disk.keys() | own.keys() if k not in own or own[k].dtype != torch.float32 or not torch.equal(own[k], disk[k])]

    (chunk,) = build_chunks(config)
    load_hf(chunk, folder)
    wrapped = Float16Module(chunk.config, chunk)
    found["loaded then wrapped"] = wrong(chunk)
    (later,) = build_chunks(config)
    load_hf(Float16Module(later.config, later), folder)
    found["wrapped then loaded"] = wrong(later)
    full_logits(chunk, tiny.tokens(1, 16))
    save_hf(wrapped, Path(out) / "half", folder)
    back = load_file(f"{out}/half/model.safetensors")
    found["exported"] = [k for k, v in disk.items() if back[k].dtype != torch.float32 or not torch.equal(back[k], v)]
    found["others"] = sorted({str(v.dtype) for k, v in back.items() if k not in disk})
    return found
