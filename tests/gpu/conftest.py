"""For the tests marked gpu: a CUDA device or one clear failure, NCCL at one rank, exact matrix products, models made once."""

import os

import pytest

from tests.parallel.conftest import zoo  # noqa: F401
from tests.training.conftest import data  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test marked gpu never passes, and never is skipped, without a device; it fails before any fixture works for it."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail("no CUDA device is visible: the tests marked gpu need one (leave them out with -m 'not gpu')", pytrace=False)


@pytest.fixture(autouse=True)
def _on_cuda(request):
    """Tests marked gpu run on platform cuda, others as they like."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("cuda")


@pytest.fixture(scope="session")
def cuda():
    """{'platform', 'before', 'after'}: platform cuda with torch.distributed up on NCCL; snapshots around its activation."""
    import torch

    from megatron_patch import parallel, platform
    from tests.platform.solo import _snapshot

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product: deterministic ones need it
    before = _snapshot()
    chosen = platform.activate("cuda")
    after = _snapshot()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(chosen.device)
    parallel.start_processes()
    yield dict(platform=chosen, before=before, after=after)
    from megatron_patch.training.run import close_processes

    close_processes()


@pytest.fixture
def deterministic():
    """torch's deterministic kernels; a kernel that has none warns."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
