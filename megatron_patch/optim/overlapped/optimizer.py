"""The DistributedOptimizer that reads gradients from shards and gathers parameters ahead of the next forward pass."""

import torch

from megatron_patch.optim.distributed import DistributedOptimizer


class OverlappedDistributedOptimizer(DistributedOptimizer):
    """Upstream's class, same arguments, same file formats, for chunks of overlapped.ddp.OverlappedDDP."""

    def _copy_model_grads_to_main_grads(self):
        """Each main parameter gets the part of its gradient that this rank's shard holds; nothing is copied."""
        if self.is_stub_optimizer:
            return
        for models, mains in ((self.model_float16_groups, self.shard_fp32_from_float16_groups),
                              (self.model_fp32_groups, self.shard_fp32_groups)):
            for model_group, main_group in zip(models, mains, strict=True):
                for model_param, main in zip(model_group, main_group, strict=True):
                    assert model_param.main_grad.numel() == main.numel(), (model_param.main_grad.shape, main.shape)
                    main.grad = model_param.main_grad.view(main.shape)

    @torch.no_grad()
    def step_with_ready_grads(self):
        """Upstream's; then the gathering of the parameters that this optimizer updated begins."""
        updated = super().step_with_ready_grads()
        mine = {bucket for buffer in self.buffers for bucket in buffer.buckets} if not self.is_stub_optimizer else set()
        for chunk in self.model_chunks if mine else ():
            groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            chunk.gather([group for group in groups if mine.issuperset(group.buckets)])
        return updated
