"""How long a run is: batch sizes, micro-batches, iterations, and how many samples each split must hold."""

from dataclasses import dataclass

from megatron_patch.delta import DOCUMENTS, has_delta


@dataclass(frozen=True)
class Length:
    """Sizes of a run. Samples are sequences of ``seq_length`` tokens; an iteration takes ``global_batch`` of them."""

    micro_batch: int
    global_batch: int
    data_parallel: int
    seq_length: int
    train_iters: int
    eval_interval: int | None
    eval_iters: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one data-parallel rank runs per iteration."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    def samples(self) -> tuple[int, int, int]:
        """Samples asked of (train, valid, test). Source: megatron/training/training.py, get_train_valid_test_num_samples."""
        if not (self.eval_interval and self.eval_iters):
            return self.train_iters * self.global_batch, 0, 0
        evaluations = self.train_iters // self.eval_interval + 1
        return tuple(n * self.global_batch for n in (self.train_iters, evaluations * self.eval_iters, self.eval_iters))


def run_length(settings, data_parallel: int, max_position_embeddings: int | None = None) -> Length:
    """The Length of a run on ``data_parallel`` replicas. Raises ValueError for sizes that are missing or do not fit."""
    run, schedule, data = settings.run, settings.schedule, settings.data
    seq_length = data.seq_length or max_position_embeddings
    for flag, value in (("--micro-batch-size", run.micro_batch_size), ("--seq-length", seq_length)):
        if value is None:
            raise ValueError(f"{flag} is missing: give it, there is no default.")
    unit = run.micro_batch_size * data_parallel
    batch = run.global_batch_size or unit
    if batch % unit:
        raise ValueError(f"--global-batch-size {batch} is not a multiple of --micro-batch-size {run.micro_batch_size} x data-parallel size "
                         f"{data_parallel} = {unit}; choose {-(-batch // unit) * unit}.")
    if schedule.train_iters is None and schedule.train_samples is None and not run.skip_train:
        raise ValueError("--train-iters or --train-samples is missing: give one of them.")
    iterations = schedule.train_iters if schedule.train_iters is not None else (schedule.train_samples or 0) // batch
    return Length(run.micro_batch_size, batch, data_parallel, seq_length, iterations, run.eval_interval, run.eval_iters or 0)


def check_layout(length: Length, config) -> None:
    """Raise ValueError for a layout that works without a backward pass or with other batch sizes, but not for this run."""
    stages, tp = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
    if config.get("num_moe_experts") and tp > 1 and not config.sequence_parallel:
        raise ValueError(f"training a mixture of experts with tensor-model-parallel-size {tp} needs --sequence-parallel; add it, or use "
                         "TP 1 and --expert-model-parallel-size.")
    if config.virtual_pipeline_model_parallel_size and length.micro_batches % stages:
        raise ValueError(f"virtual pipeline stages need micro-batches per iteration ({length.micro_batches}) to be a multiple of "
                         f"pipeline-model-parallel-size {stages}: --global-batch-size {length.global_batch} / (--micro-batch-size "
                         f"{length.micro_batch} x data-parallel size {length.data_parallel}); raise --global-batch-size.")


def check_documents(settings, config) -> None:
    """Raise ValueError for documents that cannot be kept apart in this model."""
    if has_delta(config) and settings.data.reset_attention_mask:
        raise ValueError(f"{DOCUMENTS}; drop --reset-attention-mask.")
    if config.get("prefix_tokens") and settings.data.reset_attention_mask:
        raise ValueError("documents with attention of their own do not go with a context that sees itself in both directions; drop "
                         "--reset-attention-mask.")
    if config.get("prefix_tokens") and settings.data.mock_data and not settings.run.dry_run:
        raise ValueError("--mock-data has no context, mask and bos in its rows, which this model is trained on; give --data-path.")
