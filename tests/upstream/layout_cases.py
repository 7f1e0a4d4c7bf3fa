"""Run in a process of its own: what upstream says each pipeline stage builds, for a list of layouts."""


def upstream_split(cases: list) -> list:
    """For each {TransformerConfig fields}: [[[layer ids] per virtual stage] per pipeline rank] by upstream's own functions."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    out = []
    for fields in cases:
        fields = {k: v for k, v in fields.items() if v is not None}
        pp, vpp = fields.get("pipeline_model_parallel_size", 1), fields.get("virtual_pipeline_model_parallel_size") or 1
        text = fields.pop("pipeline_model_parallel_layout", None)
        if text:
            rows, first, split = PipelineParallelLayerLayout(text, pp).layout, 0, [[[] for _ in range(vpp)] for _ in range(pp)]
            for stage in range(vpp):
                for rank in range(pp):
                    n = sum(kind.name == "decoder" for kind in rows[rank][stage])
                    split[rank][stage] = list(range(first, first + n))
                    first += n
            out.append(split)
            continue
        config = TransformerConfig(hidden_size=64, num_attention_heads=4, pipeline_dtype=__import__("torch").float32, **fields)
        stages = [None] if vpp == 1 else range(vpp)
        out.append([[_ids(config, s, r, get_num_layers_to_build, get_transformer_layer_offset) for s in stages] for r in range(pp)])
    return out


def _ids(config, stage, rank, count, offset):
    first = offset(config, stage, rank)
    return list(range(first, first + count(config, stage, rank)))
