from __future__ import annotations

import pytest
import torch

from octavo.kv.api import Copy
from octavo.kv.groups import LayerKV, page_layout
from octavo.runner.store import KVStore, StoreError

LAYERS = [
    LayerKV(0, 2, 4, 6, 4),
    LayerKV(1, 2, 4, 6, 4),
    LayerKV(2, 2, 4, 6, 4, window=8),
    LayerKV(3, 2, 4, 6, 4, window=8),
]


def make(token_major: bool = False, blocks: int = 12) -> KVStore:
    return KVStore(
        LAYERS,
        page_layout(LAYERS, 4),
        blocks,
        dtype=torch.float32,
        device=torch.device("cpu"),
        token_major=token_major,
    )


@pytest.mark.parametrize("token_major", [False, True])
def test_layers_of_a_group_do_not_overlap_and_fill_the_page(token_major: bool) -> None:
    store = make(token_major)
    for number, layer in enumerate((0, 1), start=1):
        store.k[layer].fill_(number)
        store.v[layer].fill_(number + 10)
    for number, layer in enumerate((0, 1), start=1):
        assert (store.k[layer] == number).all()
        assert (store.v[layer] == number + 10).all()
    store.k[2].fill_(7)  # another group: its blocks are the same bytes
    assert (store.k[0] != 1).any()


@pytest.mark.parametrize("token_major", [False, True])
def test_write_reaches_only_its_slots(token_major: bool) -> None:
    store = make(token_major)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 6)
    blocks, offsets = torch.tensor([5, 5, 9]), torch.tensor([3, 0, 2])
    store.write(1, k, v, blocks, offsets)
    for i in range(3):
        assert torch.equal(store.k[1][blocks[i], :, offsets[i]], k[i])
        assert torch.equal(store.v[1][blocks[i], :, offsets[i]], v[i])
    assert int((store.buffer != 0).sum()) <= 3 * 2 * 10 * 4


@pytest.mark.parametrize(("src", "dst", "n"), [(0, 1, 6), (4, 1, 6), (2, 2, 3), (0, 8, 4), (8, 0, 4)])
def test_copies_may_overlap(src: int, dst: int, n: int) -> None:
    store = make()
    store.buffer.copy_(torch.randint(0, 256, store.buffer.shape, dtype=torch.uint8))
    wanted = store.buffer.clone()
    wanted[dst : dst + n] = wanted[src : src + n].clone()
    store.apply([Copy(src, dst, n)])
    assert torch.equal(store.buffer, wanted)


def test_copies_run_in_order() -> None:
    store = make()
    store.buffer[:] = torch.arange(12, dtype=torch.uint8)[:, None]
    store.apply([Copy(0, 1), Copy(1, 2), Copy(3, 0, 2)])
    assert store.buffer[:5, 0].tolist() == [3, 4, 0, 3, 4]


def test_a_bad_copy_leaves_everything_as_it_was() -> None:
    store = make()
    store.buffer[:] = torch.arange(12, dtype=torch.uint8)[:, None]
    before = store.buffer.clone()
    for bad in (Copy(0, 11, 2), Copy(-1, 0)):
        with pytest.raises(StoreError):
            store.apply([Copy(0, 1), bad])
        assert torch.equal(store.buffer, before)


def test_refuses_a_wrong_element_size_and_an_empty_pool() -> None:
    with pytest.raises(StoreError, match=r"4 bytes per KV element .* torch\.bfloat16 takes 2 and 0"):
        KVStore(LAYERS, page_layout(LAYERS, 4), 1, dtype=torch.bfloat16, device=torch.device("cpu"))
    with pytest.raises(StoreError, match="num_blocks is 0"):
        make(blocks=0)
