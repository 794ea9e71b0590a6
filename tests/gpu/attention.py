"""Calls of the CUDA kernels of attention_d512 on PyTorch tensors, as the Rust plans launch them."""

import math
import pathlib
import struct
import subprocess

import torch

import driver

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCES = ["attention_d512", "attention_matrix", "attention_tiled", "attention_states", "projection"]
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
NAMES = {t: n for n, t in TYPES.items()}
NUMBERS = {"f32": 0, "f16": 1, "bf16": 2}


class Kernels:
    def __init__(self, folder=ROOT / "target/gpu-cubins", arch="sm_90", nvcc="nvcc"):
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = []
        for source in SOURCES:
            cubin = folder / f"cuda-{source}.cubin"
            if not cubin.exists():
                command = [nvcc, "-std=c++17", "-O3", "-lineinfo", f"-arch={arch}", "-cubin", "-o", str(cubin), str(ROOT / "cuda" / f"{source}.cu")]
                jobs.append(subprocess.Popen(command))
        assert all(job.wait() == 0 for job in jobs)
        self._modules = {s: driver.Module((folder / f"cuda-{s}.cubin").read_bytes()) for s in SOURCES}

    def __getitem__(self, name):
        # attention_d512_partial_.., attention_d512_shared_kv_partial_.. and the same with matrix and tiled, attention_states_.., projection_..
        if name.startswith("projection_"):
            return self._modules["projection"].function(name)
        kinds = [kind for kind in ("states", "matrix", "tiled") if f"_{kind}_" in name]
        return self._modules[f"attention_{kinds[0]}" if kinds else "attention_d512"].function(name)


def rows(t):
    return struct.pack("<4Q", t.storage_offset(), *t.stride()[:3])


def storage(t):
    return t.untyped_storage().data_ptr()


# The f32 units, the matrix units for a few query rows that see every key, and for many.
FAMILIES = ["partial", "matrix", "tiled"]


def header(family, team, rebuilt):
    """Shared memory before the slots."""
    if family == "partial":
        return 512 + 2048
    if family == "tiled":
        return 512 + 2 * 64 * 80 + 3 * 64 * 4 + 64 * 1040 + (32 * 1040 if rebuilt else 0)
    return 512 + team * ((16384 if rebuilt else 8192) + 64) + 2048


def slot(family, element, pairs):
    if family == "matrix":
        return 16 * (1040 + (8 * pairs + 32 if pairs else 0))
    if family == "tiled":
        return 32 * (1040 + 8 * pairs)
    return 8 * (512 * element + 8 * pairs)


class Attention:
    """softmax(q k^T * scale) v; with `keys` = (weight, angles, first position), k is rebuilt from v."""

    def __init__(self, kernels, q, k, v, scale=1.0, partitions=33, family="partial", warps=8, slots=None, causal=False, keys=None, out=None):
        batch, heads, q_len, _ = q.shape
        kv_heads, kv_len = v.shape[1], v.shape[2]
        group = heads // kv_heads
        need = group * q_len
        own = {"partial": 4, "matrix": 8, "tiled": 8}[family]
        together = 64 if family == "tiled" else own
        while together < need and together < 16:
            together *= 2
        team = together // own
        teams = max(1, warps // team)
        pairs = keys[1].shape[1] // 2 if keys else 0
        before, size = header(family, team, bool(keys)), slot(family, v.element_size(), pairs)
        most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        while teams > 1 and min((most - before) // size, 32) // teams == 0:
            teams -= 1
        self.slots = slots or min((most - before) // size, 32) // teams
        merged = 0 if family == "tiled" else teams * together * (516 * 4 + 12)
        self.shared = before + max(self.slots * teams * size, merged)
        assert self.slots > 0 and self.shared <= most, (self.slots, self.shared, most)
        number = NUMBERS[NAMES[q.dtype]]
        params = rows(q) + rows(v if keys else k) + rows(v)
        params += struct.pack(
            "<11If", batch, heads, kv_heads, group, q_len, kv_len, causal, partitions, -(-kv_len // partitions), number, number, scale
        )
        blocks = f"_blocks{1 if pairs <= 128 else 2}" if keys and family == "partial" else ""
        self.whole = family == "tiled" and partitions == 1 and not out
        size = ("_whole" if self.whole else "") if family == "tiled" else f"_rows{together}{blocks}"
        self.name = f"attention_d512_{'shared_kv_' if keys else ''}{family}_{NAMES[v.dtype]}{size}"
        self.first_kernel, self.finish_kernel = kernels[self.name], kernels["attention_states_finish"]
        self.grid = (partitions, batch * kv_heads, -(-need // together))
        self.threads = 32 * team * teams
        self.rows = batch * heads * q_len
        nan = dict(fill_value=math.nan, device="cuda")
        self.maxima = torch.full((partitions, self.rows), **nan)
        self.denominators = torch.full((partitions, self.rows), **nan)
        self.numerators = torch.full((partitions, self.rows, 512), **nan)
        self.out = torch.full(q.shape, dtype=TYPES[out] if out else q.dtype, **nan)
        self.held = (q, k, v, keys)
        self.states = [t.data_ptr() for t in (self.maxima, self.denominators, self.numerators)]
        if keys:
            weight, angles, position = keys
            params += struct.pack("<2Q2I", weight.storage_offset(), angles.storage_offset() + position * 2 * pairs, pairs, 0)
            self.inputs = [storage(q), storage(v), storage(weight), storage(angles)]
        else:
            self.inputs = [storage(q), storage(k), storage(v)]
        self.params = params
        self.finish_params = struct.pack("<3Q6I", 0, 0, 0, self.rows, partitions, 512, NUMBERS[out or NAMES[q.dtype]], 0, 0)

    def first(self):
        stream = torch.cuda.current_stream().cuda_stream
        outputs = [self.out.data_ptr()] if self.whole else self.states
        driver.launch(self.first_kernel, self.grid, self.threads, self.shared, self.inputs + outputs + [self.params], stream)

    def finish(self):
        if self.whole:
            return
        stream = torch.cuda.current_stream().cuda_stream
        arguments = self.states + [self.out.data_ptr(), self.finish_params]
        driver.launch(self.finish_kernel, (self.rows, 4, 1), 128, 0, arguments, stream)

    def __call__(self):
        self.first()
        self.finish()
        return self.out


def tables(positions, turning=64, theta=1e6):
    """Angles as gem::attention::RotaryTables holds them: pairs in whole vectors of 32."""
    pairs = -(-turning // 32) * 32
    frequencies = torch.zeros(pairs, dtype=torch.float64, device="cuda")
    frequencies[:turning] = theta ** (-2 * torch.arange(turning, device="cuda", dtype=torch.float64) / 512)
    angles = torch.arange(positions, device="cuda", dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1).float().contiguous()


def rebuilt(v, keys):
    """Keys in f64."""
    weight, angles, position = keys
    pairs = angles.shape[1] // 2
    cos, sin = angles[position : position + v.shape[2]].double().split(pairs, 1)
    k = v.double() * weight.double()
    low, high = k[..., :pairs].clone(), k[..., 256 : 256 + pairs].clone()
    k[..., :pairs] = low * cos - high * sin
    k[..., 256 : 256 + pairs] = low * sin + high * cos
    return k


def oracle(q, k, v, scale=1.0, causal=False):
    """Direct softmax in f64."""
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = v.shape[1], v.shape[2]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=torch.float64, device="cuda")
    hidden = torch.arange(kv_len, device="cuda")[None, :] > (kv_len - q_len + torch.arange(q_len, device="cuda"))[:, None]
    for b in range(batch):
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            scores = (q[b, own].double().reshape(-1, dim) @ k[b, h].double().T * scale).view(group, q_len, kv_len)
            if causal:
                scores = scores.masked_fill(hidden, -math.inf)
            out[b, own] = (scores.softmax(-1).view(-1, kv_len) @ v[b, h].double()).view(group, q_len, dim)
    return out
