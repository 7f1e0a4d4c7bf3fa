"""A GGUF file as a Hugging Face folder in fp32: `python -m examples.quickstart.checkpoint GGUF OUT`.

A process of its own: dequantising takes a gigabyte and half a minute, and neither is to stay. Transformers does it all,
so that nothing of ours decides what the original is.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

NEEDED = ("gguf", "accelerate")


def convert(gguf: Path, out: Path) -> None:
    """Write ``out`` with weights, config, tokenizer and chat template. Raises ValueError without the 'demo' packages."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}, or megatron-patch[demo].")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    # Without dequantize=True Transformers keeps the weights quantised, and save_pretrained refuses.
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        fresh = Path(scratch) / out.name
        model.save_pretrained(fresh)
        AutoTokenizer.from_pretrained(**source).save_pretrained(fresh)
        try:
            fresh.rename(out)
        except OSError:
            if not (out / "model.safetensors").is_file():  # else another quickstart was first with the same
                raise


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
