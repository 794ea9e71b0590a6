//! Keys and values in 8 bits.

use super::geometry::GROUP;
use candle::{DType, Result, Tensor};

/// Heads in 8 bits, with a scale for each group of 64 neighbouring dimensions.
///
/// A value is `code * scale`. A group's scale is `f16(max|x| / 127)`, its codes are `x / scale` rounded to nearest even and held
/// within -127..=127. Two groups are special: one whose scale rounds to 0 has codes of 0, and one that holds a NaN or an
/// infinity, or whose scale would pass the range of f16 (values from about 8.3e6 on), has a scale of NaN and codes of 0: all 64
/// values of it are NaN, none of them is silently wrong.
#[derive(Debug, Clone)]
pub struct QsaCodes {
    /// u8 `(tokens, 2, 256)`, to be read as i8 (two's complement), which candle does not have.
    pub codes: Tensor,
    /// f16 `(tokens, 2, 4)`.
    pub scales: Tensor,
}

impl QsaCodes {
    /// The values that the codes stand for: f32 `(tokens, 2, 256)`.
    pub fn dequantize(&self) -> Result<Tensor> {
        let codes = self.codes.to_dtype(DType::F32)?;
        let negative = self.codes.ge(128u8)?.to_dtype(DType::F32)?;
        let signed = (codes - (negative * 256.0)?)?;
        let (tokens, heads, dim) = signed.dims3()?;
        let grouped = signed.reshape((tokens, heads, dim / GROUP, GROUP))?;
        let scales = self.scales.to_dtype(DType::F32)?.unsqueeze(3)?;
        grouped
            .broadcast_mul(&scales)?
            .reshape((tokens, heads, dim))
    }
}
