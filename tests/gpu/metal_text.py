"""Makes CUDA C++ of the text of metal/*.metal, which stays as it is: attributes and address spaces go, functions become device code,
every instantiated kernel gets a __global__ function of its name."""

import pathlib
import re
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
METAL = HERE.parent.parent / "metal"

BUILT_IN = {
    ("threadgroup_position_in_grid", "uint3"): "uint3{blockIdx.x, blockIdx.y, blockIdx.z}",
    ("threadgroup_position_in_grid", "uint"): "blockIdx.x",
    ("threads_per_threadgroup", "uint3"): "uint3{blockDim.x, blockDim.y, blockDim.z}",
    ("threads_per_threadgroup", "uint"): "blockDim.x",
    ("thread_index_in_threadgroup", "uint"): "threadIdx.x",
    ("thread_position_in_grid", "uint"): "blockIdx.x * blockDim.x + threadIdx.x",
    ("thread_index_in_simdgroup", "uint"): "threadIdx.x % 32",
    ("simdgroup_index_in_threadgroup", "uint"): "threadIdx.x / 32",
}


def closing(text, at, pair="()"):
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise ValueError(f"no {pair[1]} for the {pair[0]} at {text[at:at + 60]!r}")


def split(text):
    """At the commas that are in no bracket."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "(<[") - (c in ")>]")
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [p.strip() for p in parts + [text[last:]] if p.strip()]


def preprocessed(path, edit):
    """The text with its own header and macros expanded."""
    text = edit(path.read_text()).replace("#include <metal_stdlib>", "")
    run = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", "-I", str(path.parent), "-"], input=text, capture_output=True, text=True, check=True
    )
    return run.stdout


def without_spaces(text):
    text = re.sub(r"\b(device|threadgroup|thread)\b", "", text)
    return re.sub(r"\bconstant\b", "const", text)


def as_device_code(text):
    """Puts __device__ before every function definition."""
    out, at = [], 0
    for match in re.finditer(r"\b(\w+)\s*\(", text):
        if match.start() < at or match.group(1) in ("if", "for", "while", "switch", "static_assert", "alignas"):
            continue
        end = closing(text, match.end() - 1)
        if not re.match(r"\)\s*(const\s*)?\{", text[end:]):
            continue
        # The declaration begins after the last statement, block, or template header.
        start = max(text.rfind(c, 0, match.start()) for c in ";{}") + 1
        header = re.match(r"\s*template\s*<", text[start:])
        if header:
            start = closing(text, start + header.end() - 1, "<>") + 1
        out += [text[at:start], "\n__device__ ", text[start:match.start()].lstrip()]
        at = match.start()
    return "".join(out + [text[at:]])


class Kernel:
    """Parameters of a kernel: what each is bound to, and its type where the kernel is no template."""

    def __init__(self, parameters):
        self.parameters = []
        for parameter in split(parameters):
            kind, index = re.search(r"\[\[(\w+)(?:\((\d+)\))?\]\]", parameter).groups()
            declared = re.sub(r"\[\[.*\]\]", "", parameter).strip()
            self.parameters.append((kind, index, re.match(r"(.*[\s*&])\w+$", declared).group(1).strip()))

    def wrapper(self, name, call, types):
        arguments, passed = {}, []
        for (kind, index, _), type in zip(self.parameters, types):
            plain = without_spaces(type).strip()
            if kind == "buffer" and plain.endswith("&"):
                arguments[int(index)] = f"const __grid_constant__ {plain[:-1].replace('const', '').strip()} b{index}"
                passed.append(f"b{index}")
            elif kind == "buffer":
                arguments[int(index)] = f"{plain} b{index}"
                passed.append(f"b{index}")
            elif kind == "threadgroup":
                passed.append(f"({plain})memory")
            else:
                passed.append(BUILT_IN[kind, plain])
        signature = ", ".join(arguments[i] for i in sorted(arguments))
        return (
            f'extern "C" __global__ void {name}({signature}) {{\n'
            f"    extern __shared__ __align__(16) uchar memory[];\n    {call}({', '.join(passed)});\n}}\n"
        )


def translate(path, edit=lambda text: text):
    text = preprocessed(path, edit)
    kernels, wrappers = {}, []

    def kernel(match):
        end = closing(text, match.end() - 1)
        kernels[match.group(1)] = Kernel(text[match.end() : end])
        return match.group(0)

    re.sub(r"\[\[kernel\]\]\s+void\s+(\w+)\s*\(", kernel, re.sub(r'template\s*\[\[host_name.*?;', lambda m: " " * len(m.group(0)), text, flags=re.S))

    def instantiation(match):
        name = "".join(re.findall(r'"([^"]*)"', match.group(1)))
        wrappers.append(kernels[match.group(2)].wrapper(name, match.group(2) + match.group(3), split(match.group(4))))
        return ""

    body = re.sub(
        r'template\s*\[\[host_name\((.*?)\)\]\]\s*\[\[kernel\]\]\s*void\s+(\w+)\s*(<[^>]*>)\s*\((.*?)\);', instantiation, text, flags=re.S
    )
    instantiated = {w.split("(")[0] for w in wrappers}
    for name, kernel in kernels.items():
        if not re.search(r"template\s*<[^>]*>\s*\[\[kernel\]\]\s*void\s+" + name + r"\b", body):
            wrappers.append(kernel.wrapper(name, f"msl::{name}", [type for _, _, type in kernel.parameters]))
    body = re.sub(r"\[\[[^\[\]]*\]\]", "", body)
    body = as_device_code(without_spaces(body).replace("inline ", ""))
    wrappers = [re.sub(r"\n    (\w+<)", r"\n    msl::\1", w) for w in wrappers]
    return '#include "msl.cuh"\nnamespace msl {\n' + body + "\n}\nusing namespace msl;\n" + "\n".join(wrappers)


def compile(source, out, nvcc="nvcc", arch="sm_90"):
    subprocess.run(
        [nvcc, "-std=c++17", "-O3", "-lineinfo", f"-arch={arch}", "-cubin", "-diag-suppress=186,177", "-I", str(HERE), "-o", str(out), str(source)],
        check=True,
    )
    return pathlib.Path(out)


if __name__ == "__main__":
    import sys

    print(translate(pathlib.Path(sys.argv[1])))
