"""What rank 0 shows: a live progress line on a terminal, plain lines elsewhere, TensorBoard, a loss curve at the end."""

import logging
import sys
import time
from pathlib import Path

from megatron_patch.training.metrics import Metrics, metrics_path, read

LOG = logging.getLogger(__name__)


class Report:
    """Takes the line of every iteration (see metrics.record). On ranks other than 0 make a Silent instead."""

    def __init__(self, settings, start: int, total: int):
        self.settings, self.total, self.start = settings, total, start
        path = metrics_path(settings)
        self.metrics = Metrics(path, start) if path else None
        self.board = open_tensorboard(settings)
        self.live, self.skipped, self.began = open_progress(start, total), 0, time.monotonic()

    def note(self, text: str) -> None:
        """One line about the run."""
        if self.live:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def iteration(self, line: dict) -> None:
        """Record one iteration, and show it."""
        self.skipped += line.get("skipped", 0)
        if self.metrics:
            self.metrics.write(line)
        number, run = line["iteration"], self.settings.run
        if self.board and number % run.tensorboard_log_interval == 0:
            write_tensorboard(self.board, line)
        done = number - self.start
        eta = (time.monotonic() - self.began) / done * (self.total - number) if done > 0 else 0.0
        text = self._text(line, eta)
        if self.live:
            self.live.update(0, completed=number, description=text)
        elif number % run.log_interval == 0 or number in (self.start + 1, self.total) or "valid_loss" in line:
            self.note(text)

    def _text(self, line, eta: float) -> str:
        if "lm_loss" not in line:
            return "  ".join(f"{name} {line[name]:.6f}" for name in ("valid_loss", "test_loss") if name in line)
        norm = "-" if line["grad_norm"] is None else f"{line['grad_norm']:.3f}"
        parts = [f"iteration {line['iteration']}/{self.total}", f"loss {line['lm_loss']:.6f}", f"lr {line['lr']:.3e}", f"grad norm {norm}",
                 f"{line['tokens_per_second']:.0f} tokens/s", f"{line['step_ms']:.0f} ms", f"ETA {clock(eta)}"]
        if line["loss_scale"] != 1:
            parts.append(f"loss scale {line['loss_scale']:g}, skipped {self.skipped}")
        if "comm_bytes" in line:
            parts += [f"waited {line['comm_exposed_ms']:.0f} ms for {line['comm_bytes'] / 1e6:.1f} MB ({line['comm_overlap']:.0%} hidden)",
                      f"gradients {line['grad_bytes'] / 2**20:.1f} MiB"]
        known = {"valid_loss": "valid loss", "test_loss": "test loss"}
        parts += [f"{label} {line[name]:.6f}" for name, label in known.items() if name in line]
        return "  ".join(parts)

    def close(self) -> None:
        """Close the files; draw the loss curve beside metrics.jsonl."""
        if self.live:
            self.live.stop()
        if self.board:
            self.board.close()
        if self.metrics:
            self.metrics.close()
            curve = draw_curve(self.metrics.path)
            print(f"metrics {self.metrics.path}" + (f"  curve {curve}" if curve else ""), flush=True)


class Silent:
    """The Report of the other ranks."""

    def note(self, text):
        pass

    def iteration(self, line):
        pass

    def close(self):
        pass


def clock(seconds: float) -> str:
    """1:02:03"""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def open_progress(start: int, total: int):
    """A started rich Progress with one task, or None when the output is no terminal."""
    if not sys.stdout.isatty():
        return None
    from rich.progress import BarColumn, Progress, TextColumn

    live = Progress(TextColumn("{task.description}", markup=False), BarColumn(bar_width=20))
    live.add_task("starting", total=total, completed=start)
    live.start()
    return live


def check_tensorboard(settings) -> None:
    """Raise ValueError when --tensorboard-dir is given and TensorBoard is not installed."""
    import importlib.util

    if settings.run.tensorboard_dir and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard-dir needs TensorBoard: pip install tensorboard, or leave the flag out.")


def open_tensorboard(settings):
    """A SummaryWriter for --tensorboard-dir, or None."""
    if not settings.run.tensorboard_dir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(settings.run.tensorboard_dir, max_queue=settings.run.tensorboard_queue_size)


def write_tensorboard(board, line: dict) -> None:
    for name, value in line.items():
        if isinstance(value, (int, float)) and name not in ("iteration", "consumed_samples", "consumed_tokens"):
            board.add_scalar(name, value, line["iteration"])


def draw_curve(path: Path) -> Path | None:
    """loss_curve.png beside a metrics file; None without matplotlib or without a loss."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = read(path)
    target, drawn = path.with_name("loss_curve.png"), False
    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label, mark in (("lm_loss", "training", "-"), ("valid_loss", "validation", "o-"), ("test_loss", "test", "s")):
        points = [(line["iteration"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            axes.plot(*zip(*points), mark, label=label, markersize=4)
            drawn = True
    if not drawn:
        return None
    axes.set(xlabel="iteration", ylabel="loss per token")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = target.with_name(target.name + ".tmp")
    try:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
        temporary.replace(target)
    except OSError as error:  # a full disk, most likely: no reason to lose what the run has to say
        temporary.unlink(missing_ok=True)
        LOG.warning("no loss curve: %s: %s", target, error.strerror)
        return None
    return target
