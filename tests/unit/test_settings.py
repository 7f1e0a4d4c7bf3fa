"""parse(): flags and YAML to frozen values; every mistake is one message that says what was found and expected."""

import dataclasses
import signal

import pytest
import torch

from megatron_patch import platform

SMALL = ['--num-layers', '4', '--hidden-size', '64', '--num-attention-heads', '4', '--max-position-embeddings', '64']


@pytest.fixture(scope='module')
def parse():
    platform.activate()
    from megatron_patch.training.settings import parse

    return parse


def error_of(parse, line):
    """The message of the SettingsError that a command line gives."""
    from megatron_patch.training.flags_parser import SettingsError

    with pytest.raises(SettingsError) as caught:
        parse(line.split() if isinstance(line, str) else line)
    return str(caught.value)


def test_defaults_are_megatron_lms(parse):
    """Numbers of Megatron-LM's own documentation, not of ours."""
    s = parse([])
    assert (s.optimizer['lr'], s.optimizer['min_lr'], s.optimizer['weight_decay'], s.optimizer['adam_beta2']) == (None, 0.0, 0.01, 0.999)
    assert (s.schedule.lr_decay_style, s.run.seed, s.run.log_interval, s.data.num_workers) == ('linear', 1234, 100, 2)
    assert (s.gpt.position_embedding_type, s.gpt.rotary_base, s.checkpoint.ckpt_format) == ('learned_absolute', 10000, 'torch_dist')
    assert s.optimizer['initial_loss_scale'] == 2**32 and s.optimizer['clip_grad'] == 1.0
    assert s.run.exit_signal is signal.SIGTERM and s.run.transformer_impl == 'native'
    assert s.given == s.model.given == frozenset()


def test_settings_are_values(parse):
    """Nothing can be assigned, and two parses share no mutable default."""
    s = parse(SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.run.seed = 1
    with pytest.raises(TypeError):
        s.optimizer['lr'] = 1.0
    parse(SMALL).namespace().cp_comm_type.append('a2a')
    assert parse(SMALL).namespace().cp_comm_type == ['p2p']


def test_inversions_and_compositions(parse):
    """The fields that Megatron-LM's core_transformer_config_from_args sets, by hand."""
    s = parse([*SMALL, '--disable-bias-linear', '--swiglu', '--norm-epsilon', '1e-6', '--num-experts', '8', '--bf16', '--normalization',
               'RMSNorm', '--group-query-attention', '--num-query-groups', '2', '--no-bias-swiglu-fusion', '--no-persist-layer-norm',
               '--decoder-first-pipeline-num-layers', '1', '--pipeline-model-parallel-size', '2', '--apply-layernorm-1p',
               '--untie-embeddings-and-output-weights', '--no-initialization', '--moe-layer-freq', '([0]+[1])*2'])
    expected = {
        'add_bias_linear': False, 'add_qkv_bias': False, 'gated_linear_unit': True, 'activation_func': torch.nn.functional.silu,
        'bias_activation_fusion': False, 'layernorm_epsilon': 1e-6, 'num_moe_experts': 8, 'params_dtype': torch.bfloat16,
        'pipeline_dtype': torch.bfloat16, 'num_query_groups': 2, 'persist_layer_norm': False, 'normalization': 'RMSNorm',
        'num_layers_in_first_pipeline_stage': 1, 'layernorm_zero_centered_gamma': True, 'perform_initialization': False,
        'moe_layer_freq': [0, 1, 0, 1], 'ffn_hidden_size': 128, 'overlap_p2p_comm': False, 'batch_p2p_comm': True}
    assert {name: s.model[name] for name in expected} == expected
    assert s.gpt.untie_embeddings_and_output_weights and s.ddp['grad_reduce_in_fp32']
    assert {'num_moe_experts', 'gated_linear_unit', 'layernorm_epsilon'} <= s.model.given
    assert 'attention_dropout' not in s.model.given


@pytest.mark.parametrize(('flags', 'virtual'), [
    (['--num-layers-per-virtual-pipeline-stage', '1'], 2), (['--num-virtual-stages-per-pipeline-rank', '2'], 2),
    (['--pipeline-model-parallel-layout', 'Et|t|t|tL'], 2), (['--num-layers-per-virtual-pipeline-stage', '2'], None)])
def test_virtual_stages_turn_on_overlapped_communication(parse, flags, virtual):
    """4 layers, 2 stages: with virtual stages p2p is overlapped and not batched, without them the other way round."""
    model = parse([*SMALL, '--pipeline-model-parallel-size', '2', *flags]).model
    found = model.get('virtual_pipeline_model_parallel_size'), model['overlap_p2p_comm'], model['batch_p2p_comm']
    assert found == (virtual, virtual is not None, virtual is None)


@pytest.mark.parametrize(('line', 'words'), [
    ('--hiden-size 64', ['unknown flag --hiden-size', 'did you mean --hidden-size?']),
    ('--add-bias-linear', ['did you mean --disable-bias-linear?']),
    ('--batch-size 4', ['known to Megatron-LM, not supported here: --batch-size (', '--micro-batch-size']),
    ('--use-megatron-fsdp', ['known to Megatron-LM, not supported here: --use-megatron-fsdp (', '--use-distributed-optimizer']),
    ('--wandb-project x', ['known to Megatron-LM, not supported here: --wandb-project (']),
    ('--mtp-depth 1', ['use --mtp-num-layers']), ('--attn-recompute', ['--recompute-modules core_attn']),
    ('--moe-router-use-sigmoid', ['--moe-router-score-function sigmoid']),
    ('--reduce-bucket-size 5', ['--overlapped-distributed-optimizer']),
    *[(f'--overlapped-distributed-optimizer --reduce-every auto {flag}', [flag, more]) for flag, more in (
        ('--grad-memory-limit nan', 'expected GiB'), ('--grad-memory-limit inf', 'expected GiB'),
        ('--grad-memory-limit -1', 'expected GiB'), ('--ddp-bucket-size 0', 'expected 1 or more'))],
    ('--RMSNorm', ['--normalization RMSNorm']), ('--nproc_per_node 2', ['torchrun']), ('--dtype bf16', ['use --bf16']),
    ('--tp 2', ['use --tensor-model-parallel-size']), ('--wait-after-ckpt 3', ['checkpoint']),
    ('--tokenizer-type PretrainedFromHF', ["found 'PretrainedFromHF'", 'HuggingFaceTokenizer']),
    ('--moe-token-dispatcher-type alltoall_seq', ['alltoall_seq', 'use alltoall']),
    ('--num-layers 2.5', ['--num-layers', "found '2.5'", 'expected int']), ('--lr x', ['--lr', "found 'x'", 'expected float']),
    ('--loss-scale dynamic', ["found 'dynamic'", 'leave --loss-scale out']), ('stray', ["unexpected argument 'stray'"]),
    ('--moe-layer-freq __import__("os")', ['--moe-layer-freq', 'expected int or a list expression']),
    ('--num-layers', ['--num-layers', 'expected one argument']), ('--hidden 64', ['unknown flag --hidden']),
    ('--fp16 --bf16', ['--fp16 and --bf16']), ('--loss-scale 8', ['--loss-scale 8.0 needs --fp16']),
    ('--swiglu --squared-relu', ['--swiglu and --squared-relu']),
    ('--recompute-granularity full', ['--recompute-method', '--recompute-num-layers']),
    ('--recompute-granularity selective --recompute-method uniform', ['selective']),
    ('--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-modules mlp', ['mlp', 'full']),
    ('--recompute-num-layers 1', ['--recompute-granularity']),
    ('--num-virtual-stages-per-pipeline-rank 2', ['--pipeline-model-parallel-size above 1']),
    ('--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication', ['above 2, found 2']),
    ('--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1',
     ['give one of']),
    ('--num-layers 10 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2', ['10 layers', '2', 'multiple']),
    ('--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --num-layers-per-virtual-pipeline-stage 1',
     ['--num-virtual-stages-per-pipeline-rank']),
    ('--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|tL', ['3 stages', '2']),
    ('--train-iters 1 --train-samples 1', ['give one']), ('--lr 1e-4 --min-lr 1e-3', ['0.001', '0.0001']),
    ('--train-iters 8 --lr-decay-samples 8', ['--lr-decay-samples 8', '--lr-decay-iters']),
    ('--overlap-param-gather', ['--use-distributed-optimizer']),
    ('--overlapped-distributed-optimizer --ddp-average-in-collective', ['--ddp-average-in-collective', 'fp32 sum']),
    ('--overlapped-distributed-optimizer --bf16 --grad-reduce-in-bf16', ['--grad-reduce-in-bf16', '--grad-comm-dtype bf16']),
    ('--overlapped-distributed-optimizer --reduce-bucket-size 5 --ddp-bucket-size 6', ['--reduce-bucket-size', 'give one']),
    ('--overlapped-distributed-optimizer --optimizer sgd', ['--optimizer sgd', 'adam only']),
    ('--overlapped-distributed-optimizer --num-distributed-optimizer-instances 2', ['--num-distributed-optimizer-instances 2']),
    ('--overlapped-distributed-optimizer --reduce-every 0', ['--reduce-every 0', '1 or more']),
    ('--overlapped-distributed-optimizer --grad-comm-dtype int8 --grad-collective reduce-scatter', ['int8', 'all-to-all']),
    ('--use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload', ['--optimizer-cpu-offload', 'issue 1842']),
    ('--optimizer sgd --use-distributed-optimizer', ['--optimizer sgd', 'adam only']),
    ('--optimizer sgd --use-distributed-optimizer --use-precision-aware-optimizer', ['--optimizer sgd']),
    ('--exp-avg-dtype bf16', ['--exp-avg-dtype bf16 needs --use-precision-aware-optimizer']),
    ('--fp8-format hybrid', ['--fp8-format hybrid needs --transformer-impl te']),
    ('--num-experts 4 --moe-grouped-gemm', ['--moe-grouped-gemm needs --transformer-impl te']),
    ('--save x', ['--save-interval']), ('--save-hf-interval 2', ['--save-hf']), ('--use-checkpoint-args', ['--load']),
    ('--data-path a --mock-data', ['--data-path and --mock-data']), ('--world-size 8', ['--dry-run']),
    ('--seq-length 30 --context-parallel-size 2 ', ['30', '2']), ('--tensor-model-parallel-size 0', ['must be positive']),
    ('--num-query-groups 2', ['--group-query-attention']), ('--expert-model-parallel-size 2', ['--num-experts']),
])
def test_a_mistake_is_one_message_that_says_what_to_do(parse, line, words):
    """Unknown, unsupported, foreign and contradictory flags, pairs of optimizer options that do not resume (B76); wrong types."""
    message = error_of(parse, line)
    assert all(word in message for word in words) and '\n' not in message, message


def test_flags_that_need_nothing_are_accepted_with_a_notice(parse):
    """Scripts for Megatron-LM say these; they are not errors and not silent."""
    s = parse('--use-mcore-models --use-flash-attn --use-rotary-position-embeddings'.split())
    assert s.gpt.position_embedding_type == 'rope' and len(s.notices) == 3
    assert parse(['--transformer-impl', 'transformer_engine']).run.transformer_impl == 'te'
    assert parse(['--transformer-impl', 'local']).run.transformer_impl == 'native'


def test_no_position_embedding_needs_another_kind(parse):
    """Megatron-LM stops there too: learned embeddings would be trained in silence."""
    assert '--position-embedding-type' in error_of(parse, '--no-position-embedding')
    assert parse('--no-position-embedding --position-embedding-type rope'.split()).gpt.position_embedding_type == 'rope'


def yaml_file(tmp_path, text):
    path = tmp_path / 'run.yaml'
    path.write_text(text)
    return str(path)


def test_a_file_says_what_flags_say(parse, tmp_path):
    """The same settings, by dashes or underscores, nested or not; lists, patterns, and exponents that YAML calls strings."""
    text = '''
hidden-size: 64
lr: 1e-4                      # a string in YAML 1.1
model: {num_layers: 4, num_attention_heads: 4, swiglu: true, moe-layer-freq: [0, 1, 0, 1]}
optimizer:
  optimizer: sgd
data: {data-path: [0.3, a, 0.7, b], split: 1}
no-rope-fusion: false
exit_signal: SIGINT
'''
    flags = '--hidden-size 64 --lr 1e-4 --num-layers 4 --num-attention-heads 4 --swiglu --moe-layer-freq [0,1]*2 --optimizer sgd '
    flags += '--data-path 0.3 a 0.7 b --split 1 --exit-signal SIGINT'
    from_file, from_flags = parse(['--config', yaml_file(tmp_path, text)]), parse(flags.split())
    assert from_file.run.config and from_file.model.fields == from_flags.model.fields
    assert (from_file.optimizer, from_file.data, from_file.schedule) == (from_flags.optimizer, from_flags.data, from_flags.schedule)
    assert from_file.given - from_flags.given == {'config', 'apply_rope_fusion'}


def test_a_flag_overrides_the_file(parse, tmp_path):
    """--lr on the command line wins; what it does not name stays the file's."""
    s = parse(['--config', yaml_file(tmp_path, 'lr: 0.1\nseed: 7\n'), '--lr', '0.2'])
    assert (s.optimizer['lr'], s.run.seed) == (0.2, 7)


@pytest.mark.parametrize(('text', 'words'), [
    ('hiden-size: 64', ['run.yaml:1', "'hiden-size'", 'did you mean --hidden-size?']),
    ('seed: 1\nSeed: 2', ['run.yaml:2', "'Seed'"]), ('seed: 1\nseed: 2', ['run.yaml:2', "'seed'", 'twice', 'line 1']),
    ('num-layers: 2\nmodel: {num_layers: 2}', ['run.yaml:2', 'twice']), ('num-layers: 2.0', ["found '2.0'", 'expected int']),
    ('num-layers: true', ["found 'true'", 'expected int']), ('num-layers: "2"', ["'2' (str)", 'expected int']),
    ('num-layers:', ['(null)', 'expected int']), ('num-layers: [1]', ['found a list', 'expected int']),
    ('bf16: 1', ["'1' (int)", 'expected true or false']), ('bf16: "true"', ['expected true or false']),
    ('bf16: yes', ["'yes' (bool)", 'expected true or false']), ('save: true', ["'true' (bool)", 'expected str']),
    ('lr-decay-style: cosin', ["'cosin'", 'expected one of', 'cosine']), ('lr: fast', ["'fast'", 'expected float']),
    ('lr: {a: 1}', ['found a mapping', 'expected float']), ('batch-size: 1', ['known to Megatron-LM, not supported here']),
    ('modle: {num-layers: 2}', ['run.yaml:1', "'modle'"]), ('- a', ['found a list', 'expected keys and values']),
    ('add_bias_linear: false', ['did you mean --disable-bias-linear?']), ('config: x', ['does not include another']),
    ('a: [', ['not YAML']), ('fp16: true\nbf16: true', ['--fp16 and --bf16']), ('? [a, b]\n: 1', ['run.yaml:1']),
    ('use-mcore-models: true', ['not needed']), ('mtp-depth: 1', ['use --mtp-num-layers']),
])
def test_a_file_is_as_strict_as_flags(parse, tmp_path, text, words):
    """Each message names file, line and key, what was found and what was expected."""
    message = error_of(parse, ['--config', yaml_file(tmp_path, text)])
    assert all(word in message for word in words) and '\n' not in message, message


def test_a_missing_file_is_an_error(parse, tmp_path):
    """Not an empty configuration."""
    assert 'No such file' in error_of(parse, ['--config', str(tmp_path / 'none.yaml')])


def test_help_lists_the_groups(parse, capsys):
    """--help prints each section, a stock flag of each, and its text."""
    with pytest.raises(SystemExit) as caught:
        parse(['--help'])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for word in ('schedule:', 'checkpoint:', 'transformer:', '--train-iters', '--norm-epsilon', 'rate decay function', '--hf-model'):
        assert word in text


@pytest.mark.parametrize(('argv', 'name'), [
    (['--platform', 'cpu'], 'cpu'), (['--platform=cuda'], 'cuda'), ([], None), (['--config', 'FILE'], 'cpu'), (['--config=none'], None)])
def test_the_platform_is_known_before_anything_is_imported(parse, tmp_path, argv, name):
    """The command must choose it before megatron.core is there to parse the rest."""
    from megatron_patch.training.settings import requested_platform

    path = yaml_file(tmp_path, 'run: {platform: cpu}')
    assert requested_platform([token.replace('FILE', path) for token in argv]) == name


def test_checkpoint_without_args(tmp_path):
    """--use-checkpoint-args and a checkpoint that has none: its folder is named. Mutant: KeyError 'args'."""
    from types import SimpleNamespace

    from megatron_patch.training.model_source import with_checkpoint_args

    with pytest.raises(ValueError, match=f"{tmp_path} has no args.*--use-checkpoint-args"):
        with_checkpoint_args(None, SimpleNamespace(path=tmp_path), {})


@pytest.mark.parametrize("case, beyond", [
    ("llama", None), ("qwen3_moe", None), ("glm", None), ("deepseek_v2_lite", ["latent_norm_epsilon"]),
    ("llama_yarn", ["rope of type yarn"]),
    ("falcon", ["parallel_attention", "activation_func"]), ("gemma3", ["embedding_multiplier", "sublayer_output_norm", "activation_func",
                                                                       "rope of type linear", "rope of sliding windows"])])
def test_what_arguments_cannot_say_is_refused(tmp_path, case, beyond):
    """--use-checkpoint-args of a model that Megatron-LM has no arguments for would build another one: it is named. Mutant: no marker."""
    from types import SimpleNamespace

    from megatron_patch import translate
    from megatron_patch.checkpoint.saved_args import saved_args
    from megatron_patch.training.model_source import with_checkpoint_args
    from tests.families import tiny

    args = saved_args(translate.from_hf(tiny.raw_config(case)))
    assert getattr(args, "needs_hf_model", None) == beyond
    if beyond:
        with pytest.raises(ValueError, match=f"{beyond[0]}.*give --hf-model DIR instead"):
            with_checkpoint_args(None, SimpleNamespace(path=tmp_path), {"args": args})
