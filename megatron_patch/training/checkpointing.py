"""Save a run as a torch_dist checkpoint in Megatron-LM's layout, in the foreground or in the background.

core writes into a hidden sibling, `.iter_0000010.partial`. When every rank's data is complete, rank 0 renames it to
`iter_0000010` and only then points the tracker at it. A process killed at any moment leaves the previous checkpoint or
the new one, never half of one.
"""

import contextlib
import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_patch import parallel, upstream
from megatron_patch.checkpoint import output
from megatron_patch.checkpoint.tracker import iteration_folder, locate, write_tracker
from megatron_patch.training.assemble import gather_parameters
from megatron_patch.training.checkpoint_state import content_metadata, full_state
from megatron_patch.training.resume import one_line
from megatron_patch.training.stop import spare_children

LOG = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints of one run below ``root``. Every method is collective."""

    def __init__(self, settings):
        self.settings, self.root = settings, Path(settings.checkpoint.save)
        self.queue, self.last_saved, self.behind = None, None, None  # behind: what a background save makes
        parallel.on_first_rank(self._prepare)

    def _prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        output.sweep(self.root / "iter_*")

    def save(self, job, progress) -> None:
        """Write the checkpoint of ``progress.iteration``; with --async-save it is complete only after a later poll() or close()."""
        with spare_children(self.settings.run):
            self._save(job, progress)

    def _save(self, job, progress) -> None:
        self.close()
        gather_parameters(job)
        iteration = progress.iteration  # it moves on while a background save is written
        target = iteration_folder(self.root, iteration)
        with _failing(target):
            parallel.on_first_rank(lambda: output.start(target))
            metadata = content_metadata(self.settings)
            request = _write(full_state(job, progress, metadata), output.partial(target), metadata, self.settings.checkpoint)
            if request is None:
                self._publish(target, iteration)
        self.last_saved = iteration
        if request is not None:
            request.add_finalize_fn(lambda: self._publish(target, iteration))
            self.behind = target
            self._calls().schedule_async_request(request)

    def poll(self) -> None:
        """Publish a background save that has ended on all ranks. Costs nothing while there is none."""
        self._finalize(blocking=False)

    def close(self) -> None:
        """Wait for the background save, on every rank, and publish it."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        if self.queue is not None and self.queue.get_num_unfinalized_calls():
            with _failing(self.behind):
                self.queue.maybe_finalize_async_calls(blocking=blocking)

    def _calls(self):
        if self.queue is None:
            from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

            self.queue = AsyncCallsQueue()
        return self.queue

    def _publish(self, target: Path, iteration: int) -> None:
        """The data is complete on all ranks (core's last step is a barrier), so rank 0 shows it and points the tracker at it."""
        parallel.on_first_rank(lambda: self._show(target, iteration))

    def _show(self, target: Path, iteration: int) -> None:
        add_common_file(output.partial(target))
        previous = self._previous(iteration)
        output.publish(target, replace=True)
        write_tracker(self.root, iteration)
        self._prune(previous)

    def _previous(self, iteration: int):
        """The checkpoint that the tracker names now; None without one, and when it is the one being replaced."""
        try:
            found = locate(self.root)
        except ValueError:
            return None
        return found if found is not None and found.iteration != iteration else None

    def _prune(self, previous) -> None:
        """--save-retain-interval: drop the checkpoint before this one unless its iteration is a multiple, as Megatron-LM does."""
        keep = self.settings.checkpoint.save_retain_interval
        if keep and previous is not None and not previous.release and previous.iteration % keep:
            shutil.rmtree(previous.path, ignore_errors=True)


@contextlib.contextmanager
def _failing(target: Path):
    """What fails inside the block raises OSError that names ``target``, and its work folder goes, so that its disk space is free."""
    try:
        yield
    except (CheckpointException, OSError) as error:  # torch's is no Exception
        if dist.get_rank() == 0:
            output.discard(target)
        raise OSError(f"saving {target} failed, and the tracker names the checkpoint before it: {one_line(error)}") from error


def _write(state: dict, folder: Path, metadata: dict, options):
    """core's save into ``folder``: None when it is done, or its AsyncRequest."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if options.ckpt_fully_parallel_save:
        strategy = FullyParallelSaveStrategyWrapper(strategy, parallel_state.get_data_parallel_group(with_context_parallel=True), False)
    more = upstream.async_save_options() if options.async_save else {}
    return dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=options.async_save, content_metadata=metadata, **more)


def add_common_file(folder: Path) -> None:
    """Write common.pt where core did not (0.17 and later keep it inside the data), so that core 0.16 reads the checkpoint too."""
    from megatron.core import dist_checkpointing

    path = folder / "common.pt"
    if path.is_file():
        return
    common = dist_checkpointing.load_common_state_dict(str(folder))
    temporary = path.with_name("common.pt.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    torch.save(common, temporary)
    temporary.rename(path)
