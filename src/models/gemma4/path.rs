//! Which ops attention layers run on.

use super::config::{Config, LayerConfig, LayerKind};
use crate::attention::sdpa;
use candle::{bail, DType, Device, Result};

/// Which ops attention runs on; chosen per [`Cache`](super::Cache), so both can run in one process on the same weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionPath {
    /// Plain candle ops everywhere: a product each for q, k and v, and [`crate::attention::reference`].
    Reference,
    /// As `Reference`, with candle's own fused kernel ([`crate::attention::sdpa`]) for single tokens in full layers: what a Mac user
    /// would compare with. On Metal alone.
    Sdpa,
    /// In every layer one [`FusedProjection`](crate::FusedProjection) for q, k and v; in full layers
    /// [`crate::attention_d512`], for prompts and single tokens alike, in sliding layers [`crate::attention::reference`].
    ///
    /// With half-precision weights q, k and v are f32 until they are normed and rotated, where the reference path rounds
    /// them once more.
    Fused,
    /// As `Fused` with half the cache in full layers: values alone, from which [`crate::attention_d512_shared_kv`] rebuilds the
    /// keys. For models whose full layers have no value projection.
    FusedSharedKv,
}

impl Default for AttentionPath {
    /// `Fused` with the feature `fused` (on by default), else `Reference`.
    fn default() -> Self {
        match cfg!(feature = "fused") {
            true => Self::Fused,
            false => Self::Reference,
        }
    }
}

impl AttentionPath {
    /// Every path, the reference first.
    pub const ALL: [Self; 4] = [
        Self::Reference,
        Self::Sdpa,
        Self::Fused,
        Self::FusedSharedKv,
    ];

    /// Those that [`check`](Self::check) finds nothing against, the reference first.
    pub fn available(config: &Config, dtype: DType, device: &Device) -> Vec<Self> {
        let runs = |path: &Self| path.check(config, dtype, device).is_ok();
        Self::ALL.into_iter().filter(runs).collect()
    }

    /// As `--attention` and [`FromStr`](std::str::FromStr) spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Sdpa => "sdpa",
            Self::Fused => "fused",
            Self::FusedSharedKv => "fused-kv",
        }
    }

    /// Whether the cache of this layer holds values alone.
    pub(super) fn rebuilds_keys(self, layer: &LayerConfig) -> bool {
        self == Self::FusedSharedKv && layer.kind == LayerKind::Full
    }

    /// Fails with the reason if a model of this configuration, with weights of `dtype` on `device`, can't run on this path.
    pub fn check(self, config: &Config, dtype: DType, device: &Device) -> Result<()> {
        let full = |(_, layer): &(usize, &LayerConfig)| layer.kind == LayerKind::Full;
        for (i, layer) in config.layers.iter().enumerate().filter(full) {
            match self {
                Self::Reference => continue,
                Self::Sdpa => {
                    sdpa::check_device(device, dtype, layer.head_dim)?;
                    continue;
                }
                Self::Fused | Self::FusedSharedKv => {}
            }
            if layer.head_dim != 512 {
                bail!(
                    "gemma4: the {self} path has ops for head_dim 512, full-attention layer {i} has {}; want the {} path",
                    layer.head_dim,
                    Self::Reference
                );
            }
            if self.rebuilds_keys(layer) && !layer.value_is_key {
                bail!(
                    "gemma4: the {self} path rebuilds keys from values, full-attention layer {i} projects its values apart; want the {} path",
                    Self::Fused
                );
            }
        }
        Ok(())
    }
}

impl std::fmt::Display for AttentionPath {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for AttentionPath {
    type Err = candle::Error;

    fn from_str(name: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|path| path.name() == name) {
            Some(path) => Ok(path),
            None => bail!(
                "attention path is {name:?}, want one of {:?}",
                Self::ALL.map(Self::name)
            ),
        }
    }
}
