use crate::{Error, Result};

/// The text of one of candle's Metal kernel files, such as `reduce.metal`: kernels that this project did not write. It
/// is read from the source of the candle-metal-kernels crate that Cargo.lock pins.
///
/// # Errors
///
/// When the build could not find that source, or it has no such file.
pub fn candle_kernels(file: &str) -> Result<String> {
    let folder = env!("MSL_CANDLE_KERNELS");
    if folder.is_empty() {
        let reason = env!("MSL_CANDLE_KERNELS_ERROR");
        return Err(Error::Machine(format!(
            "no source of candle-metal-kernels: {reason}"
        )));
    }
    let path = std::path::Path::new(folder).join(file);
    std::fs::read_to_string(&path)
        .map_err(|e| Error::Machine(format!("candle's {file}: {}: {e}", path.display())))
}
