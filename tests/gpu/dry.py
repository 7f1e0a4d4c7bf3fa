"""Run on one rank of the CPU platform: the bodies of the GPU tests, so that they are not met for the first time on a GPU."""

import torch


def bodies(root: str) -> dict:
    """What each body of tests/gpu/models.py returns for the tiny llama."""
    from pathlib import Path

    from tests.families import tiny
    from tests.gpu import models
    from tests.training.conftest import data

    folder = Path(root) / "llama"
    model, ids, labels = tiny.save("llama", folder), tiny.tokens(), tiny.tokens(seed=6)
    loss = tiny.save_gradients(model, folder / "gradients", ids, labels)
    torch.save({"tokens": ids, "labels": labels, "loss": loss}, folder / "expected.pt")
    prefix = data.__wrapped__(_Folders(root))
    return dict(
        gradients=models.gradients(str(folder), f"{root}/out"), packed={d: models.packed(str(folder), d) for d in models.DTYPES},
        resume={d: models.resume(str(folder), prefix, f"{root}/{d}", d) for d in models.DTYPES},
        twenty=models.twenty_steps(str(folder), prefix))


class _Folders:
    """The one method of pytest's tmp_path_factory that the data fixture calls."""

    def __init__(self, root):
        self.root = root

    def mktemp(self, name):
        from pathlib import Path

        path = Path(self.root) / name
        path.mkdir()
        return path
