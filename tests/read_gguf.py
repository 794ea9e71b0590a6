"""Reads a GGUF file with llama.cpp's own Python package and compares matrices and norms with the checkpoint that it was made of.

    pip install gguf
    cargo run --release --example quantize -- assets/tiny-gemma4 tiny.gguf --type q8_0
    python3 tests/read_gguf.py assets/tiny-gemma4/model.safetensors tiny.gguf
"""

import json
import re
import struct
import sys
from collections import defaultdict

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}


def checkpoint(path):
    data = open(path, "rb").read()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            raw = np.frombuffer(data[first:last], dtype={"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[entry["dtype"]])
            values = (raw.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else raw.astype(np.float32)
            yield name.removeprefix("model.").removeprefix("language_model."), values.reshape(entry["shape"])


def name_of(tensor):
    in_layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor)
    if in_layer and in_layer[2] in OF_LAYER:
        return f"layers.{in_layer[1]}.{OF_LAYER[in_layer[2]]}.weight"
    return WHOLE.get(tensor)


def main():
    stored, reader = dict(checkpoint(sys.argv[1])), GGUFReader(sys.argv[2])
    architecture = reader.fields["general.architecture"].contents()
    print(f"{architecture}, {len(reader.tensors)} tensors, {len(reader.fields)} keys")
    errors, compared = defaultdict(float), 0
    for tensor in reader.tensors:
        want = stored.get(name_of(tensor.name))
        if want is None:
            continue
        got = dequantize(tensor.data, tensor.tensor_type).reshape(want.shape)
        error = float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
        errors[tensor.tensor_type.name] = max(errors[tensor.tensor_type.name], error)
        compared += 1
    print(f"{compared} compared; largest root of the mean squares, relative, by type: {dict(errors)}")
    sys.exit(0 if compared > 0 else 1)


if __name__ == "__main__":
    main()
