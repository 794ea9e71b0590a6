//! Several projections of one input as one product.

pub mod geometry;

pub use geometry::ProjectionGeometry;
