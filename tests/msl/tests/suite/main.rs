//! What `msl` says about kernels, by kind of property.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod candle;
mod counts;
mod decode;
mod defects;
mod language;
mod machine;
mod reference;
mod support;
