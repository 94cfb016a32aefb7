"""A checkpoint in the formats of other engines, for race.py: GGUF for llama.cpp, and the two of llama2.c."""
import json
import struct

import gguf
import numpy as np

import make_random

GGUF_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "int8": "Q8_0"}
# llama2.c has all layers of one kind of matrix together, in this order.
LLAMA2C_KINDS = [f"self_attn.{letter}_proj" for letter in "qkvo"] + ["mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]
LLAMA2C_GROUP = 64  # what its own export takes


def read_values(path):
    """name -> float32 values of a model.safetensors in bf16 and float32, each read when it is asked for."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, "u1", "r", offset=8 + size)

    def values(name):
        begin, end = header[name]["data_offsets"]
        stored = data[begin:end]
        numbers = stored.view("<f4") if header[name]["dtype"] == "F32" else (stored.view("<u2").astype("<u4") << 16).view("<f4")
        return numbers.reshape(header[name]["shape"])
    return values


def interleaved(matrix, heads):
    """Rows of q or k as llama.cpp rotates them: the pairs of a head are neighbours, not its two halves."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def write_gguf(path, weights, config, values, vocabulary=None):
    """vocabulary: a GGUF whose tokenizer this one gets; without it llama-bench takes ids at random."""
    writer = gguf.GGUFWriter(path, "llama")
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        for key, field in gguf.GGUFReader(vocabulary).fields.items():
            if key.startswith("tokenizer."):
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    for key, value in (("vocab_size", config["vocab_size"]), ("context_length", config["max_position_embeddings"]),
                       ("block_count", config["num_hidden_layers"]), ("embedding_length", config["hidden_size"]),
                       ("feed_forward_length", config["intermediate_size"]), ("rope.dimension_count", head_dim),
                       ("attention.head_count", config["num_attention_heads"]),
                       ("attention.head_count_kv", config["num_key_value_heads"])):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    types = {1: gguf.GGMLQuantizationType.F32, 2: gguf.GGMLQuantizationType[GGUF_TYPES[weights]]}
    for name, dims in make_random.tensors(config):
        stored = gguf.quant_shape_to_byte_shape(dims, types[len(dims)])
        writer.add_tensor_info(names.get_name(name, (".weight",)), stored, np.dtype("u1"), int(np.prod(stored)),
                               types[len(dims)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, dims in make_random.tensors(config):
        matrix, count = values(name), heads.get(name.split(".")[-2])
        writer.write_tensor_data(gguf.quantize(interleaved(matrix, count) if count else matrix, types[len(dims)]))
    writer.close()


def write_llama2c(path, weights, config, values):
    """run.c reads f32 (the first format), runq.c int8 in groups with an f32 scale (version 2)."""
    layers, heads, tied = config["num_hidden_layers"], config["num_attention_heads"], config["tie_word_embeddings"]
    context, vocabulary = config["max_position_embeddings"], config["vocab_size"]
    shape = [config["hidden_size"], config["intermediate_size"], layers, heads, config["num_key_value_heads"]]

    def in_layers(*kinds):
        return [f"model.layers.{i}.{kind}.weight" for kind in kinds for i in range(layers)]
    before, after = in_layers("input_layernorm"), in_layers("post_attention_layernorm")
    embedding, norm, head = ["model.embed_tokens.weight"], ["model.norm.weight"], [] if tied else ["lm_head.weight"]

    with open(path, "wb") as file:
        def write_f32(names):
            for name in names:
                values(name).tofile(file)

        def write_int8(names):
            for name in names:
                groups = values(name).reshape(-1, LLAMA2C_GROUP)
                scales = np.abs(groups).max(axis=1, keepdims=True) / 127
                np.rint(groups / scales).astype("i1").tofile(file)
                scales.tofile(file)

        if weights == "int8":
            header = struct.pack("<Ii7iBi", 0x616B3432, 2, *shape, vocabulary, context, tied, LLAMA2C_GROUP)
            file.write(header.ljust(256, b"\0"))
            write_f32(before + after + norm)
            write_int8(embedding + in_layers(*LLAMA2C_KINDS) + head)
        else:  # a vocabulary below 0 says that the head is not tied
            file.write(struct.pack("<7i", *shape, vocabulary if tied else -vocabulary, context))
            write_f32(embedding + before + in_layers(*LLAMA2C_KINDS[:4]) + after + in_layers(*LLAMA2C_KINDS[4:]) + norm)
            np.zeros(context * (shape[0] // heads), "<f4").tofile(file)  # angles of RoPE, which run.c skips
            write_f32(head)


def write_llama2c_tokenizer(path, config):
    """A token a byte, and the space that run.c puts before each prompt; the others are words that nothing merges to."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), " "]
    pieces += [f"word{i}" for i in range(len(pieces), config["vocab_size"])]
    with open(path, "wb") as file:
        file.write(struct.pack("<i", max(map(len, pieces))))
        for piece in pieces:
            file.write(struct.pack("<fi", 0.0, len(piece)) + piece.encode())
