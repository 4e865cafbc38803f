"""The table of published models against the numbers that their authors published."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from bigmodel.models.published import PUBLISHED
from bigmodel.observe.sources import resolve

pytest.importorskip("transformers")

# Parameters, tied ones once. Sources: `safetensors` metadata of the Hub repositories
# that the table names, for Llama 2 to 3.1, Mistral, Mixtral, Qwen2.5, Qwen3 and Gemma 2
# (tied embeddings counted once, as the model cards do); arXiv 1910.10683 and the T5
# checkpoints; the OpenAI GPT-2 checkpoints; arXiv 1810.04805 (110 M and 340 M with the
# pooler, which a masked language model lacks); torchvision's ViT-B/16, L/16 and H/14.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "vit-huge": 632_045_800,
}


def test_every_model_has_a_golden_number():
    assert set(PARAMETERS) == set(PUBLISHED.names())


@pytest.mark.parametrize("name", PUBLISHED.names())
def test_parameters_are_the_published_ones(name):
    row = PUBLISHED.get(name)
    subject = resolve(name)
    with FakeTensorMode():
        model = subject.model()
    assert type(model).__name__ == row.architecture
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == pytest.approx(PARAMETERS[name], rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED.names())
def test_every_row_is_complete(name):
    row = PUBLISHED.get(name)
    assert row.name == name == name.lower()
    assert row.source.startswith("https://")
    assert row.default_length >= 1
    assert "model_type" in row.settings
