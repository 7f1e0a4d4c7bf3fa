"""One pytorch_model.bin, read as safetensors are: by byte ranges, nothing mapped, nothing loaded that was not asked for, no code run."""

from pathlib import Path

import torch
from torch import Tensor

from megatron_patch.checkpoint import archive_read
from megatron_patch.checkpoint.strided import Stored

KINDS = {"_rebuild_sparse_tensor": "sparse", "_rebuild_sparse_csr_tensor": "sparse", "_rebuild_nested_tensor": "nested",
         "_rebuild_meta_tensor_no_storage": "on the meta device, without values", "_rebuild_qtensor": "quantised"}


class BinFile:
    """The state dict in ``path``, zip archive or from before torch's zip format. Raises ValueError for anything but a dict of tensors."""

    def __init__(self, path):
        self.path, self.bytes_read = Path(path), 0
        self._tensors = _tensors(self.path)

    def names(self):
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def span(self, name: str) -> tuple[Path, int] | None:
        """(this file, offset of the tensor's first byte), None where its elements do not lie one after the other."""
        tensor = self._tensors[name]
        return (self.path, tensor.offset) if tensor.contiguous else None

    def rows(self, name: str, start: int = 0, stop: int | None = None, index: int | None = None) -> Tensor:
        """Rows [start, stop), of slab ``index`` of a 3-D tensor when given; a scalar as itself."""
        tensor = self._slab(name, index)
        return self._read(tensor.part(0, start, tensor.shape[0] if stop is None else stop) if tensor.shape else tensor)

    def columns(self, name: str, start: int, stop: int, index: int | None = None) -> Tensor:
        """Columns [start, stop) of a matrix, of slab ``index`` of a 3-D tensor when given."""
        return self._read(self._slab(name, index).part(1, start, stop))

    def _slab(self, name, index) -> Stored:
        return self._tensors[name] if index is None else self._tensors[name].slab(index)

    def _read(self, tensor: Stored) -> Tensor:
        self.bytes_read += tensor.nbytes
        return tensor.read()


def _tensors(path: Path) -> dict[str, Stored]:
    found = archive_read.read(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a dict of tensors; expected what save_pretrained writes.")
    for name, tensor in found.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} holds a tensor under {name!r}, a {type(name).__name__}; tensor names are strings.")
        if not isinstance(tensor, Stored):
            kind = KINDS.get(type(tensor).__name__, f"a {type(tensor).__name__}")
            raise ValueError(f"{path}: '{name}' is {kind}; expected plain tensors, as save_pretrained writes.")
    return dict(found)
