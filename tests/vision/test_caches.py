"""Caches of images are bounded by bytes, and what they give is exact."""

import gc
import pickle
import sys
import weakref

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor

from roost.rollout.colours import square
from roost.vision import processor as processor_module
from roost.vision.cache import ByteCache
from roost.vision.image import Image, decode_rgb, png
from roost.vision.processor import FAMILIES, Processor
from roost.vision.tower import FeatureCache, model_class


def noise(height, width, seed=0):
    from PIL import Image as Pillow

    return png(Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"do_normalize": False}, {"do_rescale": False, "image_std": [0.5, 0.25, 0.3]}])
def test_kept_patches_are_exactly_those_of_the_image_processor(folders, family, options):
    images = AutoImageProcessor.from_pretrained(folders[family], backend="pil", **options)
    processor = Processor(images, 0, images.merge_size)
    for data in (noise(37, 61), square("red", 1)):
        wanted, found = images(images=[decode_rgb(data)], return_tensors="np"), processor.patches(Image(data))
        assert np.array_equal(found.pixels, np.asarray(wanted["pixel_values"], np.float32))
        assert found.grid == tuple(wanted["image_grid_thw"][0])
        assert found.pixels.dtype == np.float32 and found.pixels.nbytes == 8 * found.raw.nbytes


def test_patches_are_bounded_by_bytes(folders, monkeypatch):
    size = Processor.of_model(str(folders["qwen2_5_vl"])).patches(Image(square("red", 0))).raw.nbytes
    monkeypatch.setattr(processor_module, "KEPT_BYTES", 3 * size)
    processor = Processor.of_model(str(folders["qwen2_5_vl"]))
    kept = [weakref.ref(processor.patches(Image(square("red", seed))).raw) for seed in range(8)]
    gc.collect()
    assert [each() is not None for each in kept] == [False] * 5 + [True] * 3


def test_embeddings_are_bounded_by_bytes(folders):
    folder = str(folders["qwen2_5_vl"])
    config = AutoConfig.from_pretrained(folder)
    body = model_class(config).from_config(config).base_model
    processor = Processor.of_model(folder)
    with torch.no_grad():
        size = FeatureCache(body, processor).get(Image(square("red", 0))).nbytes
        cache = FeatureCache(body, processor, limit=2 * size)
        kept = [weakref.ref(cache.get(Image(square("red", seed)))) for seed in range(4)]
        gc.collect()
        assert [each() is not None for each in kept] == [False, False, True, True]
        assert cache.get(Image(square("red", 3))) is kept[3]()
        cache.clear()
        assert kept[3]() is None


def test_a_digest_keeps_no_file_in_memory():
    data = bytes(1000)
    before = sys.getrefcount(data)
    digest = Image(data).digest
    assert sys.getrefcount(data) == before
    moved = Image(data).at(7)
    assert (moved, moved.digest) == (Image(data, 7), digest)
    assert pickle.loads(pickle.dumps(moved)).digest == digest != Image(b"other").digest


def test_a_value_above_the_limit_is_the_only_one():
    cache = ByteCache[bytes](10, len)
    for size in (4, 5, 20):
        cache.get(bytes([size]), lambda size=size: bytes(size))
    assert cache.bytes == 20
    cache.get(b"small", lambda: b"1")
    assert cache.bytes == 1
