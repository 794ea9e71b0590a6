"""Runs the plans that `cargo test --release -- --ignored plans_for_a_gpu` wrote, on the kernels of metal/ (translated) or cuda/, on an
NVIDIA GPU, and compares with what the harness made of them on the CPU.

    python3 tests/gpu/run_plans.py [--only WORDS] [--sanitize TOOL] [--plant] [--cubins FOLDER]

--sanitize TOOL    runs itself under compute-sanitizer (memcheck, racecheck, synccheck, initcheck)
--plant            takes the barrier after a tile is loaded out of attention_d512.metal: racecheck must find it
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

import driver
import metal_text

ROOT = metal_text.HERE.parent.parent
WHOLE = "// The tile is whole before anyone reads it.\n            threadgroup_barrier(mem_flags::mem_threadgroup);"


def planted(text):
    assert WHOLE in text, "the barrier to take out is not there"
    return text.replace(WHOLE, "")


def values(data, dtype):
    """f32 of raw bytes."""
    if dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view({"f32": np.float32, "f16": np.float16}[dtype]).astype(np.float32)


# A rounding of the type at the size of the largest value, and what f32 sums may differ by.
STEP = {"f32": 0, "f16": 2.0**-10, "bf16": 2.0**-7}


def modules(sources, folder, plant):
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for source in sources:
        stem = source.rsplit(".", 1)[0] + ("-planted" if plant else "")
        cubin = folder / (stem + ".cubin")
        if not cubin.exists():
            code = folder / (stem + ".cu")
            edit = planted if plant and source == "attention_d512.metal" else (lambda text: text)
            code.write_text(metal_text.translate(metal_text.METAL / source, edit))
            metal_text.compile(code, cubin)
        found[source] = driver.Module(cubin.read_bytes())
    return found


def run(case, folder, modules, poison):
    plan = case["plan"]
    held = {
        "input": [driver.Buffer(np.fromfile(folder / f, dtype=np.uint8)) for f in case["inputs"]],
        "scratch": [driver.Buffer(size, poison) for size in plan["scratch"]],
        "output": [driver.Buffer(o["elements"] * {"f32": 4, "f16": 2, "bf16": 2}[o["dtype"]], poison) for o in plan["outputs"]],
    }
    for p in plan["passes"]:
        function = modules[p["source"]].function(p["entry"])
        buffers = [held[kind][index].address for _, kind, index in p["buffers"]]
        driver.launch(function, p["threadgroups"], p["threads"], p["threadgroup_bytes"], buffers + [bytes(p["params"])])
    driver.synchronize()
    worst = 0.0
    for output, got, want in zip(plan["outputs"], held["output"], case["expected"]):
        got = values(got.bytes(), output["dtype"])
        want = values(np.fromfile(folder / want, dtype=np.uint8), output["dtype"])
        # NaN where NaN is wanted, and nowhere else.
        if not np.array_equal(np.isnan(got), np.isnan(want)):
            worst = float("inf")
            continue
        finite = np.isfinite(want)
        scale = max(1.0, float(np.abs(want[finite]).max()))
        error = float(np.abs(got[finite] - want[finite]).max())
        worst = max(worst, error / (scale * (2e-6 + STEP[output["dtype"]])))
    for buffers in held.values():
        for buffer in buffers:
            buffer.free()
    return worst


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=pathlib.Path, default=ROOT / "target/gpu-plans")
    parser.add_argument("--cubins", type=pathlib.Path, default=ROOT / "target/gpu-cubins")
    parser.add_argument("--only", default="")
    parser.add_argument("--sanitize")
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--no-poison", action="store_true", help="leave what is not written uninitialised, for initcheck")
    arguments, _ = parser.parse_known_args()
    if arguments.sanitize:
        at = sys.argv.index("--sanitize")
        rest = sys.argv[1:at] + sys.argv[at + 2 :]
        if arguments.sanitize == "initcheck":
            rest.append("--no-poison")
        tool = ["compute-sanitizer", "--tool", arguments.sanitize, "--error-exitcode", "9", "--print-limit", "3"]
        sys.exit(subprocess.run(tool + [sys.executable, __file__] + rest).returncode)

    driver.start()
    cases = [c for c in json.loads((arguments.plans / "cases.json").read_text()) if all(w in c["name"] for w in arguments.only.split())]
    sources = {p["source"] for c in cases for p in c["plan"]["passes"]}
    began = time.time()
    loaded = modules(sources, arguments.cubins, arguments.plant)
    print(f"{len(sources)} sources ready after {time.time() - began:.0f} s", flush=True)
    wrong, by_route = 0, {}
    for case in cases:
        error = run(case, arguments.plans, loaded, not arguments.no_poison)
        if not error <= 1:
            wrong += 1
            print(f"WRONG by {error:.1f} times what is allowed: {case['name']}")
        kind = case["name"].split(" (")[0]
        worst, count = by_route.get(kind, (0, 0))
        by_route[kind] = (max(worst, error), count + 1)
    for kind, (worst, count) in by_route.items():
        print(f"{count:4} plans, error {worst:.3f} of what is allowed: {kind}")
    print(f"{len(cases)} plans, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
