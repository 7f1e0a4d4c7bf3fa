"""pytest plugin (-p tests.gpu.on_cpu): the tests marked gpu on the CPU platform, as if a device were there."""

import pytest


def pytest_configure(config):
    """Whatever platform is asked for, the CPU's is active."""
    from megatron_patch import platform

    here = platform.activate("cpu")
    platform.activate = lambda name=None: here


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    """The check for a device sees one."""
    import torch

    told, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        return (yield)
    finally:
        torch.cuda.is_available = told
