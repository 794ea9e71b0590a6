//! The plots of docs/performance.md.

use std::path::Path;

use anyhow::Result;

use crate::report::Receipt;

pub fn draw(_receipts: &[Receipt], _folder: &Path) -> Result<()> {
    Ok(())
}
