"""Advantages: the weight of each token of a group in each component, in both layouts of a batch."""

import dataclasses

import numpy as np
import pytest

from rl.learning.algorithms import advantages
from rl.learning.batch import credit, packing, training_batch
from tests.support import tiny


def rollout(prompt, sampled, mask, reward):
    """Tokens `sampled` after `prompt`; those whose `mask` is 0 are of the environment."""
    tokens = np.array([*prompt, *sampled], np.int32)
    sampled_mask = np.array([False] * len(prompt) + [bool(x) for x in mask])
    return tiny.rollout(
        sampled_mask,
        tokens=tokens,
        logprobs=np.where(sampled_mask, -tokens / 64, 0).astype(np.float32),
        temperature=0.5,
        reward=reward,
        rewards={"reward": reward},
        finish_reason="stop",
    )


GROUPS = [
    [
        rollout([5, 6], [20, 21], [1, 1], 0.0),
        rollout([5, 6], [22, 23, 24, 25], [1, 0, 0, 1], 1.0),
        rollout([5, 6], [26], [1], 4.0),
    ],
    [rollout([7], [30, 31, 32], [1, 0, 1], 2.0) for _ in range(2)],  # flat
    [rollout([8, 9, 10], [40 + i] * (i + 1), [1] * (i + 1), float(i * i)) for i in range(3)],
]
GROUPS = [[dataclasses.replace(one, sample=number) for number, one in enumerate(group)] for group in GROUPS]
COLUMNS = ("behavior_logp", "advantage", "temperature")


def trained(trees, streams=()):
    """The trained tokens of a packed batch, read off its arrays: (context seen, token, the numbers of `COLUMNS`, the weights of `streams`)."""
    batch = packing.pack(trees, packing.Layout(row_length=32, rows=2, num_micro_batches=8, streams=streams))
    absent = ("num_micro_batches", "routed_experts", "kept", *packing.OPTIONAL)
    names = [f.name for f in dataclasses.fields(batch) if f.name not in absent]
    rows = {name: getattr(batch, name).reshape(16, 32) for name in (*names, *streams)}
    found = []
    for row, column in np.argwhere(sum(rows[name] > 0 for name in ("loss_mask", *streams)) > 0):
        here = {name: array[row] for name, array in rows.items()}
        mine = (here["segment_ids"] == here["segment_ids"][column]) & (
            (here["branch_ids"] == 0) | (here["branch_ids"] == here["branch_ids"][column])
        )
        before = np.flatnonzero(mine & (here["positions"] < here["positions"][column]))
        before = before[np.argsort(here["positions"][before])]
        assert here["positions"][before].tolist() == list(range(here["positions"][column]))
        assert here["predictors"][column] == before[-1]
        numbers = (float(here[name][column]) for name in (*COLUMNS, *streams))
        found.append((tuple(here["tokens"][before].tolist()), int(here["tokens"][column]), *numbers))
    return sorted(found)


@pytest.mark.parametrize("advantage", sorted(advantages.ADVANTAGES.keys() - {"given"}))  # there a flat group is none
def test_shared_prompts_train_the_same_tokens(advantage):
    """Gaps in the mask, lengths that differ, a flat group: the same work, laid out in two ways."""
    shared, flat = credit.Credit(advantage).assign(GROUPS)
    alone, same = credit.Credit(advantage, share_prompts=False).assign(GROUPS)
    assert flat == same == 1 / 3
    assert len(shared) == 2 and len(alone) == 6
    assert sum(tree.num_tokens for tree in shared) == sum(tree.num_tokens for tree in alone) - 2 * (2 + 3)
    assert trained(shared) == trained(alone)
    assert len(trained(shared)) == sum(int(r.sampled_mask.sum()) for group in (GROUPS[0], GROUPS[2]) for r in group)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_teacher_sees_every_group_and_takes_nothing_from_reward(share_prompts):
    """Written out by hand: sampled tokens weigh 0.5 for the teacher, those of the flat group nothing for the policy."""
    rule = credit.Credit("group_mean", teacher_coef=0.5, share_prompts=share_prompts)
    assert rule.streams == ("ref_kl_weight",)
    trees, flat = rule.assign(GROUPS)
    assert flat == 1 / 3
    expected = []
    for group in GROUPS:
        mean = np.mean([r.reward for r in group])
        for r in group:
            for t in np.flatnonzero(r.sampled_mask):
                numbers = (float(r.logprobs[t]), float(np.float32(r.reward - mean)), 0.5)
                expected.append((tuple(r.tokens[:t].tolist()), int(r.tokens[t]), *numbers, 0.5))
    assert trained(trees, rule.streams) == sorted(expected)
    plain, _ = credit.Credit("group_mean", share_prompts=share_prompts).assign(GROUPS)
    masked = [sum(branch.loss_mask.sum() for tree in found for branch in tree.branches) for found in (trees, plain)]
    assert masked[0] == masked[1]  # the policy's denominator


def test_a_long_answer_is_worth_less():
    """DAPO, eq. 13, with 4 tokens allowed and a buffer of 2: 1 sampled token 0, 2 tokens 0, 3 tokens -1/2."""
    trees, _ = credit.Credit("group_mean", overlong_buffer=2, max_tokens=4).assign([GROUPS[2]])
    shaped = np.array([0.0, 1.0, 4.0 - 0.5])
    got = [float(branch.advantage[0]) for branch in trees[0].branches]
    np.testing.assert_allclose(got, shaped - shaped.mean(), rtol=1e-6)  # one rounding to float32
    with pytest.raises(ValueError, match="rl.overlong_buffer = 5 is not in 1..4"):
        credit.Credit(overlong_buffer=5, max_tokens=4)
    with pytest.raises(ValueError, match="returned .nan, .* for 3 rewards; return one finite number for each"):
        credit.Credit(lambda rewards_G: rewards_G * np.nan).assign([GROUPS[2]])
    with pytest.raises(
        ValueError, match=r"rl.average = 'token' is unknown \(did you mean tokens\?\); choose one of tokens, "
    ):
        credit.Credit(average="token")


@pytest.mark.parametrize(("failed", "expected"), [([], [0.0, 1.0, 4.0]), ([1], [0.0, 4.0]), ([2, 0], [])])
def test_samples_for_which_the_scorer_raised_are_left_out_of_a_group_with_enough_others(failed, expected):
    samples = GROUPS[0]
    scores = {one.sample: {"reward": one.reward} for one in samples}
    scores |= dict.fromkeys(failed, {"reward": 0.0, "error": 1.0})
    left_out = training_batch.failed(samples, scores)
    assert left_out == {*failed}
    found = training_batch.rewarded(samples, scores, left_out, 2)
    assert [one.reward for one in found] == expected
    trees, _ = credit.Credit().assign([found])
    alone, _ = credit.Credit().assign([[one for one in samples if one.sample not in failed]] * (len(expected) > 1))
    assert trained(trees) == ([] if len(failed) > 1 else trained(alone))
    rewards = [one.reward for one in training_batch.rewarded(samples, scores)]
    assert rewards == [0.0 if one.sample in failed else one.reward for one in samples]


def test_a_branch_is_left_out_with_its_sample_and_a_continuation_alone():
    root = GROUPS[0][0]
    branches = [dataclasses.replace(root, branch=n, num_branches=3) for n in range(3)]
    for raised, expected in ((branches[0], []), (branches[1], [0, 2])):
        scores = {one.number: {"reward": 1.0} for one in branches} | {raised.number: {"reward": 0.0, "error": 1.0}}
        left_out = training_batch.failed(branches, scores)
        assert [one.branch for one in training_batch.rewarded(branches, scores, left_out)] == expected
    scores = {root.sample: {"reward": 0.0, "error": 1.0}}  # of an episode of several calls: its branches have no own
    assert training_batch.failed(branches, scores) == {one.number for one in branches}


def test_a_claim_leaves_out_nothing_that_was_scored_here():
    """Neither an answer that exceeds the limits of the scorer nor a worker's claim of an error gains by it."""
    samples = [dataclasses.replace(one, rewards={"reward": 0.0, "error": 1.0}) for one in GROUPS[0]]
    scores = {one.sample: {"reward": 1.0, "error": 0.0} for one in samples} | {1: None}
    assert training_batch.failed(samples, scores) == set()
    assert [one.reward for one in training_batch.rewarded(samples, scores)] == [1.0, 0.0, 1.0]
    assert training_batch.failed(samples, {}) == {one.sample for one in samples}  # none is scored here


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_turn_is_compared_with_the_same_turn_of_others(share_prompts):
    """Loops over an episode of two turns, one of one, and one whose second turn is a branch after a longer prompt."""
    parts = [[1.0, 2.0], [4.0], [0.0, 5.0]]
    streams = [  # (episode, branch, prompt, sampled, mask)
        (0, 0, [5, 6], [20, 21, 22, 23], [1, 0, 1, 1]),
        (1, 0, [5, 6], [24], [1]),
        (2, 0, [5, 6], [25, 26], [1, 1]),
        (2, 1, [5, 6, 7], [27], [1]),
    ]
    group, expected = [], {}
    for g, branch, prompt, sampled, mask in streams:
        rewards = {f"turn_{k + 1}": part for k, part in enumerate(parts[g])}
        calls = np.array([[2, 3], [4, 6]] if g == 0 else [[len(prompt), len(prompt) + len(sampled)]], np.int32)
        one = rollout(prompt, sampled, mask, sum(parts[g]))
        group.append(
            dataclasses.replace(one, rewards=rewards, sample=g, branch=branch, num_branches=1 + g // 2, calls=calls)
        )
        turns = [0, 0, 1, 1] if g == 0 else [branch] * len(sampled)
        for token, turn in ((token, turn) for token, turn, on in zip(sampled, turns, mask, strict=True) if on):
            left = [sum(own[turn:]) for own in parts if len(own) > turn]
            expected[token] = (sum(parts[g][turn:]) - sum(left) / len(left)) * (0.5 if branch else 1.0)
    rule = credit.Credit(credit="turn", branch_weight=0.5, share_prompts=share_prompts)
    trees, _ = rule.assign([group])
    assert len(trees) == (1 if share_prompts else 4)  # the longer prompt begins with that of the others
    assert {token: advantage for _, token, _, advantage, _ in trained(trees)} == pytest.approx(expected)
    judge = dataclasses.replace(group[1], sample=0, branch=1, num_branches=2, trains=False)
    judged, _ = rule.assign([[*group, judge], [dataclasses.replace(one, trains=False) for one in group]])
    assert trained(judged) == trained(trees)
    assert rule.has_signal(group) and not rule.has_signal([dataclasses.replace(group[1], sample=g) for g in range(2)])
    with pytest.raises(ValueError, match="no episode of the batch has a reward component 'turn_1'"):
        rule.assign(GROUPS)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_streams_beyond_the_room_of_a_batch_are_left_out(share_prompts):
    """An episode may have more branches than anyone expected, which must not end the run."""
    groups, rule = (
        [[dataclasses.replace(one, step=1, task=None) for one in g] for g in GROUPS],
        credit.Credit(share_prompts=share_prompts),
    )
    whole = training_batch.assemble(1, groups, rule, {"a": 1.0})
    number = sum(len(tree.branches) for tree in whole.trees)
    assert number > 3 and "batch/num_streams_left_out" not in whole.metrics
    for room in range(1, number + 1):
        cut = training_batch.assemble(1, groups, rule, {"a": 1.0}, room)
        assert {*trained(cut.trees)} <= {*trained(whole.trees)}
        assert sum(len(tree.branches) for tree in cut.trees) == room
        assert cut.metrics.get("batch/num_streams_left_out", 0) == number - room and cut.metrics["a"] == 1.0


def test_averages_are_taken_over_what_trains():
    """ "samples": each sample weighs N / (samples * length), without the flat groups."""
    trees, _ = credit.Credit("group_mean", average="samples").assign(GROUPS)
    lengths = [int(r.sampled_mask.sum()) for group in (GROUPS[0], GROUPS[2]) for r in group]
    credits = [r.reward - np.mean([s.reward for s in group]) for group in (GROUPS[0], GROUPS[2]) for r in group]
    expected = [c * sum(lengths) / (len(lengths) * n) for c, n in zip(credits, lengths, strict=True)]
    got = [float(branch.advantage[np.argmax(branch.loss_mask)]) for tree in trees for branch in tree.branches]
    np.testing.assert_allclose(got, expected, rtol=1e-6)  # one rounding to float32


def test_flat_means_equal_up_to_rounding():
    """Small advantages train; equal rewards do not, although their mean is not exact."""
    slight = [dataclasses.replace(rollout([5], [20 + i], [1], 0.5 + 1e-6 * i), sample=i) for i in range(3)]
    equal = [dataclasses.replace(rollout([6], [30], [1], 0.1), sample=i) for i in range(7)]
    assert np.ptp([r.reward for r in equal]) == 0 != 0.1 - np.mean([0.1] * 7)
    trees, flat = credit.Credit("group_mean_std").assign([slight, equal])
    assert flat == 0.5 and len(trees) == 1 and trees[0].prompt.tolist() == [5]
    trees, flat = credit.Credit("group_mean").assign([slight])
    assert flat == 0 and [float(b.advantage[0]) for b in trees[0].branches] == pytest.approx([-1e-6, 0, 1e-6], rel=1e-5)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_tokens_after_keys_of_other_versions_are_mixed(share_prompts):
    """Each token and each key that it reads, by the contract of versions in docs/architecture.md, one by one."""
    rng = np.random.default_rng(0)
    for prompt_length in (1, 3):
        versions = np.sort(rng.integers(2, 5, (2, 9)), axis=1).astype(np.int32)
        versions[0, 1:] = versions[0, -1]  # the prompt alone may be older
        group = [
            rollout([5] * prompt_length, [20] * (9 - prompt_length), [1] * (9 - prompt_length), float(i))
            for i in (0, 1)
        ]
        group = [dataclasses.replace(one, versions=versions[i], sample=i) for i, one in enumerate(group)]
        trees, _ = credit.Credit(max_lag=1, share_prompts=share_prompts).assign([group])
        found = [branch.mixed[-(9 - prompt_length) :] for tree in trees for branch in tree.branches]
        for one, mixed in zip(group, found, strict=True):
            keys = [one.versions[j + 1] if one.sampled_mask[j + 1] else one.versions[j] for j in range(8)]
            for t in range(prompt_length, 9):
                assert mixed[t - prompt_length] == any(key != one.versions[t] for key in keys[:t])


def test_tokens_of_a_call_that_reused_keys_of_an_older_version_are_mixed():
    group = [rollout([5] * 3, [20 + i, 30, 9, 22], [1, 1, 0, 1], float(i)) for i in (0, 1)]
    calls, reused = np.array([[3, 5], [6, 7]], np.int32), np.array([[1, 4, 2]], np.int32)
    fields = {"versions": np.full(7, 3, np.int32), "calls": calls}
    group = [
        dataclasses.replace(group[0], **fields, prefix_versions=reused),
        dataclasses.replace(group[1], **fields, sample=1),
    ]
    trees, _ = credit.Credit(max_lag=1).assign([group])
    assert [branch.mixed[-4:].tolist() for tree in trees for branch in tree.branches] == [[0, 0, 0, 1], [0] * 4]


def of_env(group, env, first_token):
    """The group as one of environment `env`, with tokens of its own, by which trained tokens are told apart."""
    return [
        dataclasses.replace(
            one,
            tokens=np.where(one.sampled_mask, one.tokens + first_token, one.tokens),
            task=dataclasses.replace(one.task, env=env),
        )
        for one in group
    ]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("average", ["tokens", "batch", "samples", "prompts"])
def test_each_environment_of_a_batch_has_its_own_rules(average, share_prompts):
    """Loops over tokens: two environments with other advantages, normalizations, penalties, weights, and credit; "c" has turns."""
    turns = [[1.0, 2.0], [4.0, 0.5], [0.0, 5.0]]
    by_turn = [
        dataclasses.replace(
            rollout([11], [50 + 4 * g + i for i in range(4)], [1, 1, 0, 1], 0.0),
            sample=g,
            rewards={"turn_1": parts[0], "turn_2": parts[1]},
            calls=np.array([[1, 3], [4, 5]], np.int32),
        )
        for g, parts in enumerate(turns)
    ]
    batch = [
        of_env(GROUPS[0], "a", 100),
        of_env(GROUPS[2], "b", 200),
        of_env(by_turn, "c", 0),
        of_env(GROUPS[1], "a", 0),
    ]
    batch.append(of_env(GROUPS[2], "a", 300))
    own = {
        "a": credit.Credit("group_mean", normalize="batch_std", weight=2.0),
        "b": credit.Credit("rloo", overlong_buffer=2, max_tokens=4),
        "c": credit.Credit("group_mean", credit="turn", weight=0.25),
    }
    own = {env: dataclasses.replace(rule, average=average, share_prompts=share_prompts) for env, rule in own.items()}
    rule = credit.Credit(average=average, share_prompts=share_prompts, envs=own)
    trees, flat = rule.assign(batch)
    assert flat == 1 / 5  # GROUPS[1], whose rewards are equal

    lengths = {id(group): [int(r.sampled_mask.sum()) for r in group] for group in batch}
    trained_groups = [group for group in batch if group is not batch[3]]
    num_tokens = sum(sum(lengths[id(group)]) for group in trained_groups)
    num_samples = sum(len(group) for group in trained_groups)
    raw = {id(group): [r.reward - np.mean([s.reward for s in group]) for r in group] for group in batch}
    values = [x for group in (batch[0], batch[3], batch[4]) for x in raw[id(group)]]  # of "a" alone
    std = np.sqrt(sum((x - np.mean(values)) ** 2 for x in values) / (len(values) - 1))
    expected = {}
    for group in trained_groups:
        env = group[0].task.env
        for g, r in enumerate(group):
            length = lengths[id(group)][g]
            factor = {
                "tokens": 1.0,
                "batch": num_tokens / sum(map(sum, lengths.values())),
                "samples": num_tokens / (num_samples * length),
                "prompts": num_tokens / (len(trained_groups) * sum(lengths[id(group)])),
            }[average]
            for t in np.flatnonzero(r.sampled_mask):
                if env == "a":
                    advantage = 2.0 * raw[id(group)][g] / (std + 1e-6)
                elif env == "b":
                    shaped = [
                        s.reward - min(max((n - 2) / 2, 0), 1) for s, n in zip(group, lengths[id(group)], strict=True)
                    ]
                    advantage = shaped[g] - (sum(shaped) - shaped[g]) / (len(group) - 1)
                else:
                    turn = int(t > 2)
                    left = [sum(parts[turn:]) for parts in turns]
                    advantage = 0.25 * (left[g] - np.mean(left))
                expected.setdefault((env, int(r.tokens[t])), []).append(advantage * factor)
    got = {}
    envs = {int(token): g[0].task.env for g in trained_groups for r in g for token in r.tokens[r.sampled_mask]}
    for _, token, _, advantage, _ in trained(trees):
        got.setdefault((envs[token], token), []).append(advantage)
    assert got.keys() == expected.keys()
    for place, advantages_N in expected.items():
        assert sorted(got[place]) == pytest.approx(sorted(advantages_N), rel=1e-6), place  # one rounding to float32
    assert [rule.has_signal(group) for group in batch] == [True, True, True, False, True]


def test_one_rule_for_all_environments_gives_the_same_bits_as_none():
    same = credit.Credit(
        "group_mean_std", envs={"a": credit.Credit("group_mean_std"), "b": credit.Credit("group_mean_std")}
    )
    mixed = [of_env(GROUPS[0], "a", 0), of_env(GROUPS[1], "b", 0), of_env(GROUPS[2], "b", 0)]
    assert trained(same.assign(mixed)[0]) == trained(credit.Credit("group_mean_std").assign(GROUPS)[0])


def test_the_weight_of_an_environment_counts_for_distillation_too():
    half = credit.Credit(teacher_coef=0.5, weight=0.5)
    rule = credit.Credit(teacher_coef=0.5, envs={"a": half, "b": dataclasses.replace(half, weight=1.0)})
    trees, _ = rule.assign([of_env(GROUPS[0], "a", 0), of_env(GROUPS[2], "b", 0)])
    assert sorted({weight for *_, weight in trained(trees, rule.streams)}) == [0.25, 0.5]


def test_metrics_name_each_environment_and_the_parts_of_its_reward():
    def scored(group, env, **parts):
        rewards = [dict(one.rewards) | parts | {"turn_1": 1.0} for one in group]
        return of_env([dataclasses.replace(one, rewards=r) for one, r in zip(group, rewards, strict=True)], env, 0)

    many = {f"part_{n:02}": float(n) for n in range(20)}
    groups = [scored(GROUPS[0], "a", tool_errors=2.0), scored(GROUPS[1], "a"), scored(GROUPS[2], "b", **many)]
    rule = credit.Credit(envs={"a": credit.Credit(), "b": credit.Credit()})
    found = training_batch.assemble(1, groups, rule, {}).metrics
    assert found["env/a/reward"] == pytest.approx((0 + 1 + 4 + 2 + 2) / 5) and found["env/b/reward"] == pytest.approx(
        5 / 3
    )
    assert found["env/a/response_length"] == pytest.approx((2 + 2 + 1 + 2 + 2) / 5)
    assert (found["env/a/num_groups"], found["env/b/num_groups"], found["env/a/zero_advantage_frac"]) == (2, 1, 0.5)
    assert found["env/a/scores/tool_errors"] == 2.0  # of the episodes that have it
    parts = sorted(name for name in found if name.startswith("env/b/scores/"))
    assert parts == [f"env/b/scores/part_{n:02}" for n in range(16)] and found[parts[7]] == 7.0
    alone = training_batch.assemble(1, GROUPS, credit.Credit(), {}).metrics
    assert not [name for name in alone if name.startswith("env/")]


@pytest.mark.parametrize(
    ("gate", "expected"), [(0.0, [True, False, True]), (1.9, [True, False, True]), (2.34, [False, False, False])]
)
def test_a_gate_refuses_groups_whose_advantages_are_close_to_zero(gate, expected):
    """The largest distances from the mean are 4 - 5/3 = 2.33, 0, and 4 - 5/3 = 2.33."""
    rule = credit.Credit(gate=gate)
    assert [rule.has_signal(group) for group in GROUPS] == expected
    trees, flat = rule.assign(GROUPS)  # a gate chooses groups, and changes no advantage
    assert flat == pytest.approx(1 / 3) and len(trees) > 0


def test_a_metric_of_the_user_that_fails_does_not_end_the_run(capsys):
    """The batch is in the ledger: it would come again after a resume, where other code is refused."""

    def broken(groups):
        return {"x": 1 / 0}

    rule = credit.Credit(metrics=(broken, lambda groups: {"y": len(groups)}))
    found = training_batch.assemble(1, GROUPS, rule, {}).metrics
    assert {name: value for name, value in found.items() if name.startswith("own/")} == {"own/y": len(GROUPS)}
    assert (
        "warning: metrics function broken failed: ZeroDivisionError: division by zero (test_credit"
        in capsys.readouterr().err
    )
