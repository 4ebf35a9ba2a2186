"""KVLayout.from_tensors and KVPool.wrap: found where the slow reference finds it, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.forms import WAYS, Form, rotary, same_bits

from kvtrie._core import LayoutError
from kvtrie.pool import KVLayout, KVPool
from kvtrie.rope import RopeSpec


@WAYS
def test_wrap_finds_k_and_v(form: Form) -> None:
    sizes = form.sizes()
    held = form.build("float32", sizes)
    layout = form.layout(held, sizes)
    assert layout.num_layers == sizes.layers
    assert (layout.head_dim, layout.v_head_dim) == (sizes.head_dim, sizes.v_head_dim)
    pool = KVPool.wrap(held.tensors, layout)
    assert pool.num_blocks == sizes.blocks
    want = form.split(held.tensors, sizes)
    for (k, v), my_k, my_v in zip(want, pool.k, pool.v, strict=True):
        assert same_bits(k, my_k)
        assert (v is None) == (my_v is None)
        assert v is None or my_v is None or same_bits(v, my_v)


@WAYS
def test_views_reach_the_tensors(form: Form) -> None:
    sizes = form.sizes()
    held = form.build("bfloat16", sizes)
    pool = form.pool(held, sizes)
    for view in (*pool.k, *pool.v):
        if view is not None:
            view.fill_(7.0)
    for k, v in form.split(held.tensors, sizes):
        assert bool((k == 7).all())
        assert v is None or bool((v == 7).all())


@WAYS
def test_scatter_and_gather_on_every_form(form: Form) -> None:
    sizes = form.sizes()
    held = form.build("float32", sizes)
    pool = form.pool(held, sizes)
    before = form.split(held.tensors, sizes)
    bits = held.bits()
    rows = torch.arange(sizes.layers * 8 * sizes.heads * 12.0)
    k = rows.reshape(sizes.layers, 8, sizes.heads, 12)
    v = -k[..., : sizes.v_head_dim].clone() if sizes.v_head_dim else None
    pool.scatter(k, v, [6, 1, 3], 4)
    got_k, got_v = pool.gather([6, 1, 3], 4, 12)
    assert torch.equal(got_k, k)
    assert (v is None) == (got_v is None)
    assert v is None or got_v is None or torch.equal(got_v, v)
    slots = [6 * 5 + 4, *range(5, 10), 15, 16]
    for (old_k, old_v), new_k, new_v in zip(before, pool.k, pool.v, strict=True):
        for old, new in ((old_k, new_k), (old_v, new_v)):
            if old is not None and new is not None:
                for slot in slots:
                    new[slot // 5, slot % 5] = old[slot // 5, slot % 5]
    for now, then in zip(held.bits(), bits, strict=True):
        assert torch.equal(now, then)


def _args(**changes: Any) -> dict[str, Any]:
    known = {
        "axes": "kv blocks tokens heads dim",
        "block_size": 4,
        "num_kv_heads": 3,
        "head_dim": 8,
    }
    return known | changes


def _rows_of_12() -> dict[str, Any]:
    return _args(axes="(blocks tokens) heads dim", num_kv_heads=1, head_dim=12)


def _tensors(count: int = 2, **options: Any) -> list[torch.Tensor]:
    return [torch.zeros(2, 6, 4, 3, 8, **options) for _ in range(count)]


def _overlapping() -> list[torch.Tensor]:
    whole = torch.zeros(2 * 6 * 4 * 3 * 8 + 8)
    return [whole[start:].as_strided((2, 6, 4, 3, 8), (576, 96, 24, 8, 1)) for start in (0, 8)]


def _apart(offset: int, heads_stride: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V in rows of 24, V at an offset from K."""
    whole = torch.zeros(999)
    shape, strides = (8, 1, 12), (24, heads_stride, 1)
    return [whole.as_strided(shape, strides)], [whole[offset:].as_strided(shape, strides)]


def _same_twice() -> list[torch.Tensor]:
    return _tensors(1) * 2


def _expanded() -> list[torch.Tensor]:
    return [torch.zeros(2, 1, 4, 3, 8).expand(2, 6, 4, 3, 8)]


def _sliding() -> list[torch.Tensor]:
    return [torch.zeros(9_999).as_strided((2, 6, 4, 3, 8), (576, 96, 20, 8, 1))]


def _tangled() -> list[torch.Tensor]:
    """No element is there twice, but nesting does not show it."""
    one = torch.zeros(99).as_strided((2, 1, 1, 1, 3), (3, 9, 9, 9, 2))
    return [one]


def _lying_within() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    whole = torch.zeros(2 * 576)
    return [whole.as_strided((24, 3, 8), (48, 16, 2))], [whole[1:577].view(24, 3, 8)]


REFUSED = [
    ("shape", _tensors(), _args(num_kv_heads=2), "axis 'heads' of length 3 should have length 2"),
    ("dim", _tensors(), _args(head_dim=16), "axis 'dim' of length 8"),
    ("block-size", _tensors(), _args(block_size=8), "axis 'tokens' of length 4"),
    ("rank", [torch.zeros(6, 4, 3, 8)], _args(), "has 4 axes"),
    ("kv-3", [torch.zeros(3, 6, 4, 3, 8)], _args(), "axis 'kv' of length 3"),
    ("dtypes", [*_tensors(1), *_tensors(1, dtype=torch.float16)], _args(), "tensor 1 is torch.f"),
    ("devices", [*_tensors(1), *_tensors(1, device="meta")], _args(), "tensor 1 has no addresses"),
    ("meta", _tensors(1, device="meta"), _args(), "no addresses"),
    ("shapes", [*_tensors(1), torch.zeros(2, 7, 4, 3, 8)], _args(), "tensor 1 has shape"),
    (
        "strides",
        [*_tensors(1), torch.zeros(2, 6, 3, 4, 8).transpose(2, 3)],
        _args(),
        "tensor 1 has strides",
    ),
    ("float8", _tensors(1, dtype=torch.float8_e4m3fn), _args(), "float8_e4m3fn"),
    ("int8", _tensors(1, dtype=torch.int8), _args(), "int8"),
    ("overlap", _overlapping(), _args(), "tensors 0 and 1 overlap"),
    ("next-row", _apart(20, 24), _rows_of_12(), "tensors 0 and 1 overlap"),
    ("lone-head", _apart(8, 5), _rows_of_12(), "tensors 0 and 1 overlap"),
    ("twice", _same_twice(), _args(), "tensors 0 and 1 overlap"),
    ("expanded", _expanded(), _args(), "share addresses"),
    ("sliding", _sliding(), _args(), "share addresses"),
    ("tangled", _tangled(), _args(block_size=1, num_kv_heads=1, head_dim=3), "cannot be verified"),
    ("within", _lying_within(), _args(axes="(blocks tokens) heads dim"), "different strides"),
    ("no-blocks", [torch.zeros(2, 0, 4, 3, 8)], _args(), "no elements"),
    ("empty", [], _args(), "empty"),
    ("bare", _tensors(1)[0], _args(), "do not name 'layers'"),
    ("layers-list", _tensors(3), _args(axes="layers blocks tokens heads dim"), "must be a pair"),
    ("no-pair", _tensors(3), _args(axes="blocks kv tokens heads dim"), "axis 'blocks'|axis 'kv'"),
    (
        "uneven-pair",
        ([torch.zeros(24, 3, 8)] * 2, [torch.zeros(24, 3, 8)]),
        _args(axes="(blocks tokens) heads dim"),
        "2 tensors of K, but 1 of V",
    ),
    (
        "uneven-blocks",
        ([torch.zeros(24, 3, 8)], [torch.zeros(20, 3, 8)]),
        _args(axes="(blocks tokens) heads dim"),
        "K has 6 blocks, V 5",
    ),
    ("slots", [torch.zeros(25, 3, 16)], _args(axes="(blocks tokens) heads (kv dim)"), "multiple"),
    ("unlike", _tensors(), _args(v_head_dim=4), "cannot hold both"),
    ("kv-without-v", _tensors(), _args(v_head_dim=0), "no V"),
    ("heads", [torch.zeros(6, 4, 16)], _args(axes="blocks tokens (kv dim)"), "'heads'"),
    ("unknown-axis", _tensors(), _args(axes="kv blocks tokens heads width"), "'width'"),
    ("twice-named", _tensors(), _args(axes="kv blocks tokens dim dim"), "'dim' twice"),
    ("missing", _tensors(), _args(axes="kv blocks heads dim"), "do not name 'tokens'"),
    ("open", _tensors(), _args(axes="kv blocks tokens (heads dim"), "not closed"),
    ("nested", _tensors(), _args(axes="((kv blocks) tokens) heads dim"), "malformed"),
    ("closed", _tensors(), _args(axes="kv) blocks tokens heads dim"), "malformed"),
    ("symbol", _tensors(), _args(axes="kv, blocks tokens heads dim"), "malformed"),
    (
        "two-unknown",
        torch.zeros(12, 2, 4, 3, 8),
        _args(axes="(layers blocks) kv tokens heads dim"),
        "neither is known",
    ),
]


@pytest.mark.parametrize(
    ("tensors", "args", "message"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_from_tensors_refuses(tensors: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        KVLayout.from_tensors(tensors, **args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [None, 3, {"layer": torch.zeros(2)}, [3], [None]])
def test_from_tensors_refuses_what_is_no_tensor(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"KVLayout\.from_tensors"):
        KVLayout.from_tensors(bad, **_args())


def test_from_tensors_refuses_axes_of_another_type() -> None:
    with pytest.raises(TypeError, match="axes"):
        KVLayout.from_tensors(_tensors(), **_args(axes=3))


@pytest.mark.parametrize(
    ("name", "bad"), [("block_size", 0), ("head_dim", -1), ("num_kv_heads", 0)]
)
def test_from_tensors_refuses_sizes_out_of_range(name: str, bad: int) -> None:
    with pytest.raises(ValueError, match=name):
        KVLayout.from_tensors(_tensors(), **_args(**{name: bad}))


def test_wrap_verifies_again() -> None:
    layout = KVLayout.from_tensors(_tensors(), **_args())
    with pytest.raises(LayoutError, match="layers 3, the layout says 2"):
        KVPool.wrap(_tensors(3), layout)
    with pytest.raises(LayoutError, match="float16, the layout says float32"):
        KVPool.wrap(_tensors(2, dtype=torch.float16), layout)
    with pytest.raises(LayoutError, match=r"KVPool\.wrap.* overlap"):
        KVPool.wrap(_same_twice(), layout)


def test_own_layouts_and_engines_are_not_mixed_up() -> None:
    own = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, dtype="float32", block_size=4)
    with pytest.raises(LayoutError, match="from_tensors"):
        KVPool.wrap(_tensors(), own)
    engines = KVLayout.from_tensors(_tensors(), **_args())
    assert engines != own
    with pytest.raises(LayoutError, match=r"KVPool\.wrap"):
        KVPool(engines, num_blocks=4)


@pytest.mark.parametrize(
    ("layers", "head_dim", "message"),
    [(3, 8, "3 layers, the layout has 2"), (2, 16, "head_dim 16, the layout has 8")],
)
def test_pool_refuses_a_rope_of_another_geometry(layers: int, head_dim: int, message: str) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, dtype="float32", block_size=4)
    rope = RopeSpec((rotary(4),) * layers, head_dim)
    with pytest.raises(LayoutError, match=message):
        KVPool(layout, rope, num_blocks=4)
    with pytest.raises(LayoutError, match=message):
        KVPool.wrap(_tensors(), KVLayout.from_tensors(_tensors(), **_args()), rope)


def test_pool_refuses_a_device_without_kernel() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, dtype="float32", block_size=4)
    with pytest.raises(ValueError, match="no kernel for meta"):
        KVPool(layout, num_blocks=4, device="meta")


def test_rows_of_k_and_v_that_alternate_do_not_overlap() -> None:
    for stride in (24, 5, 1, 10_000):
        assert KVLayout.from_tensors(_apart(12, stride), **_rows_of_12()).num_layers == 1


def test_layers_of_one_tensor_do_not_count_as_overlap() -> None:
    """Eighty layers inside the blocks of one tensor: every pair of ranges meets, none shares."""
    whole = torch.zeros(4, 80, 2, 4, 3, 8)
    layout = KVLayout.from_tensors(
        [whole[:, layer] for layer in range(80)], **_args(axes="blocks kv tokens heads dim")
    )
    assert layout.num_layers == 80


MLA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_size": 256,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "dtype": "bfloat16",
}


def test_from_config_of_mla() -> None:
    latent = KVLayout.from_config(MLA)
    assert (latent.num_kv_heads, latent.head_dim, latent.v_head_dim) == (1, 80, 0)
    assert latent.bytes_per_token == 5 * 80 * 2
    expanded = KVLayout.from_config(MLA, mla="expanded")
    assert (expanded.num_kv_heads, expanded.head_dim, expanded.v_head_dim) == (8, 48, 24)
    assert expanded.bytes_per_token == 5 * 8 * (48 + 24) * 2


@pytest.mark.parametrize("name", ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
def test_from_config_of_mla_refuses_missing_field(name: str) -> None:
    config = {key: value for key, value in MLA.items() if key != name}
    with pytest.raises(LayoutError, match=name):
        KVLayout.from_config(config, mla="expanded")


def test_from_config_refuses_another_form_of_mla() -> None:
    with pytest.raises(ValueError, match="absorbed"):
        KVLayout.from_config(MLA, mla="absorbed")  # type: ignore[arg-type] # what is refused


def test_layout_without_v_is_half_as_large() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", v_head_dim=0)
    assert layout.bytes_per_token == 2 * 8 * 4
    pool = KVPool(layout, num_blocks=3)
    assert pool.v == (None, None)
    assert pool.num_bytes == sum(rows.nbytes for rows in pool.k)
    with pytest.raises(ValueError, match="v_head_dim is 0"):
        pool.scatter(torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8), [0], 0)


def test_keys_by_channel_next_to_values_by_token() -> None:
    # One page per block and head: all of K channel by channel, then all of V token by token.
    blocks, heads, tokens, dim = 5, 2, 8, 4
    pages = [torch.zeros(blocks, heads, 2, tokens * dim) for _ in range(2)]
    of_k = [page[:, :, 0].view(blocks, heads, dim, tokens).transpose(2, 3) for page in pages]
    of_v = [page[:, :, 1].view(blocks, heads, tokens, dim) for page in pages]
    layout = KVLayout.from_tensors(
        (of_k, of_v),
        axes="blocks heads tokens dim",
        block_size=tokens,
        num_kv_heads=heads,
        head_dim=dim,
    )
    pool = KVPool.wrap((of_k, of_v), layout)
    k = torch.arange(2 * 3 * heads * dim, dtype=torch.float32).reshape(2, 3, heads, dim) + 1
    pool.scatter(k, -k, blocks=[3], start=2)
    assert pages[1][3, 1, 0].view(dim, tokens)[2, 4] == k[1, 2, 1, 2]
    assert pages[1][3, 1, 1].view(tokens, dim)[4, 2] == -k[1, 2, 1, 2]
    assert sum(int(page.count_nonzero()) for page in pages) == 2 * k.numel()


def test_strides_that_differ_and_rows_that_meet() -> None:
    page = torch.zeros(5, 2, 2 * 8 * 4)
    of_k = [page[:, :, :32].view(5, 2, 4, 8).transpose(2, 3)]
    of_v = [page[:, :, 31:63].view(5, 2, 8, 4)]
    with pytest.raises(LayoutError, match="different strides"):
        KVLayout.from_tensors(
            (of_k, of_v), axes="blocks heads tokens dim", block_size=8, num_kv_heads=2, head_dim=4
        )
