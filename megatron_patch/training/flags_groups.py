"""The settings that no dataclass of megatron-core holds, one frozen dataclass per group.

A field is a flag (`--field-name`) and a docstring under it is its help. Names, types and defaults are Megatron-LM's;
a field that Megatron-LM has not is marked "Ours". What a field may hold is checked by flags_checks.
"""

import signal
from dataclasses import dataclass
from typing import Literal

from megatron_patch.training.flags_options import flag

TOKENIZERS = ('HuggingFaceTokenizer', 'NullTokenizer')


@dataclass(frozen=True)
class ScheduleSettings:
    """How long to train, and the learning-rate and weight-decay schedules (lr and weight_decay are optimizer's)."""

    train_iters: int | None = None
    """Iterations to train over all runs. Give this or --train-samples."""
    train_samples: int | None = None
    """Samples to train over all runs. Give this or --train-iters."""
    lr_decay_style: Literal['constant', 'linear', 'cosine', 'inverse-square-root', 'WSD'] = 'linear'
    """Learning rate decay function."""
    lr_wsd_decay_style: Literal['exponential', 'linear', 'cosine', 'minus_sqrt'] = 'exponential'
    """Decay of the annealing phase of WSD."""
    lr_decay_iters: int | None = None
    """Iterations to decay the learning rate over; train_iters when not given."""
    lr_decay_samples: int | None = None
    """Samples to decay the learning rate over; train_samples when not given."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the annealing phase of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the annealing phase of WSD."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay length."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    override_opt_param_scheduler: bool = flag(
        False, '--override-opt_param-scheduler', '--override-opt-param-scheduler')
    """On resume, take the schedule from these flags, not from the checkpoint."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, '--use-checkpoint-opt_param-scheduler', '--use-checkpoint-opt-param-scheduler')
    """On resume, take the schedule from the checkpoint, not from these flags."""
    start_weight_decay: float | None = None
    """Weight decay at the start, for a growing weight decay."""
    end_weight_decay: float | None = None
    """Weight decay at the end, for a growing weight decay."""
    weight_decay_incr_style: Literal['constant', 'linear', 'cosine'] = 'constant'
    """Weight decay increment function."""


@dataclass(frozen=True)
class DataSettings:
    """Data sets, the order of samples, and the tokenizer."""

    data_path: list[str] | None = flag(None, type=str, nargs='*')
    """Prefix of .bin/.idx files, or a blend: weight prefix weight prefix ... (weights may be left out)."""
    split: str | None = None
    """Shares of train, validation and test, as 969,30,1 (the default with --data-path)."""
    train_data_path: list[str] | None = flag(None, type=str, nargs='*')
    """Like --data-path, for training only."""
    valid_data_path: list[str] | None = flag(None, type=str, nargs='*')
    """Like --data-path, for validation only."""
    test_data_path: list[str] | None = flag(None, type=str, nargs='*')
    """Like --data-path, for the test only."""
    data_cache_path: str | None = None
    """Folder for the index caches of the data sets."""
    mmap_bin_files: bool = flag(True, '--no-mmap-bin-files')
    """Do not map .bin files into memory."""
    mock_data: bool = False
    """Synthetic samples instead of files."""
    seq_length: int | None = None
    """Tokens in one sample."""
    num_workers: int = 2
    """Data loader worker processes."""
    dataloader_type: Literal['single', 'cyclic'] | None = None
    """Order of samples: single (one pass, the default) or cyclic (shuffled epochs)."""
    reset_position_ids: bool = False
    """Start position ids at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """No attention across an end-of-document token."""
    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""
    create_attention_mask_in_dataloader: bool = flag(True, '--no-create-attention-mask-in-dataloader')
    """Do not build attention masks in the data loader."""
    num_dataset_builder_threads: int = 1
    """Threads a rank uses to build data sets."""
    mid_level_dataset_surplus: float = 0.005
    """Share of extra samples drawn for the parts of a blend."""
    allow_ambiguous_pad_tokens: bool = False
    """Keep pad tokens in the loss when the pad id is also an ordinary id."""
    tokenizer_type: Literal[TOKENIZERS] | None = None
    """Kind of tokenizer; HuggingFaceTokenizer when --tokenizer-model is given."""
    tokenizer_model: str | None = None
    """Folder or hub name of a Hugging Face tokenizer; the --hf-model folder when not given."""
    trust_remote_code: bool = False
    """Let the tokenizer's own code run."""
    null_tokenizer_eod_id: int | None = None
    """End-of-document id of NullTokenizer; vocab_size when not given."""


@dataclass(frozen=True)
class CheckpointSettings:
    """Saving, loading and resuming Megatron checkpoints."""

    save: str | None = None
    """Folder to write checkpoints to."""
    save_interval: int | None = flag(None, '--save-interval', '--persistent-save-interval')
    """Iterations between checkpoints."""
    save_retain_interval: int | None = None
    """Keep checkpoints at multiples of this only (and the newest)."""
    load: str | None = None
    """Folder to read a checkpoint from."""
    pretrained_checkpoint: str | None = None
    """Folder to read weights from when --load holds no checkpoint; iteration 0, no optimizer state."""
    finetune: bool = False
    """Read weights only and start at iteration 0."""
    ckpt_step: int | None = None
    """Iteration to load, instead of the newest."""
    use_checkpoint_args: bool = False
    """Take model settings that no flag gives from the checkpoint."""
    exit_on_missing_checkpoint: bool = False
    """Stop when --load holds no checkpoint, instead of starting from scratch."""
    ckpt_format: Literal['torch_dist'] = 'torch_dist'
    """Checkpoint format."""
    async_save: bool = False
    """Write checkpoints in the background."""
    ckpt_fully_parallel_save: bool = flag(True, '--no-ckpt-fully-parallel-save')
    """Do not spread the writing over data-parallel ranks."""
    ckpt_fully_parallel_load: bool = False
    """Spread the reading over data-parallel ranks."""
    dist_ckpt_strictness: Literal[
        'assume_ok_unexpected', 'log_unexpected', 'log_all', 'raise_unexpected', 'raise_all', 'return_unexpected',
        'return_all', 'ignore_all'] = 'assume_ok_unexpected'
    """What to do when the keys of checkpoint and model differ."""
    dist_ckpt_optim_fully_reshardable: bool = False
    """Write optimizer state that loads in any TP, PP, EP and DP layout."""
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    """Gather that state on one rank through gloo, with less memory."""
    no_save_optim: bool | None = flag(None, action='store_true')
    """Do not save the optimizer state."""
    no_save_rng: bool | None = flag(None, action='store_true')
    """Do not save the random state."""
    no_load_optim: bool | None = flag(None, action='store_true')
    """Do not load the optimizer state."""
    no_load_rng: bool | None = flag(None, action='store_true')
    """Do not load the random state."""
    save_hf: str | None = None
    """Ours: folder to export a Hugging Face model to, at the end."""
    save_hf_interval: int | None = None
    """Ours: iterations between Hugging Face exports; needs --save-hf."""


@dataclass(frozen=True)
class RunSettings:
    """The run itself: batch sizes, evaluation, logging, exit, platform, and where the model comes from."""

    micro_batch_size: int | None = None
    """Samples in one forward pass of one model replica."""
    global_batch_size: int | None = None
    """Samples in one iteration; micro_batch_size x data-parallel size when not given."""
    seed: int = 1234
    """Random seed."""
    data_parallel_random_init: bool = False
    """Initialise data-parallel replicas with different seeds."""
    eval_iters: int | None = 100
    """Iterations of one evaluation."""
    eval_interval: int | None = None
    """Iterations between evaluations; no evaluation when not given."""
    skip_train: bool = False
    """Evaluate and exit."""
    exit_interval: int | None = None
    """Exit at the first iteration divisible by this."""
    exit_duration_in_mins: int | None = None
    """Exit after this many minutes."""
    exit_signal_handler: bool = False
    """On the exit signal, save a checkpoint and exit."""
    exit_signal: signal.Signals = signal.SIGTERM
    """The signal of --exit-signal-handler."""
    log_interval: int = 100
    """Iterations between progress lines."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard points."""
    tensorboard_queue_size: int = 1000
    """Points held before TensorBoard writes them."""
    distributed_backend: Literal['nccl', 'gloo'] = 'nccl'
    """Communication backend; nccl stands for gloo on the cpu platform."""
    distributed_timeout_minutes: int = 10
    """Time limit of a collective."""
    use_gloo_process_groups: bool = flag(True, '--disable-gloo-process-groups')
    """Do not make gloo groups beside the nccl ones."""
    metrics_file: str | None = None
    """Ours: JSON-lines file of per-iteration metrics; metrics.jsonl in the --save folder when not given."""
    config: str | None = None
    """Ours: YAML file with the same settings; a flag overrides the file."""
    platform: str | None = None
    """Ours: cpu, cuda or a registered platform; found out when not given."""
    transformer_impl: Literal['native', 'te'] = flag(
        'native', choices=['native', 'te', 'local', 'transformer_engine'])
    """Layers: native (no Transformer Engine; also spelt local) or te (also spelt transformer_engine)."""
    hf_model: str | None = None
    """Ours: Hugging Face folder to build the model from and load its weights."""
    family: str | None = None
    """Ours: family of the model, when no --hf-model tells it."""
    dry_run: bool = False
    """Ours: check settings, layout and data, print parameters and bytes per rank, and exit; needs no GPU."""
    world_size: int | None = None
    """Ours: number of ranks to assume with --dry-run."""
