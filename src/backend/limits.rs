//! What fits a launch: numbers of 32 bits, grids that every device takes.

use super::plan::Pass;
use candle::{bail, Result};

/// Refuses a pass whose grid CUDA would not take: at most 2^31 - 1 threadgroups in x, 65,535 in y and z. Metal names no limit; a plan
/// is the same everywhere.
pub(crate) fn check_grid(op: &str, pass: &Pass) -> Result<()> {
    let most = [i32::MAX as u32, 65_535, 65_535];
    if pass
        .threadgroups
        .iter()
        .zip(most)
        .any(|(&n, most)| n > most)
    {
        bail!(
            "{op}: {} needs a grid of {:?} threadgroups, want at most {most:?}",
            pass.entry,
            pass.threadgroups
        );
    }
    Ok(())
}

/// A size as a kernel takes it.
pub(crate) fn narrow(op: &str, what: &str, n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) if n <= i32::MAX as u32 => Ok(n),
        _ => bail!("{op}: {what} is {n}, want less than 2^31 on a GPU"),
    }
}
