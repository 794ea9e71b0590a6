use std::collections::BTreeMap;

/// What a dispatch did. The same dispatch gives the same counts, whatever its seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Threadgroups that ran.
    pub threadgroups: u64,
    /// Threads that ran, in all of them.
    pub threads: u64,
    /// Threadgroup memory, static and dynamic, in bytes.
    pub threadgroup_bytes: u32,
    /// Threadgroup barriers passed, each counted once for a threadgroup.
    pub barriers: u64,
    /// `simdgroup_barrier`s passed, each counted once for a SIMD group.
    pub simd_barriers: u64,
    /// SIMD reductions, shuffles and scans, each counted once for a SIMD group.
    pub collectives: u64,
    /// `simdgroup_multiply_accumulate`s, each counted once for a SIMD group.
    pub matrix_multiplies: u64,
    /// Bytes moved, by kind of memory. Checked mode only: a fast module does not see accesses.
    pub memory: Option<MemoryTraffic>,
}

/// Bytes moved, by kind of memory. Private memory, the registers of the device, is not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryTraffic {
    /// `device` arguments, by buffer index; only bound buffers.
    pub device: BTreeMap<u32, Traffic>,
    /// `constant` arguments, by buffer index; only bound buffers.
    pub constant: BTreeMap<u32, Traffic>,
    /// Threadgroup memory. Unique bytes are counted anew in every threadgroup.
    pub threadgroup: Traffic,
}

/// Both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Traffic {
    /// Loads.
    pub read: Flow,
    /// Stores.
    pub written: Flow,
}

/// One direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Flow {
    /// Loads or stores of the compiled code; a vector can take one or several.
    pub accesses: u64,
    /// Bytes issued: a byte that two threads load counts twice.
    pub bytes: u64,
    /// Different bytes.
    pub unique_bytes: u64,
}

impl MemoryTraffic {
    /// Bytes issued to `device` memory, read and written.
    pub fn device_bytes(&self) -> u64 {
        self.device
            .values()
            .map(|t| t.read.bytes + t.written.bytes)
            .sum()
    }

    /// Different bytes of `device` memory, read and written.
    pub fn unique_device_bytes(&self) -> u64 {
        let unique = |t: &Traffic| t.read.unique_bytes + t.written.unique_bytes;
        self.device.values().map(unique).sum()
    }
}
