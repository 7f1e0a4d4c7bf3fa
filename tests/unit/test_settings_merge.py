"""Settings over a Hugging Face model, and a model's settings as flags.

Oracles: the config.json keys by hand, and the 0.19.2 wheel's own parser and core_transformer_config_from_args.
"""

import importlib.util
import json

import pytest
import torch
import torch.nn.functional as F

from megatron_patch import platform

LLAMA = {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': 64, 'intermediate_size': 176, 'num_hidden_layers': 4,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'vocab_size': 128, 'max_position_embeddings': 256, 'rms_norm_eps': 1e-6,
    'hidden_act': 'silu', 'tie_word_embeddings': False, 'rope_theta': 500000.0, 'torch_dtype': 'float32'}
QWEN_MOE = {
    'architectures': ['Qwen3MoeForCausalLM'], 'model_type': 'qwen3_moe', 'hidden_size': 64, 'intermediate_size': 96,
    'num_hidden_layers': 4, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 32, 'vocab_size': 128, 'num_experts': 4,
    'num_experts_per_tok': 2, 'moe_intermediate_size': 32, 'norm_topk_prob': True, 'decoder_sparse_step': 1, 'mlp_only_layers': [1],
    'max_position_embeddings': 256, 'rms_norm_eps': 1e-6, 'hidden_act': 'silu', 'tie_word_embeddings': True, 'rope_theta': 10000.0}
LLAMA3_ROPE = {'rope_type': 'llama3', 'factor': 32.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
               'original_max_position_embeddings': 8192}
STOCK_HERE = importlib.util.find_spec('megatron') and importlib.util.find_spec('megatron.training')


@pytest.fixture(scope='module')
def api():
    platform.activate()
    from megatron_patch.training import flags_inverse, flags_merge, settings

    class Api:
        parse, to_flags = staticmethod(settings.parse), staticmethod(flags_inverse.to_flags)
        merge, describe = staticmethod(settings.merge_model), staticmethod(flags_merge.describe)
        with_settings = staticmethod(flags_merge.with_settings)

    return Api


def config_of(tmp_path, raw, **changes):
    from megatron_patch.translate import load_config

    (tmp_path / 'config.json').write_text(json.dumps({**raw, **changes}))
    return load_config(tmp_path)


def test_flags_fill_only_what_they_give(api, tmp_path):
    """Sizes come from config.json although the flags have other defaults; layout, dtype and dropout come from flags."""
    config = config_of(tmp_path, LLAMA)
    s = api.parse('--hf-model D --tensor-model-parallel-size 2 --sequence-parallel --bf16 --attention-dropout 0.2'.split())
    merged = api.with_settings(config, s)
    assert (merged.num_layers, merged.hidden_size, merged.layernorm_epsilon, merged.num_query_groups) == (4, 64, 1e-6, 2)
    assert merged.tensor_model_parallel_size == 2 and merged.sequence_parallel and merged.params_dtype is torch.bfloat16
    assert merged.attention_dropout == 0.2 and merged.get('hidden_dropout', 0.0) == 0.0 and 'apply_rope_fusion' not in merged.fields
    assert (merged.vocab_size, merged.tied, merged.rope.theta) == (128, False, 500000.0)


def test_virtual_stages_use_the_layers_of_the_checkpoint(api, tmp_path):
    """4 layers from config.json, 2 stages, 1 layer a virtual stage: 2 virtual stages; 3 do not divide."""
    config = config_of(tmp_path, LLAMA)
    line = '--hf-model D --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage '
    assert api.with_settings(config, api.parse((line + '1').split())).virtual_pipeline_model_parallel_size == 2
    with pytest.raises(ValueError, match='4 layers'):
        api.with_settings(config, api.parse((line + '3').split()))


@pytest.mark.parametrize('line', [
    '--hidden-size 64', '--num-layers 4', '--swiglu', '--group-query-attention --num-query-groups 2', '--num-query-groups 2',
    '--normalization RMSNorm', '--disable-bias-linear', '--untie-embeddings-and-output-weights', '--vocab-size 128',
    '--position-embedding-type rope', '--rotary-base 500000', '--norm-epsilon 1e-6', '--kv-channels 16', '--no-bias-swiglu-fusion',
    '--max-position-embeddings 512', '--recompute-granularity selective', '--moe-aux-loss-coeff 0.1', '--rotary-percent 1.0'])
def test_flags_that_agree_with_the_checkpoint_or_are_free_pass(api, tmp_path, line):
    """Repeating the architecture is no contradiction; layout and training fields are the user's."""
    api.with_settings(config_of(tmp_path, LLAMA), api.parse(['--hf-model', 'D', *line.split()]))


def test_a_bias_fusion_flag_is_about_the_activation_of_the_checkpoint(api, tmp_path):
    """--no-bias-swiglu-fusion turns it off in a SwiGLU model, --no-bias-gelu-fusion does not."""
    config = config_of(tmp_path, LLAMA)
    fusion = {flag: api.with_settings(config, api.parse(['--hf-model', 'D', flag])).bias_activation_fusion
              for flag in ('--no-bias-swiglu-fusion', '--no-bias-gelu-fusion')}
    assert fusion == {'--no-bias-swiglu-fusion': False, '--no-bias-gelu-fusion': True}


@pytest.mark.parametrize(('line', 'words'), [
    ('--hidden-size 128', ['--hidden-size 128', 'hidden_size 64']), ('--num-layers 6', ['--num-layers 6', '4']),
    ('--num-experts 4', ['--num-experts 4', 'None']), ('--norm-epsilon 1e-5', ['--norm-epsilon 1e-05', '1e-06']),
    ('--num-query-groups 4', ['--num-query-groups 4', '2']), ('--normalization LayerNorm', ['LayerNorm', 'RMSNorm']),
    ('--qk-layernorm', ['--qk-layernorm', 'False']), ('--squared-relu', ['--squared-relu', 'silu']),
    ('--rotary-base 10000', ['--rotary-base 10000', '500000']), ('--vocab-size 256', ['--vocab-size 256', '128']),
    ('--multi-latent-attention', ['--multi-latent-attention']), ('--position-embedding-type none', ['none', 'rope'])])
def test_a_flag_that_contradicts_the_checkpoint_is_an_error(api, tmp_path, line, words):
    """Both values are named (B15)."""
    with pytest.raises(ValueError, match='contradicts the checkpoint') as caught:
        api.with_settings(config_of(tmp_path, LLAMA), api.parse(['--hf-model', 'D', *line.split()]))
    assert all(word in str(caught.value) for word in words), caught.value


def test_untying_a_tied_checkpoint_is_an_error(api, tmp_path):
    """B15: --untie-embeddings-and-output-weights against tie_word_embeddings, never a silent new output layer."""
    config = config_of(tmp_path, LLAMA, tie_word_embeddings=True)
    with pytest.raises(ValueError, match='untie.*contradicts.*tied embeddings'):
        api.with_settings(config, api.parse(['--hf-model', 'D', '--untie-embeddings-and-output-weights']))


def test_multi_latent_flags_count_without_repeating_that_the_model_is_one(api):
    """A checkpoint with MLA makes --kv-lora-rank meaningful: it contradicts, or passes and is merged."""
    fields = {'multi_latent_attention': True, 'kv_lora_rank': 512, 'q_lora_rank': 1536, 'num_layers': 4}
    with pytest.raises(ValueError, match='--kv-lora-rank 32 contradicts.*512'):
        api.merge(api.parse(['--hf-model', 'D', '--kv-lora-rank', '32']), fields)
    merged = api.merge(api.parse(['--hf-model', 'D', '--kv-lora-rank', '512', '--cache-mla-latents']), fields)
    assert merged == {**fields, 'cache_mla_latents': True}


def test_a_false_in_the_file_is_the_users_word(api, tmp_path):
    """`swiglu: false` against a SwiGLU checkpoint contradicts, though it is the flag's default."""
    (tmp_path / 'run.yaml').write_text('swiglu: false\nhf-model: D\n')
    with pytest.raises(ValueError, match='contradicts the checkpoint'):
        api.with_settings(config_of(tmp_path, LLAMA), api.parse(['--config', str(tmp_path / 'run.yaml')]))


MODELS = {
    'llama': (LLAMA, {}), 'qwen3_moe': (QWEN_MOE, {}), 'llama3': (LLAMA, {'rope_scaling': LLAMA3_ROPE}),
    'linear': (LLAMA, {'rope_scaling': {'rope_type': 'linear', 'factor': 4.0}}),
    'yarn': (LLAMA, {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 64}}),
    'head_dim': (LLAMA, {'head_dim': 32, 'num_key_value_heads': 1, 'attention_bias': False}),
    'no groups': (LLAMA, {'num_key_value_heads': 4}),
}


@pytest.mark.parametrize('name', MODELS)
def test_the_flags_of_a_model_give_its_fields_back(api, tmp_path, name):
    """parse(to_flags(describe(config))) holds every field and name of describe(config)."""
    raw, changes = MODELS[name]
    wanted = api.describe(config_of(tmp_path, raw, **changes))
    s = api.parse(api.to_flags(wanted))
    found = {**s.values, **s.model.fields}
    assert {key: found.get(key) for key, value in wanted.items() if value is not None} == {
        key: value for key, value in wanted.items() if value is not None}


def test_llama3_rope_parameters_reach_the_flags(api, tmp_path):
    """B47: factor and, where they are not Megatron-LM's fixed 1, 4 and 8192, the other three."""
    flags = api.to_flags(api.describe(config_of(tmp_path, LLAMA, rope_scaling={**LLAMA3_ROPE, 'high_freq_factor': 2.0})))
    line = ' '.join(flags)
    assert '--use-rope-scaling' in line and '--rope-scaling-factor 32.0' in line and '--rope-scaling-high-freq-factor 2.0' in line
    assert 'low-freq' not in line and 'original' not in line


def test_what_no_flag_can_say_is_an_error(api):
    """A softmax scale and an activation that Megatron-LM has no flag for are named, not dropped."""
    with pytest.raises(ValueError, match='softmax_scale'):
        api.to_flags({'softmax_scale': 0.5})
    with pytest.raises(ValueError, match='relu'):
        api.to_flags({'activation_func': F.relu})
    with pytest.raises(ValueError, match='--rotary-base takes an int'):
        api.to_flags({'rotary_base': 10000.5})


@pytest.mark.skipif(not STOCK_HERE, reason='this megatron-core wheel ships without megatron.training')
@pytest.mark.parametrize('name', MODELS)
def test_megatron_lms_own_parser_reads_the_flags_the_same_way(api, tmp_path, name):
    """core_transformer_config_from_args on stock's namespace has the fields we started from."""
    import argparse

    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import add_megatron_arguments

    raw, changes = MODELS[name]
    wanted = api.describe(config_of(tmp_path, raw, **changes))
    args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(api.to_flags(wanted))
    args.params_dtype, args.overlap_p2p_comm, args.cuda_graph_modules = torch.float32, False, []
    args.apply_rope_fusion = args.gradient_accumulation_fusion = False  # Transformer Engine's
    args.moe_router_load_balancing_type = args.moe_router_load_balancing_type[0] if isinstance(
        args.moe_router_load_balancing_type, list) else args.moe_router_load_balancing_type
    config = core_transformer_config_from_args(args)
    found = {**vars(args), **vars(config)}
    if wanted.get('num_query_groups') is None:
        wanted['num_query_groups'] = wanted['num_attention_heads']
    differ = {key: (value, found.get(key)) for key, value in wanted.items() if value is not None and found.get(key) != value}
    fixed = {'rope_scaling_low_freq_factor': 1.0, 'rope_scaling_high_freq_factor': 4.0,
             'rope_scaling_original_max_position_embeddings': 8192}
    assert {key: pair for key, pair in differ.items() if fixed.get(key) != pair[0]} == {}
