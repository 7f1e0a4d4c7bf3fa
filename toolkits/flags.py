"""Print the Megatron flags of a Hugging Face checkpoint, one a line, ready for a shell script.

    python -m toolkits.flags HF_DIR
    ARCH=($(python -m toolkits.flags HF_DIR))
"""

import argparse
import sys
from pathlib import Path

from toolkits import console


def parser() -> argparse.ArgumentParser:
    about, _, usage = __doc__.partition("\n")
    made = console.Parser("python -m toolkits.flags", description=about, epilog=usage,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", metavar="DIR", help="Hugging Face folder or hub-cache snapshot")
    made.add_argument("--json", metavar="FILE", type=Path, help="also write flags and notes to FILE as JSON")
    made.add_argument("--platform", metavar="NAME", help="cuda, cpu or a registered platform")
    return made


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits 0, or 1 with one line on stderr."""
    console.run(command, parser().parse_args(argv))


def command(flags) -> int:
    """Print the flags on stdout and, on stderr, what they cannot say. Returns the exit code."""
    from megatron_patch.translate import load_config

    config = load_config(flags.model)
    console.start(flags.platform)
    argv, notes = model_flags(config), missing(config)
    print("\n".join(lines(argv)))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    console.write_json(flags.json, {"family": config.family.name, "flags": argv, "notes": notes})
    return 0


def model_flags(config) -> list[str]:
    """The command line of the model itself: no parallel sizes, no training settings."""
    from megatron_patch.training.flags_inverse import to_flags, without_flag

    fields = said_fields(config)
    unsaid = without_flag(fields)
    if "activation_func" in unsaid:
        fields.pop("gated_linear_unit", None)
    return to_flags({**{k: v for k, v in fields.items() if k not in unsaid}, **model_settings(config)})


def said_fields(config) -> dict:
    """The config's fields, less those of ours that change nothing."""
    from megatron_patch.own import Own

    usual = {**vars(Own), "embedding_dropout": config.get("hidden_dropout")}
    return {k: v for k, v in config.fields.items() if v is not None and not (hasattr(Own, k) and v == usual[k])}


def model_settings(config) -> dict:
    """What GPTModel takes beside its TransformerConfig, under Megatron-LM's names."""
    rope = config.rope
    theta = int(rope.theta) if float(rope.theta).is_integer() else rope.theta
    out = dict(position_embedding_type=config.position_embedding_type, max_position_embeddings=config.max_position_embeddings,
               rotary_base=theta, rotary_percent=rope.percent, vocab_size=config.vocab_size,
               untie_embeddings_and_output_weights=not config.tied)
    if config.get("multi_latent_attention"):
        return {**out, **rope.latent(), "rotary_base": theta}
    if rope.interpolation():
        out["rotary_seq_len_interpolation_factor"] = rope.interpolation()
    if rope.type == "llama3":
        out.update(use_rope_scaling=True, rope_scaling_factor=float(rope.scaling["factor"]),
                   rope_scaling_low_freq_factor=float(rope.scaling["low_freq_factor"]),
                   rope_scaling_high_freq_factor=float(rope.scaling["high_freq_factor"]),
                   rope_scaling_original_max_position_embeddings=int(rope.scaling["original_max_position_embeddings"]))
    return out


def missing(config) -> list[str]:
    """What no flag of Megatron-LM says about this model."""
    from megatron_patch.training.flags_inverse import without_flag

    rope, out = config.rope, []
    for name, value in without_flag(said_fields(config)).items():
        shown = getattr(value, "__name__", None) or getattr(getattr(value, "func", None), "__name__", value)
        out.append(f"{name} ({shown}) has no flag; train with --hf-model DIR, which takes it from config.json.")
    if rope.sliding is not None:
        out.append("layers with a sliding window have a rope of their own, for which there are no flags; train with --hf-model DIR.")
    latent = config.get("multi_latent_attention")
    unwhole = rope.type == "linear" and (latent or not float(rope.scaling["factor"]).is_integer())
    if rope.type in ("dynamic", "longrope", "qwen_ntk") or rope.type == "yarn" and not latent or unwhole:
        out.append(f"rope type '{rope.type}' {dict(rope.scaling)} has no flags; train with --hf-model DIR, which takes it from "
                   f"config.json.")
    if rope.type == "llama3" and not rope.is_stock_llama3():
        out.append("Megatron-LM itself fixes llama3 rope scaling at low 1, high 4, original 8192; the other values here work only with "
                   "megatron_patch.pretrain.")
    return out


def lines(argv: list[str]) -> list[str]:
    """A flag and its values to a line."""
    out: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not out:
            out.append([])
        out[-1].append(word)
    return [" ".join(words) for words in out]


if __name__ == "__main__":
    main()
