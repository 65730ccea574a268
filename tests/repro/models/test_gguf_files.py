"""GGUF files, written here by gguf's own writer, against the transformers models they came from."""

import json
import shutil
import struct
import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from repro.__main__ import FINE, USAGE, main
from repro.models.checkpoint import checkpoint_inputs, resolve
from repro.models.files import gguf_files
from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import load_policy
from repro.run.select import model_source
from repro.spec.hub import PINNED_BYTES, snapshots, user_cache
from repro.spec.shapes import shape_of_checkpoint
from repro.spec.whole_files import sha256_of
from tests.repro.architectures import CLASSES
from tests.said import refusal

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

LETTERS = [*map(chr, (*range(33, 127), *range(161, 173), *range(174, 324)))]
MERGES = ["t h", "th e", "Ġ the", "1 2", "12 3", "Ġ 123"]
CONTROL = ["<|end|>", "<|begin|>", "<|pad|>"]
TOKENS = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES), *CONTROL, "<tool>", "[PAD0]"]
KINDS = [1] * (len(LETTERS) + len(MERGES)) + [3] * len(CONTROL) + [4, 5]
END, BEGIN, PAD = map(TOKENS.index, CONTROL)
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
PARTS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
TYPES = (
    Type.Q4_K, Type.Q8_0, Type.Q6_K, Type.Q5_0, Type.Q4_1, Type.Q4_0, Type.F16, Type.BF16,
    Type.Q5_1, Type.F32,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def codes_of(values, kind, generator):
    """Return a matrix as a file keeps it: random codes for types that gguf cannot make."""
    if kind not in (Type.Q4_K, Type.Q6_K):
        return gguf.quantize(values, kind)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (len(values), values.shape[1] // block, nbytes)
    codes = generator.integers(0, 256, shape, dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-5).tobytes(), np.uint8)
    # Q4_K begins with two float16 scales; Q6_K ends with one.
    codes[..., :4] = np.tile(scale, 2) if kind == Type.Q4_K else codes[..., :4]
    codes[..., -2:] = scale if kind == Type.Q6_K else codes[..., -2:]
    return codes.reshape(len(values), -1)


def pairs(rows, heads):
    """Return a projection's rows as Llama's files have them: a head's halves interleaved."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(architecture, *, tied, types=TYPES):
    """Return a random model whose weights a file can hold exactly, and that file's tensors."""
    config_class, model_class = CLASSES[architecture]
    torch.manual_seed(3)
    model = model_class(config_class(**SIZES, tie_word_embeddings=tied)).eval()
    generator = np.random.default_rng(5)
    tensors = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        part = module.split(".", 3)[3] if "layers" in module else module
        layer = f"blk.{module.split('.')[2]}." if "layers" in module else ""
        values = parameter.detach().numpy()
        if values.ndim == 1:
            values, kind = values + generator.normal(0, 0.2, values.shape).astype("f4"), Type.F32
        else:
            kind = types[number % len(types)]
        codes = codes_of(values, kind, generator)
        parameter.data = torch.tensor(gguf.dequantize(codes, kind)).bfloat16().float()
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
        stored = pairs(codes, heads) if heads and architecture == "llama" else codes
        tensors[f"{layer}{PARTS[part]}.{leaf}"] = (stored, kind)
    model.tie_weights()
    return model, tensors


def metadata(architecture, **changes):
    """Return what a file says beside its tensors; None leaves a key out."""
    values = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
    }
    tokenizer = {
        "model": "gpt2",
        "pre": "qwen2" if architecture == "qwen2" else "smollm",
        "tokens": TOKENS,
        "token_type": KINDS,
        "merges": MERGES,
        "eos_token_id": END,
        "bos_token_id": BEGIN,
        "padding_token_id": PAD,
    }
    whole = {f"{architecture}.{key}": value for key, value in values.items()}
    whole |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    whole["tokenizer.chat_template"] = (
        "{% for m in messages %}{{ '<|begin|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>{% endif %}"
    )
    return {key: value for key, value in (whole | changes).items() if value is not None}


def write(path, architecture, tensors, named=None, **changes):
    writer = gguf.GGUFWriter(path, named or architecture)
    for key, value in metadata(architecture, **changes).items():
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for name, (codes, kind) in tensors.items():
        plain = kind in (Type.F32, Type.F16, Type.I32)
        writer.add_tensor(name, codes, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama(tmp_path):
    """Return a function that writes a small Llama's file with changed metadata and tensors."""

    def make(tensors=None, **changes):
        _, own = tensors_of("llama", tied=True, types=(Type.F16,))
        kept = {name: item for name, item in (own | (tensors or {})).items() if item is not None}
        return write(tmp_path / "model.gguf", "llama", kept, **changes)

    return make


def refused(path):
    """Return the sentence with which a file is refused; it names the file, and leaves nothing."""
    said = refusal(lambda: resolve(path), CheckpointError)
    assert str(path) in said
    assert "\n" not in said
    assert not list(user_cache().glob("gguf/*"))
    assert not list(user_cache().glob("gguf/.*"))
    return said


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("turn", [0, 5])
def test_logits_are_those_of_the_tensors_model(tmp_path, architecture, tied, turn):
    types = (*TYPES[turn:], *TYPES[:turn])
    model, tensors = tensors_of(architecture, tied=tied, types=types)
    path = write(tmp_path / "model.gguf", architecture, tensors)
    folder = resolve(path)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert read.config.tie_word_embeddings is tied
    ids = torch.arange(40).view(2, 20) * 6
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=0)
    source = json.loads((folder / "SOURCE.json").read_text())
    assert source["gguf_sha256"] == sha256_of(path)
    assert source["gguf_bytes"] == path.stat().st_size
    assert sum(source["types_in_the_file"].values()) == len(tensors)
    assert {kind.name for _, kind in tensors.values()} == set(source["types_in_the_file"])
    assert resolve(path) == folder


@pytest.mark.parametrize(("coarse", "fine"), [(Type.Q4_0, Type.Q8_0), (Type.Q5_0, Type.F16)])
def test_a_matrix_stored_twice_is_tied_to_its_finer_copy(llama, coarse, fine):
    values = np.random.default_rng(0).normal(0, 0.02, (len(TOKENS), 256)).astype("f4")
    stored = {kind: (gguf.quantize(values, kind), kind) for kind in (coarse, fine)}
    for first, second in ((coarse, fine), (fine, coarse)):
        path = llama({"token_embd.weight": stored[first], "output.weight": stored[second]})
        model = AutoModelForCausalLM.from_pretrained(resolve(path), dtype=torch.bfloat16)
        assert model.config.tie_word_embeddings
        expected = torch.tensor(gguf.dequantize(*stored[fine])).bfloat16()
        assert torch.equal(model.lm_head.weight, expected)


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("qwen2", ["the", "Ġ", "1", "2", "3", "Ġthe"]),
        ("smollm", ["the", "Ġ", "1", "2", "3", "Ġthe"]),
        ("gpt-2", ["the", "Ġ123", "Ġthe"]),
    ],
)
def test_the_tokenizer_splits_and_merges_as_the_file_says(llama, split, pieces):
    tokenizer = AutoTokenizer.from_pretrained(resolve(llama(**{"tokenizer.ggml.pre": split})))
    ids = tokenizer("the 123 the")["input_ids"]
    assert [TOKENS[at] for at in ids] == pieces
    composed = len(tokenizer("e\u0301")["input_ids"]) == 2
    assert composed == (split == "qwen2")  # normalised to one letter of two bytes
    for text in ("é 12\n\n  the\t日本", "the<tool>the<|end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer("the<tool><|end|>")["input_ids"]
    assert [TOKENS[at] for at in ids] == ["the", "<tool>", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<tool>"
    assert "[PAD0]" not in tokenizer.get_vocab()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<|begin|>the<|end|>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, PAD)


MATRIX = np.zeros((256, 512), "f4")
DOWN = "blk.0.ffn_down.weight"


@pytest.mark.parametrize(
    ("tensors", "changes", "named"),
    [
        ({}, {"named": "gemma"}, "gemma"),
        ({}, {"tokenizer.ggml.model": "llama"}, "llama"),
        ({}, {"tokenizer.ggml.pre": "tekken"}, "tekken"),
        ({}, {"tokenizer.ggml.merges": ["t h e"]}, "t h e"),
        ({}, {"tokenizer.ggml.token_type": KINDS[:-1]}, "tokens"),
        ({}, {"tokenizer.ggml.eos_token_id": None}, "eos_token_id"),
        ({}, {"split.count": 3}, "3"),
        ({}, {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "as 'yarn'"),
        ({}, {"llama.rope.scaling.factor": -2.0}, "scaling.factor as -2.0"),
        ({}, {"llama.rope.scaling.factor": float("nan")}, "scaling.factor as nan"),
        ({}, {"llama.rope.scaling.attn_factor": 1.2}, "attn_factor"),
        ({}, {"llama.attention.scale": 0.5}, "attention.scale"),
        ({}, {"llama.expert_count": 8}, "expert_count"),
        ({}, {"llama.vocab_size": 7}, "vocab_size as 7"),
        ({}, {"tokenizer.ggml.token_type": [9] * len(KINDS)}, "[9]"),
        ({}, {"llama.rope.scaling.factor": 0.5}, "factor is 0.5"),
        ({}, {"llama.attention.causal": False}, "attention.causal"),
        ({"rope_factors_long.weight": (MATRIX[0, :32], Type.F32)}, {}, "rope_factors_long"),
        ({}, {"llama.attention.sliding_window": 64}, "64"),
        ({}, {"llama.attention.head_count_kv": 3}, "3"),
        ({}, {"llama.block_count": 3}, "blk.2."),
        ({}, {"llama.block_count": 10**9}, "1000000000"),
        ({"blk.1.ffn_down.weight": None}, {}, "blk.1.ffn_down.weight"),
        ({"blk.0.attn_q.bias": (MATRIX[0, :256], Type.F32)}, {}, "blk.0.attn_q.bias"),
        ({"rope_freqs.weight": (MATRIX[0, :32], Type.F32)}, {}, "rotary"),
        ({DOWN: (MATRIX.T, Type.F32)}, {}, "(512, 256)"),
        ({DOWN: (MATRIX + np.nan, Type.F32)}, {}, DOWN),
    ],
)
def test_what_a_file_holds_and_is_not_read_is_named(llama, tensors, changes, named):
    assert named in refused(llama(tensors, **changes))


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"scaling.factor": 4.0}, 4.0),
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.factor": 4.0, "scale_linear": 2.0, "scaling.attn_factor": 1.0}, 4.0),
        ({"scaling.factor": 4.0, "scaling.type": "linear", "scaling.finetuned": True}, 4.0),
        ({"scaling.factor": 1.0, "scaling.type": "linear"}, 1.0),
        ({"scaling.factor": 0.0, "scaling.original_context_length": 256}, 1.0),
        ({"scaling.factor": 4.0, "scaling.type": "none"}, 1.0),
        ({"scaling.type": "linear"}, 1.0),
    ],
)
def test_rotary_angles_are_scaled_by_the_factor_with_or_without_a_type(tmp_path, changes, factor):
    model, tensors = tensors_of("llama", tied=True, types=(Type.F16,))
    rope = {f"llama.rope.{key}": value for key, value in changes.items()}
    path = write(tmp_path / "model.gguf", "llama", tensors, **rope)
    read = AutoModelForCausalLM.from_pretrained(resolve(path), dtype=torch.float32)
    expected = model.model.rotary_emb.inv_freq / factor
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, expected)


def header(*keys, tensors=b"", counts=None):
    """Return a GGUF file of raw key-value pairs and tensor descriptions, with 256 bytes of data."""
    counted = counts or (bool(tensors), len(keys))
    whole = b"GGUF" + struct.pack("<IQQ", 3, *counted) + b"".join(keys) + tensors
    return whole + bytes(-len(whole) % 32 + 256)


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def tensor(dimensions, kind=0, offset=0, named=None):
    start = struct.pack("<Q", 1 if named is None else named) + b"t"
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return start + sizes + struct.pack("<IQ", kind, offset)


ARRAY, UINT8, STRING = 9, 0, 8


@pytest.mark.parametrize(
    "content",
    [
        header(key("a", ARRAY, struct.pack("<IQ", UINT8, 2**62))),
        header(key("a", ARRAY, struct.pack("<IQ", STRING, 2**63))),
        header(key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000)),
        header(key("a", ARRAY, struct.pack("<IQ", 77, 1))),
        header(key("a", 77, b"")),
        header(key("a", STRING, struct.pack("<Q", 2**63))),
        header(key("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")),
        header(key("a", UINT8, b"1"), key("a", UINT8, b"1")),
        header(key("general.alignment", 4, struct.pack("<I", 0))),
        header(key("general.alignment", 4, struct.pack("<I", 24))),
        header(key("general.alignment", 4, struct.pack("<I", 2**31))),
        header(counts=(0, 2**62)),
        header(counts=(2**62, 0)),
        header(tensors=tensor([2**33, 2**31])),
        header(tensors=tensor([2**63, 2])),
        header(tensors=tensor([0])),
        header(tensors=tensor([1] * 9)),
        header(tensors=tensor([8], kind=1000)),
        header(tensors=tensor([8], kind=12)),
        header(tensors=tensor([8], offset=2**64 - 64)),
        header(tensors=tensor([8], offset=4)),
        header(tensors=tensor([80])),
        header(tensors=tensor([8], named=2**62)),
        header(tensors=tensor([8]) + tensor([8], offset=32), counts=(2, 0)),
        header(tensors=tensor([8]) * 2, counts=(2, 0)),
    ],
)
def test_a_header_that_promises_too_much_is_refused_at_once(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    started = time.monotonic()
    refused(path)
    assert time.monotonic() - started < 5


def test_any_header_is_read_or_refused_in_one_sentence(llama):
    path = llama()
    whole = path.read_bytes()
    _, tensors = tensors_of("llama", tied=True, types=(Type.F16,))
    described = len(whole) - sum(codes.nbytes for codes, _ in tensors.values())
    words = st.sampled_from([struct.pack("<Q", n) for n in (2**62, 2**63, 2**64 - 1, 2**31, 0)])

    @settings(max_examples=60, deadline=None)
    @example(place=whole.index(b"context_length"), changed=b"\n")
    @given(place=st.integers(0, described), changed=st.binary(min_size=1, max_size=8) | words)
    def check(place, changed):
        path.write_bytes(whole[:place] + changed + whole[place + len(changed) :])
        said = refusal(lambda: resolve(path), CheckpointError)
        assert said is None or (str(path) in said and "\n" not in said)

    check()


def test_a_file_cut_short_and_one_without_the_library_are_refused(llama, monkeypatch):
    path = llama()
    whole = path.read_bytes()
    for share in (0.0, 0.002, 0.5, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        refused(path)
    path.write_bytes(whole)
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    assert "qerl-repro[gguf]" in refused(path)


def test_a_file_pinned_by_its_bytes_is_found_wherever_it_lay(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = llama()
    pinned, name = f"{PINNED_BYTES}{sha256_of(path)}", "owner/model:elsewhere.gguf"
    with pytest.raises(CheckpointError, match=r"elsewhere\.gguf"):
        resolve(name, pinned)
    made = resolve(path)
    assert resolve(name, pinned) == made
    # The hub's cache of the model at a commit.
    commit, model = "b" * 40, tmp_path / "hub" / "models--owner--model"
    (model / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(path, model / "snapshots" / commit / "elsewhere.gguf")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    assert resolve(name) == resolve(name, commit) == made
    assert snapshots("model", name) == [made]
    with pytest.raises(CheckpointError, match=f"{PINNED_BYTES}{'0' * 64} is needed"):
        resolve(name, f"{PINNED_BYTES}{'0' * 64}")


def test_commands_take_a_file_for_a_folder(llama, tmp_path, capsys):
    path = llama()
    assert model_source(str(path)) == str(path)
    shape = shape_of_checkpoint(str(path))
    assert (shape.layers, shape.tied) == (2, True)
    facts = load_policy(path, weight_format="nvfp4").facts
    assert facts["gguf"]["types_in_the_file"] == {"F16": 15, "F32": 5}
    assert facts["gguf"]["dtype"] == "bfloat16"
    assert facts["end_token_ids"] == [END, PAD]
    assert checkpoint_inputs(facts)["gguf"] == sha256_of(path)
    assert "gguf" not in checkpoint_inputs(load_policy("tiny", weight_format="bf16").facts)
    out = tmp_path / "nvfp4"
    assert main(["quantize", str(path), str(out), "--device", "cpu"]) == FINE
    assert load_policy(out, weight_format="nvfp4").facts["gguf"]["gguf_sha256"] == sha256_of(path)
    record = tmp_path / "record.json"
    asked = ["--template", "boxed", "--data", "generated", "--limit", "2", "--tokens", "4"]
    assert main(["evaluate", str(path), *asked, "--device", "cpu", "--out", str(record)]) == FINE
    said = json.loads(record.read_text())["checkpoint"]
    assert (said["name"], said["gguf"]["gguf_sha256"]) == (str(path), sha256_of(path))
    few = ["--formats", "nvfp4", "--prompts", "2", "--new-tokens", "4", "--device", "cpu"]
    assert main(["dose", "--model", str(path), *few]) == FINE
    assert main(["plan", "table1", "--tier", "paper", "--model", str(path)]) == FINE
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "absent.gguf"), *asked]) == USAGE
    assert "absent.gguf" in capsys.readouterr().err
