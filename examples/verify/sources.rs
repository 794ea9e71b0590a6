//! The text of what runs on a CPU, so that a receipt says of which program it is.

macro_rules! sources {
    ($($path:literal),* $(,)?) => {
        [$(($path, include_str!(concat!("../../", $path)))),*]
    };
}

/// By path; a test finds every file that is not here.
pub const CPU: [(&str, &str); 25] = sources![
    "src/attention/cpu/bf16.rs",
    "src/attention/cpu/body.rs",
    "src/attention/cpu/exp.rs",
    "src/attention/cpu/kernels.rs",
    "src/attention/cpu/mod.rs",
    "src/attention/cpu/rows.rs",
    "src/attention/cpu/scratch.rs",
    "src/attention/cpu/shared.rs",
    "src/attention/cpu/tile.rs",
    "src/attention/geometry.rs",
    "src/attention/keys.rs",
    "src/attention/partial/mod.rs",
    "src/attention/partial/ops.rs",
    "src/attention/plan.rs",
    "src/attention/reference.rs",
    "src/attention/shared_kv.rs",
    "src/attention/store.rs",
    "src/cpu/isa.rs",
    "src/cpu/lines.rs",
    "src/cpu/mod.rs",
    "src/cpu/x86.rs",
    "src/projection/cpu/body.rs",
    "src/projection/cpu/halves.rs",
    "src/projection/cpu/kernels.rs",
    "src/projection/cpu/mod.rs",
];
