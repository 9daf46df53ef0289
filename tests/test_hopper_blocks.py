"""Which program of a Hopper launch takes which blocks, and which queries and keys a block's groups have."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import call_spec

from pallas_kernels import launch
from pallas_kernels.hopper import blocks as module
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.blocks import Blocks
from pallas_kernels.hopper.tiles import GROUP

STEPS = {"equal": [5] * 7, "falling": [9, 7, 5, 3, 1], "one tile": [4], "some with one": [3, 1, 1]}


def make(batch, heads, steps, cores=13, stream_bytes=0):
    streams = [jax.ShapeDtypeStruct((batch * heads, stream_bytes), jnp.int8)]
    return Blocks.make(batch, heads, steps, streams, cores)


def taken(blocks):
    """Batch, head and tile of each program's blocks, in its order."""
    plan, found = blocks.plan, []
    for program in range(blocks.programs):
        count = int(blocks.count(program, plan))
        assert count > 0
        found.append([tuple(map(int, blocks.at(program, step, plan))) for step in range(count)])
    return found


class TestBlocks:
    @pytest.mark.parametrize("heads", [(1, 1), (2, 6), (3, 5)], ids=str)
    @pytest.mark.parametrize("steps", STEPS)
    def test_each_is_taken_once(self, steps, heads):
        found = sum(taken(make(*heads, STEPS[steps])), [])
        assert sorted(found) == sorted(itertools.product(*map(range, (*heads, len(STEPS[steps])))))

    def test_too_many_to_plan_are_each_taken_once_too(self, monkeypatch):
        monkeypatch.setattr(module, "MOST_PLANNED", 1)
        blocks = make(2, 3, STEPS["falling"])
        assert blocks.plan is None
        assert sorted(sum(taken(blocks), [])) == sorted(itertools.product(range(2), range(3), range(5)))

    @pytest.mark.parametrize("stream_bytes", [0, module.CACHE_BYTES // 5, 2 * module.CACHE_BYTES])
    def test_no_program_has_much_more_to_do_than_the_mean(self, stream_bytes):
        steps = list(range(40, 0, -2))
        blocks = make(4, 16, steps, cores=132, stream_bytes=stream_bytes)
        done = [sum(steps[tile] + module.START for *_, tile in some) for some in taken(blocks)]
        # What is taken last is short where all heads are gone through together.
        assert max(done) <= np.mean(done) + (3 if stream_bytes == 0 else max(steps))

    def test_as_many_heads_are_gone_through_together_as_the_cache_holds(self):
        a_fifth = module.CACHE_BYTES // 5
        assert make(4, 16, [2, 1], stream_bytes=a_fifth).side == 4
        assert make(3, 5, [2, 1], stream_bytes=a_fifth).side == 5
        assert make(1, 7, [2, 1], stream_bytes=a_fifth).side == 1
        assert make(4, 16, [2, 1], stream_bytes=4 * module.CACHE_BYTES).side == 1


@pytest.mark.parametrize("span", [64, 128])
@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 128), (256, 1000), (1024, 256), (1280, 1280)], ids=str)
def test_groups_of_all_blocks_have_all_queries_and_see_all_their_keys(lengths, is_causal, groups, span):
    queries_module = pytest.importorskip("pallas_kernels.hopper.queries", exc_type=ImportError)
    queries, keys = lengths
    spec = call_spec(queries, keys, is_causal=is_causal)
    where = queries_module.QueryBlocks(queries, span, 1, tiles.Groups(groups=groups, stages=2), spec)
    steps = where.dealt(1, 1, jax.ShapeDtypeStruct((1,), jnp.int8)).steps
    covered = set()
    for tile, of_block in enumerate(steps):
        at = (0, 0, jnp.int32(tile))
        assert int(where.of(at)[1]) == of_block
        for group in range(groups):
            own, count, of_all = where.of_group(group, at)
            assert int(of_all) == of_block
            covered |= set(range(int(own), int(own) + GROUP))
            seen = min(int(own) + GROUP, keys) if is_causal else keys
            assert -(-seen // span) == int(count) <= of_block
    assert covered == set(range(queries))
    # The longest come first.
    assert list(steps) == sorted(steps, reverse=True)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 128), (256, 1280), (1000, 256), (1280, 1280)], ids=str)
def test_groups_of_all_blocks_have_all_keys_and_the_queries_that_see_them(lengths, is_causal, groups, group):
    kernel = pytest.importorskip("pallas_kernels.hopper.grad_kv", exc_type=ImportError)
    queries, keys = lengths
    spec, span = call_spec(queries, keys, is_causal=is_causal), kernel.SPAN_16
    layout = tiles.Groups(groups=groups, stages=2)
    call = kernel._Call(keys, span, group, (True, True), ("k",), ("q",), ("shift",), layout, spec)
    steps = call.dealt(1, 1, jax.ShapeDtypeStruct((1,), jnp.int8)).steps
    covered = set()
    for block, of_block in enumerate(steps):
        at = (0, 0, jnp.int32(block))
        first, per_head = call.queries_of(at)
        assert int(per_head) * group == of_block
        for index in range(groups):
            own = int(call.keys_of(index, at))
            covered |= set(range(own, own + GROUP))
            sees = [query for query in range(queries) if not is_causal or query >= own]
            assert not sees or int(first) * span <= sees[0] and sees[-1] < (int(first) + int(per_head)) * span
    assert covered == set(range(keys))
    assert list(steps) == sorted(steps, reverse=True)


def test_multiprocessors_are_those_of_the_described_gpu():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H20", num_cores=78, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert launch.target_cores() == 78
    if jax.devices()[0].platform == "cpu":
        assert launch.target_cores() == 132


def adds_of(kernel, sizes, dealt, program):
    """The tiles of dQ (batch, head, tile) that a program adds to in order, and how many blocks must have before."""
    found, plan = collections.deque(), dealt.plan
    for number in range(int(dealt.count(program, plan))):
        block = kernel._Block(sizes, dealt.at(program, jnp.int32(number), plan))
        for step in range(int(block.steps)):
            head, tile = block.at(jnp.int32(step))
            found.append(((int(block.batch), int(head), int(tile)), int(block.earlier(tile))))
    return found


@pytest.mark.parametrize("cores", [2, 5, 12])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("blocks", [(4, 4), (1, 5), (6, 2)], ids=str)
@pytest.mark.parametrize(("batch", "kv_heads", "group"), [(1, 6, 1), (2, 3, 2), (1, 5, 1)])
def test_no_program_waits_for_its_turn_forever(is_causal, blocks, batch, kv_heads, group, cores):
    # Each block counts in memory what it has added to a tile of dQ; a program takes the next when it has added to all.
    kernel = pytest.importorskip("pallas_kernels.hopper.grad_qkv", exc_type=ImportError)
    of_queries, of_keys = blocks
    spec = call_spec(128 * of_queries, 128 * of_keys, depth=64, is_causal=is_causal)
    sizes = kernel._Sizes(2 * of_queries, of_keys, group, tiles.Groups(groups=2, stages=3), spec)
    dealt = sizes.dealt(batch, kv_heads, cores)
    assert dealt.programs <= cores or dealt.programs == dealt.total
    # No more programs than one team's are on the GPU at a time; they start in their order.
    resident = dealt.programs // dealt.teams if dealt.programs < dealt.total else 1
    waiting = collections.deque(adds_of(kernel, sizes, dealt, program) for program in range(dealt.programs))
    started, turns, before = [], collections.Counter(), -1
    while turns.total() > before:
        before = turns.total()
        while waiting and len(started) < resident:
            started.append(waiting.popleft())
        for adds in started:
            while adds and turns[adds[0][0]] == adds[0][1]:
                turns[adds.popleft()[0]] += 1
        started = [adds for adds in started if adds]
    assert not waiting and not started
    assert set(turns) == set(itertools.product(range(batch), range(kv_heads * group), range(2 * of_queries)))
    assert sorted(sum(taken(dealt), [])) == sorted(itertools.product(*map(range, (batch, kv_heads, of_keys))))
