"""Buckets: everything travels once, in order, and never more than the limit at a time."""

import itertools

from hypothesis import given, strategies as st

from roost.engines.weights.payload import TensorInfo, size_of, split_buckets

tensors = st.lists(
    st.builds(
        TensorInfo,
        st.text("abc", min_size=1, max_size=3),
        st.sampled_from(["float32", "bfloat16", "int8"]),
        st.tuples(st.integers(1, 40)),
    )
)


@given(tensors, st.integers(1, 200))
def test_buckets_keep_the_order_and_the_limit(infos, limit):
    buckets = list(split_buckets(infos, limit))
    assert [info for bucket in buckets for info in bucket] == infos
    assert all(len(bucket) == 1 or sum(map(size_of, bucket)) <= limit for bucket in buckets)
    assert all(sum(map(size_of, one)) + size_of(other[0]) > limit for one, other in itertools.pairwise(buckets)), (
        "a bucket was closed though the next tensor had room"
    )
