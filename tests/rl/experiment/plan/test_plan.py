"""The planner: HLO text of known traffic, formulas against sums by hand, lowered programs, and the compiler itself (slow)."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from ml_collections import config_dict

from configs import base, intellect2, intellect3
from inference.engine import weights
from models import config as config_lib
from models import flops, transformer
from models.hf import config as hf_config
from models.kernels import splash_attention
from rl import sft
from rl.experiment import initial
from rl.experiment.plan import hlo, lowered_programs, plan, reads, roofline, sizes
from rl.learning.learner import train_step
from sharding.mesh import mesh as mesh_lib
from sharding.weights import broadcast
from tests.support import census, tiny

ROOT = pathlib.Path(__file__).resolve().parents[4]
# ---- the text of a program -------------------------------------------------------------------------------------------

# A loop bounded by data around a scan of 3 layers; in the scan a gather over 4 devices, a fused reduce-scatter, a permute.
TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[8,128]) -> f32[2,128] {
  %input = f32[8,128]{1,0} parameter(0)
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)} all-reduce(%input), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  ROOT %slice = f32[2,128]{1,0} dynamic-slice(%all-reduce.1, %zero), dynamic_slice_sizes={2,128}
}

%fused (p: bf16[4,64,2,16]) -> bf16[4,2,64,16] {
  %inner = bf16[4,2,64,16]{3,2,1,0} transpose(%p), dimensions={0,2,1,3}
  ROOT %out = bf16[4,2,64,16]{3,2,1,0} add(%inner, %inner)
}

%layer (state: (s32[], bf16[16,128])) -> (s32[], bf16[16,128]) {
  %all-gather.1 = bf16[16,128]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  %start = (bf16[5,64]{1,0}, bf16[5,64]{1,0}, u32[], u32[]) collective-permute-start(%y), channel_id=2, source_target_pairs={{0,0},{1,3},{3,1}}
  %scatter = f32[2,128]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
  %read = bf16[4,2,64,16]{3,2,1,0} fusion(%cache), kind=kLoop, calls=%fused
  ROOT %tuple.1 = (s32[], bf16[16,128]) tuple(%next, %all-gather.1)
}

%layer_cond (state: (s32[], bf16[16,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%micro (state: (s32[], s32[])) -> (s32[], s32[]) {
  %while.1 = (s32[], bf16[16,128]) while(%init), condition=%layer_cond, body=%layer
  %all-reduce.2 = (f32[10]{0}, f32[6]{0}) all-reduce(%a, %b), channel_id=4, replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,4]T(1,0)) {'axis_1'}, to_apply=%add
  ROOT %tuple.2 = (s32[], s32[]) tuple(%i, %n)
}

%micro_cond (state: (s32[], s32[])) -> pred[] {
  ROOT %less.2 = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (batch: s32[8]) -> f32[] {
  %copy.1 = bf16[4,2,64,16]{3,2,1,0} copy(%cache)
  %copy-start.1 = (bf16[4,2,64,16]{3,2,1,0:T(8,128)S(1)}, bf16[4,2,64,16]{3,2,1,0}, u32[]) copy-start(%cache)
  %while.2 = (s32[], s32[]) while(%start.1), condition=%micro_cond, body=%micro
  ROOT %all-reduce.3 = f32[1]{0} all-reduce(%loss), channel_id=5, replica_groups=[8,1]<=[8], to_apply=%add
}
"""


def test_collectives_are_counted_through_loops_and_fusions():
    found = {c.kind: c for c in hlo.collectives(hlo.parse(TEXT, turns=(5,)))}
    kinds = {"all-gather", "collective-permute", "reduce-scatter", "all-reduce"}
    assert found.keys() == kinds  # one device: no traffic
    gather = found["all-gather"]
    assert (gather.count, gather.num_bytes, gather.group) == (15, 16 * 128 * 2, (0, 2, 4, 6))
    assert gather.sent_bytes == 15 * 4096 * 3 / 4
    scatter = found["reduce-scatter"]  # groups [2, 4] of 0..7 laid out [4, 2] and transposed: 0 2 4 6
    assert (scatter.count, scatter.num_bytes, scatter.group) == (15, 8 * 128 * 4, (0, 2, 4, 6))
    assert scatter.sent_bytes == 15 * 4096 * 3 / 4
    permute = found["collective-permute"]
    assert (permute.count, permute.num_bytes, permute.group) == (15, 5 * 64 * 2, (1, 3))
    assert permute.sent_bytes == 15 * 640
    reduce = found["all-reduce"]  # 0..7 laid out [2, 4] and transposed: 0 4 1 5, 2 6 3 7
    assert (reduce.count, reduce.num_bytes, reduce.group) == (5, 64, (0, 4, 1, 5))
    assert reduce.sent_bytes == 5 * 64 * 2 * 3 / 4


def test_nested_loops_over_data_take_the_turns_in_order():
    steps = TEXT.replace("condition=%micro_cond, body=%micro", "condition=%micro_cond, body=%outer")
    steps = steps.replace(
        "ENTRY %main",
        """%outer (state: (s32[], s32[])) -> (s32[], s32[]) {
  %all-to-all.1 = f32[4]{0} all-to-all(%p), channel_id=6, replica_groups=[2,4]<=[8], dimensions={0}
  %while.3 = (s32[], s32[]) while(%start.2), condition=%micro_cond, body=%micro
  ROOT %tuple.3 = (s32[], s32[]) tuple(%i, %n)
}

ENTRY %main""",
    )
    counts = {c.kind: c.count for c in hlo.collectives(hlo.parse(steps, turns=(2, 7)))}
    assert counts["all-to-all"] == 2 and counts["all-reduce"] == 14 and counts["all-gather"] == 42
    # A loop over data that holds no other takes all that is left: here the scoring of every micro-batch.
    assert {c.kind: c.count for c in hlo.collectives(hlo.parse(TEXT, turns=(2, 7)))}["all-gather"] == 42


def test_unrolled_loops_count_by_the_step_of_their_body():
    """The loop over 3 layers runs twice if its counter grows by 2, and once if it grows by 3."""
    for step, turns in ((1, 3), (2, 2), (3, 1)):
        counter = f"%i.2 = s32[] get-tuple-element(%state), index=0\n  %n.2 = s32[]{{:T(128)}} constant({step})\n  "
        text = TEXT.replace("  ROOT %tuple.1 =", f"  {counter}%next = s32[] add(%i.2, %n.2)\n  ROOT %tuple.1 =")
        counts = {c.kind: c.count for c in hlo.collectives(hlo.parse(text, turns=(5,)))}
        assert (counts["all-gather"], counts["all-reduce"]) == (5 * turns, 5)


def test_of_a_conditional_the_shortest_branch_counts():
    """It leaves out the rare work, here the loop over micro-batches; branches are named in either way."""
    for branches in (
        "branch_computations={%micro, %fused}",
        "true_computation=%fused, false_computation=%micro",
    ):
        text = TEXT.replace("condition=%micro_cond, body=%micro", "condition=%micro_cond, body=%rare")
        choice = f"%out.2 = s32[] conditional(%p, %a, %b), {branches}"
        text = text.replace(
            "ENTRY %main", f"%rare (s: s32[]) -> s32[] {{\n  {choice}\n  ROOT %r = s32[] add(%out.2)\n}}\n\nENTRY %main"
        )
        assert hlo.collectives(hlo.parse(text, turns=(5,))) == []


def test_matmuls_and_kernels_are_counted_by_hand():
    """A product of 16 heads in a window of 16 whose padding does no work, a dot, a strided window, a product of 7 matrices as a dilated one, a grouped product, and kernels."""
    lines = """  %x = bf16[8192,2,128,1]{2,0,3,1} parameter(0)
  %w = bf16[2,128,16,128]{3,1,0,2} parameter(1)
  %c.1 = bf16[8192,16,128,1]{2,0,3,1:T(8,128)} convolution(%x, %w), window={size=16x2 pad=15_15x0_0 rhs_reversal=1x0}, dim_labels=b1f0_1i0o->b0f1
  %y = f32[7,30,40]{2,1,0} parameter(2)
  %z = f32[7,40,50]{2,1,0} parameter(3)
  %c.2 = f32[7,30,50]{2,1,0} dot(%y, %z), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  %c.3 = f32[3,30,50]{2,1,0} convolution(%y, %z), window={size=3 stride=2}, dim_labels=0bf_0io->0bf
  %c.4 = f32[7,30,50]{2,1,0} convolution(%y, %z), window={size=7 stride=6 lhs_dilate=7}, dim_labels=0bf_0io->0bf
  %gmm.1 = bf16[64,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"1000"}}
  %splash.1 = (f32[4], bf16[2,64,8]) custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)/splash_forward/pallas_call"}
  %splash.2 = (f32[4], bf16[2,64,8]) custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/splash_backward/pallas_call"}
"""
    program = hlo.parse(TEXT.replace("  %while.1 =", f"{lines}  %while.1 ="), turns=(5,))
    products = 8192 * 256 * 16 * 128 + 7 * 30 * 40 * 50 + 3 * 3 * 30 * 40 * 50 + 7 * 30 * 40 * 50
    assert census.matmul_flops(program) == 5 * (2 * products + 1000)
    assert census.attention_passes(program) == 5 * (1 + 2.5)


def test_copies_are_whole_arrays_that_are_written():
    """A copy moves the array; a prefetch into on-chip memory and a transpose inside a fusion do not."""
    program = hlo.parse(TEXT, turns=(5,))
    assert hlo.copies(program, (4, 64, 2, 16)) == 1 and hlo.copies(program, (64, 2, 1, 4, 16)) == 1
    assert hlo.copies(program, (4, 64, 2, 8)) == 0


# A decode step of 3 layers: a slice of stacked weights in a fusion, a row written into the cache in place, the kernel of pages, a prefetch.
STEP = """HloModule jit_generate, is_scheduled=true

%sliced (p0: bf16[3,60,576], p1: s32[], p2: bf16[4,60]) -> bf16[4,576] {
  %p0 = bf16[3,60,576]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %b0 = bf16[3,60,576]{2,1,0:T(8,128)(2,1)} bitcast(%p0)
  %s0 = bf16[1,60,576]{2,1,0:T(8,128)(2,1)} dynamic-slice(%b0, %p1, %p1, %p1), dynamic_slice_sizes={1,60,576}
  %p2 = bf16[4,60]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  ROOT %d0 = bf16[4,576]{1,0:T(8,128)(2,1)} convolution(%p2, %s0), dim_labels=bf_io->bf
}

%written (p3: bf16[2,3,8,64,128], p4: bf16[2,4,128], p5: s32[4,3]) -> bf16[2,3,8,64,128] {
  %p3 = bf16[2,3,8,64,128]{4,3,2,1,0:T(8,128)(2,1)} parameter(0)
  %p4 = bf16[2,4,128]{2,1,0:T(4,128)(2,1)} parameter(1)
  %p5 = s32[4,3]{1,0:T(4,128)} parameter(2)
  ROOT %w0 = bf16[2,3,8,64,128]{4,3,2,1,0:T(8,128)(2,1)} scatter(%p3, %p5, %p4), to_apply=%add
}

%layer (state: (s32[], bf16[3,60,576])) -> (s32[], bf16[3,60,576]) {
  %i.1 = s32[]{:T(128)} get-tuple-element(%state), index=0
  %weights = bf16[3,60,576]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %cache = bf16[2,3,8,64,128]{4,3,2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %x = bf16[4,60]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=3
  %new = bf16[2,4,128]{2,1,0:T(4,128)(2,1)} get-tuple-element(%state), index=4
  %where = s32[4,3]{1,0:T(4,128)} get-tuple-element(%state), index=5
  %y = bf16[4,576]{1,0:T(8,128)(2,1)} fusion(%weights, %i.1, %x), kind=kOutput, calls=%sliced
  %cache.1 = bf16[2,3,8,64,128]{4,3,2,1,0:T(8,128)(2,1)} fusion(%cache, %new, %where), kind=kLoop, calls=%written
  %out = bf16[4,2,1,128]{3,2,1,0} custom-call(%where, %y, %cache.1, %cache.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/paged_attention/pallas_call"}
  ROOT %tuple.1 = (s32[], bf16[3,60,576]) tuple(%i.1, %weights)
}

%layer_cond (state: (s32[], bf16[3,60,576])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (embed: f32[100,128]) -> f32[4,128] {
  %embed = f32[100,128]{1,0:T(8,128)} parameter(0)
  %rows = s32[4]{0:T(128)} parameter(1)
  %start = (f32[100,128]{1,0:T(8,128)S(1)}, f32[100,128]{1,0:T(8,128)}, u32[]) copy-start(%embed)
  %here = f32[100,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %while.1 = (s32[], bf16[3,60,576]) while(%init), condition=%layer_cond, body=%layer
  %logits = f32[4,128]{1,0:T(4,128)} negate(%here)
  ROOT %picked = f32[4,128]{1,0:T(4,128)} gather(%embed, %rows), offset_dims={1}
}
"""


def test_bytes_read_are_counted_by_hand():
    """60 rows are padded to 64 and 576 lanes to 640; the kernel reads 1,000 bytes of the cache of any size."""
    layer = 64 * 640 * 2 + 4  # the slice, and its number
    layer += 2 * 4 * 128 * 2 + 4 * 128 * 4  # new keys, and where they go
    layer += 4 * 128 * 4 + 8 * 640 * 2 + 1000  # of the kernel
    condition = 2 * 4  # the number of the layer, and of layers
    rest = 104 * 128 * 4 + 128 * 4 + 4 * 128 * 4  # a prefetch, and a gather of four rows
    program, cache = hlo.parse(STEP), ((2, 3, 8, 64, 128),)
    assert reads.num_bytes(program, cache, 1000) == 3 * layer + 4 * condition + rest
    whole = 3 * 2 * 3 * 8 * 64 * 128 * 2
    assert reads.num_bytes(program, (), 1000) == 3 * layer + 4 * condition + rest + whole
    copied = STEP.replace(" scatter(%p3, %p5, %p4), to_apply=%add", " add(%p3, %p3)")
    assert (
        reads.num_bytes(hlo.parse(copied), cache, 1000)
        == 3 * (layer - 2 * 4 * 128 * 2 - 4 * 128 * 4) + 4 * condition + rest + whole
    )


def test_a_report_is_the_sums_by_hand(monkeypatch):
    """Two chips that compute for a second, read for two, and send for three; 1.5 s of model FLOPs at full rate."""
    monkeypatch.setattr(plan, "_links_s", lambda outcome, topology: 3.0)
    mesh = mesh_lib.create({"fsdp": 2}, jax.devices()[:2])
    chip = roofline.CHIPS["v5p"]
    program = lowered_programs.LoweredProgram(
        name="decode",
        title="decode",
        mesh=mesh,
        lower=None,
        held={"parameters": 2.0 * 2**30, "cache": 2.0**30},
        needed={},
        num_tokens=1000,
        executed_flops=2 * chip.flops_per_s,
        model_flops=3 * chip.flops_per_s,
        read_bytes=2 * chip.memory_bytes_per_s,
        cache=((2, 3),),
        weights_bytes=2.0**30,
        loads=(lowered_programs.Load("half", 2.0**30, 0.0),),
    )
    sizes = {"peak_bytes": 4.0 * 2**30, "workspace_bytes": 2.0**30, "host_bytes": 3.0 * 2**30}
    outcome = plan.Outcome(program, "", compile_s=7.0, read_bytes=[2.5 * 2**30], **sizes)
    lines = {line[2:20].strip(): line[20:] for line in plan.describe(outcome, "v5p:2x2x1").splitlines()[1:]}
    assert lines["memory per chip"] == "parameters 2.00, cache 1.00, workspace 1.00: 4.00 GiB of 95.74 GiB, 91.74 left"
    assert lines["memory of hosts"] == "3.00 GiB per chip"
    assert lines["arithmetic"] == "1.38 PFLOP of the model, 918 TFLOP executed, 1,000 tokens"
    assert lines["collectives"] == "none" and lines["cache"].startswith("0 copies")
    assert lines["read per step"].startswith("2.50 GiB with half of the cache in use (1.25), ")
    times = "compute 1 s, memory 2 s, links 3 s: at least 3 s (links), 5 s with links not overlapped"
    assert lines["time"] == times and lines["MFU"].startswith("at most 50%; 30% with links")
    assert re.fullmatch(r"500 tokens/s = 1000 / \(.* 2,765 GB/s\)", lines["memory allows"])
    assert plan._flops(1.5e19) == "15 EFLOP"
    assert (plan._seconds(1000.4), plan._seconds(0.0306)) == ("1,000 s", "30.6 ms")


def test_malformed_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("HloModule nothing\n")
    with pytest.raises(ValueError, match="unsupported replica groups"):
        hlo.collectives(hlo.parse(TEXT.replace("replica_groups=[2,4]<=[4,2]T(1,0)", "replica_groups=new")))


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_work_of_a_dense_model_is_the_sum_by_hand():
    """2 layers of D 32, H 4, K 2, C 8, F 64; V 272, untied."""
    work = flops.ModelFlops.of(tiny.model(tie_embeddings=False, remat="block"))
    layer = 32 * 4 * 8 + 2 * 32 * 2 * 8 + 4 * 8 * 32 + 3 * 32 * 64
    head = 32 * 272
    assert work.multiplied == 2 * layer + head and work.head == head and work.last == 2 * 32 * 64
    norms = 2 * (2 * 32 + 2 * 8) + 32
    assert work.held == 2 * layer + 2 * head + norms
    # 10 tokens in sequences of 5: each reads 3 keys on average, 2 FLOPs x 4 heads x (8 + 8) dims x 3 keys x 2 layers.
    rows = flops.PackedRows(12, ((5, 5),))
    assert (rows.num_tokens, rows.num_columns) == (10, 12)
    assert work.forward_flops(rows) == 10 * (2 * (2 * layer + head) + 2 * 4 * 16 * 3 * 2)
    assert work.model_flops(rows) == 3 * work.forward_flops(rows)
    # The kernel's only block has all 12 columns; 1 + 1 + 2.5 forward passes. The product of `down` is not computed again.
    executed = 12 * (4 * 2 * 2 * layer - 2 * work.last + 4 * 2 * head + 4.5 * 2 * 4 * 16 * 12 * 2)
    assert work.executed_flops(rows) == executed
    assert work.scoring_flops(rows) == 12 * (2 * (2 * layer + head) + 2 * 4 * 16 * 12 * 2)
    assert work.read_parameters(1) == work.held - head  # the table is looked up


def test_work_of_a_mixture_counts_the_experts_of_a_token():
    model = tiny.model(num_experts=8, experts_per_token=2, expert_ffn_dim=16, first_dense_layers=1, norm_topk=True)
    work = flops.ModelFlops.of(model)
    attention = 32 * 4 * 8 + 2 * 32 * 2 * 8 + 4 * 8 * 32
    expert = 3 * 32 * 16
    assert work.multiplied == 2 * attention + 3 * 32 * 64 + 2 * expert + 32 * 8 + 32 * 272
    assert work.last == 32 * 64  # that of the dense layer; products of experts are weighted by the router
    assert work.read_parameters(10**6) == pytest.approx(work.held)
    assert work.held - work.read_parameters(1) == pytest.approx(8 * expert * 3 / 4)
    assert work.held - work.read_parameters(3) == pytest.approx(8 * expert * (3 / 4) ** 3)


def test_a_sliding_layer_reads_its_window():
    model = tiny.model(window=3, layer_pattern="SF")
    assert flops.ModelFlops.of(model).attention_flops(10) == 2 * 4 * 16 * (3 + 10)


@pytest.mark.parametrize(("window", "row"), [(0, 4096), (300, 4096), (600, 6144), (0, 2048), (200, 1280)])
def test_the_kernel_works_on_the_blocks_that_are_read(window, row):
    """The blocks are counted in the attention mask of whole rows, of random sequences; padding reads padding."""
    model = tiny.model(**({"window": window, "layer_pattern": "S"} if window else {}))
    draw, columns, block = np.random.default_rng(row + window), np.arange(row), splash_attention.block_of(row)
    rows, visited = [], 0
    for fill in (1.0, 0.6, 0.0):
        ends = np.unique(draw.integers(1, int(fill * row) + 1, 6)) if fill else np.array([], int)
        rows.append(tuple(np.diff(ends, prepend=0).tolist()))
        of = np.searchsorted(ends, columns, side="right")
        mask = (of[:, None] == of) & (columns[:, None] >= columns)
        mask &= columns[:, None] - columns < (window or row)
        blocks = mask.reshape(row // block, block, row // block, block).any(axis=(1, 3))
        is_padding = of[::block] == len(ends)
        visited += blocks[~is_padding].sum() + is_padding.sum()
    packed = flops.PackedRows(row, rows)
    assert packed.visited_keys(window) == visited * block * block
    assert flops.ModelFlops.of(model).kernel_flops(packed) == 2 * 4 * 16 * visited * block * block * 2


def test_lengths_are_quantiles_of_the_stated_distribution():
    config = small()
    config.rl.prompts_per_step, config.inference.max_model_len = 64, 128
    mesh = mesh_lib.create({"fsdp": 8})
    longest = lowered_programs.train_program(lowered_programs.resolve(config), mesh)
    assert longest.num_tokens == 64 * 8 * 128 and "all rollouts at 128 tokens" in longest.title
    config.plan.update(median_length=40, length_sigma=0.5)
    drawn = np.array(lowered_programs.lengths(config))
    assert len(drawn) == 64 * 8 and drawn.min() >= 1 and drawn.max() == 128
    random = np.random.default_rng(0).lognormal(np.log(40), 0.5, 200_000)
    quantiles = [0.1, 0.5, 0.9]
    np.testing.assert_allclose(np.quantile(drawn, quantiles), np.quantile(random, quantiles), rtol=0.02)
    program = lowered_programs.train_program(lowered_programs.resolve(config), mesh)
    assert program.num_tokens == drawn.sum() and "lognormal lengths of median 40, sigma 0.5" in program.title
    assert program.turns < longest.turns and program.executed_flops < longest.executed_flops
    assert program.held == longest.held and program.needed == longest.needed  # a batch has room for the longest


@pytest.mark.parametrize(
    ("extent", "coords", "ports"),
    [
        ((4, 4, 4), [(0, 0, z) for z in range(4)], 2),  # a ring
        ((4, 4, 4), [(x, y, 0) for x in range(4) for y in range(4)], 4),  # two rings
        ((2, 2, 1), [(x, y, 0) for x in range(2) for y in range(2)], 2),  # two lines
        ((4, 4, 4), [(0, 0, z) for z in range(2)], 1),  # a part of a ring is a line
    ],
)
def test_links_of_a_group(extent, coords, ports):
    chip = roofline.CHIPS["v5p"]
    assert roofline.link_bytes_per_s(chip, extent, np.array(coords)) == ports * 100e9


def test_collectives_over_slices_send_each_chips_part_through_the_network():
    """8 chips in two slices of 2x2: 100 MB inside a slice over two ports, and a quarter of it, times two, from slice to slice."""
    chips = [
        types.SimpleNamespace(coords=(x, y, 0), slice_index=i) for i in range(2) for x in range(2) for y in range(2)
    ]
    devices = types.SimpleNamespace(ravel=lambda: chips)
    program = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=devices))

    def seconds(*group):
        found = hlo.Collective("collective-permute", 1, 100e6, group)  # sends all of its bytes
        return plan._links_s(types.SimpleNamespace(program=program, collectives=[found]), "v5p:2x2x1")

    assert seconds(0, 1, 2, 3) == pytest.approx(100e6 / 200e9)
    assert seconds(0, 4) == pytest.approx(100e6 / 6.25e9)  # each chip sends all of it
    assert seconds(*range(8)) == pytest.approx(100e6 / 200e9 + 100e6 / 4 / 6.25e9)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5p", "malformed; write <kind>:<dims>"),
        ("v5p:4xx4", "malformed"),
        ("h100:8", "unknown kind; choose one of v5e, v6e, v5p"),
    ],
)
def test_a_malformed_topology_is_refused(topology, message):
    with pytest.raises(ValueError, match=message):
        roofline.chip_of(topology)


@pytest.mark.parametrize(
    ("topology", "host"),
    [("v5e:1x1", "v5e:1x1"), ("v6e:2x4", "v6e:2x4"), ("v5e:4x4", "v5e:2x2"), ("v5p:4x4x8", "v5p:2x2x1")],
)
def test_a_host_is_a_slice_or_four_chips_of_one(topology, host):
    assert roofline.host_of(topology) == host


def test_the_chip_of_a_device_follows_from_its_name():
    assert roofline.of_device("NVIDIA H100 80GB HBM3") == roofline.DEVICES["NVIDIA H100"]
    assert roofline.of_device("TPU v5 lite") == roofline.CHIPS["v5e"]
    assert roofline.of_device("cpu") is None


def test_other_topologies_come_by_size():
    assert roofline.alternatives("v5e:8x8")[:2] == ["v5e:8x16", "v5e:16x16"]
    assert not any(name.startswith("v5p") for name in roofline.alternatives("v5p:16x16x16"))
    others = [name for name in roofline.alternatives("v5e:2x4") if not name.startswith("v5e")]
    assert roofline.alternatives("v5e:2x4")[-len(others) :] == others
    assert others[0] in ("v6e:2x2", "v5p:2x2x1")
    assert [roofline.num_chips(name) for name in others] == sorted(roofline.num_chips(name) for name in others)


def test_the_mfu_of_a_step_is_that_of_its_mean_length():
    """10,000 tokens in rollouts of 50 take 2 s on two chips."""
    chip = types.SimpleNamespace(device_kind="TPU v5", memory_stats=lambda: None)
    values = {"time/wait_s": 0.0, "time/step_s": 3.0, "time/train_step_s": 2.0}
    values |= {"batch/num_row_tokens": 10_000.0, "batch/sequence_length": 50.0}
    work = flops.ModelFlops.of(tiny.model()).model_flops(flops.PackedRows(64, [(50,)] * 200))
    found = roofline.utilization(values, tiny.model(), 2, [chip])
    assert found["machine/mfu"] == pytest.approx(work / (2 * 459e12 * 2))


# ---- programs --------------------------------------------------------------------------------------------------------


def small():
    c = base.get_config()
    c.model.num_layers = 2
    c.train.rows = 8
    c.train.row_length = 128
    c.inference.num_slots = 8
    return c


def test_every_program_lowers_without_an_array():
    """The learner's and the engine's own functions, on meshes of fake devices; bytes per chip are those of the shards."""
    exp = lowered_programs.resolve(small())
    mesh = mesh_lib.create({"fsdp": 4, "tensor": 2})
    server_mesh = mesh_lib.create({"tensor": 2}, jax.devices()[:2])
    made = [
        lowered_programs.train_program(exp, mesh),
        lowered_programs.logprobs_program(exp, mesh),
        lowered_programs.prefill_program(exp, server_mesh),
        lowered_programs.decode_program(exp, server_mesh),
    ]
    chunks = small()
    chunks.inference.update(prefill_chunk=16)
    made.append(lowered_programs.prefill_program(lowered_programs.resolve(chunks), server_mesh))
    for program in made:
        assert isinstance(program.lower(), jax.stages.Lowered)
    assert "a chunk of 16 tokens of one prompt, against 64 keys" in made.pop().title
    assert [program.name for program in made] == [*lowered_programs.LEARNER, *lowered_programs.SERVER]
    train, _, _, decode = made
    # All but the norms (replicated over tensor, and too small to matter) are split 8 ways.
    total = 4 * flops.ModelFlops.of(exp.model).held
    assert total / 8 <= train.held["parameters"] < total / 8 * 1.1
    assert train.held["optimizer"] == pytest.approx(2 * train.held["parameters"], rel=0.01)
    # k and v of 2 layers, 8 slots, one of 2 key heads, 64 positions, 32 dims, float32.
    assert decode.held["cache"] == 2 * 2 * 8 * 1 * 64 * 32 * 4


def test_transfers_between_slices_are_collectives():
    """A gradient of 3 x 8 x 128 bfloat16 numbers, summed over two slices in each of 5 micro-batches; its send is the same transfer."""
    transfer = 'is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    lines = f"""  %recv.1 = (bf16[3,8,128]{{2,1,0:T(8,128)}}, u32[], token[]) recv(%after), channel_id=3, {transfer}
  %send.1 = (bf16[3,8,128]{{2,1,0:T(8,128)}}, u32[], token[]) send(%g, %after), channel_id=4, {transfer}
"""
    program = hlo.parse(TEXT.replace("  %while.1 =", f"{lines}  %while.1 ="), turns=(5,))
    found = [one for one in hlo.collectives(program, across=(0, 8)) if one.group == (0, 8)]
    assert found == [hlo.Collective("all-reduce", 5, 3 * 8 * 128 * 2, (0, 8))] and found[0].sent_bytes == 5 * 6144
    chips = [types.SimpleNamespace(slice_index=n // 4) for n in range(12)]
    mesh = types.SimpleNamespace(devices=np.array(chips, object), size=12)
    assert plan._across(mesh) == [0, 4, 8]


def test_slices_have_replicas_of_the_learner():
    config = small()
    assert lowered_programs.learner_axes(config) == config.mesh.to_dict() | {"num_slices": 1}
    config.plan.num_slices = 4
    assert lowered_programs.learner_axes(config)["data"] == 4
    config.mesh.data = 8
    assert lowered_programs.learner_axes(config)["data"] == 8


def test_the_batch_is_that_of_full_length_rollouts():
    """32 x 8 rollouts of 64 tokens, two to a row of 128: 128 rows, 16 micro-batches of 8."""
    exp = lowered_programs.resolve(small())
    batch, packed = lowered_programs.abstract_batch(exp, mesh_lib.create({"fsdp": 8}))
    assert packed == flops.PackedRows(128, [(64, 64)] * 16 * 8)
    assert batch.tokens.shape[0] >= 16 and batch.tokens.shape[1:] == (8, 128)
    assert batch.tokens.sharding.shard_shape(batch.tokens.shape)[1] == 1
    assert batch.num_micro_batches.shape == ()


@pytest.mark.parametrize(
    ("scan_layers", "num_pages", "watched"),
    [
        (True, 0, ((2, 8, 1, 64, 32), (8, 1, 64, 32))),
        pytest.param(False, 0, ((8, 1, 64, 32),), marks=pytest.mark.slow),
        (True, 16, ((1, 2, 16, 64, 64), (1, 16, 64, 64), (1, 32, 64, 64))),  # a key and its value
    ],
)
def test_decode_copies_no_cache(scan_layers, num_pages, watched):
    """Compiled for the CPU; rl.plan prints the same count for a TPU. A stacked cache is watched whole and by layer."""
    c = small()
    c.model.scan_layers, c.inference.num_pages = scan_layers, num_pages
    mesh = mesh_lib.create({"tensor": 2}, jax.devices()[:2])
    decode = lowered_programs.decode_program(lowered_programs.resolve(c), mesh)
    assert decode.cache == watched
    text = decode.lower().compile().as_text()
    # Arrays of the cache occur in the form that is searched for.
    assert any(dims in text for dims in ("32,64]", "64,32]", "64,64]"))
    assert sum(hlo.copies(hlo.parse(text, decode.turns), dims) for dims in decode.cache) == 0


@pytest.mark.parametrize("layout", ["remote", "split", "time-shared"])
def test_new_weights_are_counted_once(layout):
    """They wait in the host of a server elsewhere, next to those of an engine with its own devices, or in the budget of shared ones."""
    config = small()
    config.topology.mode = "remote" if layout == "remote" else "auto"
    config.mesh.rollout_devices = 2 if layout == "split" else 0
    exp = lowered_programs.resolve(config)
    assert exp.config.topology.mode == config.topology.mode
    train = lowered_programs.train_program(exp, mesh_lib.create({"fsdp": 4}, jax.devices()[:4]))
    decode = lowered_programs.decode_program(exp, mesh_lib.create({"tensor": 2}, jax.devices()[:2]))
    weights_bytes = decode.held["parameters"]
    assert decode.waiting_bytes == (transformer.num_bytes(exp.published_model) if layout == "remote" else 0)
    assert decode.held.get("new version", 0) == (weights_bytes if layout == "split" else 0)
    sizes_of = dict(argument_size_in_bytes=7, output_size_in_bytes=3, alias_size_in_bytes=2, temp_size_in_bytes=5)
    memory = types.SimpleNamespace(**sizes_of, host_argument_size_in_bytes=0, host_temp_size_in_bytes=0)
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: TEXT)
    lowered = types.SimpleNamespace(compile=lambda options: compiled)
    program = dataclasses.replace(decode, lower=lambda: lowered, turns=(5,))
    outcome = plan.compile_program(program, roofline.CHIPS["v5p"])
    assert outcome.peak_bytes == 7 + 1 + 5 + decode.held.get("new version", 0)
    text = "swap of weights   one by one, with no second copy; the new ones wait in"
    described = plan.describe(dataclasses.replace(outcome, collectives=()), "v5p:2x2x1")
    assert (text in described) == (layout == "remote")
    if layout == "time-shared":
        parts = sizes.budget({"train": train, "decode": decode}, {"train": -1e12, "decode": -1e12})
        assert parts["weights of the engine"] == parts["new version"] == weights_bytes


def test_resolving_for_a_plan_leaves_the_config_alone():
    config = intellect2.get_config()
    before = config.to_json()
    assert lowered_programs.resolve(config).model.model_dim == 5120
    assert config.to_json() == before


def test_a_program_too_large_for_its_chips_is_not_compiled():
    program = lowered_programs.train_program(lowered_programs.resolve(small()), mesh_lib.create({"fsdp": 8}))
    chip = dataclasses.replace(roofline.CHIPS["v5e"], memory_bytes=1000)
    program = dataclasses.replace(program, lower=None)  # would raise
    outcome = plan.compile_program(program, chip)
    assert re.match(r"its arguments alone need [\d.]+ GiB of 0.00 GiB per chip", outcome.refusal)
    assert "DOES NOT FIT" in plan.describe(outcome, "v5e:2x4")


def abstract_mesh(topology, axes, role=lowered_programs.LEARNERS):
    """Replaces `lowered_programs.create_mesh`: the same sizes and shardings, without a compiler."""
    size, num_own = roofline.num_chips(topology) * axes.get("num_slices", 1), axes.get("rollout_devices", 0)
    if num_own:
        num_own *= size // roofline.num_chips(roofline.host_of(topology))
        size = num_own if role == lowered_programs.ENGINES else size - num_own
    axes = {axis: axes[axis] for axis in mesh_lib.AXES}
    known = math.prod(n for n in axes.values() if n != -1)
    if size % known:
        raise ValueError(f"{axes} does not fit {size}")
    sizes = tuple(size // known if axes[axis] == -1 else axes[axis] for axis in mesh_lib.AXES)
    if math.prod(sizes) != size:
        raise ValueError(f"{axes} does not fit {size}")
    return jax.sharding.AbstractMesh(sizes, mesh_lib.AXES)


@pytest.mark.parametrize(
    ("name", "held", "multiplied"),
    [
        ("intellect1", 10.2e9, 9.7e9),
        ("intellect2", 32.8e9, 32.0e9),
        ("intellect3", 106.9e9, 12.8e9),
        ("qwen3_0_6b_gsm8k", 0.596e9, 0.596e9),
        ("qwen3_30b_a3b", 30.5e9, 3.0e9),
    ],
)
def test_the_shipped_configs_are_those_models_and_divide(name, held, multiplied):
    """Parameters by the models' cards; rows, heads and parameters divide on the topology the config names."""
    module = importlib.import_module(f"configs.{name}")
    config = module.get_config()
    exp = lowered_programs.resolve(config)
    work = flops.ModelFlops.of(exp.model)
    assert work.held == pytest.approx(held, rel=0.01)
    assert work.multiplied == pytest.approx(multiplied, rel=0.03)
    topology = config.plan.topology
    kind, chip = topology.partition(":")[0], roofline.chip_of(topology)
    program = lowered_programs.train_program(exp, abstract_mesh(topology, config.mesh.to_dict()))
    assert program.estimated_bytes < chip.memory_bytes
    server = abstract_mesh(f"{kind}:{chip.host}", config.plan.server_mesh.to_dict())
    decode = lowered_programs.decode_program(exp, server)
    assert sum(decode.held.values()) < chip.memory_bytes
    version = transformer.num_bytes(exp.published_model)
    assert version == pytest.approx(2 * work.held, rel=1e-4)  # bfloat16, and few corrections of routers
    assert name != "intellect3" or version <= 214e9
    assert topology in module.__doc__ and f"configs/{name}.py" in module.__doc__
    assert name in SHIPPED  # whose tests would be skipped if no config was found


def test_both_stages_of_intellect_3_are_trained_as_it_says():
    """arXiv 2512.16144, section 3: Muon at 5e-5 after 300 steps in 65,536 tokens, then at 5e-8 in 98,304 over two chips."""
    for stage, rate, length, parts in (("reasoning", 5e-5, 65536, 1), ("agentic", 5e-8, 98304, 2)):
        config = intellect3.get_config(stage)
        exp = lowered_programs.resolve(config)
        rates = sft.rates(exp)
        assert (rates.name, rates.learning_rate, rates.warmup_steps) == ("muon", rate, 300)
        mesh = abstract_mesh(config.plan.topology, config.mesh.to_dict())
        assert (config.train.row_length, mesh.shape["context"]) == (length, parts)
        program = lowered_programs.train_program(exp, mesh)
        assert program.estimated_bytes < roofline.chip_of(config.plan.topology).memory_bytes
        assert config.train.row_length * config.warmup.tasks_per_step == pytest.approx(33.5e6, rel=0.02)
    with pytest.raises(ValueError, match="stage 'tools' does not exist; write .*:agentic"):
        intellect3.get_config("tools")


SHIPPED = [p.stem for p in sorted(ROOT.glob("configs/*.py")) if f"--config=configs/{p.name}" in p.read_text()]
SMALL = dict(model_dim=64, vocab_size=320, num_heads=8, num_kv_heads=4, head_dim=16, ffn_dim=128, rope_dim=0)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_server_holds_the_bytes_of_the_plan(name, tmp_path, monkeypatch):
    """The weights that the learner of each shipped config publishes, pulled and loaded by a server's store; narrower, but of the same tensors."""
    config = importlib.import_module(f"configs.{name}").get_config()
    if config.init_from and config.model.dtype == "auto":  # its model is that of its checkpoint
        (tmp_path / "config.json").write_text(json.dumps(hf_config.write(tiny.model(**SMALL, dtype="bfloat16"))))
        config.init_from = str(tmp_path)
        config = initial.completed(config, needs_files=False)
        monkeypatch.setattr(lowered_programs, "create_mesh", abstract_mesh)
        exp, _ = sizes.settled(config, lambda config: sizes.planned(config, "v5e:2x4"), lowered_programs.resolve)
        config = config_dict.ConfigDict(exp.config)
    config.model.update(SMALL | dict(num_layers=min(config.model.num_layers, 3)))
    if config.model.num_experts:
        config.model.update(num_experts=4, experts_per_token=2, expert_ffn_dim=32)
    exp, mesh = lowered_programs.resolve(config), mesh_lib.create({"tensor": 4}, jax.devices()[:4])
    learner = exp.learner(mesh_lib.create({}, jax.devices()[:1]))
    state = train_step.abstract_state(learner)
    trained = jax.eval_shape(functools.partial(train_step.policy, learner), state)
    options = broadcast.PublishOptions(dtype=exp.published_dtypes)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), trained)
    published, metadata = exp.published(params)
    broadcast.publish(published, 0, tmp_path, options, metadata=metadata)
    model = config_lib.ModelConfig(**broadcast.read_manifest(tmp_path, 0).metadata["model"])
    store = weights.Store(model, mesh, lora=exp.lora or None)
    pulled = broadcast.pull(tmp_path, shardings=store.load_shardings)
    weights.check_params(pulled.params, store)
    held = jax.tree.leaves(store.load(pulled.params))
    decode = lowered_programs.decode_program(exp, mesh)
    assert decode.held["parameters"] == sum(x.addressable_shards[0].data.nbytes for x in held)
    assert {str(x.dtype) for x in held} <= {config.model.dtype, "float32"}


@pytest.mark.slow
def test_a_remedy_costs_rows_before_chips(monkeypatch):
    """Everything "compiles" whose arguments and saved inputs fit: 106 B parameters need more than eight small chips."""
    monkeypatch.setattr(lowered_programs, "create_mesh", abstract_mesh)
    monkeypatch.setattr(plan, "compile_program", lambda program, chip, effort=0: plan.Outcome(program, ""))
    said = plan.remedy(intellect3.get_config(), "v5e:2x4", ["train"])
    assert said == "--topology=v5p:2x4x4 --config.train.rows=32 (compiled: it fits)"
    # 8 key heads divide over no larger v5e.
    said = plan.remedy(intellect3.get_config(), "v5e:2x4", ["prefill", "decode"])
    assert said == "--server_topology=v5p:2x2x1 (compiled: it fits)"
    assert plan.remedy(intellect2.get_config(), "v5p:4x4x4", ["train", "logprobs"]).startswith(
        "--config.model.remat=offload"
    )
    assert plan.remedy(intellect2.get_config(), "v5p:2x2x1", ["decode"]).startswith("--config.inference.num_slots=")


def test_without_the_compiler_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match="pip install -r third_party/plan-requirements.txt"):
        lowered_programs.create_mesh("v5e:2x4", {"fsdp": -1})


# ---- the compiler ----------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"),
    reason="the TPU compiler is not installed: pip install -r third_party/plan-requirements.txt",
)


def command(*args):
    done = subprocess.run(
        [sys.executable, "-m", "rl.plan", *args], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "topology", "programs"),
    [
        ("intellect2.py", "v5p:4x4x4", ()),
        ("intellect3.py", "v5p:4x4x8", ()),
        ("intellect3.py:reasoning", "v5p:4x4x8", ("--programs=train",)),
        ("intellect3.py:agentic", "v5p:4x4x8", ("--programs=train",)),
    ],
)
def test_the_large_configs_fit_their_pods(name, topology, programs):
    code, out, err = command(f"--config=configs/{name}", f"--topology={topology}", *programs)
    assert code == 0, out + err
    assert programs or "0 copies of a whole array of it" in out  # of decode's cache
    memory = float(re.search(r"fits; \d+ s, ([\d.]+) GiB of this machine", out)[1])
    assert memory < 6


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("module", "topology", "num_slices"),
    [(intellect2, "v5p:4x4x4", 1), (intellect2, "v5p:4x4x4", 2), (intellect3, "v5p:4x4x8", 1)],
)
def test_the_formula_counts_the_products_of_the_compiled_train_step(module, topology, num_slices):
    config = module.get_config()
    config.plan.num_slices = num_slices
    exp = lowered_programs.resolve(config)
    made = plan.make_program("train", exp, topology)
    compiled = made.lower().compile({"optimization_level": plan.EFFORTS[plan.EFFORT]})
    program = hlo.parse(compiled.as_text(), made.turns, made.turns_alone)
    batch, packed = lowered_programs.abstract_batch(exp, made.mesh)
    num_passes = census.attention_passes(program) / (
        exp.model.num_layers * len(packed.sequences) // batch.tokens.shape[1]
    )
    kernels = num_passes * flops.ModelFlops.of(exp.model).kernel_flops(packed)
    counted = made.mesh.size * census.matmul_flops(program) + kernels
    assert 0.99 < counted / made.executed_flops < 1.01


MODELS_TO_SERVE = {
    "Qwen3-0.6B": {"model_dim": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "ffn_dim": 3072, "vocab_size": 151936},
    "SmolLM2-135M": {"model_dim": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "ffn_dim": 1536, "vocab_size": 49152},
}  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", MODELS_TO_SERVE)
def test_a_decode_step_reads_the_weights_and_the_pages_in_use(name):
    """A quarter of the cache is in use, or all of it."""
    c = small()
    c.model.update(
        MODELS_TO_SERVE[name], dtype="bfloat16", scan_layers=True, tie_embeddings=True, qk_norm=name.startswith("Qwen")
    )
    c.train.row_length = 2048
    c.inference.update(num_slots=32, max_model_len=2048, steps_per_call=16, num_pages=-1)
    made = plan.make_program("decode", lowered_programs.resolve(c), "v5e:1x1")
    outcome = plan.compile_program(made, roofline.CHIPS["v5e"])
    assert not outcome.refusal
    for load, num_bytes in zip(made.loads, outcome.read_bytes, strict=True):
        least = made.weights_bytes + load.live_bytes
        assert 0.98 < num_bytes / least < 1.3, load.name  # the count of Qwen3 misses a part of one layer's weights


@pytest.mark.slow
@needs_compiler
def test_a_pod_too_small_is_refused_with_a_remedy():
    """One for the learner, one for the server, each compiled."""
    code, out, _ = command("--config=configs/intellect3.py", "--topology=v5e:2x4")
    assert code == 1
    assert out.count("DOES NOT FIT: its arguments alone need") == 4
    assert re.search(r"remedy for train and logprobs: --topology=\S+ .*\(compiled: it fits\)", out)
    assert re.search(r"remedy for prefill and decode: --server_topology=\S+ .*\(compiled: it fits\)", out)


# ---- the benchmark of the same programs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cpu_times_a_toy_and_says_so(tmp_path):
    dims = dict(model_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=16)
    fields = {f"model.{name}": size for name, size in dims.items()} | {
        "rl.prompts_per_step": 2,
        "inference.num_slots": 4,
    }
    command = [sys.executable, "-m", "bench.accelerator", "--config=configs/quickstart.py", "--repeats=1"]
    command += [f"--trace={tmp_path}", *(f"--config.{name}={value}" for name, value in fields.items())]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    for words in ("a toy", "train step: ", "swap: ", "prefill: ", "decode: 4 slots"):
        assert words in done.stdout
    assert "at least" not in done.stdout and done.stdout.count(" tokens/s") == 3
    traced = {path.name for path in tmp_path.iterdir() if [*path.rglob("*.xplane.pb")]}
    assert traced == {"train", "swap", "prefill", "decode"}
