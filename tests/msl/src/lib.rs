//! Runs the text of Metal kernels on the CPU, one thread of the GPU after the other, and says what is wrong with them:
//! races with both lines, barriers and SIMD functions that not all threads reach, accesses out of bounds, misaligned or
//! to memory that nobody wrote, writes to inputs, too much threadgroup memory. It also counts the bytes that move.
//!
//! ```
//! use msl::{Buffer, Dispatch, Mode, Module};
//! # if !cfg!(all(target_os = "linux", target_arch = "x86_64")) { return Ok(()); }
//!
//! const TEXT: &str = "
//! #include <metal_stdlib>
//! using namespace metal;
//! kernel void twice(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
//!                   uint i [[thread_position_in_grid]]) {
//!   y[i] = 2 * x[i];
//! }";
//!
//! let module = Module::compile(&[("twice.metal", TEXT)], &[], Mode::Checked)?;
//! let x = Buffer::new(&[1f32, 2.0, 3.0, 4.0]);
//! let mut y = Buffer::uninitialised(16);
//! let stats = module.run(
//!     &mut Dispatch::new("twice", [2, 1, 1], [2, 1, 1])
//!         .input(0, &x)
//!         .output(1, &mut y),
//! )?;
//! assert_eq!(y.to_vec::<f32>(), [2.0, 4.0, 6.0, 8.0]);
//! let memory = stats.memory.unwrap();
//! assert_eq!(memory.device[&0].read.bytes, 16);
//! # Ok::<(), msl::Error>(())
//! ```
//!
//! The README says how it works and what it cannot show.

mod buffer;
mod candle;
mod compiler;
mod dispatch;
mod error;
mod ffi;
mod lines;
mod module;
mod schedules;
mod stats;
mod translate;

pub use buffer::{Buffer, Element};
pub use candle::candle_kernels;
pub use dispatch::{Binding, Constant, Dispatch, Limits, Memory, Tolerance};
pub use error::Error;
pub use module::{address_space_check_unit, Mode, Module};
pub use schedules::SEEDS;
pub use stats::{Flow, MemoryTraffic, Stats, Traffic};

/// `Ok` or [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
