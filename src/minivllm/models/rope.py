"""Rotary inverse frequencies, with the scalings that amount to other frequencies folded in.

Knows no file format: loaders translate their metadata to these arguments, which may be any numbers. What
overflows is no matter here: ModelConfig refuses frequencies that are not finite.
"""

import math

import numpy as np
import numpy.typing as npt

from minivllm.errors import ModelError

Floats = npt.NDArray[np.float32]


@np.errstate(all="ignore")
def inverse_frequencies(head_dim: int, theta: float) -> Floats:
    """theta ** (-2i / head_dim) for i in 0 … head_dim / 2 - 1, float32 [head_dim / 2].

    Rounded step by step as the reference (transformers, in float32) rounds, the power itself correctly:
    one unit in the last place would be felt at position 8,000.

    Raises:
        ModelError: head_dim is odd or out of range, or theta is not a positive number.
    """
    if not (2 <= head_dim <= 2**14 and head_dim % 2 == 0):
        raise ModelError(f"head_dim {head_dim} cannot be rotated; it must be even and in 2 … 16384")
    if not (math.isfinite(theta) and theta > 0):
        raise ModelError(f"the rotary base (rope theta) is {theta}; it must be positive and finite")
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    powers = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


@np.errstate(all="ignore")
def scale_linear(inv_freq: Floats, factor: float) -> Floats:
    """Position interpolation (arXiv 2306.15595): every position counts as position / factor.

    Raises:
        ModelError: factor is not a positive number.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ModelError(f"the rope scaling factor is {factor}; it must be positive and finite")
    return inv_freq / np.float32(factor)


@np.errstate(all="ignore")
def scale_llama3(
    inv_freq: Floats, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Floats:
    """Llama 3.1's scaling: low frequencies are divided by ``factor``, high ones kept, those between blended.

    With wavelength = 2π / frequency, "low" is wavelength > original_context / low_freq_factor and "high" is
    wavelength < original_context / high_freq_factor (Llama 3.1's reference code, ``apply_scaling``).

    Raises:
        ModelError: a value is not a positive number, or high_freq_factor is not above low_freq_factor.
    """
    values = (factor, low_freq_factor, high_freq_factor, original_context)
    if not all(math.isfinite(value) and value > 0 for value in values) or high_freq_factor <= low_freq_factor:
        raise ModelError(
            f"llama3 rope scaling with factor {factor}, low_freq_factor {low_freq_factor}, high_freq_factor "
            f"{high_freq_factor}, original context {original_context}: all must be positive, and "
            "high_freq_factor above low_freq_factor"
        )
    wavelengths = np.float32(2 * math.pi) / inv_freq
    low_wavelength = original_context / low_freq_factor
    high_wavelength = original_context / high_freq_factor
    scaled = np.where(wavelengths > low_wavelength, inv_freq / np.float32(factor), inv_freq)
    blend = (original_context / wavelengths - np.float32(low_freq_factor)) / np.float32(
        high_freq_factor - low_freq_factor
    )
    blended = (1 - blend) * scaled / np.float32(factor) + blend * scaled
    between = ~(wavelengths < high_wavelength) & ~(wavelengths > low_wavelength)
    result: Floats = np.where(between, blended, scaled).astype(np.float32)
    return result


@np.errstate(all="ignore")
def divide_frequencies(inv_freq: Floats, factors: Floats) -> Floats:
    """Inverse frequencies divided one by one (GGUF's ``rope_freqs``: a scaling worked out by the converter).

    Raises:
        ModelError: there is not one positive factor for each frequency.
    """
    if factors.shape != inv_freq.shape or not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"rope_freqs must be {len(inv_freq)} positive numbers")
    return inv_freq / factors


def as_config_field(inv_freq: Floats) -> tuple[float, ...]:
    """As ``ModelConfig.rope_inv_freq`` wants them."""
    return tuple(float(value) for value in inv_freq)
