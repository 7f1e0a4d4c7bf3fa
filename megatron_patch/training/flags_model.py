"""Model settings that are not plain fields of TransformerConfig: GPTModel's, and Megatron-LM's other spellings.

`GptSettings` are values GPTModel or the rope module take. `ModelFlags` are flags that set TransformerConfig fields under
another name or through a rule (--swiglu, --num-experts, ...); flags_config turns them into fields.
Source: megatron/training/arguments.py (0.19.2).
"""

from dataclasses import dataclass
from typing import Literal

from megatron_patch.training.flags_options import flag

PATTERN_CHARACTERS = frozenset('0123456789[]()+*, ')


def pattern(text: str) -> int | list[int]:
    """An int, or a layer pattern such as '([0]*3+[1])*2' -> [0, 0, 0, 1, 0, 0, 0, 1]. Raises ValueError."""
    if not text.strip().startswith(('[', '(')):
        return int(text)
    if set(text) - PATTERN_CHARACTERS or '**' in text:
        raise ValueError(f'{text!r} may hold only digits, [ ] ( ) + * and commas')
    try:
        # Brackets, digits, + and * only: no name can be reached from here.
        value = eval(text, {'__builtins__': {}})  # noqa: S307
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(f'{text!r} is not a list expression: {error}') from None
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ValueError(f'{text!r} is not a list of integers')
    return value


def window(text: str) -> tuple[int, ...]:
    """'(128,0)' or '128,0' -> (128, 0)."""
    return tuple(int(part) for part in text.strip().strip('()').split(','))


pattern.expected = "int or a list expression such as '[0]*3+[1]*2'"
window.expected = "two ints, as '(128,0)'"


@dataclass(frozen=True)
class GptSettings:
    """Embeddings, vocabulary and rope: what GPTModel takes beside its TransformerConfig."""

    position_embedding_type: Literal['learned_absolute', 'rope', 'yarn', 'mrope', 'relative', 'none'] = (
        'learned_absolute')
    """Position embedding."""
    max_position_embeddings: int | None = None
    """Longest sequence the position embedding knows."""
    rotary_base: int = 10000
    """Base (theta) of the rotary embedding."""
    rotary_percent: float = 1.0
    """Share of a head that is rotated."""
    rotary_seq_len_interpolation_factor: int | None = None
    """Linear rope scaling: divides positions."""
    use_rope_scaling: bool = False
    """Llama 3 rope scaling."""
    rope_scaling_factor: float = 8.0
    """Factor of llama 3 rope scaling."""
    rope_scaling_low_freq_factor: float = 1.0
    """Ours: low_freq_factor of llama 3 rope scaling (Megatron-LM has 1 fixed)."""
    rope_scaling_high_freq_factor: float = 4.0
    """Ours: high_freq_factor of llama 3 rope scaling (Megatron-LM has 4 fixed)."""
    rope_scaling_original_max_position_embeddings: int = 8192
    """Ours: original context length of llama 3 rope scaling (Megatron-LM has 8192 fixed)."""
    yarn_original_max_position_embeddings: int | None = None
    """Original context length of YaRN."""
    yarn_beta_fast: float | None = None
    """beta_fast of YaRN."""
    yarn_beta_slow: float | None = None
    """beta_slow of YaRN."""
    yarn_correction_range_round_to_int: bool = flag(True, '--no-yarn-correction-range-round-to-int')
    """Do not round YaRN's correction range."""
    rotary_scaling_factor: float = 1.0
    """Factor of YaRN."""
    mscale: float = 1.0
    """mscale of YaRN."""
    mscale_all_dim: float = 0.0
    """mscale_all_dim of YaRN."""
    vocab_size: int | None = None
    """Vocabulary before padding."""
    padded_vocab_size: int | None = None
    """Rows of the embedding; from vocab_size and --make-vocab-size-divisible-by when not given."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""
    fp16_lm_cross_entropy: bool = False
    """Compute the loss in fp16."""


@dataclass(frozen=True)
class ModelFlags:
    """Flags that set TransformerConfig fields by another name, type or default than the field's own."""

    group_query_attention: bool = False
    """Use grouped-query attention; give --num-query-groups too."""
    num_experts: int | None = None
    """Number of experts; a dense model when not given."""
    swiglu: bool = False
    """SiLU and a gated MLP."""
    squared_relu: bool = False
    """Squared ReLU."""
    quick_geglu: bool = False
    """Quick GELU and a gated MLP."""
    bias_gelu_fusion: bool = flag(True, '--no-bias-gelu-fusion')
    """Do not fuse bias and GELU."""
    bias_swiglu_fusion: bool = flag(True, '--no-bias-swiglu-fusion')
    """Do not fuse bias and SwiGLU."""
    no_persist_layer_norm: bool = False
    """Do not use the persistent LayerNorm kernel."""
    init_method_xavier_uniform: bool = False
    """Xavier uniform initialisation."""
    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    window_size: str | None = flag(None, type=window)
    """Sliding-window attention: tokens to the left and to the right."""
    window_attn_skip_freq: str | None = flag(None, type=pattern)
    """Every N-th layer has full attention, or a list: 1 for a windowed layer."""
    no_rope_freq: str | None = flag(None, type=pattern)
    """Every N-th layer has no rope, or a list: 1 for a layer without."""
    moe_layer_freq: str = flag(1, type=pattern)
    """One MoE layer every N layers, or a list: 1 for a MoE layer."""
    linear_attention_freq: str | None = flag(None, type=pattern)
    """(N-1) linear-attention layers to one softmax layer, or a list: 1 for linear attention."""
    moe_router_load_balancing_type: str = flag('aux_loss', type=str, nargs='+', choices=[
        'aux_loss', 'seq_aux_loss', 'global_aux_loss', 'sinkhorn', 'quantile_balancing', 'none'])
    """Load balancing of the router; several may be given."""
    moe_aux_loss_coeff: float = flag(0.0, type=float, nargs='+')
    """Coefficient of the auxiliary loss, one per --moe-router-load-balancing-type. 0 for a Hugging Face model until given. Transformers'
    router_aux_loss_coef c is c * top-k / number of MoE layers here: its loss is top-k times this one, and it is taken once over the
    tokens of all layers, this one in every layer."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of every pipeline stage, as 'Et|tt|tL'."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one virtual stage; the number of virtual stages follows."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages of one pipeline rank."""
    overlap_p2p_comm: bool = flag(True, '--no-overlap-p2p-communication')
    """Do not overlap pipeline communication (with virtual stages only)."""
    cp_comm_type: str = flag(['p2p'], type=str, nargs='+')
    """Communication of context parallelism: p2p, all_gather, a2a or a2a+p2p; one, or one per layer."""
    fp8_param_gather: bool = False
    """Keep and gather weights in fp8."""
    rope_type: str | None = flag(None, type=str, choices=['rope', 'yarn'])
    """Rope of multi-latent attention."""
    q_lora_rank: int | None = None
    """Rank of the query's down-projection; none when not given."""
    kv_lora_rank: int = 32
    """Rank of the key-value down-projection."""
