"""Products of a few rows with output-major matrices on a CPU, at the speed of its memory: machine code that XLA calls.

Such a product costs the time to read the weights. XLA's kernels read 7 to 10 GB/s of bfloat16 where two cores can read 22.

1. out[r, n] = sum over k of x[r, k] w[n, k]. Each weight is read once, in the order of memory, in a vector that becomes float32
   (bfloat16: its bits, shifted by 16) or int16 (int8; 4 bits times the factor of their group). Products of floats are added in
   float32, those of integers in int32: exactly. Several matrices may be multiplied by the same rows, one after the other.
2. LLVM (llvmlite) compiles this for the host's CPU when a program with such a product is traced, once for each number of rows: 20 ms.
3. XLA calls `handler(frame)` by its typed FFI. The offsets in `THREADS` are those of the C structs in jaxlib's
   include/xla/ffi/api/c_api.h. XLA asks for their version by an extension of the frame, and refuses one that it does not support.
   Any other frame is a call. The result null means success.
4. The handler asks XLA's pool for its other threads. Each takes chunks of output channels, by an atomic counter, until none is
   left: a thread that comes late, or never, delays none. Then the handler waits for the chunks that others took.
5. A late thread reads only the job's counters, which its last user frees: the frame may be gone.

The name of the target has the digest of its code: a compiled program from a cache calls the code that it was compiled with.
There is no gradient. Where `fits` is false, as without llvmlite, XLA multiplies.

Letters: R rows, K numbers summed over, N output channels of all matrices, H = K / 2, G groups of half a row.
"""

import ctypes
import functools
import hashlib
import logging
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    from llvmlite import binding, ir
except (ImportError, OSError):  # not installed, or not for this system
    binding: Any = None
    ir: Any = None
if binding is not None and binding.llvm_version_info[0] < 20:  # llvmlite 0.44 does not parse the code
    binding = None

MULTIPLE = 64  # K is a multiple of this
MIN_BYTES = 131072  # of a matrix: a smaller one stays in a core's cache
CHUNK_BYTES = 65536  # of weights that a thread takes at a time
BYTES_PER_THREAD = 262144  # waking a thread takes as long as reading these
MAX_THREADS = 8  # more do not make memory faster
AHEAD = 4096  # so many bytes before their use, weights are requested from memory
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 1}  # kind of weights -> of an element in memory
MAX_ROWS = {"float32": 8, "bfloat16": 8, "int8": 8, "int4": 16}  # twice as many take longer than XLA's product
LANES = 16  # sums in a vector
API = {"MAJOR": 0, "MINOR": 3}  # version of XLA's structs, that of jax 0.10.2; jax 0.12 has 0.5, with the same offsets


def fits(num_rows: int, weights: Sequence[jax.Array], kind: str) -> bool:
    """Returns True if `product` can multiply `num_rows` rows by these matrices faster than XLA. `kind` is their dtype, or "int4"."""
    if os.name != "posix" or ctypes.sizeof(ctypes.c_void_p) != 8 or not 0 < num_rows <= MAX_ROWS.get(kind, 0):
        return False
    multiple = MULTIPLE // 2 if kind == "int4" else MULTIPLE
    if any(matrix.shape[1] % multiple or matrix.size * BYTES[kind] < MIN_BYTES for matrix in weights):
        return False
    if binding is None:
        _warn()
    return binding is not None


def product(x_RK: jax.Array, weights: Sequence[jax.Array], kind: str, factors: Sequence[jax.Array] = ()) -> jax.Array:
    """Returns the products of rows and matrices [..., K], one after the other: [R, N], float32; int32 for matrices of integers, with x in int8.

    Weights of kind "int4" are the bytes [..., H] of `cpu_integers.Nibbles`, and `factors` those [..., 2, G] of each.
    """
    K, is_nibbles = x_RK.shape[1], kind == "int4"
    # Nothing else keeps the code from reading beyond an array.
    assert K % MULTIPLE == 0 and len(factors) == is_nibbles * len(weights), (x_RK.shape, len(factors))
    for matrix in weights:
        assert matrix.shape[1:] == (K >> is_nibbles,) and matrix.dtype == ("int8" if is_nibbles else kind), matrix
    for matrix, factor in zip(weights, factors, strict=False):
        assert factor.shape == (len(matrix), 2, K // 64) and factor.dtype == "int8", factor
    x_type, out_type = (jnp.int16, jnp.int32) if "int" in kind else (jnp.float32, jnp.float32)
    out = jax.ShapeDtypeStruct((len(x_RK), sum(map(len, weights))), out_type)
    call = jax.ffi.ffi_call(_target(kind, len(x_RK), len(weights)), out, vmap_method="sequential")
    return call(x_RK.astype(x_type), *weights, *factors)


@functools.cache
def _warn() -> None:
    text = "llvmlite 0.45 or later cannot be imported: products of few rows on this CPU take about twice as long"
    logging.getLogger(__name__).warning("%s; pip install -U llvmlite", text)


def _target(kind: str, num_rows: int, num_matrices: int) -> str:
    """Returns XLA's name of the code for products of this kind. Compiles and registers it at the first call."""
    with _lock:
        return _registered(kind, num_rows, num_matrices)


_lock = threading.Lock()  # a second registration is an error


@functools.cache
def _registered(kind: str, num_rows: int, num_matrices: int) -> str:
    code = _code(kind, num_rows, num_matrices)
    name = f"intellax_rows_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(_compiled(code)), platform="cpu")
    return name


def _code(kind: str, num_rows: int, num_matrices: int) -> str:
    """Returns LLVM's code of `handler(frame)`."""
    numbers = API | {"CHUNK": CHUNK_BYTES, "PER_THREAD": BYTES_PER_THREAD, "MOST": MAX_THREADS, "SIZE": BYTES[kind]}
    code = _rows(kind, num_rows, num_matrices) + THREADS
    for name, number in numbers.items():
        code = re.sub(rf"\b{name}\b", str(number), code)
    place = r"\3.\4 = getelementptr i8, ptr \3, i64 \4\n  "
    code = re.sub(r"(%\w+) = get (\w+), (%\w+) \+ (\d+)", rf"{place}\1 = load \2, ptr \3.\4", code)
    return re.sub(r"set (\w+) (\S+), (%\w+) \+ (\d+)", rf"{place}store \1 \2, ptr \3.\4", code)


def _compiled(code: str):
    """Returns the function `handler` of code."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    options = {"cpu": binding.get_host_cpu_name(), "features": binding.get_host_cpu_features().flatten(), "opt": 2}
    machine = binding.Target.from_default_triple().create_target_machine(**options)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(code), machine)
    engine.finalize_object()
    _engines.append(engine)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("handler"))


_engines = []  # which own the code: programs have its addresses


def _rows(kind: str, num_rows: int, num_matrices: int) -> str:
    """Returns the code of `rows(frame, first, last)`, which computes these channels of all rows, each from two vectors of sums."""
    i8, i16, i32, i64 = map(ir.IntType, (8, 16, 32, 64))
    f32, pointer, void, module = ir.FloatType(), ir.PointerType(), ir.VoidType(), ir.Module()
    is_float, is_nibbles = "int" not in kind, kind == "int4"
    element, sum_type = {"float32": f32, "bfloat16": i16}.get(kind, i8), f32 if is_float else i32
    x_type, width = (f32, LANES) if is_float else (i16, 2 * LANES)
    function = ir.Function(module, ir.FunctionType(void, (pointer, i64, i64)), "rows")
    frame, first, last = function.args
    b = ir.IRBuilder(function.append_basic_block())
    sums_type = ir.VectorType(sum_type, LANES)
    add = "fadd" if is_float else "add"
    total_arguments = [f32(0.0)] * is_float
    total_type = ir.FunctionType(sum_type, [f32] * is_float + [sums_type])
    total = ir.Function(module, total_type, f"llvm.vector.reduce.{add}.v{LANES}{'f' if is_float else 'i'}32")
    fma = ir.Function(module, ir.FunctionType(sums_type, [sums_type] * 3), f"llvm.fmuladd.v{LANES}f32")
    prefetch = ir.Function(module, ir.FunctionType(void, (pointer, i32, i32, i32)), "llvm.prefetch.p0")

    def get(base, offset, kind=pointer):
        return b.load(b.gep(base, [i64(offset)], source_etype=i8), typ=kind)

    def vector(base, at, kind):
        return b.load(b.gep(base, [at], source_etype=kind), typ=ir.VectorType(kind, width), align=1)

    def splat(number, type_):
        return ir.Constant(ir.VectorType(type_, width), [number] * width)

    def widened(values, type_):
        return b.sext(values, ir.VectorType(type_, width))

    def loop(start, end, step, initial, body):
        """Adds a loop of at least one turn; `body(index, values)` returns the next values. Returns the last ones."""
        before, block, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(block)
        b.position_at_end(block)
        index, *values = phis = [b.phi(value.type) for value in (start, *initial)]
        results = body(index, values)
        following = b.add(index, i64(step))
        for phi, value, result in zip(phis, (start, *initial), (following, *results), strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(result, b.block)
        b.cbranch(b.icmp_signed("<", following, end), block, after)
        b.position_at_end(after)
        return results

    arguments, results = get(frame, 72), get(frame, 112)
    buffers = [get(arguments, 8 * index) for index in range(1 + num_matrices * (1 + is_nibbles))]
    data, out = [get(buffer, 24) for buffer in buffers], get(get(results, 0), 24)
    K, N = get(get(buffers[0], 40), 8, i64), get(get(get(results, 0), 40), 8, i64)
    H = b.lshr(K, i64(1))
    ends = [i64(0)]
    for buffer in buffers[1 : num_matrices + 1]:
        ends.append(b.add(ends[-1], get(get(buffer, 40), 0, i64)))

    def weights(matrix, factors, n, k):
        """Returns two pairs of a position in x and a vector of weights of channel n, for position k in memory."""
        at = b.add(b.mul(n, H if is_nibbles else K), k)
        for offset in range(0, width if is_nibbles else 2 * width, 64 // BYTES[kind]):
            place = b.gep(matrix, [b.add(at, i64(offset + AHEAD // BYTES[kind]))], source_etype=element)
            b.call(prefetch, [place, i32(0), i32(3), i32(1)])
        if is_nibbles:
            both = widened(vector(matrix, at, i8), i16)
            pairs = []
            for half, values in enumerate(
                (b.ashr(b.shl(both, splat(12, i16)), splat(12, i16)), b.ashr(both, splat(4, i16)))
            ):
                group = b.add(b.mul(b.add(b.shl(n, i64(1)), i64(half)), b.lshr(H, i64(5))), b.lshr(k, i64(5)))
                factor = b.sext(b.load(b.gep(factors, [group], source_etype=i8), typ=i8), i16)
                one = b.insert_element(ir.Constant(ir.VectorType(i16, width), ir.Undefined), factor, i32(0))
                factor = b.shuffle_vector(one, one, splat(0, i32))
                pairs.append((b.add(k, b.mul(H, i64(half))), widened(b.mul(values, factor), i32)))
            return pairs
        pairs = []
        for offset in (0, width):
            values = vector(matrix, b.add(at, i64(offset)), element)
            if kind == "bfloat16":
                values = b.shl(b.zext(values, ir.VectorType(i32, width)), splat(16, i32))
                values = b.bitcast(values, ir.VectorType(f32, width))
            elif kind == "int8":
                values = widened(values, i32)
            pairs.append((b.add(k, i64(offset)), values))
        return pairs

    def added(sums, values, x):
        if is_float:
            return b.call(fma, [x, values, sums])
        products = b.mul(widened(x, i32), values)
        lanes = (ir.Constant(ir.VectorType(i32, LANES), list(range(side, width, 2))) for side in (0, 1))
        even, odd = (b.shuffle_vector(products, products, mask) for mask in lanes)
        return b.add(sums, b.add(even, odd))  # CPUs have an instruction for that

    def channel(n, _):
        matrix, factors, start = data[1], data[num_matrices + 1] if is_nibbles else None, ends[0]
        for index in range(1, num_matrices):
            is_later = b.icmp_signed(">=", n, ends[index])
            matrix, start = b.select(is_later, data[1 + index], matrix), b.select(is_later, ends[index], start)
            if is_nibbles:
                factors = b.select(is_later, data[1 + num_matrices + index], factors)
        own_n = b.sub(n, start)

        def step(k, sums):
            pairs = weights(matrix, factors, own_n, k)
            rows = [b.gep(data[0], [b.mul(K, i64(row))], source_etype=x_type) for row in range(num_rows)]
            return [
                added(sums[2 * row + half], values, vector(rows[row], at, x_type))
                for row in range(num_rows)
                for half, (at, values) in enumerate(pairs)
            ]

        zeros = [ir.Constant(sums_type, None)] * (2 * num_rows)
        sums = loop(i64(0), H if is_nibbles else K, width if is_nibbles else 2 * width, zeros, step)
        for row in range(num_rows):
            both = getattr(b, add)(sums[2 * row], sums[2 * row + 1])
            result = b.call(total, [*total_arguments, both], fastmath=("reassoc",) if is_float else ())
            b.store(result, b.gep(out, [b.add(b.mul(N, i64(row)), n)], source_etype=sum_type))
        return ()

    loop(first, last, 1, (), channel)
    b.ret_void()
    return str(module)


# LLVM's code, except for "%a = get TYPE, %pointer + BYTES" and "set TYPE %a, %pointer + BYTES", which load and store.
# A job: next channel, channels done, users, N, channels of a chunk, frame.
THREADS = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)

define ptr @handler(ptr %frame) {
  %extension = get ptr, %frame + 8
  %has_none = icmp eq ptr %extension, null
  br i1 %has_none, label %call, label %extended
extended:
  %type = get i32, %extension + 8
  %is_query = icmp eq i32 %type, 1
  br i1 %is_query, label %query, label %call
query:
  %metadata = get ptr, %extension + 24
  set i32 MAJOR, %metadata + 24
  set i32 MINOR, %metadata + 28
  ret ptr null
call:
  %api = get ptr, %frame + 16
  %context = get ptr, %frame + 24
  %args = get ptr, %frame + 72
  %w = get ptr, %args + 8
  %w_dims = get ptr, %w + 40
  %w_rank = get i64, %w + 32
  %last_dim = sub i64 %w_rank, 1
  %width_p = getelementptr i64, ptr %w_dims, i64 %last_dim
  %width = load i64, ptr %width_p
  %results = get ptr, %frame + 112
  %out = get ptr, %results + 0
  %out_dims = get ptr, %out + 40
  %N = get i64, %out_dims + 8

  %bytes = mul i64 %width, SIZE
  %in_chunk = udiv i64 CHUNK, %bytes
  %chunk = call i64 @llvm.smax.i64(i64 %in_chunk, i64 1)
  %num_threads = alloca i64
  store i64 1, ptr %num_threads
  %ask = alloca [4 x i64]
  set i64 32, %ask + 0
  set ptr null, %ask + 8
  set ptr %context, %ask + 16
  set ptr %num_threads, %ask + 24
  %ask_num_threads = get ptr, %api + 144
  %unknown = call ptr %ask_num_threads(ptr %ask)
  %all_bytes = mul i64 %bytes, %N
  %useful = udiv i64 %all_bytes, PER_THREAD
  %threads = load i64, ptr %num_threads
  %few = call i64 @llvm.smin.i64(i64 %threads, i64 MOST)
  %tasks = call i64 @llvm.smin.i64(i64 %few, i64 %useful)
  %users = call i64 @llvm.smax.i64(i64 %tasks, i64 1)

  %job = call ptr @malloc(i64 48)
  set i64 0, %job + 0
  set i64 0, %job + 8
  set i64 %users, %job + 16
  set i64 %N, %job + 24
  set i64 %chunk, %job + 32
  set ptr %frame, %job + 40
  %request = alloca [5 x i64]
  set i64 40, %request + 0
  set ptr null, %request + 8
  set ptr %context, %request + 16
  set ptr @task, %request + 24
  set ptr %job, %request + 32
  %schedule = get ptr, %api + 136
  br label %ask_others
ask_others:
  %asked = phi i64 [1, %call], [%next_asked, %ask_other]
  %is_enough = icmp sge i64 %asked, %users
  br i1 %is_enough, label %work, label %ask_other
ask_other:
  %next_asked = add i64 %asked, 1
  %refused = call ptr %schedule(ptr %request)
  br label %ask_others
work:
  call void @work(ptr %job)
  br label %wait
wait:
  %done_p = getelementptr i8, ptr %job, i64 8
  %done = load atomic i64, ptr %done_p acquire, align 8
  %is_done = icmp eq i64 %done, %N
  br i1 %is_done, label %end, label %yield
yield:
  %ignored = call i32 @sched_yield()
  br label %wait
end:
  call void @leave(ptr %job)
  ret ptr null
}

define internal void @task(ptr %job) {
  call void @work(ptr %job)
  call void @leave(ptr %job)
  ret void
}

define internal void @work(ptr %job) {
entry:
  %N = get i64, %job + 24
  %chunk = get i64, %job + 32
  %frame = get ptr, %job + 40
  %done = getelementptr i8, ptr %job, i64 8
  br label %take
take:
  %first = atomicrmw add ptr %job, i64 %chunk acq_rel
  %is_left = icmp slt i64 %first, %N
  br i1 %is_left, label %compute, label %end
compute:
  %after = add i64 %first, %chunk
  %last = call i64 @llvm.smin.i64(i64 %after, i64 %N)
  call void @rows(ptr %frame, i64 %first, i64 %last)
  %count = sub i64 %last, %first
  %before = atomicrmw add ptr %done, i64 %count acq_rel
  br label %take
end:
  ret void
}

define internal void @leave(ptr %job) {
  %users = getelementptr i8, ptr %job, i64 16
  %before = atomicrmw sub ptr %users, i64 1 acq_rel
  %is_last = icmp eq i64 %before, 1
  br i1 %is_last, label %last, label %end
last:
  call void @free(ptr %job)
  br label %end
end:
  ret void
}
"""
