//! Sizes that must fit an address, and memory that may not be there.
//!
//! A view may repeat its rows (stride 0), so a shape says nothing of what the caller has memory for. Rust ends the process where an
//! allocation fails; what a shape asks for is made here, and ends in an error.

use std::fmt::Display;

use candle::{bail, Device, Result};

/// Elements of `dims`, if so many of `size` bytes can be addressed.
fn elements(dims: &[usize], size: usize) -> Option<usize> {
    let elements = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
    let bytes = elements.checked_mul(size)?;
    (bytes <= isize::MAX as usize).then_some(elements)
}

/// As [`elements`], or an error that says how many bytes `what` would take.
pub(crate) fn addressable(
    op: &str,
    what: impl Display,
    dims: &[usize],
    size: usize,
) -> Result<usize> {
    match elements(dims, size) {
        Some(elements) => Ok(elements),
        None => {
            let bytes = dims
                .iter()
                .fold(size as u128, |n, d| n.saturating_mul(*d as u128));
            bail!("{op}: {what} would take {bytes} bytes, which passes the 64-bit address range")
        }
    }
}

/// `len` zeros for `what`.
pub(crate) fn zeros<T: Copy + Default>(op: &str, what: impl Display, len: usize) -> Result<Vec<T>> {
    let mut values = reserved(op, what, len)?;
    values.resize(len, T::default());
    Ok(values)
}

/// Fails if candle would end the process: `what`, of `dims` elements of `size` bytes, can be neither addressed nor had on the CPU. A
/// GPU says so itself.
pub(crate) fn check(
    op: &str,
    what: impl Display,
    dims: &[usize],
    size: usize,
    device: &Device,
) -> Result<()> {
    let elements = addressable(op, &what, dims, size)?;
    match device {
        Device::Cpu => reserved::<u8>(op, what, elements * size).map(|_| ()),
        _ => Ok(()),
    }
}

fn reserved<T>(op: &str, what: impl Display, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    if values.try_reserve_exact(len).is_err() {
        let bytes = len as u128 * size_of::<T>() as u128;
        bail!("{op}: no memory for {what}, which would take {bytes} bytes");
    }
    Ok(values)
}
