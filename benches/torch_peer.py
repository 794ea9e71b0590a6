"""The torch arm of `cargo bench --bench ab`: reads a repeat count per line, answers with the seconds of one run.

Arms: torch       query heads as query rows of their KV head (decode), SDPA with is_causal otherwise
      torch-sdpa  scaled_dot_product_attention with enable_gqa
"""

import sys
import time

import torch
import torch.nn.functional as F

arm, dtype = sys.argv[1:3]
batch, q_heads, kv_heads, q_len, kv_len, threads = map(int, sys.argv[3:])
torch.set_num_threads(threads)
dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
scale = 512**-0.5
torch.manual_seed(0)
q = torch.randn(batch, q_heads, q_len, 512).to(dtype)
k = torch.randn(batch, kv_heads, kv_len, 512).to(dtype)
v = torch.randn(batch, kv_heads, kv_len, 512).to(dtype)


def run():
    if q_len == 1 and arm == "torch":
        rows = q.view(batch, kv_heads, q_heads // kv_heads, 512)
        return F.scaled_dot_product_attention(rows, k, v, scale=scale).view(q.shape)
    return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=q_len > 1, enable_gqa=True)


with torch.inference_mode():
    for line in sys.stdin:
        n = int(line)
        start = time.perf_counter()
        for _ in range(n):
            run()
        print((time.perf_counter() - start) / n, flush=True)
