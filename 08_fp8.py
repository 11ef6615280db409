"""
08 · Mixed precision and FP8

Idea      A product of two matrices takes half the bytes, and on recent hardware half the time, in
          numbers of half the bits, if the sums stay wide. 8 bits are 3 for the precision and a
          range so short that no tensor fits into it as it is: it is divided by a scale first, and
          how many numbers share a scale is what recipes differ in.
Picture   x ─ amax ─ scale = amax / 448 ─ x / scale ─ round to FP8 ─┐
          w ─ the same ─────────────────────────────────────────────┴─ product, sums in fp32
                                                                       · scale of x · scale of w
          recipe    one scale for           from              e4m3 for     e5m2 for
          tensor    a tensor                its own amax      x w          dy
          delayed   a tensor                the last 16 steps x w          dy
          block     1 x 128 of x and dy,    its own amax      x w dy       nothing
                    128 x 128 of w
          mx        1 x 32, a power of two  its own amax      x w dy       nothing
          A block is cut along the sum. Embedding, norms, router and head stay as they are, and so
          do weights, their gradients and what is kept for backward: this replaces three products.
Cost      held: nothing more, but 3·16 numbers a linear for delayed. Sent: tensor 3 times 8 bytes a
          linear and micro-batch over tp; delayed 12 bytes a linear once a step; block, mx nothing.
          FP8 on the wire: 1 + 1/128 bytes an element where bf16 has 2. FP8 moments: the same.
Pays      where FP8 products are twice as fast as bf16's and matrices are large enough (thousands)
          to hide that x, w and dy are read once more for their amax. On a CPU they are emulated.
Forget    the largest amax over the ranks of tp. Each rank scales its slice of a matrix by the
          slice's own amax, nothing crashes, and what is trained depends on the layout: gradients
          are not those of one device with the same recipe (relative error 0.130 in this demo).
Run       torchrun --nproc-per-node 2 08_fp8.py      (or python 08_fp8.py)
          python 08_fp8.py --train                   (every recipe on text, three seeds: minutes)
Copy      E4M3, E5M2, at_least_fp32, cast, TINY, Recipe, RECIPES, Quantised, tiles, scale_of,
          quantise, value: any matrix in FP8. matmul, native, scaled_mm, KINDS, FP8,
          largest_magnitude, largest_of_all: the three products of a linear. From 01: Plain,
          KeepInput, now, LinearFunction, linear. Imports: dataclass, NamedTuple.
Read      Mixed precision (1710.03740), FP8 formats (2209.05433), FP8-LM (2310.18313), DeepSeek-V3
          (2412.19437) section 3.3, MX formats (2310.10537), 8-bit optimizers (2110.02861)

Letters as in 01. Blackwell's FP4 is the same idea with blocks of 16, and is not here. Products are
real FP8 for one scale a tensor on a GPU that has them, and exact emulation everywhere else.
"""

import argparse
import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

memory = import_module("01_memory")  # for the demo
dp = import_module("02_dp")
zero = import_module("03_zero")
tp = import_module("04_tp_sp")
ep = import_module("06_ep")


# --- 1. Formats ---------------------------------------------------------------------------------
#
# sign, exponent, mantissa. A format has so few values that we can look at all of them.

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "e5m2": E5M2, "e4m3": E4M3, "e8m0": E8M0}


def at_least_fp32(dtype):
    """The dtype for sums of `dtype`: fp32, or float64 if that is what the run is in."""
    return torch.promote_types(dtype, torch.float32)


def every_value(dtype):
    """What each pattern of bits means, in order: (2^bits,) float64."""
    patterns = torch.arange(2 ** (8 * dtype.itemsize))
    return patterns.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype).double()


def cast(x, dtype):
    """x to the nearest value of an FP8 format: beyond its largest that, and NaN if not finite.

    torch's own cast to e4m3, which has no infinity, makes 448 of it: an overflow that nobody sees.
    """
    top = torch.finfo(dtype).max
    return (x.clamp(-top, top) + (x - x)).to(dtype)  # x - x is 0, but for inf and NaN it is NaN


# --- 2. Mixed precision -------------------------------------------------------------------------
#
# 16 bits came first, and stand on three supports. FP8 needs two of them as well: the fp32 master
# copy, which is in 01, and sums in at least fp32, everywhere in these chapters. The third, a factor
# for the loss, is for fp16 alone, whose smallest number is 6e-8: a loss times 65,536 has gradients
# that much larger.


class LossScale:
    """The factor for the loss of fp16, as large as it can be: halved after an overflow, doubled
    after `patience` steps without one. All of it tensors: no step waits for a value.

        (loss * scale.factor).backward();  sum the gradients;  skip = scale.bad(gradients, group)
        optimizer.step(lr, skip) with gradients / scale.factor;  scale.update(skip)
    """

    def __init__(self, device, start=2.0**16, patience=2000):
        self.factor = torch.tensor(start, device=device)
        self.good, self.patience = torch.zeros((), device=device), patience

    def bad(self, gradients, group=None):
        """1 if a gradient of any rank is not finite, or 0: all ranks agree to skip the step."""
        bad = torch.stack([1 - g.isfinite().all().float() for g in gradients]).amax()
        if group:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
        return bad

    def update(self, bad):
        self.good.copy_(torch.where(bad > 0, 0, self.good + 1))
        grow = self.good >= self.patience
        self.factor.mul_(torch.where(bad > 0, 0.5, torch.where(grow, 2.0, 1.0)))
        self.good.mul_(~grow)


# --- 3. One quantiser ---------------------------------------------------------------------------

TINY = 2.0**-126  # the smallest scale: an amax of zero, or far below, is no special case


@dataclass(frozen=True)
class Recipe:
    tile: tuple | None  # the numbers of x and dy that share a scale, (rows, along the sum)
    block: tuple | None  # those of w; None: all of the tensor
    gradient: torch.dtype  # of dy; x and w are e4m3
    rule: str = "amax"  # a block's largest becomes the format's; or "power of two"
    # ("one": no scale; "none": no FP8)
    history: int = 0  # steps whose amax a scale is made of; 0: the tensor's own


# Gradients spread over more powers of two than e4m3 has. With one scale for all, e5m2 gives up
# precision for range; a block of 128 spreads less, so there e4m3 is precise and wide enough.
RECIPES = {
    "tensor": Recipe(None, None, E5M2),
    "delayed": Recipe(None, None, E5M2, history=16),
    "block": Recipe((1, 128), (128, 128), E4M3),
    "mx": Recipe((1, 32), (1, 32), E4M3, "power of two"),
    "naive": Recipe(None, None, E4M3, "one"),  # to see what scales are for
}


class Quantised(NamedTuple):
    codes: torch.Tensor  # (m, k) in an FP8 format
    scale: torch.Tensor  # (m/r, k/c) fp32
    block: tuple  # (r, c)


def tiles(x, block):
    """(m, k) -> (m/r, r, k/c, c), padded with zeros, which change no amax and no sum."""
    (m, k), (r, c) = x.shape, block
    rows, columns = -(-m // r), -(-k // c)
    if (m, k) != (rows * r, columns * c):
        x = F.pad(x, (0, columns * c - k, 0, rows * r - m))
    return x.unflatten(1, (columns, c)).unflatten(0, (rows, r))


def scale_of(amax, dtype, rule):
    """What to divide a block by: its amax comes to the largest number of the format, not beyond."""
    scale = (amax.float() / torch.finfo(dtype).max).clamp(min=TINY)
    if rule == "one":
        return torch.ones_like(scale)
    if rule == "power of two":  # up to the next: add to the bits of the mantissa, drop them
        scale = (scale.view(torch.int32) + 0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)
    return scale


def quantise(x, block=None, dtype=E4M3, rule="amax", amax=None, rounding=cast):
    """x (m, k) in codes, a scale for each block; of an amax from elsewhere, if there is one.

    A block in which something is not finite is NaN as a whole: its scale is no number.
    """
    block = block or [max(n, 1) for n in x.shape]
    t = tiles(x, block).to(at_least_fp32(x.dtype))
    scale = scale_of(t.abs().amax((1, 3)) if amax is None else amax.view(1, 1), dtype, rule)
    codes = rounding(t / scale[:, None, :, None], dtype).flatten(0, 1).flatten(1)
    return Quantised(codes[: x.shape[0], : x.shape[1]], scale, block)


def value(q, dtype=torch.float32):
    """What the codes stand for: (m, k)."""
    t = tiles(q.codes.to(dtype), q.block) * q.scale[:, None, :, None]
    return t.flatten(0, 1).flatten(1)[: q.codes.shape[0], : q.codes.shape[1]]


# --- 4. The three products ----------------------------------------------------------------------
#
# All are a bᵀ with the sum along the last dimension of both, and are cut in blocks along it:
#   forward      y  = x wᵀ        over in
#   input grad   dx = dy (wᵀ)ᵀ    over out
#   weight grad  dw = dyᵀ (xᵀ)ᵀ   over the tokens
# So x and dy are quantised twice, in their two directions. What is kept in between is x itself.


def matmul(a, b, dtype):
    """a bᵀ (m, k), (n, k) -> (m, n), the sum in at least fp32."""
    if dtype != torch.float64 and a.scale.numel() == b.scale.numel() == 1 and native(a.codes):
        return scaled_mm(a, b, dtype)
    wide = at_least_fp32(dtype)
    return (value(a, wide) @ value(b, wide).T).to(dtype)


def native(x):
    """Does this device have FP8 products? Ada and Hopper do, and what came after."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def scaled_mm(a, b, dtype):
    """The same by the hardware, for one scale a tensor. It wants multiples of 16: zeros add none.

    use_fast_accum would sum in fewer bits than fp32; no product here allows it.
    """
    (m, k), n = a.codes.shape, len(b.codes)

    def padded(codes, rows):
        room = codes.new_zeros(rows, k + -k % 16, dtype=torch.uint8)
        room[: len(codes), :k] = codes.view(torch.uint8)
        return room.view(codes.dtype)

    left, right = padded(a.codes, m + -m % 16), padded(b.codes, n + -n % 16)
    scales = a.scale.view(()), b.scale.view(())
    y = torch._scaled_mm(left, right.T, *scales, out_dtype=dtype, use_fast_accum=False)
    return y[:m, :n]


class FP8:
    """How (01's seam): the three products of one linear in FP8.

    group       the ranks over which matrices are cut (04): a matrix has one scale, whoever holds it
    state, row  for delayed scaling, see section 5: where the amax of this linear are. They are
                noted in backward: an evaluation has none, and recomputation repeats the forward
                pass only
    """

    def __init__(self, recipe, group=None, state=None, row=None):
        self.recipe, self.group, self.state, self.row = recipe, group, state, row

    def forward(self, x, w):
        return self.product(False, x=x.flatten(0, -2), w=w).unflatten(0, x.shape[:-1])

    def input_grad(self, dy, w):
        return self.product(True, dy=dy.flatten(0, -2), w=w.T).unflatten(0, dy.shape[:-1])

    def weight_grad(self, dy, x):
        return self.product(True, dy=dy.flatten(0, -2).T, x=x.flatten(0, -2).T)

    def product(self, backward, **operands):
        """a bᵀ of two operands, given by their kinds."""
        recipe, (a, b) = self.recipe, operands.values()
        amaxes = self.amaxes(operands, backward)
        if recipe.rule == "none" or (self.state and self.state.fresh):
            wide = at_least_fp32(a.dtype)
            return (a.to(wide) @ b.to(wide).T).to(a.dtype)
        quantised = []
        for (kind, x), amax in zip(operands.items(), amaxes):
            block = recipe.block if kind == "w" else recipe.tile
            dtype = recipe.gradient if kind == "dy" else E4M3
            quantised.append(quantise(x, block, dtype, recipe.rule, amax))
        return matmul(*quantised, a.dtype)

    def amaxes(self, operands, backward):
        """What the scale of a whole tensor is made of; blocks have each their own."""
        if self.recipe.tile or self.recipe.rule != "amax":
            return None, None
        amax = torch.stack([largest_magnitude(x) for x in operands.values()])  # (2,)
        if self.state:
            return [self.delayed(KINDS.index(k), x, backward) for k, x in zip(operands, amax)]
        amax = largest_of_all(amax, self.group)  # forget
        return amax

    def delayed(self, kind, own, note):
        past, now = self.state.amax[self.row, kind].amax(), self.state.now[self.row, kind]
        if note:
            now.copy_(torch.maximum(now, own))
        return torch.where(past > 0, past, own)  # own: of who has not run before


def largest_magnitude(x):
    """amax in fp32; of nothing, as of an expert without tokens, zero."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def largest_of_all(amax, group):
    """The largest of each number over the ranks, in place."""
    if group:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


class GroupedFP8:
    """06's Grouped in FP8: each expert's rows meet its matrix, with scales of their own."""

    def __init__(self, fp8, sizes, offsets):
        self.fp8, self.sizes = fp8, sizes

    def forward(self, x, w):
        return torch.cat([self.fp8.forward(*pair) for pair in zip(x.split(self.sizes), w)])

    def input_grad(self, dy, w):
        return torch.cat([self.fp8.input_grad(*pair) for pair in zip(dy.split(self.sizes), w)])

    def weight_grad(self, dy, x):
        pairs = zip(dy.split(self.sizes), x.split(self.sizes))
        return torch.stack([self.fp8.weight_grad(*pair) for pair in pairs])


# --- 5. Into the model --------------------------------------------------------------------------

# Attention's own two products, of q and k and with v, stay in the model's dtype.
PRODUCTS = [  # every module with products, by its full name, and: in FP8?
    (r"layers\.\d+\.self_attn\.[qkvo]_proj", True),
    (r"layers\.\d+\.mlp\.(shared_expert\.)?(gate|up|down)_proj", True),
    (r"layers\.\d+\.mlp\.experts", True),
    (r"layers\.\d+\.mlp\.router", False),  # chooses among scores that lie close together
    (r"lm_head", False),  # few of the FLOPs, and its errors go straight into the loss
]
KINDS = "x", "w", "dy"


def in_fp8(name, layers):
    """Does the table say so? An unknown name, or a layer that no stage has, is an error."""
    rows = [yes for pattern, yes in PRODUCTS if re.fullmatch(pattern, name)]
    layer = re.match(r"layers\.(\d+)\.", name)
    if len(rows) != 1 or (layer and int(layer[1]) >= layers):
        raise ValueError(f"{name} is no module with products of a model of {layers} layers")
    return rows[0]


class State:
    """What `use` did, and delayed scaling's memory: amax (linears, 3, steps), the newest first.

    names    all modules in FP8
    delayed  those with a row in amax
    """

    def __init__(self, names, delayed, steps, device):
        self.names, self.delayed = names, delayed
        self.amax = torch.zeros(len(delayed), len(KINDS), steps, device=device)
        self.now = torch.zeros(len(delayed), len(KINDS), device=device)  # of this step, so far
        # The first step has no past. It computes as without FP8 and takes notes: by its own amax
        # each micro-batch and rank would round otherwise, and the layout be seen in the weights.
        self.fresh = True

    def tensors(self):
        """{name: tensor} to save and to fill; whole on every rank, in any layout the same."""
        rows = zip(self.delayed, self.amax)
        return {f"{name}.{kind}": row[k] for name, row in rows for k, kind in enumerate(KINDS)}

    @torch.no_grad()
    def end_step(self, *groups, skip=0):
        """Once a step, after all backward passes: this step's amax enters, the oldest leaves.

        groups: those that share a stage's layers (dp, cp, tp, or one for all), not the pipeline,
        whose stages have other linears. Who did not run, or saw an infinity, keeps what it has; so
        do all if `skip`, a number or a tensor, is 1.
        """
        if not self.delayed:
            return
        now = self.now.nan_to_num_(nan=math.inf, posinf=math.inf)
        for group in groups:
            largest_of_all(now, group)
        ran = (now * (1 - skip) > 0) & now.isfinite()
        moved = torch.cat((now[..., None], self.amax[..., :-1]), -1)
        self.amax.copy_(torch.where(ran[..., None], moved, self.amax))
        self.now.zero_()
        self.fresh = False

    def filled(self):
        """To be called when a checkpoint has filled tensors(): what follows is no first step."""
        self.fresh = False


def use(models, recipe, keep=(), group=None):
    """Let the linears of a model, or of a list of stages of one, compute in FP8; returns a State.

    keep   names of modules to leave out, beside those that PRODUCTS leaves out
    group  the ranks of tp, for the scales of "tensor"

    Before or after the cuts of 04 and recomputation: these change what a linear keeps, this how it
    computes. Quantised weights live for one product: ZeRO may gather others for the next. Experts
    have a scale each; delayed scaling computes them with their own amax, which needs no memory.
    """
    models = [models] if isinstance(models, nn.Module) else models
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    layers = models[0].config.layers
    for name in keep:
        in_fp8(name, layers)  # raises if there is no such module
    found = {
        name: part
        for model in models
        for name, part in model.named_modules()
        if hasattr(part, "how") and in_fp8(name, layers) and name not in keep
    }
    experts = {name for name, part in found.items() if not isinstance(part, memory.Linear)}
    delayed = [name for name in found if recipe.history and name not in experts]
    state = State([*found], delayed, recipe.history, next(models[0].parameters()).device)
    for name, part in found.items():
        if name in experts:
            part.how = partial(GroupedFP8, FP8(replace(recipe, history=0)))
        else:
            part.how = FP8(recipe, group)
        if name in delayed:
            part.how = FP8(recipe, None, state, delayed.index(name))
    return state


# --- 6. On the wire -----------------------------------------------------------------------------
#
# 03's all-gather of weights and 06's dispatch of rows take wire = (encode, decode). What travels is
# bytes, as gloo knows no FP8: the codes of a row, then a power of two for each BLOCK of them.

BLOCK = 128


def encode(x, rounding=cast):
    """(…, n) -> (…, n + ceil(n/128)) uint8."""
    q = quantise(x.reshape(-1, x.shape[-1]), (1, BLOCK), E4M3, "power of two", rounding=rounding)
    both = torch.cat((q.codes.view(torch.uint8), q.scale.to(E8M0).view(torch.uint8)), 1)
    return both.unflatten(0, x.shape[:-1]) if x.dim() > 1 else both[0]


def decode(packed, dtype=torch.float32):
    """(…, n + ceil(n/128)) uint8 -> (…, n)."""
    n = packed.shape[-1] - -(-packed.shape[-1] // (BLOCK + 1))
    codes, scale = packed.reshape(-1, packed.shape[-1]).split((n, packed.shape[-1] - n), 1)
    scale = scale.contiguous().view(E8M0).to(at_least_fp32(dtype))
    x = value(Quantised(codes.contiguous().view(E4M3), scale, (1, BLOCK)), scale.dtype).to(dtype)
    return x.unflatten(0, packed.shape[:-1]) if packed.dim() > 1 else x[0]


def wire(dtype):
    """For models of this dtype."""
    return encode, partial(decode, dtype=dtype)


# --- 7. Optimizer states ------------------------------------------------------------------------
#
# A moment moves by a few percent a step, less than half the spacing of e4m3: rounded to the nearest
# it would stand still. Rounded up or down at random, more often to where it is nearer, it moves on
# average as it should. And v, a square, has twice the range of the gradient, more than FP8; its
# root has not. (Rounded so, v is about 5 % too large: the variance of its root adds to it.) A root
# is never rounded to zero: the step is divided by it.


def noise(n, step, salt, device):
    """n numbers in [0, 1), a function of step (a tensor) and salt: a resumed run has the same."""
    x = torch.arange(1, n + 1, device=device) * 6364136223846793005 + step.long() * 1442695040888963
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # splitmix64
        x = (x ^ (x >> shift) ^ salt) * factor
    return ((x ^ (x >> 31)) & 0xFFFFFF).float() / 2**24


def at_random(x, dtype, noise, smallest=0.0):
    """x to a neighbour of it in dtype, so that the mean over noise in [0, 1) is x."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x).exponent - 1  # 2^exponent <= |x|
    exponent = exponent.clamp(min=round(math.log2(info.smallest_normal)))
    spacing = torch.ldexp(torch.full_like(x, info.eps), exponent)
    return ((x / spacing + noise).floor() * spacing).clamp(min=smallest or info.min).to(dtype)


class Moments:
    """The optimizer's state of one parameter: FP8 codes with their scales, as `encode` makes them.

    To the outside it is what torch's AdamW has, step, exp_avg and exp_avg_sq, so checkpoints (03)
    go from one to the other. items() lends a moment as a plain tensor, and takes back what was
    written into it when the next is asked for; what was only read stays as it was.
    """

    def __init__(self, p):
        zeros = torch.zeros(p.numel(), dtype=at_least_fp32(p.dtype), device=p.device)
        self.dtype, self.step = zeros.dtype, torch.zeros((), device=p.device)
        self.first, self.root = encode(zeros), encode(zeros)

    def values(self):
        """What is held."""
        return self.step, self.first, self.root

    def items(self):
        yield "step", self.step
        m = decode(self.first, self.dtype)
        yield "exp_avg", m
        self.first.copy_(encode(m))
        v = decode(self.root, self.dtype).square()
        yield "exp_avg_sq", v
        self.root.copy_(encode(v.sqrt()))


class FP8AdamW(torch.optim.Optimizer):
    """AdamW with both moments in FP8, in blocks of 128. Parameters may be fp32 or bf16.

    Parameters below fp32 are rounded at random: a step is less than bf16 can add to a weight.
    found_inf is a tensor or None, as in torch's fused optimizers: where it is 1, nothing changes.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.found_inf = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.update(p, **group)

    def update(self, p, lr, betas, eps, weight_decay, **_):
        if p not in self.state:
            self.state[p] = Moments(p)
        s, (b1, b2) = self.state[p], betas
        step, g = s.step + 1, p.grad.flatten().to(s.dtype)
        m = decode(s.first, s.dtype).lerp_(g, 1 - b1)
        v = decode(s.root, s.dtype).square_().mul_(b2).addcmul_(g, g, value=1 - b2)
        w = p.flatten().to(s.dtype) * (1 - lr * weight_decay)
        w -= lr / (1 - b1**step) * m / ((v / (1 - b2**step)).sqrt_() + eps)
        # The same for every parameter: ranks that hold the same one may have others beside it.
        dice = [noise(p.numel(), step, salt, p.device) for salt in range(3)]
        if p.dtype != s.dtype:
            w = at_random(w, p.dtype, dice[2])
        new = encode_at_random(m, dice[0]), encode_at_random(v.sqrt_(), dice[1], 2.0**-9)
        for old, new in zip((p, s.step, s.first, s.root), (w.view_as(p), step, *new)):
            old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0, old, new))


def encode_at_random(x, noise, smallest=0.0):
    def rounding(t, dtype):
        n = F.pad(noise, (0, t.numel() - len(noise))).view_as(t)
        return at_random(t, dtype, n, smallest)

    return encode(x, rounding)


# --- 8. Costs -----------------------------------------------------------------------------------

WIDE, HALF = torch.float32, torch.bfloat16
STATES = {  # what others hold: master, summed gradients, weights, gradients, both moments
    "bf16, fp32 gradient sums": (WIDE, WIDE, HALF, HALF, WIDE, WIDE),
    "bf16": (WIDE, None, HALF, HALF, WIDE, WIDE),
    "Transformer Engine": (None, None, WIDE, WIDE, WIDE, WIDE),
    "FP8-LM": (torch.float16, torch.float16, E4M3, E4M3, E4M3, torch.float16),
    "DeepSeek-V3": (WIDE, WIDE, E4M3, HALF, HALF, HALF),
    "nanotron FP8": (HALF, WIDE, E4M3, E4M3, E4M3, E4M3),
    "here, --fp8-optimizer": (WIDE, WIDE, HALF, None, E4M3, E4M3),
}


def packed(n):
    """Bytes of a row of n numbers as `encode` makes it."""
    return n + -(-n // BLOCK)


def held(sizes):
    """Bytes of FP8AdamW's moments, for parameters of these sizes."""
    return sum(2 * packed(n) for n in sizes)


def sent(recipe, linears, n, m=1, forwards=1):
    """{collective: (calls, bytes)} a rank sends for scales in a step of m micro-batches.

    n: the ranks of tp for "tensor" (forwards is 2 under full recomputation), those of the group of
    `end_step` for "delayed".
    """
    if n == 1 or recipe.tile or recipe.rule == "one":
        return {}
    calls, size = m * linears * (forwards + 2), 2 * 4
    if recipe.history:
        calls, size = 1, linears * len(KINDS) * 4
    return {"all_reduce": (calls, Fraction(2 * (n - 1) * calls * size, n))}


def bytes_per_parameter(dtypes):
    """By formula, without and with the scales of what is FP8."""
    dtypes = [dtype for dtype in dtypes if dtype]
    plain = sum(dtype.itemsize for dtype in dtypes)
    return plain, plain + Fraction(dtypes.count(E4M3), BLOCK)


def allocated(dtypes, N):
    """The same by allocating N parameters, N a multiple of 128."""
    with memory.Live() as live:
        keep = []
        for dtype in filter(None, dtypes):
            zeros = torch.zeros(N, dtype=WIDE if dtype == E4M3 else dtype)
            keep.append(encode(zeros) if dtype == E4M3 else zeros)
            del zeros
        return live.total / N


# --- 9. Check and measure -----------------------------------------------------------------------

NONE = Recipe(None, None, E4M3, "none")  # operands as they are, sums in fp32: a GPU's bf16
CONFIG = memory.Config(vocab=256, dim=256, layers=2, heads=4, kv_heads=4, ffn=512)


def format_rows():
    rows = []
    for name, dtype in FORMATS.items():
        v = every_value(dtype)
        finite, positive = v[v.isfinite()], v[v.isfinite() & (v > 0)]
        between = ((v > 1) & (v < 2)).sum().item()
        special = [int(which.sum()) for which in (v.isinf(), v.isnan(), v == 0)]
        rows.append([name, f"{finite.max():.4g}", f"{positive.min():.3g}", between, *special])
    return rows


def small_steps(master, steps=100, size=1e-3):
    """A bf16 weight of 1 after steps of -size, with a master copy of this dtype."""
    w = torch.ones((), dtype=master)
    for _ in range(steps):
        w -= size
    return w.bfloat16().item()


def lost_to_fp16(factor, tokens=2**20):
    """The share of gradients that are zero in fp16, for a batch of so many tokens."""
    c = memory.Config(vocab=256, dim=64, layers=1, heads=2, kv_heads=2, ffn=128)
    model = memory.build(c, dtype=torch.float16)
    x = torch.randint(256, (2, 33), generator=generator(0))
    (model.loss(model(x[:, :-1]), x[:, 1:]) * (factor / tokens)).backward()
    grads = torch.cat([p.grad.flatten() for b in model.layers.values() for p in b.parameters()])
    return (grads == 0).float().mean().item()


def error_of_sum(dtype, addends=512):
    """The relative error of so many micro-batches' bf16 gradients, added up in dtype."""
    g = (torch.randn(addends, 1000, generator=generator(0)) + 1).bfloat16()
    total = torch.zeros(1000, dtype=dtype)
    for addend in g:
        total += addend
    return dp.relative_error(total, g.double().sum(0))


def taken_away():
    return [
        ["fp32 master copy", "weight 1 after 100 steps of -0.001",
         f"{small_steps(WIDE):.3f}", f"{small_steps(HALF):.3f}"],
        ["loss scaling", "fp16 gradients that are zero, 1 M tokens",
         f"{lost_to_fp16(2.0**16):.0%}", f"{lost_to_fp16(1.0):.0%}"],
        ["fp32 sums", "error of 512 gradients added up",
         f"{error_of_sum(WIDE):.0e}", f"{error_of_sum(HALF):.1g}"],
    ]  # fmt: skip


def generator(seed):
    return torch.Generator().manual_seed(seed)


def outliers(m, k, seed, spread=0.0):
    """Normal; rows of sizes 2^(spread · normal); one number in 10,000 is 10,000 times larger."""
    random = generator(seed)
    x = torch.randn(m, k, generator=random)
    x *= torch.exp2(spread * torch.randn(m, 1, generator=random))
    return x * torch.where(torch.rand(m, k, generator=random) < 1e-4, 1e4, 1.0)


def error_by_row(ours, right):
    """The mean over rows of the relative error: a token counts, however small its numbers."""
    return ((ours.double() - right).norm(dim=1) / right.norm(dim=1)).mean().item()


def errors(recipe, m=512, k=512, n=512):
    """Of forward, input grad and weight grad, on data with outliers."""
    how = FP8(recipe)
    x, w = outliers(m, k, 1), 0.02 * torch.randn(n, k, generator=generator(2))
    dy = outliers(m, n, 3, spread=4.0) * 1e-5
    (X, W, DY), P = (t.double() for t in (x, w, dy)), memory.Plain
    pairs = [
        (how.forward(x, w), P.forward(X, W)),
        (how.input_grad(dy, w), P.input_grad(DY, W)),
        (how.weight_grad(dy, x), P.weight_grad(DY, X)),
    ]
    return [error_by_row(*pair) for pair in pairs]


ERRORS = [  # recipe, format of dy
    ("tensor", E5M2), ("tensor", E4M3), ("block", E5M2), ("block", E4M3), ("mx", E4M3),
    ("naive", E4M3),
]  # fmt: skip


def error_rows():
    """Rows, and whether blocks are better than one scale a tensor, with the format each needs."""
    rows = {}
    for name, dtype in ERRORS:
        rows[name, dtype] = errors(replace(RECIPES[name], gradient=dtype))
    better = [
        all(block < tensor for block, tensor in zip(rows["block", E4M3], rows["tensor", E5M2])),
        rows["tensor", E5M2][1] < rows["tensor", E4M3][1],
        rows["block", E4M3][1] < rows["block", E5M2][1],
    ]
    shown = [
        [name, "e5m2" if dtype is E5M2 else "e4m3", *(f"{e:.3f}" for e in row)]
        for (name, dtype), row in rows.items()
    ]
    return shown, [] if all(better) else ["blocks are not better than tensors, or e5m2 is"]


def two_steps(recipe, groups, batches):
    """Two steps of a model cut over tp, or on one device: the second's whole gradients and wire.

    Scales have a group of their own, the same ranks: so the meter tells their bytes from 04's.
    """
    model = memory.build(CONFIG, dtype=torch.float64, device=dp.device())
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if groups:
        tp.cut(model, groups["tp"])
    state = use(model, recipe, group=groups and groups["scales"])
    for tokens, labels in batches:
        model.zero_grad()
        with dp.Wire() as wire:
            (model.loss(model(tokens), labels) / labels.numel()).backward()
            if groups:
                tp.sum_partial_gradients(model, groups["tp"])
            state.end_step(*[groups["scales"]] if groups else [])
    grads = dp.gradients(model)
    if groups:
        for name, grad in grads.items():
            args = shapes[name], groups["tp"], CONFIG.kv_heads
            grads[name] = tp.whole_tensor(name, grad, *args)
    return grads, state, wire


def parity_rows(groups):
    """Each recipe cut over tp and on one device, in float64, where both round the same numbers."""
    n, here, rows, failures = groups["tp"].size(), dp.device(), [], []
    sample = dp.Samples(dp.open_tokens(), 32, seed=0)
    batches = [dp.micro_batches(sample, range(i, i + 2), 2, here)[0] for i in (0, 2)]
    exact, *_ = two_steps(NONE, None, batches)
    for name in ("tensor", "delayed", "block", "mx"):
        alone, remembered, _ = two_steps(name, None, batches)
        ours, state, wire = two_steps(name, groups, batches)
        error, where = dp.worst_error(ours, alone)
        if not error < 1e-11:
            failures.append(f"{where} gradient relative error {error:.3g} ({name}, tp {n})")
        if name == "delayed":
            off, slot = dp.worst_error(state.tensors(), remembered.tensors())
            failures += [f"{slot}: amax relative error {off:.3g}"] * (not off < 1e-6)
        key = "scales", "all_reduce"
        measured = wire.calls[key], wire.bytes[key]
        formula = sent(RECIPES[name], len(state.names), n).get("all_reduce", (0, 0))
        if measured != formula:
            failures.append(f"{name}: sent {measured} calls and bytes, by formula {formula}")
        cells = [cell for pair in zip(measured, formula) for cell in pair]
        rows.append([name, f"{error:.0e}", f"{dp.worst_error(ours, exact)[0]:.3f}", *cells])
    dp.log(f"\ngradients of tp {n}: the worst of {len(exact)}, against one device and without FP8")
    dp.table(["", "one device", "no FP8", "calls", "formula", "sent", "formula"], rows)
    return failures


def wire_rows(group, rows=64, D=1000):
    """An all-gather (03) and a dispatch (06) in bf16 and as FP8: bytes, and the error it brings."""
    n, here, table, failures = group.size(), dp.device(), [], []
    x = torch.randn(n * rows, D, generator=generator(group.rank())).bfloat16()
    x, even = x.to(here), [rows] * n

    def all_gather(wire):
        whole = torch.empty(n * x.numel(), dtype=x.dtype, device=here)
        zero.all_gather(whole, x.flatten(), group, wire)()
        return whole

    def dispatch(wire):
        return ep.AllToAll.apply(x, even, even, group, wire)

    costs = {all_gather: ("all_gather", (n - 1) * packed(x.numel()))}
    costs[dispatch] = ("all_to_all", (n - 1) * rows * packed(D))
    for call, (name, formula) in costs.items():
        with dp.Wire() as plain:
            right = call(None)
        with dp.Wire() as small:
            ours = call(wire(x.dtype))
        key, error = (group.group_desc, name), dp.relative_error(ours, right)
        table.append([call.__name__, plain.bytes[key], small.bytes[key], formula, f"{error:.3f}"])
        if small.bytes[key] != formula or not error < 2**-4:
            failures.append(f"{call.__name__} in FP8: {small.bytes[key]} bytes, error {error:.3g}")
    return table, failures


def state_rows(N=2**20):
    rows, failures = [], []
    for name, dtypes in STATES.items():
        plain, scaled = bytes_per_parameter(dtypes)
        size = allocated(dtypes, N)
        rows.append([name, plain, f"{float(scaled):.3f}", f"{size:.3f}"])
        failures += [f"{name} holds {size} bytes, by formula {scaled}"] * (size != scaled)
    return rows, failures


def compare_optimizers(steps=5):
    """The same steps with torch's AdamW and with moments in FP8; -> failures."""
    batch, moved, held_bytes = torch.randint(256, (2, 33), generator=generator(0)), [], []
    for make in (zero.adamw, fp8_adamw):
        model = memory.build(CONFIG)
        start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        matrices = [p for p in model.parameters() if p.dim() > 1]
        optimizer = make(matrices, [p for p in model.parameters() if p.dim() < 2])
        for _ in range(steps):
            model.zero_grad()
            (model.loss(model(batch[:, :-1]), batch[:, 1:]) / 64).backward()
            optimizer.step()
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
        held_bytes.append(
            zero.bytes_of([t for s in optimizer.state.values() for t in s.values() if t.dim()])
        )
    formula = held(p.numel() for p in model.parameters())
    error = dp.relative_error(moved[1], moved[0])
    dp.log(f"\nmoments: AdamW {held_bytes[0]:,} bytes, FP8AdamW {held_bytes[1]:,} ({formula:,})")
    dp.log(f"what {steps} steps moved differs by {error:.1%}")
    return [] if held_bytes[1] == formula and error < 0.2 else [f"FP8AdamW: error {error:.3g}"]


def train(recipe, steps, seed=0, make=zero.adamw, lr=5e-4, batch=4, T=64, c=CONFIG):
    """Train on text in bf16 with this recipe; -> losses (steps,)."""
    model = memory.build(c, seed, dtype=torch.bfloat16)
    state, model.lm_head.how = use(model, recipe), FP8(NONE)
    groups = {name: (None, ()) for name, _ in model.named_parameters()}
    units = zero.llama_units(model)
    optimizer = zero.Optimizer(model, units, groups, 0, make, memory.on_finished)
    sample, losses = dp.Samples(dp.open_tokens(), T, seed), []
    for step in range(steps):
        numbers = dp.my_samples(step, batch, 0, 1)
        ((tokens, labels),) = dp.micro_batches(sample, numbers, batch, "cpu")
        loss = model.loss(model(tokens), labels) / labels.numel()
        loss.backward()
        optimizer.sum_gradients()
        optimizer.scale((1 / (optimizer.squares().sqrt() + 1e-6)).clamp(max=1))
        warm = min(1, (step + 1) / (steps / 10))
        optimizer.step(lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps)))
        state.end_step()
        losses.append(loss.detach())
    return torch.stack(losses).double()


def fp8_adamw(matrices, vectors):
    """As zero.adamw, in FP8."""
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return FP8AdamW(groups)


RUNS = {  # what `--train` compares
    "bf16": (NONE, zero.adamw),
    "tensor": (RECIPES["tensor"], zero.adamw),
    "delayed": (RECIPES["delayed"], zero.adamw),
    "block": (RECIPES["block"], zero.adamw),
    "mx": (RECIPES["mx"], zero.adamw),
    "block, FP8 moments": (RECIPES["block"], fp8_adamw),
    "naive": (RECIPES["naive"], zero.adamw),
}


def compare_training(steps=300, seeds=3, last=50, names=RUNS):
    """{run: (mean loss of the last steps over all seeds, relative gap to bf16)}"""
    means = {}
    for name in names:
        recipe, make = RUNS[name]
        means[name] = sum(
            train(recipe, steps, seed, make)[-last:].mean().item() / seeds for seed in range(seeds)
        )
        gap = means[name] / means["bf16"] - 1
        dp.log(f"{name:20} loss {means[name]:.4f}   gap {gap:+.3%}")
    return {name: (loss, loss / means["bf16"] - 1) for name, loss in means.items()}


def demo(args):
    n = dist.get_world_size()
    groups = {name: dist.new_group(range(n), group_desc=name) for name in ("tp", "scales")}
    dp.header("08 mixed precision and FP8", f"world {n} = tp {n}")
    dp.log()
    dp.table(["", "largest", "smallest", "in (1, 2)", "inf", "NaN", "zeros"], format_rows())
    dp.log()
    dp.table(["taken away", "what", "with", "without"], taken_away())
    dp.log("\nerror of a product by rows, on data with outliers")
    rows, unexpected = error_rows()
    dp.table(["", "dy", "forward", "input grad", "weight grad"], rows)
    failures = parity_rows(groups) + unexpected
    dp.log("\nbytes on the wire, and the error that FP8 brings")
    rows, wrong = wire_rows(groups["tp"])
    dp.table(["", "bf16", "FP8", "formula", "error"], rows)
    dp.log("\nbytes a parameter: master, summed gradients, weights, gradients, moments")
    rows, more = state_rows()
    dp.table(["", "codes", "with scales", "allocated"], rows)
    failures += wrong + more + compare_optimizers()
    return dp.verdict("08_fp8", failures)


def main():
    parser = argparse.ArgumentParser(description="mixed precision and FP8 training")
    parser.add_argument("--tp", type=int, default=2, help="ranks, when started as plain python")
    parser.add_argument("--train", action="store_true", help="every recipe on text, three seeds")
    args = parser.parse_args()
    zero.adamw([torch.zeros(1)], [])  # torch.optim imports much at its first use: before the fork
    if args.train:
        torch.set_num_threads(1)
        result = compare_training()
        wrong = not (result["block"][1] < 0.0025 < result["naive"][1])
        print("08_fp8 FAIL: the gap of block or naive" if wrong else "08_fp8 OK")
        return wrong
    return dp.launch(demo, args.tp, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
