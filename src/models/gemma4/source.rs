//! Where a model's weights come from.

use super::matrix::Matrix;
use candle::{DType, Device, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// Hands out weights by their names as after the checkpoint's text prefix.
pub(super) trait Source {
    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix>;

    /// A norm or a scalar: f32 whatever the type of the model.
    fn vector(&self, name: &str, len: usize) -> Result<Tensor>;

    /// Of dense matrices, and of what goes into the products.
    fn dtype(&self) -> DType;

    fn device(&self) -> &Device;
}

impl Source for VarBuilder<'_> {
    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix> {
        Ok(Matrix::Dense(self.get((rows, columns), name)?))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.get_with_hints_dtype(len, name, Init::Const(1.0), DType::F32)
    }

    fn dtype(&self) -> DType {
        VarBuilder::dtype(self)
    }

    fn device(&self) -> &Device {
        VarBuilder::device(self)
    }
}

/// A part of a source: what is under a prefix.
pub(super) struct Part<'a> {
    pub(super) source: &'a dyn Source,
    prefix: String,
}

impl<'a> Part<'a> {
    pub(super) fn root(source: &'a dyn Source) -> Self {
        let prefix = String::new();
        Self { source, prefix }
    }

    /// The part under a further name.
    pub(super) fn pp(&self, name: impl std::fmt::Display) -> Self {
        Self {
            source: self.source,
            prefix: format!("{}{name}.", self.prefix),
        }
    }

    pub(super) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix> {
        let name = format!("{}{name}.weight", self.prefix);
        self.source.matrix(&name, rows, columns)
    }

    /// Named in whole: not every vector's name ends in `.weight`.
    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.source.vector(&format!("{}{name}", self.prefix), len)
    }
}
