"""The experts of a group's tokens in packed rows: laid out by hand, saved, placed, and sent to other hosts."""

import jax
import numpy as np
import pytest

from rl.learning.batch import credit as credit_lib
from rl.learning.batch import host_feed, packing
from sharding.mesh import mesh as mesh_lib
from tests.support import claims, small_learner
from tests.support import rollouts as rollouts_lib

P, G = 4, 3


def group(claims_of=lambda i: claims.good_claim(4 + 3, seed=i), versions=(0, 0, 0)):
    """Three samples of one prompt of 4 tokens, 4 sampled tokens each."""
    rng, out = np.random.default_rng(3), []
    for i in range(G):
        fields = dict(
            tokens=np.concatenate([np.arange(P), 100 + 10 * i + np.arange(4)]).astype(np.int32),
            sampled_mask=np.arange(8) >= P,
            logprobs=np.where(np.arange(8) >= P, -rng.random(8), 0).astype(np.float32),
            versions=np.full(8, versions[i], np.int32),
            sample=i,
            reward=float(i),
            routed_experts=claims_of(i),
        )
        out.append(rollouts_lib.make(**fields))
    return out


def shared_prompt(i):
    """Claims that agree on the tokens before the prompt's last."""
    rows = claims.good_claim(7, seed=i)
    rows[: P - 1] = claims.good_claim(P - 1, seed=99)
    return rows


def streams_of(batch):
    """{token of a sample: (its experts, position)}, read back from the packed arrays of a batch with one row in use."""
    found = {}
    for token, position, segment, branch, experts in zip(
        *(getattr(batch, n)[0, 0] for n in ("tokens", "positions", "segment_ids", "branch_ids", "routed_experts")),
        strict=True,
    ):
        found[int(segment), int(branch), int(position)] = int(token), experts.tolist()
    return found


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_group_is_laid_out_with_what_each_of_its_tokens_ran(share_prompts):
    """The prompt's last token once per sample: each ran it for itself. A token that was not run is left to the routers."""
    credit = credit_lib.Credit(share_prompts=share_prompts, router_replay=claims.CLAIMS)
    (rollouts,) = groups = [group(shared_prompt)]
    trees, _ = credit.assign(groups)
    layout = packing.Layout(64, 1, 1, router_replay=claims.CLAIMS)
    batch = packing.pack(trees, layout)
    found = streams_of(batch)
    if share_prompts:
        assert len(trees) == 1 and trees[0].num_tokens == P - 1 + G * 5
        branches = [[*([1, 0, t] for t in range(P - 1)), *([1, i + 1, t] for t in range(P - 1, 8))] for i in range(G)]
    else:
        assert [tree.num_tokens for tree in trees] == [8] * G
        branches = [[[i + 1, 1, t] for t in range(8)] for i in range(G)]
    for rollout, places in zip(rollouts, branches, strict=True):
        for t, place in enumerate(places):
            token, experts = found[tuple(place)]
            assert token == rollout.tokens[t]
            assert experts == (rollout.routed_experts[t, [0, 2]].tolist() if t < 7 else [[255, 255]] * 2)
    used = batch.segment_ids[0, 0] > 0
    assert (batch.routed_experts[0, 0][~used] == 255).all() and used.sum() == sum(t.num_tokens for t in trees)


def test_samples_whose_prompts_took_other_experts_do_not_share_them():
    def claims_of(i):
        rows = shared_prompt(i)
        rows[1, 0] = (0, 1) if i == 1 else (2, 3)
        return rows

    trees, _ = credit_lib.Credit(router_replay=claims.CLAIMS).assign([group(claims_of)])
    assert sorted(len(tree.branches) for tree in trees) == [1, 2]
    by_branch = {int(branch.tokens[-1]): tree for tree in trees for branch in tree.branches}
    for rollout in group(claims_of):
        tree = by_branch[int(rollout.tokens[-1])]
        np.testing.assert_array_equal(tree.routed_experts, rollout.routed_experts[: P - 1, [0, 2]])


def test_without_replay_nothing_is_carried():
    trees, _ = credit_lib.Credit().assign([group(shared_prompt)])
    assert trees[0].routed_experts is None and len(trees[0].prompt) == P
    batch = packing.pack(trees, packing.Layout(32, 1, 1))
    assert batch.routed_experts is None
    mesh = mesh_lib.create({}, jax.devices()[:1])
    assert len(jax.tree.leaves(packing.abstract(packing.Layout(32, 1, 1), mesh))) == 10


def test_batches_are_saved_placed_and_sent_with_their_experts(tmp_path):
    mesh = mesh_lib.create({"data": 2, "fsdp": 2, "context": 2})
    layout = packing.Layout(16, 4, 2, shards=4, router_replay=claims.CLAIMS)
    trees, _ = credit_lib.Credit(router_replay=claims.CLAIMS).assign(
        [group(lambda i: claims.good_claim(7, seed=i))] * 2
    )
    batch = packing.pack(trees, layout)
    packing.save(batch, tmp_path / "b.npz")
    loaded = packing.load(tmp_path / "b.npz")
    placed = packing.place(batch, mesh)
    blocks = host_feed.cut(batch, layout, host_feed.regions(layout, mesh, 0))
    sent = host_feed.assemble(int(batch.num_micro_batches), bytearray(b"".join(map(bytes, blocks))), layout, mesh)
    for name in packing.empty_row(layout):
        expected = getattr(batch, name)
        for other in (loaded, placed, sent):
            np.testing.assert_array_equal(np.asarray(getattr(other, name)), expected, err_msg=name)
    assert sent.routed_experts.sharding == placed.routed_experts.sharding
    assert {shard.data.shape for shard in placed.routed_experts.addressable_shards} == {(2, 1, 8, 2, 2)}
    assert small_learner.kinds(packing.abstract(layout, mesh)) == small_learner.kinds(placed)
