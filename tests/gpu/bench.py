"""How long attention_d512 takes on an NVIDIA GPU, beside what PyTorch has, in one interleaved run. Needs PyTorch and nvcc.

    python3 tests/gpu/bench.py [--cubins FOLDER] [--lengths 8192 65536 131072] [--types f32 bf16] [--prompts 512/8704]

Batch 1, 32 query heads on 4 KV heads, one query row or the last rows of a prompt; every call is a replay of a CUDA graph over enough sets of inputs to leave the
L2 cache. Percent: bytes of the cache, each once, over time, of the copy bandwidth measured first.
"""

import argparse

import torch
import torch.nn.functional as F

import driver
from attention import TYPES, Attention, Kernels, oracle, rebuilt, tables


def timed(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_bandwidth():
    """TB/s, bytes read plus bytes written."""
    a = torch.empty(2**29, device="cuda").normal_()
    b = torch.empty_like(a)
    times = sorted(timed(lambda: b.copy_(a)) for _ in range(40))
    return 2 * a.numel() * 4 / times[len(times) // 2] / 1e9


def interleaved(calls, rounds):
    """Median, least and 90 % of each, in microseconds a call."""
    graphs, times = {}, {}
    for name, sets in calls.items():
        for call in sets:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in sets:
                call()
        graph.replay()
        graphs[name], times[name] = graph, []
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(timed(graph.replay) * 1000 / len(calls[name]))
    pick = lambda t: (t[len(t) // 2], t[0], t[len(t) * 9 // 10])
    return {name: pick(sorted(t)) for name, t in times.items()}


def pytorch(q, k, v):
    grouped = q.view(1, k.shape[1], -1, 512)

    def repeated():
        keys, values = (t.repeat_interleave(8, 1) for t in (k, v))
        return torch.softmax(q @ keys.transpose(-1, -2), -1) @ values

    return {
        "grouped matmul": lambda: (torch.softmax(grouped @ k.transpose(-1, -2), -1) @ v).view(q.shape),
        "sdpa, enable_gqa": lambda: F.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True),
        "repeat_kv": repeated,
    }


def case(kernels, dtype, kv_len, bandwidth, rounds):
    element = 4 if dtype == "f32" else 2
    cache = 2 * 4 * kv_len * 512 * element
    sets = [
        [(torch.randn(*shape, device="cuda") * scale).to(TYPES[dtype]) for shape, scale in (((1, 32, 1, 512), 0.05), ((1, 4, kv_len, 512), 1), ((1, 4, kv_len, 512), 1))]
        for _ in range(max(1, min(16, 600_000_000 // cache)))
    ]
    keys = (torch.rand(512, device="cuda") + 0.5, tables(kv_len), 0)
    chosen = dict(family="partial" if dtype == "f32" else "matrix")
    if kv_len < 33 * 32:
        chosen["partitions"] = -(-kv_len // 32)
    calls = {
        "gem": [Attention(kernels, q, k, v, **chosen) for q, k, v in sets],
        "gem, keys from values": [Attention(kernels, q, None, v, keys=keys, **chosen) for q, _, v in sets],
    }
    theirs = [pytorch(*s) for s in sets]
    for name in theirs[0]:
        calls[name] = [own[name] for own in theirs]
    q, k, v = sets[0]
    wants = {False: oracle(q, k, v), True: oracle(q, rebuilt(v, keys), v)}
    results = interleaved(calls, rounds)
    print(f"\n{dtype}, {kv_len} keys, {cache / 1e6:.1f} MB of K and V, {len(sets)} sets")
    for name, (median, least, most) in results.items():
        shared = name.endswith("values")
        moved = cache / 2 if shared else cache
        got = calls[name][0]().double()
        errors = [(got - wants[shared]).abs().max().item()]
        if name.startswith("gem"):
            wide = Attention(kernels, q, None if shared else k, v, keys=keys if shared else None, out="f32", **chosen)().double()
            errors.append((wide - wants[shared]).abs().max().item())
        print(
            f"{name:24} {median:9.1f} us ({least:.1f} to {most:.1f}) {moved / median / 1e6:5.2f} TB/s "
            f"{moved / median / 1e4 / bandwidth:5.1f} % error {' '.join(f'{e:.1e}' for e in errors)}",
            flush=True,
        )
    torch.cuda.empty_cache()


def prompt(kernels, dtype, q_len, kv_len, rounds):
    """The last q_len rows of kv_len, causal."""
    q, k, v = [(torch.randn(1, heads, rows, 512, device="cuda") * scale).to(TYPES[dtype]) for heads, rows, scale in ((32, q_len, 0.05), (4, kv_len, 1), (4, kv_len, 1))]
    keys = (torch.rand(512, device="cuda") + 0.5, tables(kv_len), 0)
    seen = torch.arange(kv_len, device="cuda")[None, :] <= (kv_len - q_len + torch.arange(q_len, device="cuda"))[:, None]
    mask = torch.zeros(q_len, kv_len, device="cuda", dtype=q.dtype).masked_fill(~seen, -torch.inf)

    def grouped():
        scores = q.view(1, 4, 8 * q_len, 512) @ k.transpose(-1, -2)
        weights = torch.softmax(scores.view(1, 4, 8, q_len, kv_len) + mask, -1)
        return (weights.view(1, 4, 8 * q_len, kv_len) @ v).view(q.shape)

    # As many partitions as keep 132 multiprocessors busy.
    blocks = -(-8 * q_len // 64) * 4
    chosen = dict(family="tiled", causal=True, partitions=max(1, 132 // blocks))
    calls = {
        "gem": Attention(kernels, q, k, v, **chosen),
        "gem, keys from values": Attention(kernels, q, None, v, keys=keys, **chosen),
        "gem, f32 units": Attention(kernels, q, k, v, causal=True, partitions=chosen["partitions"]),
        "grouped matmul": grouped,
        "sdpa, mask, enable_gqa": lambda: F.scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=True),
    }
    wants = {False: oracle(q, k, v, causal=True), True: oracle(q, rebuilt(v, keys), v, causal=True)}
    results = interleaved({name: [call] for name, call in calls.items()}, rounds)
    # Of the keys that a row sees: a multiply-add each for its score and for its output.
    operations = 4 * 512 * 32 * (q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2)
    print(f"\n{dtype}, the last {q_len} rows of {kv_len} keys, causal")
    for name, (median, least, most) in results.items():
        error = (calls[name]().double() - wants[name.endswith("values")]).abs().max().item()
        print(f"{name:24} {median:9.1f} us ({least:.1f} to {most:.1f}) {operations / median / 1e6:6.1f} TFLOP/s error {error:.1e}", flush=True)
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cubins")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 65536, 131072])
    parser.add_argument("--types", nargs="+", default=["f32", "bf16", "f16"])
    parser.add_argument("--prompts", nargs="*", default=["512/512", "512/8704", "512/33280", "2048/2048"], help="rows/keys")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    driver.start()
    torch.zeros(1, device="cuda")
    kernels = Kernels(**({"folder": arguments.cubins} if arguments.cubins else {}))
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, copy {bandwidth:.2f} TB/s")
    print("error: of the output against f64, largest; for gem also before it is rounded to the type")
    for kv_len in arguments.lengths:
        for dtype in arguments.types:
            case(kernels, dtype, kv_len, bandwidth, arguments.rounds)
    for rows_of_keys in arguments.prompts:
        for dtype in [t for t in arguments.types if t != "f32"]:
            prompt(kernels, dtype, *map(int, rows_of_keys.split("/")), arguments.rounds)


if __name__ == "__main__":
    main()
