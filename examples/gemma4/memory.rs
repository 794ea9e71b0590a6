//! Memory as people read it.

/// The most memory that this process has held, in bytes, where the system tells.
pub fn peak() -> Option<u64> {
    status("VmHWM:")
}

/// The memory that this process holds now.
#[allow(dead_code, reason = "the examples that share this file do not all ask")]
pub fn resident() -> Option<u64> {
    status("VmRSS:")
}

/// A line of what Linux knows of this process, in bytes.
fn status(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// `bytes` in the largest unit that leaves a number of at least 1.
#[allow(dead_code, reason = "who shares this file does not always ask")]
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{size:.1} {}", UNITS[unit]),
    }
}
