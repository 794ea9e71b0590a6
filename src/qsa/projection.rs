//! The projections of a QSA layer's keys, values and indexer as one product.

use candle::{bail, Result, Tensor};

use crate::projection::{FusedProjection, Projections};

const NAME: &str = "qsa_projection";

/// Hidden size.
const HIDDEN: usize = 2560;

/// Names of the blocks as in their weights and results, and their rows.
const BLOCKS: [(&str, usize); 4] = [("k", 512), ("v", 512), ("ik", 128), ("iq", 512)];

/// Up to so many tokens every one of them is selected (a budget of 2,048, and up to 3 in the open block), so that no one
/// asks the indexer.
const ALL_SELECTED: usize = 2051;

/// Keys, values, indexer keys and, where they are needed, indexer queries of a QSA layer, of one packed weight.
///
/// Results are f32 views of one buffer, named `k` (512 columns), `v` (512), `ik` (128) and `iq` (512). Its rows are 1,152
/// elements apart, or 1,664 with `iq`: whoever reads them must be told that stride. Without `iq` the product is over the first
/// 1,152 rows of the same weight.
#[derive(Debug, Clone)]
pub struct QsaProjection {
    with_query: FusedProjection,
    without_query: FusedProjection,
}

impl QsaProjection {
    /// Packs the weights `(rows, 2560)` of keys (512 rows), values (512), indexer keys (128) and indexer queries (512).
    ///
    /// # Errors
    ///
    /// Names the weight, what it got and what it wants: another shape, or whatever [`FusedProjection::pack`] refuses.
    pub fn new(wk: &Tensor, wv: &Tensor, wik: &Tensor, wiq: &Tensor) -> Result<Self> {
        let mut blocks = Vec::with_capacity(BLOCKS.len());
        for ((name, rows), weight) in BLOCKS.into_iter().zip([wk, wv, wik, wiq]) {
            if weight.dims() != [rows, HIDDEN] {
                bail!(
                    "{NAME}: w{name} has shape {:?}, want ({rows}, {HIDDEN})",
                    weight.dims()
                );
            }
            blocks.push((name, weight));
        }
        let with_query = FusedProjection::pack(&blocks)?;
        Ok(Self {
            without_query: with_query.first(BLOCKS.len() - 1)?,
            with_query,
        })
    }

    /// Whether `tokens` from position `pos0` on need indexer queries: if `pos0 + tokens > 2051`.
    ///
    /// # Errors
    ///
    /// The sum passes 64 bits.
    pub fn needs_query(pos0: usize, tokens: usize) -> Result<bool> {
        match pos0.checked_add(tokens) {
            Some(end) => Ok(end > ALL_SELECTED),
            None => bail!("{NAME}: {tokens} tokens from position {pos0} on pass the 64-bit range"),
        }
    }

    /// Projects xs `(.., tokens, 2560)`, whose first token is at position `pos0`; `iq` is among the results if it is
    /// [needed](QsaProjection::needs_query).
    ///
    /// # Errors
    ///
    /// As [`FusedProjection::forward`].
    pub fn forward(&self, xs: &Tensor, pos0: usize) -> Result<Projections> {
        let [.., tokens, _] = *xs.dims() else {
            bail!(
                "{NAME}: xs has shape {:?}, want (.., tokens, {HIDDEN})",
                xs.dims()
            );
        };
        self.project(xs, Self::needs_query(pos0, tokens)?)
    }

    /// Projects xs `(.., 2560)` with or without `iq`.
    ///
    /// # Errors
    ///
    /// As [`FusedProjection::forward`].
    pub fn project(&self, xs: &Tensor, query: bool) -> Result<Projections> {
        self.packed(query).forward(xs)
    }

    /// What the product is over: all four blocks, or the first three.
    pub fn packed(&self, query: bool) -> &FusedProjection {
        match query {
            true => &self.with_query,
            false => &self.without_query,
        }
    }
}
