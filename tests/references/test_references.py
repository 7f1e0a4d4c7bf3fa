"""The references on their own: formulas by hand, what sees what, and names and shapes on disk."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.references.baichuan import Baichuan, Baichuan2, Baichuan2With13B, Baichuan13B
from tests.references.chatglm import ChatGLM
from tests.references.chatglm2 import ChatGLM2, ChatGLM3
from tests.references.common import alibi_slopes, angles, prefix_positions, rotate_halves, rotate_pairs, with_prompts
from tests.references.glm130b import GLM130B
from tests.references.internlm2 import InternLM2
from tests.references.qwen1 import Qwen1

CAUSAL = (Baichuan, Baichuan13B, Baichuan2, Baichuan2With13B, Qwen1, ChatGLM2, ChatGLM3, InternLM2)
PREFIX = (ChatGLM, GLM130B)
V, H, F = 1003, 64, 128


def name(value):
    """The class's name as a test id."""
    return value.__name__


def random_ids(length=24, seed=5):
    """[2, length] token ids below the special ones."""
    return torch.randint(10, 900, (2, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids):
    """Logits without a graph."""
    with torch.no_grad():
        return model(ids).logits


def moved(model, ids, position):
    """[b, s]: by how much the logits move when the token at ``position`` changes."""
    other = ids.clone()
    other[:, position] = (other[:, position] + 1) % 900 + 10
    return (logits(model, ids) - logits(model, other)).abs().amax(-1)


@pytest.mark.parametrize("cls", CAUSAL, ids=name)
def test_a_later_token_moves_no_earlier_logits(cls):
    """A causal model: the change is seen from its own position on."""
    change = moved(cls.tiny(), random_ids(), 15)
    assert change[:, :15].max() == 0 and change[:, 15:].min() > 1e-4


@pytest.mark.parametrize("cls", PREFIX, ids=name)
def test_the_context_sees_itself_and_the_rest_is_causal(cls):
    """A change in the context moves all logits, one behind it only those from there on."""
    model = cls.tiny()
    ids = with_prompts(random_ids(), model.config, [12, 9])
    assert moved(model, ids, 6).min() > 1e-4
    change = moved(model, ids, 18)
    assert change[:, :18].max() == 0 and change[:, 18:].min() > 1e-4


def test_prefix_positions_by_hand():
    """Six tokens, context of three, for both kinds of mask token and both models."""
    c = ChatGLM.tiny(num_layers=1).config
    gmask, mask = (with_prompts(random_ids(6)[:1], c, [3], kind) for kind in ("gmask", "mask"))
    for ids, freezes, positions in ((gmask, True, [0, 1, 2, 2, 2, 2]), (gmask, False, [0, 1, 2, 3, 4, 5]),
                                    (mask, True, [0, 1, 2, 2, 2, 2]), (mask, False, [0, 1, 2, 2, 2, 2])):
        position, block, allowed = prefix_positions(ids, c, freezes)
        assert position.tolist() == [positions] and block.tolist() == [[0, 0, 0, 1, 2, 3]]
        assert allowed[0].int().tolist() == [[1, 1, 1, 0, 0, 0]] * 3 + [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("cls", PREFIX, ids=name)
def test_mask_kinds(cls):
    """ChatGLM treats [MASK] as [gMASK] but for the embedding; GLM-130B freezes positions for [MASK] alone."""
    model = cls.tiny()
    c = model.config
    table = model.transformer.word_embeddings.weight.data
    table[c.mask_token_id] = table[c.gmask_token_id]
    if cls is ChatGLM:
        model.lm_head.weight.data[c.mask_token_id] = model.lm_head.weight.data[c.gmask_token_id]
    first, second = (logits(model, with_prompts(random_ids(), c, [12, 9], kind)) for kind in ("gmask", "mask"))
    assert torch.equal(first, second) == (cls is ChatGLM)


def test_alibi_slopes_as_published():
    """8 heads: the geometric series of the paper; 40 heads: that of 32, then every second one of 64."""
    assert alibi_slopes(8).tolist() == [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    slopes = alibi_slopes(40)
    assert slopes.shape == (40,) and slopes[31] == 2**-8
    torch.testing.assert_close(slopes[:4], torch.tensor([0.8408964153, 0.7071067812, 0.5946035575, 0.5]))
    torch.testing.assert_close(slopes[32:], torch.tensor([0.9170040432, 0.7711054127, 0.6484197773, 0.5452538663,
                                                          0.4585020216, 0.3855527063, 0.3242098887, 0.2726269331]))


def test_rotations_by_hand():
    """(1, 2, 3, 4) at position 2 with base 100: angles 2 and 0.2, by halves and by pairs."""
    angle = angles(torch.tensor([2]), 4, 100.0)
    torch.testing.assert_close(angle, torch.tensor([[2.0, 0.2]]))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    c, s = -0.4161468365, 0.9092974268
    d, t = 0.9800665778, 0.1986693308
    torch.testing.assert_close(rotate_halves(x, angle), torch.tensor([[c - 3 * s, 2 * d - 4 * t, 3 * c + s, 4 * d + 2 * t]]))
    torch.testing.assert_close(rotate_pairs(x, angle), torch.tensor([[c - 2 * s, 2 * c + s, 3 * d - 4 * t, 4 * d + 3 * t]]))


@pytest.mark.parametrize("cls,kept", [(Baichuan, False), (Baichuan2, True), (Baichuan13B, False), (Baichuan2With13B, True)])
def test_norm_head_forgets_the_length_of_a_row(cls, kept):
    """NormHead's logits do not change with the scale of the rows, a plain head's do."""
    model, ids = cls.tiny(), random_ids()
    before = logits(model, ids)
    model.lm_head.weight.data *= torch.linspace(0.5, 3, V)[:, None]
    assert torch.allclose(before, logits(model, ids), atol=1e-5) == kept


@pytest.mark.parametrize("cls", (Baichuan, Baichuan13B), ids=name)
def test_baichuan_takes_its_positions_from_the_config(cls):
    """Same weights, other key: other logits."""
    given = {k: v for k, v in cls.TINY.items() if k not in ("max_position_embeddings", "model_max_length")}
    rope, alibi = cls({**given, "max_position_embeddings": 128}), cls({**given, "model_max_length": 128})
    own = rope if cls is Baichuan else alibi
    assert torch.equal(logits(cls.tiny(), random_ids()), logits(own, random_ids()))
    assert not torch.allclose(logits(rope, random_ids()), logits(alibi, random_ids()), atol=1e-2)


def test_w2_is_the_gate_of_qwen1():
    """With w2 = 0 the gate silu(0) shuts the MLP; with w1 = 0 too; swapping them changes the logits."""
    model, ids = Qwen1.tiny(num_hidden_layers=1), random_ids()
    mlp = model.transformer.h[0].mlp
    before = logits(model, ids)
    mlp.w1.weight.data, mlp.w2.weight.data = mlp.w2.weight.data, mlp.w1.weight.data
    assert not torch.allclose(before, logits(model, ids), atol=1e-2)
    with torch.no_grad():
        x = torch.ones(1, 1, H)
        mlp.w1.weight.zero_()[:, 0] = 3
        mlp.w2.weight.zero_()[:, 0] = -2
        seen = []
        hook = mlp.c_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        model.transformer.h[0].ln_2.forward = lambda states: x
        model(ids)
        hook.remove()
    torch.testing.assert_close(seen[0][0, 0], torch.full((F,), 3 * -2 / (1 + torch.e**2)))


@pytest.mark.parametrize("option,spared", [("use_logn_attn", 16), ("use_dynamic_ntk", 0)])
def test_qwen1_long_options_act_past_seq_length_and_in_inference_only(option, spared):
    """Off, within seq_length and in training they change nothing; past it logn spares the first seq_length logits, NTK changes all."""
    options = dict(use_logn_attn=False, use_dynamic_ntk=False)
    ids = random_ids(40)
    for limit, training, same in ((40, False, 40), (16, True, 40), (16, False, spared)):
        plain, model = Qwen1.tiny(seq_length=limit, **options), Qwen1.tiny(seq_length=limit, **{**options, option: True})
        change = (logits(plain.train(training), ids) - logits(model.train(training), ids)).abs().amax((0, 2))
        assert change[:same].sum() == 0 and (change[max(same, 1):] > 1e-5).all(), (limit, training)


def test_rope_ratio():
    """Divides positions in ChatGLM2, multiplies the base in ChatGLM3; 1 is the plain embedding in both."""
    ids = random_ids()
    plain = logits(ChatGLM2.tiny(), ids)
    assert torch.equal(plain, logits(ChatGLM3.tiny(rope_ratio=1), ids))
    x = torch.zeros(1, 1, 11, 16)
    x[..., 0] = x[..., 2] = 1
    for cls, expected in ((ChatGLM2, (0.2, 0.2 * 0.1)), (ChatGLM3, (10.0, 10 / (10000 * 50) ** 0.25))):
        turned = cls.tiny(num_layers=1, rope_ratio=50).rotate(x)[0, 0, 10]
        torch.testing.assert_close(turned[:4], torch.tensor([f(a) for a in expected for f in (lambda a: torch.tensor(a).cos().item(),
                                                                                              lambda a: torch.tensor(a).sin().item())]))
        assert (turned[8:] == 0).all()


def test_residual_of_chatglm_is_the_normed_input():
    """With silent sub-layers the states forget their scale and come out as alpha times a LayerNorm."""
    model = ChatGLM.tiny(num_layers=2)
    for layer in model.transformer.layers:
        for part in (layer.attention.dense, layer.mlp.dense_4h_to_h):
            part.weight.data.zero_(), part.bias.data.zero_()
    seen = []
    last = model.transformer.layers[-1]
    for norm in (last.post_attention_layernorm, model.transformer.final_layernorm):
        norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    logits(model, with_prompts(random_ids(), model.config, [12, 9]))
    for states, norm in zip(seen, (last.input_layernorm, last.post_attention_layernorm)):
        unit = (states / 2 - norm.bias) / norm.weight
        torch.testing.assert_close(unit.mean(-1), torch.zeros(2, 24), atol=1e-5, rtol=0)
        torch.testing.assert_close(unit.var(-1, unbiased=False), torch.ones(2, 24), atol=2e-3, rtol=0)


def test_chatglm_turns_the_halves_by_different_positions():
    """The first half of a head turns by position, the second by block position, each as a head of half the size."""
    x = torch.randn(1, 1, 2, 16)
    positions, blocks = torch.tensor([[3, 4]]), torch.tensor([[0, 7]])
    turned = ChatGLM.tiny(num_layers=1).rotate(x, positions, blocks)
    torch.testing.assert_close(turned[..., :8], rotate_halves(x[..., :8], angles(positions, 8)[:, None]))
    torch.testing.assert_close(turned[..., 8:], rotate_halves(x[..., 8:], angles(blocks, 8)[:, None]))


def test_second_half_is_the_gate_of_glm130b():
    """mlp(x) = down(first * gelu(second)), with the exact GELU."""
    model = GLM130B.tiny(num_layers=1)
    part = model.transformer.layers[0].mlp
    x = torch.randn(1, 3, H)
    both = x @ part.dense_h_to_4h.weight.T + part.dense_h_to_4h.bias
    first, second = both[..., :F], both[..., F:]
    expected = first * second * 0.5 * (1 + torch.erf(second / 2**0.5))
    torch.testing.assert_close(model.mlp(part, x), expected @ part.dense_4h_to_h.weight.T + part.dense_4h_to_h.bias)


@pytest.mark.parametrize("length", [24, 60])
def test_internlm2_is_llama_with_interleaved_projections(length):
    """Transformers' Llama, its projections cut row by row out of wqkv, gives the same logits, also past max_position_embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = InternLM2.tiny(max_position_embeddings=32, num_attention_heads=8)
    c = ours.config
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=F, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        rms_norm_eps=c.rms_norm_eps, max_position_embeddings=32, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e6))).eval()
    renamed = {"tok_embeddings": "embed_tokens", "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
               "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm",
               "ffn_norm": "post_attention_layernorm", "output": "lm_head"}
    weights = {}
    for key, p in ours.state_dict().items():
        if "wqkv" in key:
            rows = [p[8 * i:8 * i + 8] for i in range(12)]
            for letter, order in (("q", (0, 1, 2, 3, 6, 7, 8, 9)), ("k", (4, 10)), ("v", (5, 11))):
                weights[key.replace("attention.wqkv", f"self_attn.{letter}_proj")] = torch.cat([rows[i] for i in order])
            continue
        for old, new in renamed.items():
            key = key.replace(old, new)
        weights[key] = p
    llama.load_state_dict(weights)
    ids = random_ids(length)
    torch.testing.assert_close(logits(ours, ids), logits(llama, ids), atol=2e-5, rtol=0)


# The last logits of the tiny models as they were when the cross-checks in the docstrings were made.
CHECKED = {
    Baichuan: (0.77459, -0.17053, -0.48401, -1.10919),
    Baichuan13B: (0.42296, 0.36182, -0.71005, 0.62963),
    Baichuan2: (0.75127, -0.17213, -0.46944, -1.11965),
    Baichuan2With13B: (0.35545, 0.30125, -0.59672, 0.52423),
    Qwen1: (0.31036, -2.59444, -0.71024, -0.38448),
    ChatGLM2: (-1.00537, -0.93836, -1.05435, -0.13401),
    ChatGLM3: (-0.29434, -0.79504, -1.83255, -0.88283),
    InternLM2: (-2.37601, -1.55535, -0.48552, -0.89358),
    ChatGLM: (0.38186, 0.73745, -0.66857, -0.41937),
    GLM130B: (0.05188, 0.47894, -1.18711, -0.57150),
}


@pytest.mark.parametrize("cls", (*CAUSAL, *PREFIX), ids=name)
def test_still_the_models_that_were_cross_checked(cls):
    """The logits have not moved since."""
    model = cls.tiny()
    ids = with_prompts(random_ids(), model.config, [12, 9]) if cls in PREFIX else random_ids()
    torch.testing.assert_close(logits(model, ids)[:, -1, :2].flatten(), torch.tensor(CHECKED[cls]), atol=5e-5, rtol=0)


ON_DISK = {
    Baichuan: ("model.layers.", {
        "model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H),
        "*self_attn.W_pack.weight": (192, H), "*self_attn.o_proj.weight": (H, H), "*mlp.gate_proj.weight": (F, H),
        "*mlp.up_proj.weight": (F, H), "*mlp.down_proj.weight": (H, F), "*input_layernorm.weight": (H,),
        "*post_attention_layernorm.weight": (H,)}),
    Qwen1: ("transformer.h.", {
        "transformer.wte.weight": (V, H), "transformer.ln_f.weight": (H,), "lm_head.weight": (V, H),
        "*ln_1.weight": (H,), "*ln_2.weight": (H,), "*attn.c_attn.weight": (192, H), "*attn.c_attn.bias": (192,),
        "*attn.c_proj.weight": (H, H), "*mlp.w1.weight": (F, H), "*mlp.w2.weight": (F, H), "*mlp.c_proj.weight": (H, F)}),
    ChatGLM2: ("transformer.encoder.layers.", {
        "transformer.embedding.word_embeddings.weight": (V, H), "transformer.encoder.final_layernorm.weight": (H,),
        "transformer.output_layer.weight": (V, H), "*input_layernorm.weight": (H,), "*post_attention_layernorm.weight": (H,),
        "*self_attention.query_key_value.weight": (128, H), "*self_attention.query_key_value.bias": (128,),
        "*self_attention.dense.weight": (H, H), "*mlp.dense_h_to_4h.weight": (256, H), "*mlp.dense_4h_to_h.weight": (H, F)}),
    ChatGLM: ("transformer.layers.", {
        "transformer.word_embeddings.weight": (V, H), "transformer.final_layernorm.weight": (H,), "transformer.final_layernorm.bias": (H,),
        "lm_head.weight": (V, H), "*input_layernorm.weight": (H,), "*input_layernorm.bias": (H,), "*post_attention_layernorm.weight": (H,),
        "*post_attention_layernorm.bias": (H,), "*attention.query_key_value.weight": (192, H), "*attention.query_key_value.bias": (192,),
        "*attention.dense.weight": (H, H), "*attention.dense.bias": (H,), "*mlp.dense_h_to_4h.weight": (256, H),
        "*mlp.dense_h_to_4h.bias": (256,), "*mlp.dense_4h_to_h.weight": (H, 256), "*mlp.dense_4h_to_h.bias": (H,)}),
    InternLM2: ("model.layers.", {
        "model.tok_embeddings.weight": (V, H), "model.norm.weight": (H,), "output.weight": (V, H),
        "*attention.wqkv.weight": (128, H), "*attention.wo.weight": (H, H), "*feed_forward.w1.weight": (F, H),
        "*feed_forward.w3.weight": (F, H), "*feed_forward.w2.weight": (H, F), "*attention_norm.weight": (H,), "*ffn_norm.weight": (H,)}),
}
ON_DISK[Baichuan2] = ON_DISK[Baichuan]
ON_DISK[ChatGLM3] = ON_DISK[ChatGLM2]
ON_DISK[GLM130B] = ("transformer.layers.", {k: v for k, v in ON_DISK[ChatGLM][1].items() if k != "lm_head.weight"}
                    | {"*mlp.dense_4h_to_h.weight": (H, F)})


@pytest.mark.parametrize("cls", ON_DISK, ids=name)
def test_names_shapes_and_config_on_disk(cls, tmp_path):
    """model.safetensors has the hub's names and shapes, fp32; config.json the keys that were given and the model's type."""
    prefix, expected = ON_DISK[cls]
    model = cls.tiny(num_layers=2) if hasattr(cls.tiny().config, "num_layers") else cls.tiny(num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    layered = {f"{prefix}{n}.{key[1:]}": shape for n in range(2) for key, shape in expected.items() if key[0] == "*"}
    assert {k: tuple(v.shape) for k, v in saved.items()} == layered | {k: v for k, v in expected.items() if k[0] != "*"}
    assert {v.dtype for v in saved.values()} == {torch.float32}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == cls.model_type and config["architectures"] == [cls.architecture]
    again = cls(config, seed=1)
    again.load_state_dict(saved)
    ids = with_prompts(random_ids(), model.config, [5, 9]) if cls in PREFIX else random_ids()
    assert torch.equal(logits(model, ids), logits(again, ids))
