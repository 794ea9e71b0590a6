//! Memory of one sample, where Linux tells.

use crate::memory;
use anyhow::Result;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the process held at most before the system last forgot.
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// The most memory that this process has held, in bytes.
pub fn of_process() -> Option<u64> {
    Some(memory::peak()?.max(BEFORE.load(Relaxed)))
}

/// Bytes that `run` holds at most, on top of what is held when it starts.
pub fn gained_by<T>(run: impl FnOnce() -> Result<T>) -> Result<Option<u64>> {
    give_back();
    if let Some(peak) = of_process() {
        BEFORE.store(peak, Relaxed);
    }
    // "5" makes Linux forget the peak: proc_pid_clear_refs(5).
    let forgotten = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    let before = memory::resident();
    run()?;
    Ok(match (forgotten, before, memory::peak()) {
        (true, Some(before), Some(peak)) => Some(peak.saturating_sub(before)),
        _ => None,
    })
}

/// What an earlier sample freed and the allocator kept would count as held already.
fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        extern "C" {
            fn malloc_trim(keep: usize) -> i32;
        }
        // Takes no pointer, and locks the heaps itself.
        unsafe { malloc_trim(0) };
    }
}
