//! The read limit.

use anyhow::{bail, Result};
use candle::Tensor;
use rayon::prelude::*;

/// Reads every byte once, on all threads: the least time that anything over `t` can take.
pub fn read(t: &Tensor) -> Result<()> {
    fn sum<T: Sync>(values: &[T]) -> u64 {
        values
            .par_chunks(64 * 1024)
            .map(|chunk| {
                // SAFETY: the elements are plain numbers, and align_to only hands out whole words inside the chunk.
                let (_, words, _) = unsafe { chunk.align_to::<u64>() };
                words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word))
            })
            .reduce(|| 0, u64::wrapping_add)
    }
    let (storage, _) = t.storage_and_layout();
    let total = match &*storage {
        candle::Storage::Cpu(candle::CpuStorage::F32(s)) => sum(s),
        candle::Storage::Cpu(candle::CpuStorage::F16(s)) => sum(s),
        candle::Storage::Cpu(candle::CpuStorage::BF16(s)) => sum(s),
        _ => bail!("limit: no f32, f16 or bf16 tensor on the CPU"),
    };
    std::hint::black_box(total);
    Ok(())
}
