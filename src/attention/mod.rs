//! Attention at head_dim 512, and the plain-op reference it is compared with.

pub mod reference;
