"""08 on a GPU: real FP8 products beside their emulation, and the speed of a linear beside bf16.

By hand, on a GPU with FP8 (Ada, Hopper or later): python tests/validate_08.py
Time is of forward and backward of one linear, scaling included: n tokens, n inputs, n outputs.
"""

import statistics
import sys
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
memory = import_module("01_memory")
dp = import_module("02_dp")
fp8 = import_module("08_fp8")


def real_and_emulated(m, k, n, out, device):
    """Relative difference of the device's product and the emulation, both pairs of formats."""
    differences = []
    for left in (fp8.E4M3, fp8.E5M2):
        a = fp8.quantise(torch.randn(m, k, device=device), None, left)
        b = fp8.quantise(torch.randn(n, k, device=device), None, fp8.E4M3)
        emulated = fp8.value(a) @ fp8.value(b).T
        differences.append(dp.relative_error(fp8.scaled_mm(a, b, out), emulated))
    return differences


def seconds(how, n, rounds=20):
    """Median time of forward and backward of a linear."""
    x, dy = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.nn.Parameter(torch.randn(n, n, device="cuda", dtype=torch.bfloat16))
    x.requires_grad_()
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        memory.linear(x, w, how).backward(dy)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
        x.grad = w.grad = None
    return statistics.median(times[3:])


def main():
    if not torch.cuda.is_available() or not fp8.native(torch.empty(1, device="cuda")):
        print("no GPU with FP8 here: nothing was compared")
        return 1
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = 0
    for shape in ((4096, 4096, 4096), (17, 100, 48), (24, 31, 1000)):
        for out, bound in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
            worst = max(real_and_emulated(*shape, out, "cuda"))
            wrong += not worst < bound
            print(f"{shape} {out}: real and emulated differ by {worst:.1e} (bound {bound:.0e})")
    state = fp8.State([], [""], 16, "cuda")
    state.fresh = False
    state.amax.fill_(5.0)
    recipe = fp8.RECIPES["delayed"]
    hows = {"tensor": fp8.FP8(fp8.RECIPES["tensor"]), "delayed": fp8.FP8(recipe, None, state, 0)}
    for n in (4096, 8192):
        plain = seconds(memory.Plain, n)
        print(f"{n}: bf16 {6 * n**3 / plain / 1e12:.0f} TFLOP/s", end="")
        for name, how in hows.items():
            print(f"   {name} {plain / seconds(how, n):.2f} times as fast", end="")
        print()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
