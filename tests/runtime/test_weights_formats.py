"""The codecs: exact both ways, ties and edges as model.md 2.1 and 3.1 say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.formats import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    dequantise,
    encode_fp4,
    encode_fp8,
    encode_rows8,
)

FINITE_E4M3 = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
# Large enough for any weight, small enough that 448 x 2^e is finite and 2^-9 x 2^e is normal.
scale_byte = st.integers(127 - 100, 127 + 80)


def test_e4m3_edges() -> None:
    codes = np.array([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x80, 0x81, 0xFE], np.uint8)
    values = [0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, -0.0, -(2**-9), -448]
    assert decode_e4m3(codes).tolist() == values
    assert np.signbit(decode_e4m3(codes)[6])
    assert np.isnan(decode_e4m3(np.array([0x7F, 0xFF], np.uint8))).all()


def test_e2m1_low_nibble_is_the_even_element() -> None:
    assert decode_e2m1(np.array([0x21, 0xF7], np.uint8)).tolist() == [0.5, 1, 6, -6]


def test_e8m0_range() -> None:
    assert decode_e8m0(np.array([0, 127, 254], np.uint8)).tolist() == [2**-127, 1, 2**127]


@given(seed=st.integers(0, 2**32 - 1), low=scale_byte)
@settings(max_examples=25, deadline=None)
def test_fp8_is_the_product_of_code_and_scale(seed: int, low: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.choice(FINITE_E4M3, (64, 96))
    scales = rng.integers(low, low + 20, (2, 3), dtype=np.uint8)
    values = dequantise("fp8", codes, scales)
    n, k = np.indices(codes.shape)
    exponents = scales[n // 32, k // 32].astype(np.float64) - 127
    assert np.array_equal(values.astype(np.float64), decode_e4m3(codes) * 2.0**exponents)
    assert not (values.view(np.uint32) & 0xFFFF).any()  # exact in bf16, too


@given(arrays(np.uint8, (5, 48)), arrays(np.uint8, (5, 3), elements=scale_byte))
@settings(max_examples=25, deadline=None)
def test_fp4_is_the_product_of_code_and_scale(codes: np.ndarray, scales: np.ndarray) -> None:
    values = dequantise("fp4", codes, scales)
    expected = decode_e2m1(codes) * 2.0 ** (np.repeat(scales, 32, 1).astype(np.float64) - 127)
    assert np.array_equal(values.astype(np.float64), expected)


@given(arrays(np.uint16, (40,)))
@settings(max_examples=25, deadline=None)
def test_bf16_widens_exactly(bits: np.ndarray) -> None:
    finite = bits[(bits & 0x7F80) != 0x7F80]
    assert np.array_equal(
        dequantise("bf16", finite).view(np.uint32), finite.astype(np.uint32) << 16
    )


@pytest.mark.parametrize(
    ("encode", "format"), [(encode_fp8, "fp8"), (encode_fp4, "fp4"), (encode_rows8, "rows8")]
)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-60, 60))
@settings(max_examples=15, deadline=None)
def test_encoding_what_was_decoded_changes_nothing(
    encode: object, format: str, seed: int, exponent: int
) -> None:
    values = np.random.default_rng(seed).standard_normal((64, 64)) * 2.0**exponent
    once = dequantise(format, *encode(values.astype(np.float32)))  # type: ignore[operator]
    again = dequantise(format, *encode(once))  # type: ignore[operator]
    assert np.array_equal(once, again)


@pytest.mark.parametrize(
    ("encode", "format", "largest"),
    [(encode_fp8, "fp8", 2**-4), (encode_fp4, "fp4", 2**-1.9), (encode_rows8, "rows8", 2**-4)],
)
def test_encoding_is_near(
    rng: np.random.Generator, encode: object, format: str, largest: float
) -> None:
    values = rng.standard_normal((64, 96)).astype(np.float32)
    decoded = dequantise(format, *encode(values))  # type: ignore[operator]
    assert np.abs(decoded - values).max() <= largest * np.abs(values).max()
    assert np.abs(decoded).max() >= 0.7 * np.abs(values).max()


def test_zero_encodes_to_zero() -> None:
    for encode, format in ((encode_fp8, "fp8"), (encode_fp4, "fp4"), (encode_rows8, "rows8")):
        assert not dequantise(format, *encode(np.zeros((32, 64), np.float32))).any()


def test_a_matrix_whose_last_square_is_cut(rng: np.random.Generator) -> None:
    codes, scales = encode_fp8(rng.standard_normal((40, 33)).astype(np.float32))
    assert scales.shape == (2, 2)
    assert dequantise("fp8", codes, scales).shape == (40, 33)


def test_nan_scale_is_named_with_its_place() -> None:
    scales = np.full((4, 3), 127, np.uint8)
    scales[2, 1] = 255
    with pytest.raises(WeightsError, match=r"layers.0.x holds the NaN scale byte 255 at \[2, 1\]"):
        dequantise("fp4", np.zeros((4, 48), np.uint8), scales, "layers.0.x")


@pytest.mark.parametrize(
    ("format", "codes", "scales"),
    [
        ("fp8", np.array([[0, 0x7F]], np.uint8), np.array([[127]], np.uint8)),
        ("bf16", np.array([0, 0x7F80], np.uint16), None),
        ("f32", np.array([0, np.nan], np.float32), None),
    ],
)
def test_values_that_are_no_numbers_are_refused(
    format: str, codes: np.ndarray, scales: np.ndarray | None
) -> None:
    with pytest.raises(WeightsError, match=r"w holds (nan|inf) at \[(0, )?1\].*must be finite"):
        dequantise(format, codes, scales, "w")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(WeightsError, match="unknown storage format 'int3'"):
        dequantise("int3", np.zeros(1, np.uint8), np.zeros(1, np.uint8), "w")
