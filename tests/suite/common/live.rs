//! What this process holds, where the system tells: with glibc. Elsewhere nothing.

/// Bytes that are allocated and not freed. Resident memory can't tell a leak from what the allocator keeps; nor can this, unless
/// [`EXACT`] is in the environment.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn allocated() -> usize {
    // SAFETY: takes nothing and locks the heaps itself.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn allocated() -> usize {
    0
}

/// Blocks that a thread freed and will use again count as allocated, unless it keeps none.
pub const EXACT: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0");

pub fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    kib.unwrap_or(0)
}
