"""A pool that several threads use, that is copied whole, or that was made in inference mode."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from helpers import oracle
from pools import NAN

from paged_attention import OutOfBlocks, PagedKVCache, paged_attention

PREFIX = 6  # tokens
THREADS = 8


@contextmanager
def threads_that_change_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def pool_with_prefix():
    """A pool of 12 blocks that holds "prefix", and what attention over it gives."""
    torch.manual_seed(0)
    pool = PagedKVCache(12, 4, 1, 4)
    pool.key_cache().fill_(NAN)
    pool.value_cache().fill_(NAN)
    pool.write(torch.randn(PREFIX, 1, 4), torch.randn(PREFIX, 1, 4), pool.extend("prefix", PREFIX))
    return pool, attention(pool, "prefix")


def attention(pool, name):
    step = pool.block_tables([name]), pool.seq_lens([name])
    caches = pool.key_cache(), pool.value_cache()
    return paged_attention(torch.ones(1, 2, 4), *caches, *step, layout="HND")


def in_threads(work):
    """Run work(number) in each thread. Returns what they raised."""
    raised = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("rounds", [500])
def test_pub_26_two_threads_on_one_pool_never_get_the_same_block(rounds):
    pool, right = pool_with_prefix()
    taken = []  # blocks that a thread holds for its own

    def work(number):
        for n in range(rounds):
            try:
                pool.fork("prefix", number)
                pool.extend(number, 1 + n % 9)
            except OutOfBlocks:
                pool.free(number)
                continue
            own = pool.block_tables([number])[0, PREFIX // 4 :].tolist()
            taken.extend(own)
            assert all(taken.count(block) == 1 for block in own), "a block has two owners"
            for block in own:
                taken.remove(block)
            pool.truncate(number, PREFIX)
            pool.free(number)

    with threads_that_change_often():
        assert in_threads(work) == []
    assert pool.num_free_blocks == 10
    # A stranger that takes all that is free, and writes to it, leaves the prefix as it was.
    slots = pool.extend("stranger", 40)
    pool.write(torch.full((40, 1, 4), 9.0), torch.full((40, 1, 4), 9.0), slots)
    assert torch.equal(attention(pool, "prefix"), right)


def test_of_threads_that_want_the_last_block_one_gets_it():
    for _ in range(50):
        pool = PagedKVCache(1, 4, 1, 4)
        with threads_that_change_often():
            raised = in_threads(lambda number, pool=pool: pool.extend(number, 1))
        assert [type(error) for error in raised] == [OutOfBlocks] * (THREADS - 1)
        assert pool.num_free_blocks == 0


@pytest.mark.quick
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_of_a_pool_goes_its_own_way(copied):
    pool, right = pool_with_prefix()
    other = copied(pool)
    other.write(torch.ones(9, 1, 4), torch.ones(9, 1, 4), other.extend("prefix", 9))
    assert pool.seq_lens(["prefix"]).tolist() == [PREFIX] and pool.num_free_blocks == 10
    assert torch.equal(attention(pool, "prefix"), right)
    assert not torch.equal(attention(other, "prefix"), right)


@pytest.mark.quick
def test_pub_40_a_pool_made_in_inference_mode_can_be_written_to_outside():
    torch.manual_seed(1)
    with torch.inference_mode():
        pool = PagedKVCache(3, 4, 1, 4)
    key, value = torch.randn(2, 9, 1, 4)
    pool.write(key, value, pool.extend("a", 9))
    right, _ = oracle(torch.ones(1, 2, 4), [key], [value])
    assert (attention(pool, "a") - right).abs().max() < 1e-5
