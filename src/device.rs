//! The device that a program runs on.

use candle::utils::{cuda_is_available, metal_is_available};
use candle::{Device, Result};

/// The first GPU that this build has code for; the CPU if there is none, or if it is asked for.
///
/// # Errors
///
/// A GPU that is built for and can't be used.
pub fn choose(cpu: bool) -> Result<Device> {
    if cpu {
        Ok(Device::Cpu)
    } else if cuda_is_available() {
        Device::new_cuda(0)
    } else if metal_is_available() {
        Device::new_metal(0)
    } else {
        Ok(Device::Cpu)
    }
}
