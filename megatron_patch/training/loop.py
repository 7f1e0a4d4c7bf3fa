"""The training loop: step, evaluate, save, stop. Everything it needs is in the Job; nothing is global."""

from megatron_patch.training.assemble import Job, gather_parameters
from megatron_patch.training.checkpointing import Saver
from megatron_patch.training.export import export, interval_folder
from megatron_patch.training.extra_losses import ExtraLosses
from megatron_patch.training.feed import Feed
from megatron_patch.training.metrics import record
from megatron_patch.training.resume import Progress
from megatron_patch.training.step import check_finite, evaluate, train_step
from megatron_patch.training.stop import Stop


class Loop:
    """One run from ``progress`` on. ``report`` gets a line per iteration; ``saver`` is None without --save."""

    def __init__(self, job: Job, feed: Feed, progress: Progress, report, saver: Saver | None, stop: Stop):
        self.job, self.feed, self.progress, self.report, self.saver, self.stop = job, feed, progress, report, saver, stop
        self.settings, self.length = job.settings, job.length
        self.extra = ExtraLosses(job.config)
        self.valid = feed.iterator(feed.valid, progress.consumed_valid_samples) if feed.valid is not None else None

    def run(self) -> None:
        """Train to the last iteration or to a reason to stop; then save, evaluate, export. Raises NotFinite."""
        stopped = False
        if not self.settings.run.skip_train and self.progress.iteration < self.length.train_iters:
            stopped = self._train()
        elif self.settings.run.skip_train:
            self.report.iteration({"iteration": self.progress.iteration, **self._evaluate_all()})
        if self.saver:
            if self.progress.iteration and self.saver.last_saved != self.progress.iteration and not self.settings.run.skip_train:
                self.saver.save(self.job, self.progress)
            self.saver.close()
        if self.settings.checkpoint.save_hf and not stopped:
            self.report.note(f"exported {export(self.job, _path(self.settings.checkpoint.save_hf))}")

    def _train(self) -> bool:
        """Iterations until the end (False) or an early stop (True)."""
        iterator = self.feed.iterator(self.feed.train, self.progress.consumed_samples)
        for chunk in self.job.chunks:
            chunk.train()
        while self.progress.iteration < self.length.train_iters:
            outcome = train_step(self.job, iterator, self.extra, self.stop.wish())
            self.progress.iteration += 1
            self.progress.consumed_samples += self.length.global_batch
            check_finite(outcome, self.progress.iteration, self.settings)
            last = self.progress.iteration == self.length.train_iters
            stop = outcome.stop or self.stop.at(self.progress.iteration)
            self.report.iteration({**record(outcome, self.progress, self.length), **self._evaluations(last)})
            self._save(last, stop)
            if stop and not last:
                self.report.note(f"stopping after iteration {self.progress.iteration}")
                return True
        return False

    def _evaluations(self, last: bool) -> dict:
        """{'valid_loss': ...} when due, and both losses at the end."""
        if last:
            return self._evaluate_all()
        due = self.valid is not None and self.progress.iteration % self.length.eval_interval == 0
        return {"valid_loss": self._evaluate_valid()} if due else {}

    def _evaluate_all(self) -> dict:
        out = {"valid_loss": self._evaluate_valid()} if self.valid is not None else {}
        if self.feed.test is not None:
            gather_parameters(self.job)
            out["test_loss"] = evaluate(self.job, self.feed.iterator(self.feed.test, 0), self.length.eval_iters)
        return out

    def _evaluate_valid(self) -> float:
        gather_parameters(self.job)
        loss = evaluate(self.job, self.valid, self.length.eval_iters)
        self.progress.consumed_valid_samples += self.length.eval_iters * self.length.global_batch
        return loss

    def _save(self, last: bool, stop: bool) -> None:
        options, iteration = self.settings.checkpoint, self.progress.iteration
        if self.saver:
            self.saver.poll()
            if stop or iteration % options.save_interval == 0:
                self.saver.save(self.job, self.progress)
                self.report.note(f"{'saving' if options.async_save else 'saved'} checkpoint at iteration {iteration} to {options.save}")
        if options.save_hf and options.save_hf_interval and iteration % options.save_hf_interval == 0 and not last:
            self.report.note(f"exported {export(self.job, interval_folder(self.settings, iteration))}")


def _path(text):
    from pathlib import Path

    return Path(text)
