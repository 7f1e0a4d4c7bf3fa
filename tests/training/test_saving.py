"""A save that rank 0 cannot make."""

import signal
import subprocess
import sys

from tests.checkpoint.test_output import HOLD
from tests.groups import run_ranks


def test_every_rank_stops_with_the_error_of_the_first(tmp_path):
    """Another process writes the same iteration, or the --save folder is a file: both ranks end in rank 0's error, none waits for it;
    and the other's folder is not removed at the start. Mutants: rank 0 alone raises; the start removes what it finds."""
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "ck" / "iter_0000002")], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"ready\n"
        first, second = run_ranks(2, "tests.training.saving:refusals", str(tmp_path), 2, timeout=100)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=20)
        other.stdout.close()
    for step, words in (("start", "another process is writing there"), ("folder", str(tmp_path / "file"))):
        kind = first[step][0].partition(":")[0]
        assert words in first[step][0] and words in second[step][0] and "rank 0 failed" in second[step][0]
        assert kind in ("ValueError", "FileExistsError", "NotADirectoryError") and first[step][1] < 20 and second[step][1] < 20
