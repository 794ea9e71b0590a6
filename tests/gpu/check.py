"""The CUDA kernels of attention_d512 against f64 on an NVIDIA GPU. Needs PyTorch and nvcc.

    python3 tests/gpu/check.py [--small] [--sanitize TOOL] [--cubins FOLDER]

--small           shapes that compute-sanitizer gets through
--sanitize TOOL   the same, under compute-sanitizer
"""

import argparse
import itertools
import math
import struct
import subprocess
import sys
import time

import torch

import driver
from attention import FAMILIES, NUMBERS, TYPES, Attention, Kernels, oracle, rebuilt, tables

# Of the largest output: a rounding of the type, and what f32 sums may differ by.
ALLOWED = {"f32": 2e-6, "f16": 2.0**-11 + 4e-6, "bf16": 2.0**-8 + 4e-6}


def allowed(dtype, family, keys):
    # Many rows share keys that are rebuilt and rounded once: scores of about 1 are off by as much as half a rounding.
    return ALLOWED[dtype] * (1.5 if family == "tiled" and keys else 1)


class Checks:
    def __init__(self):
        self.count = self.wrong = 0
        self.worst = {}

    def right(self, kind, got, want, allowed, about):
        error = (got.double() - want).abs().max().item() / max(1e-30, want.abs().max().item())
        self.note(kind, error / allowed, about)

    def note(self, kind, ratio, about=""):
        self.count += 1
        self.worst[kind] = max(self.worst.get(kind, 0.0), ratio if not math.isnan(ratio) else math.inf)
        if not ratio <= 1:
            self.wrong += 1
            print(f"WRONG {kind}: {ratio:.2f} of what is allowed, {about}", flush=True)

    def same(self, kind, a, b, about):
        self.note(kind, 0.0 if torch.equal(a, b) else math.inf, about)


def normal(*shape, dtype="f32", scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(TYPES[dtype])


def view(t, offset):
    """The same values in a cache that is NaN elsewhere, whose rows start `offset` elements off."""
    b, h, n, d = t.shape
    cache = torch.full((b * (n + 3) * h * (d + 8) + 8,), math.nan, device="cuda", dtype=t.dtype)[offset:]
    seen = cache.as_strided((b, h, n, d), ((n + 3) * h * (d + 8), d + 8, h * (d + 8), 1))
    seen.copy_(t)
    return seen


def attention(kernels, checks, dtype, shape, partitions, keys=None):
    (batch, heads, kv_heads, q_len, kv_len) = shape
    q, v = normal(batch, heads, q_len, 512, dtype=dtype, scale=0.05), normal(batch, kv_heads, kv_len, 512, dtype=dtype)
    k = None if keys else normal(batch, kv_heads, kv_len, 512, dtype=dtype)
    want = oracle(q, rebuilt(v, keys) if keys else k, v)
    for family in FAMILIES if dtype != "f32" else ["partial"]:
        call = Attention(kernels, q, k, v, partitions=partitions, family=family, keys=keys)
        about = f"{dtype} {shape} in {partitions}, {call.name}"
        kind = call.name.rsplit("_rows", 1)[0]
        got = call().clone()
        checks.right(kind, got, want, allowed(dtype, family, keys), about)
        checks.same("repeats bit for bit", got, call(), about)
        if not call.whole:
            checks.note("states are written", float(torch.isnan(call.numerators).any() or torch.isnan(call.denominators).any()) * 2)


def causal(kernels, checks, dtype, heads, kv_heads, q_len, kv_len, partitions, keys, family="partial", all_keys=False):
    """Several query rows; values that no row sees are NaN, and those that only later rows see are, too."""
    tiled = family == "tiled"
    q = normal(2, heads, q_len, 512, scale=0.05, dtype=dtype if tiled else "f32")
    k, v = (normal(2, kv_heads, kv_len, 512, dtype=dtype) for _ in "kv")
    about = f"{dtype} {family} {heads}/{kv_heads} {q_len} rows {kv_len} keys in {partitions}"

    def run(q, k, v, keys):
        call = Attention(kernels, q, None if keys else k, v, partitions=partitions, causal=not all_keys, family=family, keys=keys)
        return call().clone()

    for with_keys in (None, keys) if tiled else (None,):
        want = oracle(q, rebuilt(v, with_keys) if with_keys else k, v, causal=not all_keys)
        got = run(q, k, v, with_keys)
        checks.right(f"causal rows, {family}{' of rebuilt keys' if with_keys else ''}", got, want, allowed(dtype if tiled else "f32", family, with_keys), about)
        checks.same("repeats bit for bit", got, run(q, k, v, with_keys), about)
        if all_keys:
            continue
        poisoned = v.clone()
        poisoned[:, :, -1] = math.nan
        hidden = run(q, k, poisoned, with_keys)
        # The tile of the poisoned value is summed on other units.
        if tiled:
            checks.right("a value that a row does not see is not for it", hidden[:, :, :-1], want[:, :, :-1], allowed(dtype, family, with_keys), about)
        else:
            checks.same("a value that a row does not see is not for it", got[:, :, :-1], hidden[:, :, :-1], about)
        checks.note("a NaN reaches the rows that see it", 0.0 if torch.isnan(hidden[:, :, -1]).all() else math.inf, about)
        for offset in (0, 1, 3):
            own = run(view(q, offset), view(k, offset), view(poisoned, offset), with_keys)
            checks.same("views", own.nan_to_num(7), hidden.nan_to_num(7), f"{about} offset {offset}")


def views(kernels, checks, dtype, kv_len, partitions, keys):
    q, k, v = normal(2, 8, 1, 512, dtype=dtype, scale=0.05), normal(2, 2, kv_len, 512, dtype=dtype), normal(2, 2, kv_len, 512, dtype=dtype)
    for family in FAMILIES if dtype != "f32" else ["partial"]:
        for with_keys in (None, keys):
            k_of = lambda offset: None if with_keys else (k if offset is None else view(k, offset))
            plain = Attention(kernels, q, k_of(None), v, partitions=partitions, family=family, keys=with_keys)()
            for offset in (0, 1, 2, 3):
                own = Attention(kernels, view(q, offset), k_of(offset), view(v, offset), partitions=partitions, family=family, keys=with_keys)()
                checks.same("views", plain, own, f"{dtype} {family} keys {bool(with_keys)} offset {offset}")


def states(kernels, checks, partitions, rows, dim):
    """The ops on states that a caller has: empty ones, and ones that cannot be."""
    maxima, sums, parts = normal(partitions, rows), torch.rand(partitions, rows, device="cuda") + 0.5, normal(partitions, rows, dim)
    lowest = torch.finfo(torch.float32).min
    empty = torch.rand(partitions, rows, device="cuda") < 0.3
    maxima[empty], sums[empty], parts[empty] = lowest, 0, math.nan
    if rows > 2:
        maxima[:, 0], sums[:, 0] = lowest, 0          # a row that saw no key
        sums[0, 1] = -1                               # a state that cannot be
    held = [t.data_ptr() for t in (maxima, sums, parts)]

    def run(entry, grid, elements, inputs=3, out="f32"):
        result = torch.full((elements,), -7.0, device="cuda", dtype=TYPES[out])
        params = struct.pack("<3Q6I", 0, 0, 0, rows, partitions, dim, NUMBERS[out], 1, 0)
        driver.launch(kernels[entry], grid, 128, 0, held[:inputs] + [result.data_ptr(), params])
        driver.synchronize()
        return result

    blocks = -(-dim // 128)
    top = maxima.double().max(0).values
    weights = torch.where(sums == 0, 0.0, (maxima.double() - top).exp())
    sum_of = (sums.double() * weights).sum(0)
    part_of = (torch.where(sums[..., None] == 0, 0.0, parts.double()) * weights[..., None]).sum(0)
    finished = torch.where(sum_of[:, None] == 0, 0.0, part_of / sum_of[:, None])
    cannot = torch.zeros(rows, dtype=torch.bool, device="cuda")
    if rows > 2:
        cannot[1] = True
    ok = ~cannot
    got = run("attention_states_finish", (rows, blocks, 1), rows * dim).view(rows, dim)
    checks.right("finish of states", got[ok], finished[ok], 2e-6, (partitions, rows, dim))
    checks.note("a state that cannot be makes its row NaN", 0.0 if torch.isnan(got[cannot]).all() else math.inf)
    merged = run("attention_states_merge", (rows, blocks, 1), rows * (2 + dim))
    checks.right("merge of states", merged[2 * rows :].view(rows, dim)[ok], part_of[ok], 2e-6, (partitions, rows, dim))
    checks.same("merge of states", merged[:rows][ok].double(), top[ok], (partitions, rows, dim))
    lse = run("attention_states_log_sum_exp", (rows, 1, 1), rows, inputs=2)
    want = torch.where(sum_of == 0, -math.inf, top + sum_of.log())
    checks.same("log_sum_exp of nothing is -inf", torch.isinf(lse[ok]), torch.isinf(want[ok]), (partitions, rows))
    finite = ok & (sum_of != 0)
    if finite.any():
        checks.right("log_sum_exp of states", lse[finite], want[finite], 2e-6, (partitions, rows))
    packed = run("attention_states_pack", (rows * partitions, 1, 1), rows * partitions * (2 + dim))
    whole = torch.cat([maxima.flatten(), sums.flatten(), parts.flatten()])
    checks.same("pack of states", packed.nan_to_num(9), whole.nan_to_num(9), (partitions, rows, dim))


def keys_for(kv_len, number):
    position = number % 97
    return torch.rand(512, device="cuda") + 0.5, tables(kv_len + position + 1, [64, 32, 128, 256, 40][number % 5]), position


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sanitize")
    parser.add_argument("--cubins")
    arguments = parser.parse_args()
    if arguments.sanitize:
        tool = ["compute-sanitizer", "--tool", arguments.sanitize, "--kernel-name", "kernel_substring=attention_", "--error-exitcode", "9"]
        if arguments.sanitize == "racecheck":
            # A lane arrives at a barrier for its warp: what the others did before __syncwarp is ordered, too.
            tool.append("--racecheck-indirect-barrier-dependency")
        cubins = ["--cubins", arguments.cubins] if arguments.cubins else []
        sys.exit(subprocess.run(tool + [sys.executable, __file__, "--small"] + cubins).returncode)
    torch.manual_seed(1)
    driver.start()
    torch.zeros(1, device="cuda")
    kernels = Kernels(**({"folder": arguments.cubins} if arguments.cubins else {}))
    checks, began, number = Checks(), time.time(), 0
    if arguments.small:
        lengths, counts, shapes = [1, 33, 100], [1, 3], [(1, 8, 1), (2, 2, 2), (1, 16, 1)]
    else:
        lengths, counts = [1, 3, 31, 33, 511, 512, 513], [1, 2, 7, 31, 33, 64]
        shapes = [(1, 8, 1), (2, 8, 4), (1, 16, 1), (1, 6, 1), (2, 1, 1), (1, 32, 2), (1, 4, 1), (1, 24, 1)]
    for dtype, kv_len, partitions, (batch, heads, kv_heads) in itertools.product(TYPES, lengths, counts, shapes):
        attention(kernels, checks, dtype, (batch, heads, kv_heads, 1, kv_len), partitions)
        number += 1
        if number % 2:
            attention(kernels, checks, dtype, (batch, heads, kv_heads, 1, kv_len), partitions, keys_for(kv_len, number))
    if not arguments.small:
        for dtype, (kv_len, partitions) in itertools.product(TYPES, itertools.product([8191, 8192, 8193], [1, 32, 33, 64])):
            attention(kernels, checks, dtype, (1, 32, 4, 1, kv_len), partitions)
            attention(kernels, checks, dtype, (1, 32, 4, 1, kv_len), partitions, keys_for(kv_len, 3 + kv_len))
        for dtype, (kv_len, partitions) in itertools.product(TYPES, [(65536, 33), (65536, 64), (131072, 32), (131072, 33)]):
            attention(kernels, checks, dtype, (1, 32, 4, 1, kv_len), partitions)
            attention(kernels, checks, dtype, (1, 32, 4, 1, kv_len), partitions, keys_for(kv_len, 5))
    several = [(8, 2, 2, 2, 1), (8, 2, 5, 40, 3), (4, 4, 9, 33, 2), (8, 1, 33, 100, 7), (8, 1, 64, 64, 1), (32, 4, 70, 1100, 3), (6, 1, 301, 301, 2)]
    for dtype, rows in itertools.product(TYPES, several[: 2 if arguments.small else 7]):
        causal(kernels, checks, dtype, *rows, None)
        if dtype != "f32":
            for all_keys in (False, True):
                causal(kernels, checks, dtype, *rows, keys_for(rows[3], sum(rows)), "tiled", all_keys)
    for dtype, (kv_len, partitions) in itertools.product(TYPES, [(37, 2)] if arguments.small else [(1, 1), (37, 2), (515, 7)]):
        views(kernels, checks, dtype, kv_len, partitions, keys_for(kv_len, 5))
    for partitions, rows, dim in [(1, 1, 1), (7, 5, 17), (16, 3, 512)] + ([] if arguments.small else [(33, 32, 512), (300, 9, 130)]):
        states(kernels, checks, partitions, rows, dim)
    for kind, worst in sorted(checks.worst.items()):
        print(f"{worst:6.3f} of what is allowed: {kind}")
    print(f"{checks.count} checks, {checks.wrong} wrong, {time.time() - began:.0f} s")
    sys.exit(1 if checks.wrong else 0)


if __name__ == "__main__":
    main()
