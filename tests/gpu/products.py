"""How fast products of one to eight rows with the weights of Gemma 4 31B are: cuBLAS by way of PyTorch, beside cuda/projection.cu. Needs
PyTorch and nvcc.

    python3 tests/gpu/products.py [--cubins FOLDER]

Every call is a replay of a CUDA graph over enough weights to leave the L2 cache; TB/s are the bytes of a weight over the time.
"""

import argparse
import struct

import torch

import driver
from attention import TYPES, Kernels
from bench import interleaved

SHAPES = {
    "q, k of a full layer": (18432, 5376),
    "q, k, v of a sliding layer": (16384, 5376),
    "o of a full layer": (5376, 16384),
    "o of a sliding layer": (5376, 8192),
    "gate or up": (21504, 5376),
    "down": (5376, 21504),
    "head": (262144, 5376),
}


class Projection:
    def __init__(self, kernels, name, x, w):
        (m, k), n = x.shape, w.shape[0]
        self.kernel = kernels[f"projection_{name}_rows{m}"]
        self.grid = (-(-n // 16), 1, 1)
        self.y = torch.empty(m, n, device="cuda")
        self.arguments = [x.data_ptr(), w.data_ptr(), self.y.data_ptr(), struct.pack("<4Q4I", 0, k, 0, k, m, n, k, 0)]
        self.held = (x, w)

    def __call__(self):
        driver.launch(self.kernel, self.grid, 128, 0, self.arguments, torch.cuda.current_stream().cuda_stream)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cubins")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    driver.start()
    torch.zeros(1, device="cuda")
    kernels = Kernels(**({"folder": arguments.cubins} if arguments.cubins else {}))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; microseconds: cuBLAS, projection.cu, projection.cu with x in f32")
    for about, (n, k) in SHAPES.items():
        for dtype in ("bf16", "f32"):
            if dtype == "f32" and about == "head":
                continue
            for m in (1, 2, 4, 8):
                x = torch.randn(m, k, device="cuda")
                size = n * k * torch.finfo(TYPES[dtype]).bits // 8
                weights = [torch.randn(n, k, device="cuda").to(TYPES[dtype]) for _ in range(max(1, min(8, 1_200_000_000 // size)))]
                own = x.to(TYPES[dtype])
                calls = {
                    "cublas": [lambda w=w: torch.nn.functional.linear(own, w) for w in weights],
                    "gem": [Projection(kernels, dtype, own, w) for w in weights],
                }
                if dtype != "f32":
                    calls["mixed"] = [Projection(kernels, f"f32_{dtype}", x, w) for w in weights]
                times = interleaved(calls, arguments.rounds)
                row = " ".join(f"{median:8.1f} ({size / median / 1e6:.2f} TB/s)" for median, _, _ in times.values())
                print(f"{about:26} {dtype:4} {m} rows {row}", flush=True)


if __name__ == "__main__":
    main()
