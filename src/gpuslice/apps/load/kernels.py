"""PTX of the kernels: each keeps one part of the card busy for some time and counts its rounds.

Parameters: the duration in nanoseconds, where each warp adds its rounds, a buffer and its size in bytes. A
simulated driver knows from the name that the first parameter is the duration.
"""

from __future__ import annotations

from dataclasses import dataclass

ENTRY = "load_gpusim_busy_ns"
ROUNDS = 16  # instructions between two reads of the clock


@dataclass(frozen=True, slots=True)
class Kernel:
    """`flops`: floating-point operations of one warp per round; 0 if that is not meaningful."""

    registers: str
    setup: str
    step: str
    keep: str
    flops: int = 0
    target: str = "sm_70"


def ptx(kernel: Kernel) -> str:
    """The text for the driver's compiler."""
    body = "\n".join([kernel.step] * ROUNDS)
    return f"""
.version 7.0
.target {kernel.target}
.address_size 64
.visible .entry {ENTRY}(.param .u64 time_ns, .param .u64 sink, .param .u64 buffer, .param .u64 bytes)
{{
    .reg .u64 %now, %end, %sink, %rounds, %at, %last, %first, %stride, %wide;
    .reg .u32 %lane, %thread, %block, %threads, %blocks;
    .reg .pred %again, %leader, %never, %past;
    {kernel.registers}
    ld.param.u64 %end, [time_ns];
    ld.param.u64 %sink, [sink];
    ld.param.u64 %first, [buffer];
    ld.param.u64 %last, [bytes];
    add.u64 %last, %last, %first;
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %stride, %threads, %blocks;
    shl.b64 %stride, %stride, 4;
    mad.lo.u32 %lane, %block, %threads, %thread;
    mul.wide.u32 %wide, %lane, 16;
    add.u64 %at, %first, %wide;
    and.b32 %lane, %thread, 31;
    mov.u64 %now, %globaltimer;
    add.u64 %end, %end, %now;
    mov.u64 %rounds, 0;
    {kernel.setup}
AGAIN:
{body}
    add.u64 %rounds, %rounds, 1;
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %again, %now, %end;
    @%again bra AGAIN;
    {kernel.keep}
    setp.eq.u32 %leader, %lane, 0;
    @%leader red.global.add.u64 [%sink], %rounds;
    ret;
}}
"""


def _arithmetic(kind: str, bits: int, start: str, operation: str, flops: int) -> Kernel:
    """Four independent chains, so that throughput and not latency is the bound."""
    names = [f"%v{place}" for place in range(4)]
    return Kernel(
        registers=f".reg .{kind} %v<4>;",
        setup="\n".join(f"mov.b{bits} {name}, {start};" for name in names),
        step="\n".join(f"{operation} {name}, {name}, {name}, {name};" for name in names),
        keep=_keep(kind, bits, names),
        flops=flops * 4 * ROUNDS * 32,
    )


def _keep(kind: str, bits: int, names: list[str]) -> str:
    """A store that never happens, which the compiler cannot know: without it, it would remove the work."""
    stores = "\n".join(f"@%never st.global.{kind} [%sink], {name};" for name in names)
    return f"setp.eq.u64 %never, %rounds, 0;\n{stores}"


_TENSOR_80 = Kernel(
    registers=".reg .b32 %a<4>; .reg .b32 %b<2>; .reg .f32 %c<8>;",
    setup="\n".join(
        [f"mov.b32 %a{n}, 0x3c003c00;" for n in range(4)]
        + [f"mov.b32 %b{n}, 0x3c003c00;" for n in range(2)]
        + [f"mov.f32 %c{n}, 0f00000000;" for n in range(8)]
    ),
    step="\n".join(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        f"{{{regs}}}, {{%a0,%a1,%a2,%a3}}, {{%b0,%b1}}, {{{regs}}};"
        for regs in ("%c0,%c1,%c2,%c3", "%c4,%c5,%c6,%c7")
    ),
    keep=_keep("f32", 32, ["%c0", "%c4"]),
    flops=2 * 2 * 16 * 8 * 16 * ROUNDS,
    target="sm_80",
)
_TENSOR_70 = Kernel(
    registers=".reg .b32 %a<2>; .reg .b32 %b<2>; .reg .f32 %c<8>;",
    setup="\n".join(
        [f"mov.b32 %{name}{n}, 0x3c003c00;" for name in "ab" for n in range(2)]
        + [f"mov.f32 %c{n}, 0f00000000;" for n in range(8)]
    ),
    step="mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
    "{%c0,%c1,%c2,%c3,%c4,%c5,%c6,%c7}, {%a0,%a1}, {%b0,%b1}, {%c0,%c1,%c2,%c3,%c4,%c5,%c6,%c7};",
    keep=_keep("f32", 32, ["%c0"]),
    flops=4 * 2 * 8 * 8 * 4 * ROUNDS,
)
_MEMORY = Kernel(
    registers=".reg .f32 %v<4>;",
    setup="",
    step="""ld.global.cg.v4.f32 {%v0,%v1,%v2,%v3}, [%at];
    st.global.cg.v4.f32 [%at], {%v0,%v1,%v2,%v3};
    add.u64 %at, %at, %stride;
    add.u64 %wide, %at, 16;
    setp.gt.u64 %past, %wide, %last;
    @%past sub.u64 %wide, %at, %first;
    @%past rem.u64 %wide, %wide, %stride;
    @%past add.u64 %at, %first, %wide;""",
    keep="",
)
_FP32 = _arithmetic("f32", 32, "0f3F800001", "fma.rn.f32", 2)
_FP64 = _arithmetic("f64", 64, "0d3FF0000000000001", "fma.rn.f64", 2)
_FP16 = _arithmetic("b32", 32, "0x3c003c00", "fma.rn.f16x2", 4)


def kernel_for(kind: str, major: int) -> Kernel:
    """The kernel for a kind of work on a card of compute capability `major`."""
    if kind == "tensor":
        return _TENSOR_80 if major >= 8 else _TENSOR_70
    return {"busy": _FP32, "fp32": _FP32, "fp64": _FP64, "fp16": _FP16, "memory": _MEMORY}[kind]
