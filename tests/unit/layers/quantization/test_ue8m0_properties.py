"""Properties of the power-of-two quantiser, for any number that hypothesis comes up with."""

import math
from fractions import Fraction

import fp8_moe
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_overlay.srt.layers.quantization import ue8m0


@given(st.floats(min_value=0, max_value=torch.finfo(torch.float32).max, width=32))
def test_a_scale_is_the_least_power_of_two_that_holds_amax(amax):
    scale = ue8m0.ue8m0_scale(torch.tensor([amax])).item()
    assert math.frexp(scale)[0] == 0.5
    assert Fraction(amax) <= 448 * Fraction(scale)
    assert scale == 2.0**-126 or Fraction(amax) > 448 * Fraction(scale) / 2


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16))
def test_any_group_is_the_oracles(values):
    x = torch.tensor([values])
    codes, scale = ue8m0.quantize_reference(x, 16)
    expected_codes, expected_scale = fp8_moe.quantise(x, 16, fp8_moe.power_of_two_scale)
    assert torch.equal(scale.double(), expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected_codes.to(torch.float8_e4m3fn).view(torch.uint8))
